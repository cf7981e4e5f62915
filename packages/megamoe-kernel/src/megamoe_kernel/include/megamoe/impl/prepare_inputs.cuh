// Hidden states to NVFP4 tokens in the symmetric buffer: one CTA for each token.
//
// A thread holds one block of 16 values in registers from the first pass, which finds the token's
// amax, to the second, which quantizes; nothing is read twice. Bit for bit the result of
// megamoe_kernel.quantize_tokens.
#pragma once

#include "megamoe/common/quantize.hpp"

namespace megamoe {

struct PrepareInputs {
  const void* x;
  int64_t row_bytes;  // from one token to the next
  uint8_t* codes;     // [T, hidden / 2]
  uint8_t* block_scale;  // [T, hidden / 16]
  float* scale;          // [T]
};

struct Fp32Values {
  static constexpr int kBytes = 4;
  MEGAMOE_FN static float get(const uint32_t* words, int i) { return as_float(words[i]); }
};

struct Bf16Values {
  static constexpr int kBytes = 2;
  MEGAMOE_FN static float get(const uint32_t* words, int i) {
    return fp32_from_bf16(static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16)));
  }
};

struct Fp16Values {
  static constexpr int kBytes = 2;
  // Shifted to float32's exponent field the value is 2^-112 times itself, subnormals included.
  MEGAMOE_FN static float get(const uint32_t* words, int i) {
    const uint32_t bits = words[i / 2] >> (i % 2 * 16);
    const float magnitude = mul_rn(as_float((bits & 0x7FFFu) << 13), 0x1p112f);
    return as_float(as_bits(magnitude) | (bits & 0x8000u) << 16);
  }
};

// Threads that a row of blocks needs: whole warps, at most kMostThreads.
inline constexpr int kMostThreads = 512;

template <class Values, int kHidden, int kThreads>
__device__ void prepare_inputs(const PrepareInputs& arguments) {
  constexpr int kBlocks = kHidden / kBlockSize;
  constexpr int kRounds = ceil_div(kBlocks, kThreads);
  constexpr int kWords = kBlockSize * Values::kBytes / 4;
  static_assert(kThreads % kWarpSize == 0 && kThreads <= kMostThreads);
  static_assert(kHidden % kBlockSize == 0);

  const int thread = threadIdx.x;
  const int64_t token = blockIdx.x;
  const auto* row = static_cast<const uint8_t*>(arguments.x) + token * arguments.row_bytes;

  Chunk held[kRounds][kWords / 4];
  float block_amax[kRounds];
  float amax = 0.0f;
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int block = round * kThreads + thread;
    if (block >= kBlocks) break;
    const auto* chunks = reinterpret_cast<const Chunk*>(row) + block * (kWords / 4);
#pragma unroll
    for (int i = 0; i < kWords / 4; ++i) held[round][i] = chunks[i];
  }
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    block_amax[round] = 0.0f;
    if (round * kThreads + thread >= kBlocks) break;
#pragma unroll
    for (int i = 0; i < kBlockSize; ++i) {
      const float value = Values::get(held[round]->word, i);
      block_amax[round] = fmaxf(block_amax[round], fabsf(value));
    }
    amax = fmaxf(amax, block_amax[round]);
  }

  // Magnitudes order as integers do.
  __shared__ uint32_t warp_amax[kThreads / kWarpSize];
  const uint32_t of_warp = __reduce_max_sync(kAllLanes, as_bits(amax));
  if (thread % kWarpSize == 0) warp_amax[thread / kWarpSize] = of_warp;
  __syncthreads();
  uint32_t of_token = 0;
#pragma unroll
  for (int warp = 0; warp < kThreads / kWarpSize; ++warp) {
    of_token = of_token > warp_amax[warp] ? of_token : warp_amax[warp];
  }
  const float scale = token_scale(as_float(of_token));
  if (thread == 0) arguments.scale[token] = scale;

#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int block = round * kThreads + thread;
    if (block >= kBlocks) break;
    const uint32_t byte = block_scale(block_amax[round], scale);
    const float divisor = block_divisor(byte, scale);
    uint64_t codes = 0;
#pragma unroll
    for (int i = 0; i < kBlockSize; ++i) {
      codes |= uint64_t{quantized(Values::get(held[round]->word, i), divisor)} << (4 * i);
    }
    arguments.block_scale[token * kBlocks + block] = static_cast<uint8_t>(byte);
    reinterpret_cast<uint64_t*>(arguments.codes)[token * kBlocks + block] = codes;
  }
}

// Hidden states that are BF16 already, and routing, to the buffer as they are: one kernel where
// three copies would be three.
struct CopyInputs {
  const void* x;
  int64_t row_bytes;  // from one token to the next
  const void* topk_idx;
  const float* topk_weights;
  void* to_x;  // BF16 [T, hidden]
  int64_t* to_topk_idx;
  float* to_topk_weights;
};

// A CTA copies a token's hidden states, and its routing. Id: of topk_idx.
template <class Id, int kHidden, int kTopk, int kThreads>
__device__ void copy_inputs(const CopyInputs& arguments) {
  const int64_t token = blockIdx.x;
  constexpr int kChunks = kHidden * 2 / kChunkBytes;
  const auto* from = reinterpret_cast<const Chunk*>(static_cast<const uint8_t*>(arguments.x) +
                                                    token * arguments.row_bytes);
  Chunk* to = static_cast<Chunk*>(arguments.to_x) + token * kChunks;
#pragma unroll
  for (int first = 0; first < kChunks; first += kThreads) {
    const int i = first + static_cast<int>(threadIdx.x);
    if (i < kChunks) to[i] = from[i];
  }
  for (int i = threadIdx.x; i < kTopk; i += kThreads) {
    const int64_t at = token * kTopk + i;
    arguments.to_topk_idx[at] = static_cast<const Id*>(arguments.topk_idx)[at];
    arguments.to_topk_weights[at] = arguments.topk_weights[at];
  }
}

}  // namespace megamoe
