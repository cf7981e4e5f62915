// impl/sm100.hpp under the emulator, as host/layer_run.hpp runs kernels.
//
// Of LayerRun, codes and scales are here those of layout_sm100.py: rows interleaved in w13, scale
// words in memory order; each rank's routed experts, then its shared one.
#pragma once

#include "emulator/copy_instructions.hpp"
#include "emulator/layer_machine.hpp"
#include "emulator/product_instructions.hpp"
#include "host/layer_run.hpp"
#include "megamoe/impl/sm100.hpp"

namespace megamoe::emulator {

using host::Cta;
using host::HostMachine;
using host::LayerRun;

inline Mutant chosen_mutant = Mutant::kNone;  // for the runs that follow

template <class Tiling>
class Sm100Kernel {
 public:
  using Shared = Sm100Shared<Tiling, Problem>;
  static constexpr int kCtaThreads = Sm100Warps<Tiling>::threads, kEngines = 1;

  Sm100Kernel(const LayerRun& run, World& world, const RankBuffers& buffers)
      : run_(run),
        p_(run.problem),
        buffers_(buffers),
        emulation_(world, geometry(), chosen_mutant),
        arguments_(static_cast<size_t>(run.num_launches * run.problem.num_ranks)) {
    emulation = &emulation_;
    for (int launch = 0; launch < run.num_launches; ++launch) {
      for (int rank = 0; rank < p_.num_ranks; ++rank) fill(arguments(rank, launch), rank, launch);
    }
  }

  void add_cta(Cta& cta, int rank, int index) {
    emulation_.add_cta(static_cast<size_t>(Shared::bytes(p_)));
    watch_tile(cta, emulation_.cta(rank * run_.num_ctas + index), p_);
  }
  static void watch_tile(Cta& cta, CtaState& at, const Problem& p) {
    const int begin = Shared::tile_at(), end = Shared::words_at(p);
    cta.watched.watch(at.shared.base() + begin, static_cast<size_t>(end - begin),
                      emulation->world.num_agents());
  }
  void add_thread(int, int rank, int cta, int thread) { emulation_.add_thread(rank, cta, thread); }

  void run(const HostMachine& machine, Cta&, int launch) {
    LayerMachine m(machine);
    uint8_t* shared = emulation_.cta().shared.base();
    sm100_run<Tiling>(m, p_, arguments(m.rank_idx(), launch), shared);
  }

  // All threads have ended: what is left over is a mistake.
  void end_launch(Cta& cta, int rank, int index) {
    CtaState& at = emulation_.cta(rank * run_.num_ctas + index);
    host::Crew& crew = emulation_.world.crew;
    if (at.tensor.any_allocated()) crew.note("a CTA ends and has not freed tensor memory");
    if (!(at.copies.empty() && at.products.empty())) {
      crew.note("a CTA ends while copies or products are on their way");
    }
    at.copies.clear();
    at.products.clear();
    at.barriers.clear();
    at.leaving = false;
    at.tensor_words.clear();
    at.cta_group = 0;
    at.may_allocate = true;
    at.visitors = {};
    at.shared.clear();
    watch_tile(cta, at, p_);
  }
  bool complete_one() { return emulation_.complete_one(); }

  static Geometry geometry() {
    using Stages = Sm100Stages<Tiling>;
    constexpr uint32_t kTokensAt = Stages::kWeightBytes,
                       kWeightScalesAt = kTokensAt + Stages::kTokenBytes;
    return {2 * Tiling::stages,
            Stages::kStageBytes,
            kTokensAt,
            kWeightScalesAt,
            kWeightScalesAt + Stages::kWeightScaleBytes,
            Tiling::accumulator_columns,
            Sm100Warps<Tiling>::tokens,
            Sm100Warps<Tiling>::epilogue};
  }

  static void make_map(TensorMap& map, const uint8_t* base, int64_t rows, int columns, int box_rows,
                       const TensorMap* other = nullptr) {
    const EmulatedMap made{EmulatedMap::kMagic, base, rows, columns / 2, box_rows,
                           ptx::kSwizzleBytes,  other};
    std::memcpy(map.bytes, &made, sizeof made);
  }

 private:
  Sm100Arguments& arguments(int rank, int launch) {
    return arguments_[static_cast<size_t>(launch * p_.num_ranks + rank)];
  }

  void fill(Sm100Arguments& a, int rank, int launch) {
    const Fields mine{buffers_, rank};
    make_map(a.token_map, mine.ring_x(), p_.ring_rows, p_.hidden, kTokenBoxRows, &a.hidden_map);
    make_map(a.hidden_map, mine.ring_h(), p_.ring_rows, p_.intermediate, kTokenBoxRows,
             &a.token_map);
    const int64_t experts = num_pool_experts(p_), first = rank * experts;
    const int64_t routed = p_.num_local_experts, w13_rows = 2 * p_.intermediate,
                  w2_rows = p_.hidden;
    const int64_t w13 = w13_rows * p_.hidden, w2 = w2_rows * p_.intermediate;
    const uint8_t *w13_codes = run_.w13_codes + first * w13 / 2,
                  *w2_codes = run_.w2_codes + first * w2 / 2;
    make_map(a.w13_map, w13_codes, routed * w13_rows, p_.hidden, ptx::kMmaRows);
    make_map(a.w2_map, w2_codes, routed * w2_rows, p_.intermediate, ptx::kMmaRows);
    const auto words = [](const uint8_t* scales, int64_t expert, int64_t values) {
      return reinterpret_cast<const uint32_t*>(scales + expert * values / kBlockSize);
    };
    a.w13_scales = words(run_.w13_scales, first, w13);
    a.w2_scales = words(run_.w2_scales, first, w2);
    a.w13_alpha = run_.w13_alpha + 2 * first;
    a.w2_alpha = run_.w2_alpha + first;
    if (p_.num_shared) {
      make_map(a.shared_w13_map, w13_codes + routed * w13 / 2, w13_rows, p_.hidden, ptx::kMmaRows);
      make_map(a.shared_w2_map, w2_codes + routed * w2 / 2, w2_rows, p_.intermediate,
               ptx::kMmaRows);
      a.shared_w13_scales = words(run_.w13_scales, first + routed, w13);
      a.shared_w2_scales = words(run_.w2_scales, first + routed, w2);
      a.shared_w13_alpha = a.w13_alpha + 2 * routed;
      a.shared_w2_alpha = a.w2_alpha + routed;
    }
    a.buffers = buffers_;
    a.input_scale = &run_.input_scale;
    a.shared_input_scale = &run_.shared_input_scale;
    a.limit = run_.limit;
    const int64_t at = int64_t{launch} * p_.num_ranks + rank;
    a.num_tokens = run_.num_tokens[at];
    a.output = run_.output + at * run_.max_tokens * p_.hidden;
    a.rank_idx = rank;
  }

  const LayerRun& run_;
  const Problem& p_;
  const RankBuffers& buffers_;
  Emulation emulation_;
  std::vector<Sm100Arguments> arguments_;
};

}  // namespace megamoe::emulator
