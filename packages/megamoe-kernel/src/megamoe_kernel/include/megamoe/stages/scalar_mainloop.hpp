// The mainloop without tensor cores: sums as the contract defines them, one dot product at a time.
//
// It stands where mma/'s mainloops will and hands its sums over in the same way, so that everything
// around it can run, on the host or on any GPU, before they exist. Weights are read as a checkpoint
// has them. Sums are formed in double and rounded to float32 once: L1_SUM and L2_SUM.
#pragma once

#include "megamoe/stages/l2_epilogue.hpp"

namespace megamoe {

// One projection of all experts of a rank, the shared one last: E2M1 codes [E, N, K/2], UE4M3
// scales [E, N, K/16], float32 alphas [E, 2] (gate, up) or [E, 1].
struct ScalarWeights {
  const uint8_t* codes;
  const uint8_t* scales;
  const float* alpha;
};

// Tokens of one block in the ring, or their intermediates.
struct RingRows {
  const uint8_t* values;
  const uint32_t* scales;
  int columns;
};

// The 16 values of a block scale: codes of eight bytes times the scale, exact.
MEGAMOE_FN void decode_block(const uint32_t (&codes)[2], uint32_t scale, float (&out)[kBlockSize]) {
  const float factor = fp32_from_ue4m3(scale);
  for (int i = 0; i < kBlockSize; ++i) {
    out[i] = mul_rn(fp32_from_e2m1(codes[i / 8] >> i % 8 * 4 & 15u), factor);
  }
}

template <class Format, Machine M, class Shape>
MEGAMOE_FN void load_block(M& m, const Shape& shape, const RingRows& rows, int row, int block,
                           float (&out)[kBlockSize]) {
  constexpr int kWords = Format::bytes(kBlockSize) / 4;
  const uint8_t* at = rows.values + int64_t{row} * Format::bytes(rows.columns);
  const uint32_t* from = reinterpret_cast<const uint32_t*>(at) + block * kWords;
  uint32_t words[kWords];
  for (int i = 0; i < kWords; ++i) words[i] = m.load(&from[i]);
  if constexpr (Format::kHasScales) {
    const uint32_t scales = m.load(&rows.scales[scale_word(shape, row, block / 4)]);
    decode_block(words, scales >> block % 4 * 8 & 0xFFu, out);
  } else {
    for (int i = 0; i < kBlockSize; ++i) {
      out[i] = fp32_from_bf16(static_cast<uint16_t>(words[i / 2] >> i % 2 * 16));
    }
  }
}

// Dot products of weight rows row, row + 1 with tokens token, token + 1 of the block, of which
// num_rows are there; the others give 0.
template <class Format, Machine M, class Shape>
MEGAMOE_FN void dot_products(M& m, const Shape& shape, const ScalarWeights& weights, int64_t row,
                             const RingRows& rows, int token, int num_rows, float (&out)[2][2]) {
  double sum[2][2] = {};
  const int blocks = rows.columns / kBlockSize;
  for (int block = 0; block < blocks; ++block) {
    float w[2][kBlockSize], x[kBlockSize];
    for (int j = 0; j < 2; ++j) {
      const int64_t at = (row + j) * blocks + block;
      const uint32_t* codes = reinterpret_cast<const uint32_t*>(weights.codes) + 2 * at;
      decode_block({codes[0], codes[1]}, weights.scales[at], w[j]);
    }
    for (int i = 0; i < 2 && token + i < num_rows; ++i) {
      load_block<Format>(m, shape, rows, token + i, block, x);
      for (int k = 0; k < kBlockSize; ++k) {
        for (int j = 0; j < 2; ++j) sum[j][i] += static_cast<double>(w[j][k]) * x[k];
      }
    }
  }
  for (int j = 0; j < 2; ++j) {
    for (int i = 0; i < 2; ++i) out[j][i] = static_cast<float>(sum[j][i]);
  }
}

// What a mainloop is to an epilogue, for either layer of one task.
template <class Format, Machine M, class Shape>
struct ScalarSums {
  M& m;
  const Group& group;
  const Shape& shape;
  const ScalarWeights& weights;
  const RingRows& rows;
  const Task& task;
  const Block& block;

  // Pieces of 16 outputs by 8 tokens, dealt out to the group's warps. A lane has two outputs and
  // two tokens of a piece, neighbours both, as requantize_pair wants them.
  template <class F>
  MEGAMOE_FN void for_each(F f) {
    const bool is_l1 = task.layer == Layer::kL1;
    const int outputs = is_l1 ? l1_outputs(shape) : shape.weight_rows;
    const int across = outputs / 16, pieces = across * (shape.block_rows / 8);
    for (int i = group.thread(m) / kWarpSize; i < pieces; i += group.num_warps()) {
      const int output = i % across * 16 + lane_idx(m) / 4 * 2;
      const int token = i / across * 8 + lane_idx(m) % 4 * 2;
      piece(f, task.part * outputs + output, output, token);
    }
  }

 private:
  MEGAMOE_FN void dots(int64_t row, int token, float (&out)[2][2]) {
    dot_products<Format>(m, shape, weights, row, rows, token, block.rows, out);
  }

  template <class F>
    requires requires(F f, L1Sums part) { f(part); }
  MEGAMOE_FN void piece(F f, int row, int output, int token) {
    L1Sums part{{}, {}, {output, output + 1}, token};
    const int64_t gate_row = int64_t{block.expert} * 2 * shape.intermediate + row;
    dots(gate_row, token, part.gate);
    dots(gate_row + shape.intermediate, token, part.up);
    f(part);
  }

  template <class F>
    requires requires(F f, L2Sums part) { f(part); }
  MEGAMOE_FN void piece(F f, int row, int output, int token) {
    L2Sums part{{}, {output, output + 1}, token};
    dots(int64_t{block.expert} * shape.hidden + row, token, part.sum);
    f(part);
  }
};

}  // namespace megamoe
