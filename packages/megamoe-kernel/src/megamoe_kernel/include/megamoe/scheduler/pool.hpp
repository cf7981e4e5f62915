// The tokens that came to this rank's experts, cut into blocks.
//
// After the dispatch barrier every CTA computes the same table from the counts that the ranks sent.
// Blocks are numbered expert by expert; an expert without tokens has none.
#pragma once

#include "megamoe/common/machine.hpp"
#include "megamoe/layout/problem.hpp"
#include "megamoe/layout/rank_buffers.hpp"

namespace megamoe {

// A block of tokens of one expert.
struct Block {
  int expert;     // on this rank; num_local_experts is the shared one
  int first_row;  // of the expert's tokens
  int rows;       // up to block_rows
};

// Replaces words[0..count) in shared memory by the sums of the words before each; one warp.
template <Machine M>
MEGAMOE_FN void exclusive_sums(M& m, uint32_t* words, int count) {
  uint32_t before = 0;
  for (int start = 0; start < count; start += kWarpSize) {
    const int i = start + lane_idx(m);
    const uint32_t value = i < count ? words[i] : 0;
    const uint32_t up_to = inclusive_sum(m, value);
    if (i < count) words[i] = before + up_to - value;
    before += m.shuffle(up_to, kWarpSize - 1);
  }
  m.sync_warp();
}

template <class Shape>
class Pool {
 public:
  // Shared memory that a pool needs, in words.
  MEGAMOE_FN static constexpr int num_words(const Shape& shape) {
    return 2 * num_experts(shape) + 2 * num_pool_experts(shape) + 1;
  }

  MEGAMOE_FN Pool(const Shape& shape, uint32_t* shared) : shape_(shape), shared_(shared) {}

  // Reads the counts; all threads of the group. num_tokens: this rank's, for the shared expert.
  template <Machine M>
  MEGAMOE_FN void build(M& m, const Group& group, const Fields& mine, int num_tokens) {
    const int routed = num_experts(shape_), experts = num_pool_experts(shape_);
    for (int i = group.thread(m); i < routed; i += group.num_threads) {
      shared_[i] = m.load(&mine.route_count()[i]);
      shared_[routed + i] = m.load(&mine.route_begin()[i]);
    }
    group.sync(m);
    for (int expert = group.thread(m); expert <= experts; expert += group.num_threads) {
      uint32_t rows = 0;
      if (expert < shape_.num_local_experts) {
        for (int rank = 0; rank < shape_.num_ranks; ++rank) rows += routed_rows(rank, expert);
      } else if (expert < experts) {
        rows = static_cast<uint32_t>(num_tokens);
      }
      if (expert < experts) rows_of()[expert] = rows;
      first_block_of()[expert] = ceil_div(rows, static_cast<uint32_t>(shape_.block_rows));
    }
    group.sync(m);
    if (group.thread(m) < kWarpSize) exclusive_sums(m, first_block_of(), experts + 1);
    group.sync(m);
  }

  MEGAMOE_FN int num_blocks() const {
    return static_cast<int>(first_block_of()[num_pool_experts(shape_)]);
  }

  MEGAMOE_FN Block block(int block_idx) const {
    // The last expert that begins at or before the block. Experts without tokens begin where the
    // next one does, so they are passed over.
    int low = 0, high = num_pool_experts(shape_);
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (static_cast<int>(first_block_of()[middle]) <= block_idx ? low : high) = middle;
    }
    // An expert's blocks are about equally long, in eights: a long and a short one would cost more.
    const int first_block = static_cast<int>(first_block_of()[low]);
    const int all_rows = static_cast<int>(rows_of()[low]);
    const int blocks = static_cast<int>(first_block_of()[low + 1]) - first_block;
    const int most = ceil_div(ceil_div(all_rows, blocks), 8) * 8;
    const int first_row = (block_idx - first_block) * most;
    const int left = all_rows - first_row;
    return {low, first_row, left < most ? left : most};
  }

  // Slots of a rank that want a routed expert, and where they begin in that rank's routes.
  MEGAMOE_FN uint32_t routed_rows(int rank, int expert) const {
    return shared_[rank * shape_.num_local_experts + expert];
  }
  MEGAMOE_FN uint32_t routed_begin(int rank, int expert) const {
    return shared_[num_experts(shape_) + rank * shape_.num_local_experts + expert];
  }

 private:
  MEGAMOE_FN uint32_t* rows_of() const { return shared_ + 2 * num_experts(shape_); }
  MEGAMOE_FN uint32_t* first_block_of() const { return rows_of() + num_pool_experts(shape_); }

  const Shape& shape_;
  uint32_t* shared_;
};

}  // namespace megamoe
