// Several launches of a layer on several emulated ranks: of the scalar one, or of another kernel.
#pragma once

#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "host/machine.hpp"
#include "megamoe/impl/scalar.hpp"

namespace megamoe::host {

// Arrays are C-ordered. Of launch l and rank r: tokens [l][r][max_tokens][...], which are of the
// format's width, with scales only in NVFP4. Weights: [r] and then as ScalarWeights says.
struct LayerRun {
  Problem problem;
  int32_t max_tokens, num_ctas, num_launches;
  uint64_t seed;
  float input_scale, shared_input_scale, limit;
  const int32_t* num_tokens;
  const uint8_t* x;
  const uint8_t* x_sf;
  const float* x_scale;
  const int64_t* topk_idx;
  const float* topk_weights;
  const uint8_t *w13_codes, *w13_scales;
  const float* w13_alpha;
  const uint8_t *w2_codes, *w2_scales;
  const float* w2_alpha;
  Fault fault;
  uint16_t* output;   // [l][r][max_tokens][hidden]
  uint32_t* failure;  // [r][16]: the field after the last launch
};

template <class Format>
BufferSizes sizes_of(const LayerRun& run) {
  const Problem& p = run.problem;
  const auto size = [](int value) { return static_cast<uint64_t>(value); };
  const int scales = Format::kHasScales;
  return {size(p.num_ranks), size(p.num_local_experts), size(run.max_tokens), size(p.num_topk),
          size(Format::bytes(p.hidden)), size(scales * p.hidden / kBlockSize),
          size(Format::bytes(p.intermediate)), size(scales * p.intermediate / kBlockSize),
          size(scales), size(p.hidden), size(p.ring_rows), size(p.ring_rows) / kRingTile};
}

// What a runner needs of a kernel: how many threads and tensor cores a CTA has, what a thread does
// in a launch, and what becomes of a CTA's shared memory between launches. complete_one: lets one
// asynchronous operation come to its end; false if none is on its way.
template <class Format>
class ScalarKernel {
 public:
  static constexpr int kCtaThreads = kThreads, kEngines = 0;

  ScalarKernel(const LayerRun& run, World& world, const RankBuffers& buffers)
      : run_(run), p_(run.problem), buffers_(buffers), num_agents_(world.num_agents()) {}

  void add_cta(Cta& cta, int, int) {
    cta.words.resize(static_cast<size_t>(shared_words(p_)));
    cta.tile.resize(static_cast<size_t>(shared_tile_bytes<Format>(p_)) / sizeof(Chunk) + 1);
    clear(cta);
  }
  void add_thread(int, int, int, int) {}

  void run(HostMachine& m, Cta& cta, int launch) {
    run_layer<Format>(m, p_, buffers_, layer(m.rank_idx(), launch), cta.words.data(),
                      reinterpret_cast<uint8_t*>(cta.tile.data()));
  }

  // Shared memory has nothing of the launch before.
  void end_launch(Cta& cta, int, int) { clear(cta); }
  bool complete_one() { return false; }

 private:
  void clear(Cta& cta) const {
    std::memset(cta.words.data(), 0xA5, cta.words.size() * 4);
    std::memset(cta.tile.data(), 0xA5, cta.tile.size() * sizeof(Chunk));
    cta.watched.watch(reinterpret_cast<const uint8_t*>(cta.tile.data()),
                      cta.tile.size() * sizeof(Chunk), num_agents_);
  }
  ScalarLayer layer(int rank, int launch) const {
    const int64_t experts = num_pool_experts(p_), first = rank * experts;
    const int64_t w13 = int64_t{2} * p_.intermediate * p_.hidden;
    const int64_t w2 = w13 / 2;
    const int64_t at = int64_t{launch} * p_.num_ranks + rank;
    return {{run_.w13_codes + first * w13 / 2, run_.w13_scales + first * w13 / kBlockSize,
             run_.w13_alpha + first * 2},
            {run_.w2_codes + first * w2 / 2, run_.w2_scales + first * w2 / kBlockSize,
             run_.w2_alpha + first},
            run_.input_scale, run_.shared_input_scale, run_.limit, run_.num_tokens[at],
            run_.output + at * run_.max_tokens * p_.hidden};
  }

  const LayerRun& run_;
  const Problem& p_;
  const RankBuffers& buffers_;
  const int num_agents_;
};

template <class Format, class Kernel = ScalarKernel<Format>>
class LayerRunner {
 public:
  explicit LayerRunner(const LayerRun& run)
      : run_(run), p_(run.problem), buffers_(allocate()),
        world_(run.seed, buffers_, p_.num_ranks, run.num_ctas, kCtaThreads / kWarpSize,
               Kernel::kEngines),
        kernel_(run, world_, buffers_), at_end_(static_cast<size_t>(p_.num_ranks)) {
    world_.fault = run.fault;
    ctas_.resize(static_cast<size_t>(p_.num_ranks * run.num_ctas));
    // All ranks clear their buffers and meet before the first launch, as allocating them does.
    std::vector<int> all;
    for (int rank = 0; rank < p_.num_ranks; ++rank) {
      clear_once(rank);
      const std::vector<int> agents = agents_of(rank);
      all.insert(all.end(), agents.begin(), agents.end());
    }
    world_.clocks.meet(all);
    for (int rank = 0; rank < p_.num_ranks; ++rank) {
      bring_inputs(rank, 0);
      world_.clocks.meet(agents_of(rank));
      for (int cta = 0; cta < run.num_ctas; ++cta) {
        Cta& shared = ctas_[static_cast<size_t>(rank * run.num_ctas + cta)];
        shared.warps.resize(kCtaThreads / kWarpSize);
        kernel_.add_cta(shared, rank, cta);
        for (int thread = 0; thread < kCtaThreads; ++thread) add_thread(shared, rank, cta, thread);
      }
    }
  }

  // Null if all threads came to their end, else why not. A wait that was given up is an orderly
  // end: the failure records tell.
  std::optional<std::string> run() {
    auto problem = world_.crew.run(
        [this] { return kernel_.complete_one() || world_.memory.complete_one(); });
    for (int rank = 0; rank < p_.num_ranks; ++rank) {
      std::memcpy(run_.failure + 16 * rank, Fields{buffers_, rank}.failure(), 64);
    }
    return problem;
  }

 private:
  static constexpr int kCtaThreads = Kernel::kCtaThreads;

  RankBuffers allocate() {
    RankBuffers buffers{buffer_layout(sizes_of<Format>(run_)), {}};
    // Cleared, as the first launch wants its counters. What the rest holds is never read: the
    // shadow would tell.
    memory_.resize(static_cast<size_t>(p_.num_ranks));
    for (size_t rank = 0; rank < memory_.size(); ++rank) {
      memory_[rank].resize(buffers.layout.bytes / sizeof(Chunk) + 1);
      buffers.base[rank] = reinterpret_cast<uint8_t*>(memory_[rank].data());
    }
    return buffers;
  }

  void add_thread(Cta& shared, int rank, int cta, int thread) {
    const int self = num_threads_++;
    kernel_.add_thread(self, rank, cta, thread);
    const auto body = [this, &shared, rank, cta, thread, self] {
      for (int launch = 0; launch < run_.num_launches && !failed(rank); ++launch) {
        HostMachine m(world_, shared, self, rank, cta, thread);
        kernel_.run(m, shared, launch);
        const int threads = run_.num_ctas * kCtaThreads;
        world_.crew.meet(self, at_end_[static_cast<size_t>(rank)], threads,
                         [&] { end_launch(rank, launch); });
      }
    };
    world_.crew.add(body);
  }

  // The end of a launch on one rank: its stores arrive, its host brings the next inputs. Other
  // ranks may be anywhere.
  void end_launch(int rank, int launch) {
    for (int cta = 0; cta < run_.num_ctas; ++cta) {
      world_.memory.release(rank, cta, Scope::kSystem);
      kernel_.end_launch(ctas_[static_cast<size_t>(rank * run_.num_ctas + cta)], rank, cta);
    }
    const std::vector<int> agents = agents_of(rank);
    world_.clocks.meet(agents);
    if (launch + 1 < run_.num_launches && !failed(rank)) bring_inputs(rank, launch + 1);
    world_.clocks.meet(agents);
  }

  bool failed(int rank) const { return Fields{buffers_, rank}.failure()[kFailureWait] != 0; }

  std::vector<int> agents_of(int rank) const {
    std::vector<int> agents;
    const int end = world_.host_agent(rank + 1);
    for (int agent = world_.host_agent(rank); agent < end; ++agent) agents.push_back(agent);
    return agents;
  }

  // What is zero before the first launch.
  void clear_once(int rank) {
    const Fields f{buffers_, rank};
    const int experts = num_experts(p_);
    host_wrote(rank, f.barrier(), 8 * static_cast<size_t>(p_.num_ranks) * 4);
    host_wrote(rank, f.counters(), 32 * 4);
    host_wrote(rank, f.expert_count(), static_cast<size_t>(experts) * 4);
  }

  void bring_inputs(int rank, int launch) {
    const Fields f{buffers_, rank};
    const size_t at = static_cast<size_t>((launch * p_.num_ranks + rank) * run_.max_tokens);
    const size_t first = at / static_cast<size_t>(run_.max_tokens);
    const size_t tokens = static_cast<size_t>(run_.num_tokens[first]);
    const size_t bytes = static_cast<size_t>(Format::bytes(p_.hidden));
    const size_t slots = tokens * static_cast<size_t>(p_.num_topk);
    const size_t first_slot = at * static_cast<size_t>(p_.num_topk);
    bring(rank, f.x(), run_.x + at * bytes, tokens * bytes);
    if constexpr (Format::kHasScales) {
      const size_t scales = static_cast<size_t>(p_.hidden / kBlockSize);
      bring(rank, f.x_sf(), run_.x_sf + at * scales, tokens * scales);
      bring(rank, f.x_scale(), run_.x_scale + at, tokens * 4);
    }
    bring(rank, f.topk_idx(), run_.topk_idx + first_slot, slots * 8);
    bring(rank, f.topk_weights(), run_.topk_weights + first_slot, slots * 4);
  }

  void bring(int rank, void* to, const void* from, size_t bytes) {
    std::memcpy(to, from, bytes);
    host_wrote(rank, to, bytes);
  }

  void host_wrote(int rank, const void* to, size_t bytes) {
    const int agent = world_.host_agent(rank);
    const Spot spot = world_.memory.spot(to);
    const Shadow::Found found = world_.memory.shadow(spot).write(spot.offset, bytes, agent,
                                                                 world_.clocks.of(agent), false);
    if (found.conflict != Shadow::Conflict::kNone) {
      world_.crew.note(world_.describe(found, " overwrites ", agent, world_.memory.name(spot)));
    }
  }

  const LayerRun& run_;
  const Problem& p_;
  std::vector<std::vector<Chunk>> memory_;
  RankBuffers buffers_;
  World world_;
  Kernel kernel_;
  std::vector<Cta> ctas_;
  std::vector<Meeting> at_end_;
  int num_threads_ = 0;
};

}  // namespace megamoe::host
