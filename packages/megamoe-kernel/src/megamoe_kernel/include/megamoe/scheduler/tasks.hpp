// The order in which a persistent kernel computes: one list of tasks, the same for all CTAs.
//
// A task is one tile: weight_rows rows of an expert's weights for all tokens of one block. The list
// goes through the blocks in waves of wave_blocks:
//
//   L1 of wave 0 | L1 of wave 1, L2 of wave 0 | L1 of wave 2, L2 of wave 1 | ... | L2 of the last
//
// so that L2's inputs are a wave old when it comes to them, and few tasks wait. Within a wave the
// blocks vary fastest: neighbouring CTAs then read the same weights, if the wave's blocks are one
// expert's.
//
// Nothing can wait in a circle. Each CTA takes its tasks in the order of the list. L1 of a block
// waits for its tokens, L2 for L1 tasks of its block, which come earlier in the list. Tokens are
// fetched by other warps in the order of the blocks, and wait for L2 of the block that had the ring
// slot before. A ring of two waves puts that L2 before the L1 that waits for the tokens. So among
// what is unfinished, the first in the list can always go on.
#pragma once

#include "megamoe/layout/problem.hpp"

namespace megamoe {

enum class Layer { kL1, kL2 };

struct Task {
  Layer layer;
  int block;
  int part;  // which weight_rows rows; in L1 also which l1_outputs of the intermediate
};

// One CTA's tasks. kCtas: of a cluster, which takes so many neighbouring parts of a block at a time,
// each CTA one of them: number `cluster` of a list of such tasks, and every num_clusters-th after it.
template <class Shape, int kCtas = 1>
class TaskCursor {
 public:
  MEGAMOE_FN TaskCursor(const Shape& shape, int num_blocks, int cta, int num_ctas)
      : shape_(shape), num_blocks_(num_blocks), cta_of_cluster_(cta % kCtas), index_(cta / kCtas),
        stride_(num_ctas / kCtas) {}

  // Puts the next task into `task`; false when there is none.
  MEGAMOE_FN bool next(Task& task) {
    for (; first_block() < num_blocks_; next_segment()) {
      const int size = segment_blocks() * segment_tasks();
      if (index_ < size) {
        const int blocks = segment_blocks();
        const int part = index_ / blocks * kCtas + cta_of_cluster_;
        task = {layer_, first_block() + index_ % blocks, part};
        index_ += stride_;
        return true;
      }
      index_ -= size;
    }
    return false;
  }

 private:
  // A segment is one layer of one wave: L1 of wave `step`, L2 of the wave before.
  MEGAMOE_FN int first_block() const {
    return (step_ - (layer_ == Layer::kL2)) * shape_.wave_blocks;
  }
  MEGAMOE_FN int segment_blocks() const {
    const int left = num_blocks_ - first_block();
    return left < shape_.wave_blocks ? left : shape_.wave_blocks;
  }
  MEGAMOE_FN int segment_tasks() const {
    return (layer_ == Layer::kL1 ? l1_tasks(shape_) : l2_tasks(shape_)) / kCtas;
  }
  MEGAMOE_FN void next_segment() {
    const bool more_l1 = (step_ + 1) * shape_.wave_blocks < num_blocks_;
    if (layer_ == Layer::kL1 && step_ > 0) {
      layer_ = Layer::kL2;
    } else {
      ++step_;
      layer_ = more_l1 ? Layer::kL1 : Layer::kL2;
    }
  }

  const Shape& shape_;
  int num_blocks_;
  int cta_of_cluster_;
  int index_;
  int stride_;
  int step_ = 0;
  Layer layer_ = Layer::kL1;
};

}  // namespace megamoe
