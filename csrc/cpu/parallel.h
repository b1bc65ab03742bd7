// Work distribution without a dependency on PyTorch: the bindings hand in its thread pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>

namespace moelora {

struct Parallel {
  int64_t num_threads;
  // Calls work(worker) for each worker in [0, num_workers), on different threads where it can.
  std::function<void(int64_t num_workers, const std::function<void(int64_t)>& work)> fork;

  // Calls run(worker, task) once for every task. Tasks are handed out one by one in ascending order, so that a thread that is
  // held up delays one task only; which worker runs a task must not matter.
  template <class Run>
  void for_each(int64_t num_tasks, const Run& run) const {
    const int64_t num_workers = std::min(num_threads, num_tasks);
    if (num_workers <= 1) {
      for (int64_t task = 0; task < num_tasks; ++task) run(0, task);
      return;
    }
    std::atomic<int64_t> next{0};
    fork(num_workers, [&](int64_t worker) {
      for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < num_tasks;) run(worker, task);
    });
  }
};

}  // namespace moelora
