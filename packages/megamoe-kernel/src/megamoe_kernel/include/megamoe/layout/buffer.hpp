// The memory of one rank: what peers read and write, and what only its own kernel uses.
//
// buffer_table below is the only place where a field is described. Offsets and the total size
// derive from it, here for kernels and host code. Where the native extension was not built,
// Python reads the same rows from this file (buffer_layout.py), so a row keeps to the form
//   {"name", Type::kX, Access::kX, rows, columns},
// with rows and columns made of the fields of BufferSizes, integers, + and * and parentheses.
#pragma once

#include <cstdint>

namespace megamoe {

// What the table depends on. Numbers only, so that C++ and Python fill it in the same way.
struct BufferSizes {
  uint64_t num_ranks;
  uint64_t num_local_experts;
  uint64_t max_tokens;  // a rank's tokens at most
  uint64_t num_topk;
  uint64_t token_bytes;         // of a token's values: hidden / 2 in NVFP4, 2 * hidden in BF16
  uint64_t token_scales;        // block scales of a token: hidden / 16 in NVFP4, 0 in BF16
  uint64_t intermediate_bytes;  // the same two, of the intermediate
  uint64_t intermediate_scales;
  uint64_t token_scale_count;  // float32 scales of a token: 1 in NVFP4, 0 in BF16
  uint64_t hidden;
  uint64_t ring_rows;   // tokens that the ring holds, a multiple of kRingTile
  uint64_t ring_tiles;  // ring_rows / kRingTile

  constexpr bool operator==(const BufferSizes&) const = default;
};

enum class Type { kU8, kE4M3, kBF16, kF32, kU32, kI64, kU64 };

// Who touches a field. kPeers: other ranks too, over NVLink. kHost: written by the caller before
// the launch. kKernel: the rank's own kernel alone.
enum class Access { kPeers, kHost, kKernel };

struct BufferRow {
  const char* name;
  Type type;
  Access access;
  uint64_t rows;
  uint64_t columns;
};

inline constexpr uint64_t kFieldAlignment = 128;  // a cache line; more than bulk copies need
inline constexpr uint64_t kRingTile = 8;          // the smallest tile of tokens of any kernel
inline constexpr int kMaxFields = 32;

struct BufferTable {
  BufferRow row[kMaxFields];
  int count;
};

constexpr BufferTable with_count(BufferTable table) {
  while (table.count < kMaxFields && table.row[table.count].name) ++table.count;
  return table;
}

// Fields of kind Access::kPeers and kHost come first. A slot is a token's place in its own
// topk_idx: token * num_topk + its position.
constexpr BufferTable buffer_table(const BufferSizes& s) {
  return with_count({{
      // One signal of each rank for each of eight barriers.
      {"barrier", Type::kU32, Access::kPeers, 8, s.num_ranks},
      // The tokens, which other ranks fetch.
      {"x", Type::kU8, Access::kPeers, s.max_tokens, s.token_bytes},
      {"x_sf", Type::kE4M3, Access::kPeers, s.max_tokens, s.token_scales},
      {"x_scale", Type::kF32, Access::kPeers, s.max_tokens, s.token_scale_count},
      {"topk_idx", Type::kI64, Access::kHost, s.max_tokens, s.num_topk},
      {"topk_weights", Type::kF32, Access::kHost, s.max_tokens, s.num_topk},
      // This rank's slots in the order of their experts; an expert's rank reads its part.
      {"routes", Type::kU32, Access::kPeers, 1, s.max_tokens * s.num_topk},
      // From every rank: how many of its slots want each of this rank's experts, and where in
      // its routes they begin.
      {"route_count", Type::kU32, Access::kPeers, s.num_ranks, s.num_local_experts},
      {"route_begin", Type::kU32, Access::kPeers, s.num_ranks, s.num_local_experts},
      // What experts send back, one row for each slot.
      {"slots", Type::kBF16, Access::kPeers, s.max_tokens * s.num_topk, s.hidden},
      // The first wait that was given up: stage, rank, tile and what it saw. See common/.
      {"failure", Type::kU32, Access::kKernel, 1, 16},
      // How many of this rank's slots want each expert of the group.
      {"expert_count", Type::kU32, Access::kKernel, s.num_ranks, s.num_local_experts},
      // Counters of the persistent kernel, by their place in layout/ring.hpp.
      {"counters", Type::kU32, Access::kKernel, 1, 32},
      // Tokens fetched for this rank's experts, and the row they came from: rank, slot.
      {"ring_x", Type::kU8, Access::kKernel, s.ring_rows, s.token_bytes},
      {"ring_x_sf", Type::kE4M3, Access::kKernel, s.ring_rows, s.token_scales},
      {"ring_x_scale", Type::kF32, Access::kKernel, s.ring_rows, s.token_scale_count},
      {"ring_source", Type::kU32, Access::kKernel, s.ring_rows, 2},
      // Their intermediates.
      {"ring_h", Type::kU8, Access::kKernel, s.ring_rows, s.intermediate_bytes},
      {"ring_h_sf", Type::kE4M3, Access::kKernel, s.ring_rows, s.intermediate_scales},
      // For each tile of the ring: tokens that arrived, finished tasks of L1 and of L2.
      {"ring_arrived", Type::kU32, Access::kKernel, 1, s.ring_tiles},
      {"ring_l1_done", Type::kU32, Access::kKernel, 1, s.ring_tiles},
      {"ring_l2_done", Type::kU32, Access::kKernel, 1, s.ring_tiles},
  }, 0});
}

inline constexpr int kNumFields = buffer_table({}).count;

constexpr uint64_t type_bytes(Type type) {
  switch (type) {
    case Type::kU8:
    case Type::kE4M3: return 1;
    case Type::kBF16: return 2;
    case Type::kF32:
    case Type::kU32: return 4;
    case Type::kI64:
    case Type::kU64: return 8;
  }
  return 0;
}

constexpr uint64_t row_bytes(const BufferRow& row) {
  return row.rows * row.columns * type_bytes(row.type);
}

constexpr uint64_t align_up(uint64_t value, uint64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

// Where each field begins; a kernel gets it as an argument, or as a constant.
struct BufferLayout {
  uint64_t offset[kNumFields];
  uint64_t shared_bytes;  // up to here the caller and peers write
  uint64_t bytes;
};

constexpr BufferLayout buffer_layout(const BufferSizes& sizes) {
  const BufferTable table = buffer_table(sizes);
  BufferLayout layout{};
  uint64_t end = 0;
  for (int i = 0; i < kNumFields; ++i) {
    layout.offset[i] = end;
    end = align_up(end + row_bytes(table.row[i]), kFieldAlignment);
    if (table.row[i].access != Access::kKernel) layout.shared_bytes = end;
  }
  layout.bytes = end;
  return layout;
}

int no_field_of_buffer_table_has_this_name();  // declared only: a constant cannot call it

// The index of a field in BufferLayout::offset. A name that is not in the table does not compile.
consteval int field(const char* name) {
  const BufferTable table = buffer_table({});
  for (int i = 0; i < kNumFields; ++i) {
    const char *a = table.row[i].name, *b = name;
    while (*a && *a == *b) ++a, ++b;
    if (*a == *b) return i;
  }
  return no_field_of_buffer_table_has_this_name();
}

constexpr bool shared_fields_come_first() {
  const BufferTable table = buffer_table({});
  for (int i = 1; i < kNumFields; ++i) {
    if (table.row[i].access != Access::kKernel && table.row[i - 1].access == Access::kKernel) {
      return false;
    }
  }
  return true;
}
static_assert(shared_fields_come_first());
static_assert(kNumFields < kMaxFields);

}  // namespace megamoe
