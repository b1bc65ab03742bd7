// Work distribution without a dependency on PyTorch: the bindings hand in its thread pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace moelora {

// Independent tasks; any worker in [0, num_threads) runs any task, also where there are fewer tasks than workers.
struct Stage {
  int64_t num_tasks;
  std::function<void(int64_t worker, int64_t task)> run;
};

struct Parallel {
  int64_t num_threads;
  // Calls work(worker) for each worker in [0, num_workers), on different threads where it can.
  std::function<void(int64_t num_workers, const std::function<void(int64_t)>& work)> fork;

  // Runs the stages one after the other: no task starts before all tasks of the stages before are done.
  //
  // One fork for all stages: joining costs a wake-up of every thread, milliseconds where another process holds its core. Tasks
  // are claimed one by one in ascending order. A worker that waits for an earlier task waits for a thread that is running it,
  // so this ends even if one thread plays all workers.
  void run(const std::vector<Stage>& stages) const {
    int64_t num_tasks = 0, most_tasks = 0;
    for (const Stage& stage : stages) {
      num_tasks += stage.num_tasks;
      most_tasks = std::max(most_tasks, stage.num_tasks);
    }
    if (num_tasks == 0) return;
    std::atomic<int64_t> next{0}, done{0};
    const auto work = [&](int64_t worker) {
      int64_t first = 0;  // of the stage
      auto stage = stages.begin();
      for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < num_tasks;) {
        for (; task >= first + stage->num_tasks; ++stage) first += stage->num_tasks;
        while (done.load(std::memory_order_acquire) < first) std::this_thread::yield();
        stage->run(worker, task - first);
        done.fetch_add(1, std::memory_order_release);
      }
    };
    const int64_t num_workers = std::min(num_threads, most_tasks);
    num_workers == 1 ? work(0) : fork(num_workers, work);
  }
};

}  // namespace moelora
