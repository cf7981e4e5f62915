// A persistent pool of threads that splits a range of chunks.
#pragma once
#include <cstdint>

namespace nvfp4 {

using ChunkFunction = void (*)(void* context, int64_t chunk);

// Calls function(context, c) once for every c in [0, num_chunks), on at most `threads`
// threads including the caller; returns when all calls have. Chunks are handed out one by
// one. Safe to call from several threads at once, and after fork(). Chunks run in the
// DefaultFloatEnvironment.
void parallel_for(int threads, int64_t num_chunks, ChunkFunction function, void* context);

template <class Body>
void parallel_for(int threads, int64_t num_chunks, Body body) {
  parallel_for(
      threads, num_chunks,
      [](void* context, int64_t chunk) { (*static_cast<Body*>(context))(chunk); }, &body);
}

}  // namespace nvfp4
