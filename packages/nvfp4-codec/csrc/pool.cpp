#include "pool.h"

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

#include "float_environment.h"

namespace nvfp4 {
namespace {

struct Job {
  ChunkFunction function;
  void* context;
  int64_t num_chunks;
  int helpers_wanted;      // guarded by the pool's mutex once it is there
  int helpers_active = 0;  // guarded by the pool's mutex
  std::atomic<int64_t> next{0};
  std::condition_variable done;

  void work() {
    const DefaultFloatEnvironment environment;
    for (int64_t c = next.fetch_add(1); c < num_chunks; c = next.fetch_add(1)) {
      function(context, c);
    }
  }
};

class Pool {
 public:
  void run(Job& job) {
    const int helpers = job.helpers_wanted;
    {
      const std::lock_guard lock(mutex_);
      grow(helpers);
      jobs_.push_back(&job);
    }
    for (int i = 0; i < helpers; ++i) wake_.notify_one();
    job.work();
    std::unique_lock lock(mutex_);
    std::erase(jobs_, &job);  // nobody else may join
    job.done.wait(lock, [&] { return job.helpers_active == 0; });
  }

 private:
  void grow(int wanted) {
    while (num_threads_ < wanted) {
      try {
        std::thread([this] { serve(); }).detach();
      } catch (const std::system_error&) {
        return;  // no more threads to be had: the caller works on with those there are
      }
      ++num_threads_;
    }
  }

  [[noreturn]] void serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return !jobs_.empty(); });
      Job& job = *jobs_.front();
      if (--job.helpers_wanted == 0) jobs_.pop_front();
      ++job.helpers_active;
      lock.unlock();
      job.work();
      lock.lock();
      // Notified under the lock: the job lives on the stack of the thread that waits.
      if (--job.helpers_active == 0) job.done.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Job*> jobs_;
  int num_threads_ = 0;
};

// Never destroyed: its threads are detached and may outlive static destructors. A forked
// child has none of them, and the mutex may be held by a thread it lacks, so it starts over.
std::atomic<Pool*> current_pool{nullptr};

Pool& pool() {
  static const int registered =
      pthread_atfork(nullptr, nullptr, [] { current_pool.store(nullptr); });
  static_cast<void>(registered);
  Pool* found = current_pool.load();
  if (found == nullptr) {
    Pool* const created = new Pool;
    if (current_pool.compare_exchange_strong(found, created)) return *created;
    delete created;  // another thread was first; `found` is its pool
  }
  return *found;
}

}  // namespace

void parallel_for(int threads, int64_t num_chunks, ChunkFunction function, void* context) {
  const int64_t most = num_chunks < 1024 ? num_chunks : 1024;
  const int useful = threads < most ? threads : static_cast<int>(most);
  Job job;
  job.function = function;
  job.context = context;
  job.num_chunks = num_chunks;
  job.helpers_wanted = useful - 1;
  if (useful <= 1) {
    job.work();
  } else {
    pool().run(job);
  }
}

}  // namespace nvfp4
