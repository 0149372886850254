// A persistent thread pool that runs a job of many phases without a barrier between them.
//
// A phase is cut into chunks, taken one by one from a shared cursor; the worker that finishes the last chunk opens the next
// phase. A thread that is descheduled between two chunks therefore delays nobody. Threads without work spin briefly,
// then give their core away; when there is no job they sleep.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace penstock {

class Job {
 public:
  virtual size_t phases() const = 0;
  virtual uint32_t chunks(size_t phase) const = 0;
  virtual void run(size_t phase, uint32_t chunk, unsigned worker) const noexcept = 0;

 protected:
  ~Job() = default;
};

class Pool {
 public:
  explicit Pool(unsigned threads);
  ~Pool();
  unsigned threads() const { return unsigned(workers_.size()) + 1; }

  // Runs the job to its end; the calling thread is worker 0. Calls from other threads wait for their turn.
  void run(const Job& job);

 private:
  void work(unsigned worker);
  void help(unsigned worker);
  bool take(unsigned worker);
  void open_next();

  const Job* job_ = nullptr;
  size_t phase_ = 0;
  alignas(64) std::atomic<uint64_t> cursor_{0};  // chunks of the phase << 32 | the next one to take
  alignas(64) std::atomic<uint32_t> done_{0};
  alignas(64) std::atomic<bool> busy_{false};
  std::atomic<bool> stop_{false};
  std::atomic<uint32_t> epoch_{0};  // counts jobs; sleepers wait for it to change
  std::mutex running_;
  std::vector<std::thread> workers_;
};

}  // namespace penstock
