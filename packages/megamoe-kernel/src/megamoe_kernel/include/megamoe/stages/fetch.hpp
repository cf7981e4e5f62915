// Dispatch, second half: bring the tokens of this rank's experts into the ring.
//
// Warps of all CTAs take rows in the order of the blocks, so that the first tasks of L1 can begin
// while later blocks are on their way. Blocks that fit into the ring wait for nothing. A token is pulled from its own rank's memory; nothing is
// rounded.
#pragma once

#include "megamoe/layout/block_scale.hpp"
#include "megamoe/scheduler/gates.hpp"

namespace megamoe {

// Row `row` of an expert's tokens: first those of this rank, then of the next one, and around, so
// that ranks do not all pull from the same peer.
template <Machine M, class Shape>
MEGAMOE_FN Source source_of_row(M& m, const Shape& shape, const RankBuffers& buffers,
                                const Pool<Shape>& pool, int expert, int row) {
  if (expert == shape.num_local_experts) {
    return {static_cast<uint32_t>(m.rank_idx()), kToOutput | static_cast<uint32_t>(row)};
  }
  uint32_t left = static_cast<uint32_t>(row);
  int rank = m.rank_idx();
  while (left >= pool.routed_rows(rank, expert)) {
    left -= pool.routed_rows(rank, expert);
    rank = rank + 1 == shape.num_ranks ? 0 : rank + 1;
  }
  const Fields theirs{buffers, rank};
  return {static_cast<uint32_t>(rank),
          m.load(&theirs.routes()[pool.routed_begin(rank, expert) + left])};
}

// One warp brings `chunks` pieces of 16 bytes from a peer; put(i, piece, is_there) stores one, all
// lanes together. A lane has several loads on their way before it stores: a load over NVLink takes
// more than a microsecond.
template <int kInFlight, Machine M, class Put>
MEGAMOE_FN void bring_chunks(M& m, const Chunk* from, int chunks, Put put) {
  for (int begin = 0; begin < chunks; begin += kInFlight * kWarpSize) {
    const int first = begin + lane_idx(m);
    Chunk held[kInFlight] = {};
    MEGAMOE_UNROLL
    for (int i = 0; i < kInFlight; ++i) {
      const int at = first + i * kWarpSize;
      if (at < chunks) held[i] = m.load(&from[at]);
    }
    MEGAMOE_UNROLL
    for (int i = 0; i < kInFlight; ++i) {
      const int at = first + i * kWarpSize;
      put(at, held[i], at < chunks);
    }
  }
}

// Where a token's values lie in the ring: as they are.
struct InOrder {
  template <Machine M>
  MEGAMOE_FN static void store(M& m, uint8_t* row, int idx, const Chunk& chunk, bool is_there) {
    if (is_there) m.store(reinterpret_cast<Chunk*>(row) + idx, chunk);
  }
};

// One warp: a token into row `row` of a ring slot.
template <class Format, class Order, int kInFlight, Machine M, class Shape>
MEGAMOE_FN void fetch_token(M& m, const Shape& shape, const RankBuffers& buffers, int slot,
                            int row, Source source) {
  const Fields mine{buffers, m.rank_idx()}, theirs{buffers, static_cast<int>(source.rank)};
  const uint32_t token = source.slot & kToOutput
                             ? source.slot & ~kToOutput
                             : source.slot / static_cast<uint32_t>(shape.num_topk);
  const int ring_row = slot * shape.block_rows + row;
  const int bytes = Format::bytes(shape.hidden);
  uint8_t* to = mine.ring_x() + int64_t{ring_row} * bytes;
  const auto* from = reinterpret_cast<const Chunk*>(theirs.x() + int64_t{token} * bytes);
  bring_chunks<kInFlight>(m, from, bytes / kChunkBytes,
                          [&](int idx, const Chunk& chunk, bool is_there) {
                            Order::store(m, to, idx, chunk, is_there);
                          });
  if constexpr (Format::kHasScales) {
    const int words = shape.hidden / kValuesPerScaleWord;
    uint32_t* scales = mine.ring_x_sf() + int64_t{slot} * scale_words(shape, shape.hidden);
    for (int i = lane_idx(m); i < words; i += kWarpSize) {
      m.store(&scales[scale_word(shape, row, i)], m.load(&theirs.x_sf()[int64_t{token} * words + i]));
    }
    if (lane_idx(m) == 0) m.store(&mine.ring_x_scale()[ring_row], m.load(&theirs.x_scale()[token]));
  }
  if (lane_idx(m) == 0) m.store(&mine.ring_source()[ring_row], source);
}

// All warps of the group, in every CTA: the tokens of the blocks from first_block up to, not
// including, last_block. kInFlight: of a lane's loads. False if a wait was given up.
template <class Format, class Order = InOrder, int kInFlight = 8, Machine M, class Shape>
MEGAMOE_FN bool fetch(M& m, const Group& group, const Shape& shape, const RankBuffers& buffers,
                      const Pool<Shape>& pool, int first_block, int last_block) {
  const Fields mine{buffers, m.rank_idx()};
  const Gates<Format, Shape> gates(shape, mine);
  const int warp = m.cta_idx() * group.num_warps() + group.thread(m) / kWarpSize;
  const int num_warps = m.num_ctas() * group.num_warps();
  const int num_rows = last_block * shape.block_rows;
  int free_block = -1;  // the last one whose slot is known to be free
  for (int i = first_block * shape.block_rows + warp; i < num_rows; i += num_warps) {
    const int block_idx = i / shape.block_rows, row = i % shape.block_rows;
    const Block block = pool.block(block_idx);
    if (row >= block.rows) continue;
    if (block_idx != free_block) {
      const bool ok = lane_idx(m) != 0 || gates.wait_free(m, block_idx);
      if (m.ballot(ok) != kAllLanes) return false;
      free_block = block_idx;
    }
    const Source source =
        source_of_row(m, shape, buffers, pool, block.expert, block.first_row + row);
    fetch_token<Format, Order, kInFlight>(m, shape, buffers, gates.slot(block_idx).idx, row, source);
    m.sync_warp();
    if (lane_idx(m) == 0) gates.token_arrived(m, block_idx, row + 1 == block.rows, block.rows);
  }
  return true;
}

}  // namespace megamoe
