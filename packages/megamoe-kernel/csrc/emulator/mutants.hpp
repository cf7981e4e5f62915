// Deliberate mistakes in what a kernel's instructions do, and one in what its stages compute. A run
// has one, chosen when it begins.
//
// They are made in the emulator, between the call and its effect, as if the source had said
// something else: the kernel has no trace of them, and a build for a GPU cannot have any. A check
// that none of them passes is a check of the tests.
#pragma once

#include <cstring>

namespace megamoe::emulator {

// Those of pairs of CTAs alone.
#define MEGAMOE_PAIR_MUTANTS(X)                                                   \
  X(kNoFirstSync, "pair: the CTAs do not meet at the start")                        \
  X(kNoLastSync, "pair: the CTAs do not meet at the end")                           \
  X(kNoReport, "pair: products do not wait for the other CTA's stage")            \
  X(kLoseReport, "pair: a stage of the other CTA is not reported")                \
  X(kNarrowFull, "pair: products do not wait for a stage in the cluster's scope") \
  X(kNarrowSumsFree, "pair: products do not wait for sums in the cluster's scope") \
  X(kCommitAlone, "pair: a commit reaches the leader only")                       \
  X(kOneCta, "pair: one CTA multiplies")                                          \
  X(kScalesAlone, "pair: scales are copied in the leader only")                   \
  X(kSameTokens, "pair: both CTAs copy the first half of the tokens")             \
  X(kHalvesSwapped, "pair: the halves of the tokens swapped")                     \
  X(kMaskLeader, "pair: scales of tokens go to the leader only")                  \
  X(kMaskOther, "pair: scales of tokens go to the other CTA only")                \
  X(kSignalOwn, "pair: the leader's barrier counts the bytes of both CTAs")       \
  X(kOtherExpectsLess, "pair: the other CTA expects 512 bytes too few")

// name, in words
#define MEGAMOE_MUTANTS(X)                                                        \
  X(kSkipFull, "products do not wait for a stage")                                \
  X(kSkipFree, "copies do not wait for a free stage")                             \
  X(kSkipSumsFull, "epilogue does not wait for the sums")                         \
  X(kSkipSumsFree, "products do not wait for a free accumulator")                 \
  X(kPhaseFull, "wrong phase of a full stage")                                    \
  X(kPhaseFree, "wrong phase of a free stage")                                    \
  X(kPhaseSumsFull, "wrong phase of full sums")                                   \
  X(kPhaseSumsFree, "wrong phase of free sums")                                   \
  X(kLoseFull, "a copying thread does not arrive")                                \
  X(kLoseFree, "no commit frees a stage")                                         \
  X(kLoseSumsFull, "no commit hands over the sums")                               \
  X(kLoseSumsFree, "a warp does not free the accumulator")                        \
  X(kExpectMore, "16 bytes too many expected")                                    \
  X(kExpectLess, "16 bytes too few expected")                                     \
  X(kFewerArrivals, "a stage is full without its tokens")                         \
  X(kFewerReaders, "sums are free before the last warp has read them")            \
  X(kEarlyFree, "a stage is freed by an arrival in place of a commit")            \
  X(kEarlySums, "sums are handed over by an arrival in place of a commit")        \
  X(kOtherBarrier, "copies signal the stage after theirs")                        \
  X(kNoBarrierFence, "no fence after the barriers' initialization")               \
  X(kNoProxyFence, "no proxy fence before copies from the ring")                  \
  X(kNoFenceBefore, "no tcgen05 fence before a thread hands over")                \
  X(kNoFenceAfter, "no tcgen05 fence after a wait")                               \
  X(kWeightsStay, "weights: columns not advanced")                                \
  X(kTokensStay, "tokens: columns not advanced")                                  \
  X(kWeightRows, "weights: eight rows too far")                                   \
  X(kWeightExpert, "weights: always the first rows of all")                       \
  X(kTokenRows, "tokens: another ring slot")                                      \
  X(kOtherMap, "tokens: the other layer's map")                                   \
  X(kNoSwizzle, "copies without swizzle")                                         \
  X(kOtherStage, "copies go to the stage after theirs")                           \
  X(kBoxesOverlap, "boxes of tokens all go to the first place")                   \
  X(kScaleSourceStays, "weights: scale words not advanced in memory")             \
  X(kTokenScaleSource, "tokens: scale words of the next chunk")                   \
  X(kScaleChunkStays, "scale chunk not advanced in shared memory")                \
  X(kScaleOrder, "scale words of a chunk in the order of rows")                   \
  X(kScaleBytes, "scale bytes of a word reversed")                                \
  X(kScalesSwapped, "scales of weights and tokens swapped")                       \
  X(kScaleColumns, "scales of the next columns")                                  \
  X(kScaleWarps, "scales copied to a quarter of the lanes only")                  \
  X(kScaleFormat, "scale format UE8M0")                                           \
  X(kUnpacked, "operand format of mxf8f6f4")                                      \
  X(kFewerColumns, "eight tokens too few multiplied")                             \
  X(kHalfRows, "64 rows of weights multiplied")                                   \
  X(kScaleId, "scale words begin at byte 1")                                      \
  X(kWeightStep, "step along K not advanced: weights")                            \
  X(kTokenStep, "step along K not advanced: tokens")                              \
  X(kOperandsSwapped, "operands swapped")                                         \
  X(kStride, "stride between groups of eight rows halved")                        \
  X(kVersion, "descriptor version 0")                                             \
  X(kDescriptorSwizzle, "descriptor without swizzle")                             \
  X(kKeepSums, "sums of the task before not dropped")                             \
  X(kForgetSums, "sums not kept from step to step")                               \
  X(kOneAccumulator, "one accumulator in place of two")                           \
  X(kSmallAlloc, "too few columns allocated")                                     \
  X(kLargeAlloc, "more columns allocated than there are")                         \
  X(kOddAlloc, "columns allocated that are no power of two")                      \
  X(kNoFree, "tensor memory not freed")                                           \
  X(kOtherQuarter, "a warp reads another's lanes")                                \
  X(kOtherColumns, "a warp reads the next columns")                               \
  X(kGateUpSwapped, "gate and up swapped")                                        \
  X(kTokensSwapped, "two tokens swapped")                                         \
  X(kOutputsSwapped, "two outputs swapped")                                       \
  X(kStaleRead, "registers used before the load has come")                        \
  X(kTileUnmet, "the epilogue's warps do not meet before its tile is stored")     \
  X(kEpilogueSkipsTokens, "epilogue does not wait for the tokens of its block")    \
  X(kEpilogueSkipsHidden, "epilogue does not wait for the intermediate of its block") \
  X(kCopySkipsTokens, "copies do not wait for the tokens of their block")         \
  X(kCopySkipsHidden, "copies do not wait for the intermediate of their block")   \
  X(kLateAlloc, "warps do not wait for tensor memory to be allocated")            \
  X(kAllocAfterPermit, "tensor memory allocated after its permit was given up")   \
  X(kEarlyFreeing, "tensor memory freed by a warp that does not wait for the others")  \
  X(kNoFenceFree, "no tcgen05 fence before tensor memory is freed")               \
  X(kEarlyTopk, "top-k weights before requantization, not in combine")            \
  MEGAMOE_PAIR_MUTANTS(X)

enum class Mutant : int {
  kNone = 0,
#define MEGAMOE_ROW(name, words) name,
  MEGAMOE_MUTANTS(MEGAMOE_ROW)
#undef MEGAMOE_ROW
  kCount,
};

inline const char* mutant_words(int index) {
  static constexpr const char* kWords[] = {
      "",
#define MEGAMOE_ROW(name, words) words,
      MEGAMOE_MUTANTS(MEGAMOE_ROW)
#undef MEGAMOE_ROW
  };
  return index >= 0 && index < static_cast<int>(Mutant::kCount) ? kWords[index] : nullptr;
}

}  // namespace megamoe::emulator
