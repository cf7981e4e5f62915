// Which tiling of a kernel suits a call, and the constants that the kernel is compiled for then.
//
// The tiling depends on how many tokens an expert gets on average: a block has room for most
// experts' tokens, so that weights are read once.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "megamoe/impl/sm90_shared.hpp"
#include "megamoe/stages/sm100_sizes.hpp"

namespace megamoe {

// Kernels that cannot be are refused here, before anything is divided by their sizes.
inline void require(bool holds, const std::string& what) {
  if (!holds) throw std::invalid_argument("no kernel is for these sizes: " + what);
}

// MoEShape of models.py.
struct MoEShape {
  int num_experts, num_topk, hidden, intermediate;
};

// most: of tokens that an expert gets on average, where the tiling is used.
template <class Tiling>
struct ForTokens {
  double most;
  Tiling tiling;
};
inline constexpr double kAnyNumber = std::numeric_limits<double>::infinity();

// Hopper: Sm90Tiling of stages/sm90_pipeline.cuh, and a block's tokens.
struct Sm90Choice {
  int block_rows, groups, split, depth, tiles, producer_registers, consumer_registers, least;
  int ctas = 1;

  static constexpr int kCtasInTurns = 0;  // they draw their tasks (stages/sm90_plan.cuh)
  constexpr int weight_rows() const { return groups * tiles * kTileRows; }
  constexpr int threads() const { return (1 + groups * split) * 128; }
};

// A launch's registers are shared by its threads when it starts, so what producers give up must be
// what consumers take: (168 or 96) times the threads in all.
inline constexpr ForTokens<Sm90Choice> kSm90Tilings[] = {
    {0, {16, 2, 1, 1, 1, 56, 224, 8}},  // fits every layer, for those that no other fits
    {1.5, {8, 2, 2, 1, 1, 64, 104, 8, 2}},
    {9, {16, 4, 1, 2, 1, 64, 104, 8, 2}},
    {22, {32, 4, 1, 2, 1, 64, 104, 16, 2}},
    {44, {48, 4, 1, 2, 1, 64, 104, 24, 2}},
    {72, {80, 2, 1, 1, 2, 56, 224, 48, 2}},
    {104, {112, 2, 1, 1, 2, 56, 224, 64, 2}},
    {kAnyNumber, {160, 2, 1, 1, 2, 56, 224, 80, 2}},
};

// Blackwell: Sm100Tiling of stages/sm100_pipeline.hpp.
struct Sm100Choice {
  int block_rows;  // tokens of a block
  int tiles;       // of 128 rows of weights in a task
  int ctas = 1;    // 2 where pairs of CTAs multiply together

  // One on each multiprocessor of a B200. Pairs have half as many tasks for half as many clusters.
  static constexpr int kCtasInTurns = 148;
  static constexpr int kFetchWarps = 5, kEpilogueGroups = 2;
  static constexpr int kOtherRegisters = 80, kEpilogueRegisters = 176;  // 128 x 512 threads in all
  constexpr int weight_rows() const { return tiles * ptx::kMmaRows; }
  constexpr int threads() const { return kWarpSize * (3 + kFetchWarps + 4 * kEpilogueGroups); }
};

// Two tiles share the tokens that a stage has; layers that they do not divide take one. 224 is the
// most of which tensor memory holds two accumulators and the scales.
inline constexpr ForTokens<Sm100Choice> kSm100Tilings[] = {
    {9, {16, 2}},  {9, {16, 1}},   {20, {32, 2}},          {46, {64, 2}},
    {46, {64, 1}}, {88, {112, 2}}, {kAnyNumber, {224, 1}},
};
// Each CTA of a pair copies half of the tokens. Never chosen, until a GPU has said whether they are
// right and faster.
inline constexpr ForTokens<Sm100Choice> kSm100Pairs[] = {
    {kAnyNumber, {64, 1, 2}},
    {kAnyNumber, {224, 1, 2}},
};

inline bool fits(const Sm90Choice& tiling, const MoEShape& layer) {
  const int columns = tiling.split * tiling.depth * kTileColumns;
  const int rows = tiling.ctas * tiling.weight_rows();
  return layer.hidden % columns == 0 && layer.intermediate % columns == 0 &&
         layer.hidden % rows == 0 && 2 * layer.intermediate % rows == 0;
}
inline bool fits(const Sm100Choice& tiling, const MoEShape& layer) {
  const int rows = tiling.weight_rows();
  return layer.hidden % rows == 0 && 2 * layer.intermediate % rows == 0;
}

// Those that the layer can take, for ever more tokens; of several for as many tokens the first.
template <class Tiling>
std::vector<ForTokens<Tiling>> fitting(std::span<const ForTokens<Tiling>> all,
                                       const MoEShape& layer) {
  std::vector<ForTokens<Tiling>> found;
  if (layer.hidden % 128 || layer.intermediate % 128) return found;  // as problem_error has it
  for (const ForTokens<Tiling>& row : all) {
    if (fits(row.tiling, layer) && (found.empty() || found.back().most < row.most)) {
      found.push_back(row);
    }
  }
  return found;
}

// The tiling for tokens of all ranks, spread evenly over all experts.
template <class Tiling>
Tiling chosen(const std::vector<ForTokens<Tiling>>& fitting, const MoEShape& layer,
              int64_t tokens) {
  require(!fitting.empty(), "hidden and intermediate are multiples of 128");
  const double per_expert = static_cast<double>(tokens) * layer.num_topk / layer.num_experts;
  for (const ForTokens<Tiling>& row : fitting) {
    if (per_expert <= row.most) return row.tiling;
  }
  return fitting.back().tiling;
}

// Blocks of a wave: at most `most`, a block having l1_tasks of L1, and at most kMostWaveBlocks. Where
// CTAs take turns, as many as share out best among them; else some have one more of the long tasks in
// every wave.
inline int wave_blocks(int most, int l1_tasks, int ctas_in_turns) {
  constexpr int kMostWaveBlocks = 16;
  const int blocks_at_most = std::clamp(most, 1, kMostWaveBlocks);
  if (ctas_in_turns == 0) return blocks_at_most;
  const auto idle = [&](int blocks) {
    const int tasks = blocks * l1_tasks;
    return static_cast<double>(ceil_div(tasks, ctas_in_turns) * ctas_in_turns - tasks) / tasks;
  };
  int best = blocks_at_most;
  for (int blocks = best - 1; blocks > 0; --blocks) {
    if (idle(blocks) < idle(best)) best = blocks;
  }
  return best;
}

// The layer's part of one rank; ctas_in_turns: of a launch on the GPU that the kernel is meant for, on
// others it is right too; 0 where CTAs do not take turns.
template <class Format>
Problem problem_of(const MoEShape& layer, int num_ranks, int num_shared, int ring_rows,
                   int block_rows, int weight_rows, int ctas_in_turns) {
  require(layer.num_experts > 0 && num_ranks > 0 && block_rows > 0 && weight_rows > 0,
          "experts, ranks and a tiling's rows are positive");
  Problem problem{num_ranks, layer.num_experts / num_ranks, num_shared, layer.num_topk,
                  layer.hidden, layer.intermediate, ring_rows, block_rows, 0, weight_rows};
  problem.wave_blocks =
      wave_blocks(ring_blocks<Format>(problem) / 2, l1_tasks(problem), ctas_in_turns);
  const char* error = problem_error<Format>(problem);
  require(!error, error ? error : "");
  return problem;
}

// The most stages, up to `most`, of which bytes(stages) fit into shared memory; two at least.
template <class Bytes>
int stages_that_fit(int most, Bytes bytes) {
  int stages = most;
  while (stages > 1 && bytes(stages) > kMostShared) --stages;
  require(stages > 1, "so many experts, or so large a tiling, leave no shared memory for stages");
  return stages;
}
inline int stages_of(const Sm90Choice& tiling, const Problem& problem) {
  return stages_that_fit(24, [&](int stages) {
    return sm90_shared(problem, tiling.split, tiling.depth, stages).bytes;
  });
}
inline int stages_of(const Sm100Choice& tiling, const Problem& problem) {
  const Sm100StageBytes stage = sm100_stage_bytes(tiling.block_rows, tiling.tiles, tiling.ctas);
  return stages_that_fit(8, [&](int stages) {
    return shared_bytes<Nvfp4>(problem, sm100_ring_bytes(stages, stage));
  });
}

// Template arguments of Sm90Tiling and Sm100Tiling.
inline std::vector<int> constants_of(const Sm90Choice& t, const Problem& problem) {
  return {t.groups, t.split, t.depth, t.tiles, t.least, stages_of(t, problem),
          t.producer_registers, t.consumer_registers, t.ctas};
}
inline std::vector<int> constants_of(const Sm100Choice& t, const Problem& problem) {
  return {t.block_rows, t.tiles, stages_of(t, problem), t.kFetchWarps, t.kEpilogueGroups, t.ctas,
          t.kOtherRegisters, t.kEpilogueRegisters};
}

}  // namespace megamoe
