// sm_100a: weights and tokens through shared memory to the tensor cores, W4A4.
//
// Weights are operand A (128 rows), tokens operand B. One thread copies weights, one copies tokens,
// one begins the products; each walks over the CTA's tasks by itself, and barriers in shared memory
// keep them together. So weights run ahead while tokens are waited for, and the next task's
// products while an epilogue reads the sums of the last one. In a pair of CTAs the leader's third
// thread begins the products of both, and the other's tells it when a stage is full.
#pragma once

#include "megamoe/scheduler/gates.hpp"
#include "megamoe/scheduler/tasks.hpp"
#include "megamoe/stages/l2_epilogue.hpp"
#include "megamoe/stages/sm100_pipeline.hpp"

namespace megamoe {

// One layer's weights as layout_sm100.py makes them: codes by a tensor map over [experts * rows,
// K / 2] bytes, scale words [experts, K / 64, rows], alphas [experts, 2] or [experts].
struct Sm100Weights {
  const void* codes_map;
  const uint32_t* scales;
  const float* alpha;
};

// Whose product a task is: the layer's sizes, and its expert among the weights'.
struct Sm100Operands {
  Sm100Weights weights;
  int expert;   // of `weights`
  int rows;     // of one expert
  int columns;  // K
};

template <class Shape>
MEGAMOE_GPU_FN int layer_columns(const Shape& shape, Layer layer) {
  return layer == Layer::kL1 ? shape.hidden : shape.intermediate;
}

// MMAs along K in a stage; the last stage may be half full.
MEGAMOE_GPU_FN int steps_of_stage(int columns, int first_column) {
  const int left = (columns - first_column) / ptx::kMmaK;
  return left < kStageSteps ? left : kStageSteps;
}
// Tokens that are multiplied: whole boxes, of each CTA as many.
template <class Tiling>
MEGAMOE_GPU_FN int multiplied_rows(const Block& block) {
  constexpr int kRows = Tiling::ctas * kTokenBoxRows;
  return ceil_div(block.rows, kRows) * kRows;
}

template <class Format, Machine M, class Shape>
MEGAMOE_GPU_FN bool wait_inputs(M& m, const Gates<Format, Shape>& gates, const Task& task) {
  return task.layer == Layer::kL1 ? gates.wait_tokens(m, task.block)
                                  : gates.wait_intermediate(m, task.block);
}

// One thread: the weights of this CTA's tasks. operands(task, block): an Sm100Operands.
template <class Tiling, Machine M, class Shape, class Operands>
MEGAMOE_GPU_FN bool copy_weights(M& m, const Shape& shape, const Pool<Shape>& pool,
                                 const Sm100Stages<Tiling>& stages, Operands operands) {
  TaskCursor<Shape, Tiling::ctas> tasks(shape, pool.num_blocks(), m.cta_idx(), m.num_ctas());
  RingCursor<Tiling::stages> ring;
  for (Task task; tasks.next(task);) {
    const Sm100Operands of = operands(task, pool.block(task.block));
    const int first_row = task.part * Tiling::weight_rows;
    const uint32_t* scales = of.weights.scales +
                             int64_t{of.expert} * of.rows * (of.columns / kValuesPerScaleWord) +
                             first_row;
    for (int column = 0; column < of.columns; column += kStageColumns, ring.advance()) {
      const int steps = steps_of_stage(of.columns, column);
      if (!wait_phase<1>(m, stages.free(ring.at), ring.round + 1)) return false;
      constexpr int kStepScales = Tiling::tiles * kScaleAtomBytes;
      const uint32_t full = stages.full(ring.at);
      ptx::barrier_arrive_expect(full, Sm100Stages<Tiling>::kWeightBytes + steps * kStepScales);
      MEGAMOE_UNROLL
      for (int tile = 0; tile < Tiling::tiles; ++tile) {
        // Columns beyond K come as zeros; they are not multiplied.
        ptx::copy_box(stages.weights(ring.at) + tile * ptx::kMmaRows * ptx::kSwizzleBytes,
                      of.weights.codes_map, column / 2,
                      of.expert * of.rows + first_row + tile * ptx::kMmaRows, full);
      }
      for (int step = 0; step < steps; ++step) {
        const int word = column / kValuesPerScaleWord + step;
        ptx::copy_bulk(stages.weight_scales(ring.at) + step * kStepScales,
                       scales + int64_t{word} * of.rows, kStepScales, full);
      }
    }
  }
  return true;
}

// One thread: the tokens of this CTA's tasks, as soon as they are there; the scales that both CTAs
// of a pair need, the leader's brings to both. maps: of the fields ring_x and ring_h as bytes, in
// boxes of kTokenBoxRows rows of kSwizzleBytes.
template <class Tiling, Machine M, class Shape>
MEGAMOE_GPU_FN bool copy_tokens(M& m, const Shape& shape, const Fields& mine,
                                const Pool<Shape>& pool, const Sm100Stages<Tiling>& stages,
                                const void* const (&maps)[2]) {
  constexpr int kBoxBytes = kTokenBoxRows * ptx::kSwizzleBytes;
  const Gates<Nvfp4, Shape> gates(shape, mine);
  TaskCursor<Shape, Tiling::ctas> tasks(shape, pool.num_blocks(), m.cta_idx(), m.num_ctas());
  RingCursor<Tiling::stages> ring;
  for (Task task; tasks.next(task);) {
    if (!wait_inputs(m, gates, task)) return false;
    ptx::fence_proxy_async();
    const bool is_l1 = task.layer == Layer::kL1;
    const int columns = layer_columns(shape, task.layer);
    const int rows = multiplied_rows<Tiling>(pool.block(task.block)) / Tiling::ctas;
    const int boxes = rows / kTokenBoxRows;
    const int slot = gates.slot(task.block).idx;
    const int first_row = slot * shape.block_rows + cta_of_group<Tiling>(m) * rows;
    const uint32_t* scales =
        (is_l1 ? mine.ring_x_sf() : mine.ring_h_sf()) + int64_t{slot} * scale_words(shape, columns);
    for (int column = 0; column < columns; column += kStageColumns, ring.advance()) {
      const int scale_bytes =
          steps_of_stage(columns, column) * Tiling::token_atoms * kScaleAtomBytes;
      if (!wait_phase<1>(m, stages.free(ring.at), ring.round + 1)) return false;
      const uint32_t full = stages.full(ring.at);
      ptx::barrier_arrive_expect(full, boxes * kBoxBytes + scale_bytes);
      for (int box = 0; box < boxes; ++box) {
        ptx::copy_box(stages.tokens(ring.at) + static_cast<uint32_t>(box * kBoxBytes), maps[!is_l1],
                      column / 2, first_row + box * kTokenBoxRows, full);
      }
      const uint32_t* from = scales + column / kValuesPerScaleWord * scale_rows(shape);
      if constexpr (Tiling::ctas == 1) {
        ptx::copy_bulk(stages.token_scales(ring.at), from, scale_bytes, full);
      } else if (cta_of_group<Tiling>(m) == 0) {
        // One commit freed the stage of both CTAs, so the other need not say that its own is free.
        ptx::copy_bulk_to_pair(stages.token_scales(ring.at), from, scale_bytes, full);
      }
    }
  }
  return true;
}

// The products of one stage. The scales' place is written again while products of the stage before
// may be on their way: the tensor cores carry out copies and products in the order of issue.
template <class Tiling>
MEGAMOE_GPU_FN void multiply_stage(const Sm100Stages<Tiling>& stages, int stage, int steps,
                                   uint32_t tensor, uint32_t sums, uint32_t instruction,
                                   bool begins) {
  MEGAMOE_UNROLL
  for (int step = 0; step < kStageSteps; ++step) {
    if (step >= steps) break;
    const uint32_t weight_scales =
        ptx::tensor_address(tensor, 0, Tiling::scales_at + step * Tiling::step_scale_columns);
    const uint32_t token_scales = weight_scales + Tiling::tiles * kScaleAtomColumns;
    MEGAMOE_UNROLL
    for (int tile = 0; tile < Tiling::tiles; ++tile) {
      const int atom = step * Tiling::tiles + tile;
      ptx::tensor_copy_scales<Tiling::ctas>(
          weight_scales + tile * kScaleAtomColumns,
          ptx::scales_descriptor(stages.weight_scales(stage) + atom * kScaleAtomBytes));
    }
    MEGAMOE_UNROLL
    for (int part = 0; part < Tiling::token_atoms; ++part) {
      const int atom = step * Tiling::token_atoms + part;
      ptx::tensor_copy_scales<Tiling::ctas>(
          token_scales + part * kScaleAtomColumns,
          ptx::scales_descriptor(stages.token_scales(stage) + atom * kScaleAtomBytes));
    }
    MEGAMOE_UNROLL
    for (int tile = 0; tile < Tiling::tiles; ++tile) {
      const uint32_t rows = stages.weights(stage) + tile * ptx::kMmaRows * ptx::kSwizzleBytes;
      ptx::mma_nvfp4<Tiling::ctas>(
          sums + tile * Tiling::block_rows, ptx::operand_descriptor(rows, step),
          ptx::operand_descriptor(stages.tokens(stage), step), instruction, !(begins && step == 0),
          weight_scales + tile * kScaleAtomColumns, token_scales);
    }
  }
}

// One thread: all products of this CTA's tasks, or of this pair's.
template <class Tiling, Machine M, class Shape>
MEGAMOE_GPU_FN bool multiply(M& m, const Shape& shape, const Pool<Shape>& pool,
                             const Sm100Stages<Tiling>& stages, uint32_t tensor) {
  TaskCursor<Shape, Tiling::ctas> tasks(shape, pool.num_blocks(), m.cta_idx(), m.num_ctas());
  RingCursor<Tiling::stages> ring;
  RingCursor<2> accumulator;
  for (Task task; tasks.next(task); accumulator.advance()) {
    const int columns = layer_columns(shape, task.layer);
    const uint32_t instruction = ptx::nvfp4_instruction(
        Tiling::ctas * ptx::kMmaRows, multiplied_rows<Tiling>(pool.block(task.block)));
    const uint32_t sums =
        ptx::tensor_address(tensor, 0, accumulator.at * Tiling::accumulator_columns);
    if (!wait_phase<Tiling::ctas>(m, stages.sums_free(accumulator.at), accumulator.round + 1)) {
      return false;
    }
    for (int column = 0; column < columns; column += kStageColumns, ring.advance()) {
      if (!wait_phase<Tiling::ctas>(m, stages.full(ring.at), ring.round)) return false;
      ptx::tensor_fence_after();
      multiply_stage(stages, ring.at, steps_of_stage(columns, column), tensor, sums, instruction,
                     column == 0);
      ptx::tensor_commit<Tiling::ctas>(stages.free(ring.at));
    }
    ptx::tensor_commit<Tiling::ctas>(stages.sums_full(accumulator.at));
  }
  return true;
}

// One thread of a pair's other CTA: tells the leader of each stage that is full here.
template <class Tiling, Machine M, class Shape>
MEGAMOE_GPU_FN bool report_stages(M& m, const Shape& shape, const Pool<Shape>& pool,
                                  const Sm100Stages<Tiling>& stages) {
  TaskCursor<Shape, Tiling::ctas> tasks(shape, pool.num_blocks(), m.cta_idx(), m.num_ctas());
  RingCursor<Tiling::stages> ring;
  for (Task task; tasks.next(task);) {
    const int columns = layer_columns(shape, task.layer);
    for (int column = 0; column < columns; column += kStageColumns, ring.advance()) {
      if (!wait_phase<1>(m, stages.full(ring.at), ring.round)) return false;
      ptx::barrier_arrive_at_leader(stages.full(ring.at));
    }
  }
  return true;
}

}  // namespace megamoe
