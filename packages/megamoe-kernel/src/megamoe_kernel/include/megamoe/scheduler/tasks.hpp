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
// Each CTA takes its tasks in the order of the list: by turns, or one more for each that it is through
// with (stages/sm90_plan.cuh).
//
// Nothing can wait in a circle. L1 of a block waits for its tokens, L2 for L1 tasks of its block,
// which come earlier in the list. Tokens are fetched by other warps in the order of the blocks, and
// wait for L2 of the block that had the ring slot before. A ring of two waves puts that L2 before the
// L1 that waits for the tokens. Numbers are taken without gaps, each CTA goes through its own in their
// order, and who is through takes more. So among what is unfinished the first in the list has been
// taken, is the next of who took it, and can go on.
#pragma once

#include "megamoe/layout/problem.hpp"

namespace megamoe {

enum class Layer { kL1, kL2 };

struct Task {
  Layer layer;
  int block;
  int part;  // which weight_rows rows; in L1 also which l1_outputs of the intermediate
};

// A walk through the list. kCtas: of a cluster, which takes so many neighbouring parts of a block at
// a time, each CTA one of them; the list is one of such tasks then.
template <class Shape, int kCtas = 1>
class TaskList {
 public:
  MEGAMOE_FN TaskList(const Shape& shape, int num_blocks, int cta)
      : shape_(shape), num_blocks_(num_blocks),
        wave_blocks_(num_blocks > shape.wave_blocks ? shape.wave_blocks
                                                    : ceil_div(2 * num_blocks, 3)),
        cta_of_cluster_(cta % kCtas) {}

  // Puts task `number` of the list into `task`; false if there are fewer. Numbers only grow.
  MEGAMOE_FN bool at(int number, Task& task) {
    for (; first_block() < num_blocks_; next_segment()) {
      const int left = num_blocks_ - first_block();
      const int blocks = left < wave_blocks_ ? left : wave_blocks_;
      const int tasks = (layer_ == Layer::kL1 ? l1_tasks(shape_) : l2_tasks(shape_)) / kCtas;
      const int index = number - segment_begin_;
      if (index < blocks * tasks) {
        task = {layer_, first_block() + index % blocks, index / blocks * kCtas + cta_of_cluster_};
        return true;
      }
      segment_begin_ += blocks * tasks;
    }
    return false;
  }

 private:
  // A segment is one layer of one wave: L1 of wave `step`, L2 of the wave before.
  MEGAMOE_FN int first_block() const {
    return (step_ - (layer_ == Layer::kL2)) * wave_blocks_;
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
  int cta_of_cluster_;
  int segment_begin_ = 0;  // the number of its first task
  int step_ = 0;
  Layer layer_ = Layer::kL1;
};

// The numbers that a cluster takes by turns.
//
// A task of L1 lasts as long as several of L2. Where there are few blocks, so that all of L1 comes
// before L2, clusters that took one more of L1 than others are left out of some turns of L2.
template <class Shape, int kCtas = 1>
class Turns {
 public:
  MEGAMOE_FN Turns(const Shape& shape, int num_blocks, int cta, int num_ctas)
      : shape_(shape), num_blocks_(num_blocks), cluster_(cta / kCtas),
        num_clusters_(num_ctas / kCtas), number_(cluster_) {}

  // Whether there are so few blocks: two waves.
  MEGAMOE_FN bool are_few() const { return num_blocks_ <= 2 * shape_.wave_blocks; }

  MEGAMOE_FN int next() {
    const int l1 = num_blocks_ * l1_tasks(shape_) / kCtas;
    if (are_few() && !shared_ && number_ >= l1) share_l2(number_ - l1);
    const int number = number_;
    number_ += short_turns_ > 0 ? short_turn_ : num_clusters_;
    --short_turns_;
    return number;
  }

 private:
  // After L1: some clusters had one task more, and come last now. They are left out of as many turns
  // as is best. index: of this cluster's next task in L2.
  MEGAMOE_FN void share_l2(int index) {
    const int others = num_clusters_ - (cluster_ - index + num_clusters_) % num_clusters_;
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
    if (index >= others) {
      number_ += short_turns_ * others;
      short_turns_ = 0;
    }
    shared_ = true;
  }

  const Shape& shape_;
  int num_blocks_, cluster_, num_clusters_;
  int number_;
  bool shared_ = false;
  int short_turn_ = 0, short_turns_ = 0;  // clusters that take part in so many turns
};

// One CTA's tasks by turns, for kernels in which each warp finds them out for itself.
template <class Shape, int kCtas = 1>
class TaskCursor {
 public:
  MEGAMOE_FN TaskCursor(const Shape& shape, int num_blocks, int cta, int num_ctas)
      : list_(shape, num_blocks, cta), turns_(shape, num_blocks, cta, num_ctas) {}

  // Puts the next task into `task`; false when there is none.
  MEGAMOE_FN bool next(Task& task) { return list_.at(turns_.next(), task); }

 private:
  TaskList<Shape, kCtas> list_;
  Turns<Shape, kCtas> turns_;
};

}  // namespace megamoe
