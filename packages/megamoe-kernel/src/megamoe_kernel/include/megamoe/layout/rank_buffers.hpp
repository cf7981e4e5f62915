// Typed pointers into the buffers of all ranks.
#pragma once

#include "megamoe/layout/buffer.hpp"
#include "megamoe/layout/ring.hpp"

namespace megamoe {

inline constexpr int kMaxRanks = 72;  // GPUs of the largest NVLink domain

// A kernel argument. All ranks have the same layout, so a peer's field is its base plus an offset.
struct RankBuffers {
  BufferLayout layout;
  uint8_t* base[kMaxRanks];

  template <class T>
  MEGAMOE_FN T* at(int rank_idx, int field_idx) const {
    return reinterpret_cast<T*>(base[rank_idx] + layout.offset[field_idx]);
  }
};

// One rank's fields, each under its name in buffer.hpp.
struct Fields {
  const RankBuffers& buffers;
  int rank_idx;

#define MEGAMOE_FIELD(type, name) \
  MEGAMOE_FN type* name() const { return buffers.at<type>(rank_idx, field(#name)); }
  MEGAMOE_FIELD(uint32_t, barrier)
  MEGAMOE_FIELD(uint8_t, x)
  MEGAMOE_FIELD(uint32_t, x_sf)
  MEGAMOE_FIELD(float, x_scale)
  MEGAMOE_FIELD(int64_t, topk_idx)
  MEGAMOE_FIELD(float, topk_weights)
  MEGAMOE_FIELD(uint32_t, routes)
  MEGAMOE_FIELD(uint32_t, route_count)
  MEGAMOE_FIELD(uint32_t, route_begin)
  MEGAMOE_FIELD(uint16_t, slots)
  MEGAMOE_FIELD(uint32_t, failure)
  MEGAMOE_FIELD(uint32_t, expert_count)
  MEGAMOE_FIELD(uint32_t, counters)
  MEGAMOE_FIELD(uint8_t, ring_x)
  MEGAMOE_FIELD(uint32_t, ring_x_sf)
  MEGAMOE_FIELD(float, ring_x_scale)
  MEGAMOE_FIELD(Source, ring_source)
  MEGAMOE_FIELD(uint8_t, ring_h)
  MEGAMOE_FIELD(uint32_t, ring_h_sf)
  MEGAMOE_FIELD(uint32_t, ring_arrived)
  MEGAMOE_FIELD(uint32_t, ring_l1_done)
  MEGAMOE_FIELD(uint32_t, ring_l2_done)
#undef MEGAMOE_FIELD
};

}  // namespace megamoe
