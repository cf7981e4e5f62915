// The order in which a persistent kernel computes: one list of tasks, the same for all CTAs.
//
// A task is one tile: weight_rows rows of an expert's weights for all tokens of one block. The list
// goes through the blocks in waves of wave_blocks:
//
//   L1 of wave 0 | L1 of wave 1, L2 of wave 0 | L1 of wave 2, L2 of wave 1 | ... | L2 of the last
//
// so that L2's inputs are a wave old when it comes to them, and few tasks wait. Blocks that would be
// one wave are two. Within a wave the blocks vary fastest: neighbouring CTAs then read the same
// weights, if the wave's blocks are one expert's.
//
// CTAs take turns. A task of L1 lasts as long as several of L2, so those that take one more of the
// last wave's L1 than others may be left out of some turns of L2.
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
      : shape_(shape), num_blocks_(num_blocks),
        wave_blocks_(num_blocks > shape.wave_blocks ? shape.wave_blocks
                                                    : ceil_div(2 * num_blocks, 3)),
        cluster_(cta / kCtas), cta_of_cluster_(cta % kCtas), index_(cluster_),
        num_clusters_(num_ctas / kCtas) {}

  // Puts the next task into `task`; false when there is none.
  MEGAMOE_FN bool next(Task& task) {
    for (; first_block() < num_blocks_; next_segment()) {
      const int size = segment_blocks() * segment_tasks();
      if (index_ < size) {
        const int blocks = segment_blocks();
        const int part = index_ / blocks * kCtas + cta_of_cluster_;
        task = {layer_, first_block() + index_ % blocks, part};
        index_ += short_turns_ > 0 ? short_turn_ : num_clusters_;
        --short_turns_;
        return true;
      }
      index_ -= size;
      // With two waves at most, all had nothing but L1 until here.
      const bool last_l1 = layer_ == Layer::kL1 && (step_ + 1) * wave_blocks_ >= num_blocks_;
      if (last_l1 && step_ <= 1) share_rest();
    }
    return false;
  }

 private:
  // A segment is one layer of one wave: L1 of wave `step`, L2 of the wave before.
  MEGAMOE_FN int first_block() const {
    return (step_ - (layer_ == Layer::kL2)) * wave_blocks_;
  }
  MEGAMOE_FN int segment_blocks() const {
    const int left = num_blocks_ - first_block();
    return left < wave_blocks_ ? left : wave_blocks_;
  }
  MEGAMOE_FN int segment_tasks() const {
    return (layer_ == Layer::kL1 ? l1_tasks(shape_) : l2_tasks(shape_)) / kCtas;
  }
  // After L1: some clusters had one task more, and come last now. They are left out of as many turns
  // as is best.
  MEGAMOE_FN void share_rest() {
    const int others = num_clusters_ - (cluster_ - index_ + num_clusters_) % num_clusters_;
    const int rest = num_blocks_ * l2_tasks(shape_) / kCtas;
    const int l1 = shape_.hidden / 128, l2 = shape_.intermediate / 128;  // what a task takes
    int least = 0;
    for (int turns = 0; turns * l2 < l1 && turns * others < rest; ++turns) {
      const int left = rest - turns * others;  // from here on all take turns, the others first
      const int theirs = (turns + ceil_div(left, num_clusters_)) * l2;
      const int own = l1 + (left > others ? ceil_div(left - others, num_clusters_) : 0) * l2;
      const int longest = theirs > own ? theirs : own;
      if (turns == 0 || longest < least) least = longest, short_turns_ = turns;
    }
    short_turn_ = others;
    if (index_ >= others) {
      index_ += short_turns_ * others;
      short_turns_ = 0;
    }
  }
  MEGAMOE_FN void next_segment() {
    const bool more_l1 = (step_ + 1) * wave_blocks_ < num_blocks_;
    if (layer_ == Layer::kL1 && step_ > 0) {
      layer_ = Layer::kL2;
    } else {
      ++step_;
      layer_ = more_l1 ? Layer::kL1 : Layer::kL2;
    }
  }

  const Shape& shape_;
  int num_blocks_, wave_blocks_;
  int cluster_, cta_of_cluster_;
  int index_;  // in the segment
  int num_clusters_;
  int short_turn_ = 0, short_turns_ = 0;  // clusters that take part in so many turns
  int step_ = 0;
  Layer layer_ = Layer::kL1;
};

}  // namespace megamoe
