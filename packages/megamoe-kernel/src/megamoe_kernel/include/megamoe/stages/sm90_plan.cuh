// sm_90a: which tasks a CTA takes. One warp finds them out and tells the others of the CTA.
//
// A cluster's first tasks are those of its turns, and where there are few blocks all of them.
// Otherwise it draws the next number of the list, three ahead, for each task that it is through with:
// blocks differ in tokens, and some CTAs begin later than others, so that by turns alone some would be
// done long before the last. CTA 0 of a cluster draws, and tells the other one.
#pragma once

#include "megamoe/scheduler/pool.hpp"
#include "megamoe/scheduler/tasks.hpp"
#include "megamoe/stages/decode.cuh"
#include "megamoe/stages/sm90_pipeline.cuh"

namespace megamoe {

// One warp of each CTA.
template <class Tiling, Machine M, class Shape>
class Planner {
 public:
  // count: of the tasks that are planned already; some of the turns.
  __device__ __forceinline__ Planner(M& m, const Shape& shape, const Fields& mine,
                                     const Pool<Shape>& pool, const Plan& plan,
                                     const Sm90LayerWeights& weights, uint32_t count)
      : m_(m), shape_(shape), mine_(mine), pool_(pool), plan_(plan), weights_(weights),
        list_(shape, pool.num_blocks(), m.cta_idx()),
        turns_(shape, pool.num_blocks(), m.cta_idx(), m.num_ctas()), count_(count) {
    for (uint32_t i = 0; i < count; ++i) turns_.next();
  }

  // Three tasks are planned ahead of the one whose results are stored. A place is written again when
  // its task's results are in the epilogues' tile: then nobody has yet to read it, as consumers have
  // filled the tile from stages that both copiers have filled. The other CTA of the cluster has
  // planned that task too, as it brought half of its tokens, so it has also read the number that was
  // drawn for it. False if a wait was given up.
  __device__ __forceinline__ bool plan_next() {
    PlannedTask next{};
    if (more_) {
      int number;
      if (!take(number)) return false;
      more_ = list_.at(number, next.task);
    }
    if (more_) {
      next.block = pool_.block(next.task.block);
      const bool is_l1 = next.task.layer == Layer::kL1;
      const Sm90Weights from = weights_.of(shape_, next.task.layer, next.block.expert);
      next.weights = from.tiles + next.task.part * task_bytes<Tiling>(shape_, next.task.layer);
      next.alpha = mul_rn(from.alpha[0], kDecodedScale);
      next.alpha_up = is_l1 ? mul_rn(from.alpha[1], kDecodedScale) : 0.0f;
    }
    if (lane_idx(m_) == 0) plan_.put(count_, next);
    ++count_;
    return true;
  }

 private:
  __device__ __forceinline__ bool take(int& number) {
    constexpr int kCtas = Tiling::ctas, kByTurns = kPlanned - 1;
    if (count_ < kByTurns || turns_.are_few()) {
      number = turns_.next();
      return true;
    }
    const uint32_t draw = count_ - kByTurns;
    uint32_t drawn = 0;
    if (m_.cta_idx() % kCtas == 0) {
      if (lane_idx(m_) == 0) {
        drawn = m_.add(&mine_.counters()[kDrawnWord], 1);
        for (int cta = 1; cta < kCtas; ++cta) plan_.tell(draw, drawn, cta);
      }
    } else {
      if (lane_idx(m_) == 0) plan_.expect(draw);
      if (m_.ballot(plan_.wait_told(m_, draw)) != kAllLanes) return false;
      if (lane_idx(m_) == 0) drawn = plan_.told(draw);
    }
    number = kByTurns * (m_.num_ctas() / kCtas) + static_cast<int>(m_.shuffle(drawn, 0));
    return true;
  }

  M& m_;
  const Shape& shape_;
  const Fields& mine_;
  const Pool<Shape>& pool_;
  const Plan& plan_;
  const Sm90LayerWeights& weights_;
  TaskList<Shape, Tiling::ctas> list_;
  Turns<Shape, Tiling::ctas> turns_;
  uint32_t count_;
  bool more_ = true;
};

}  // namespace megamoe
