#include "pool.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace penstock {

namespace {

constexpr int SPINS_IN_JOB = 500;      // before the core is offered to others
constexpr int SPINS_AFTER_JOB = 2000;  // before sleeping: about 100 us

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

Pool::Pool(unsigned threads) {
  for (unsigned worker = 1; worker < threads; ++worker) workers_.emplace_back([this, worker] { work(worker); });
}

Pool::~Pool() {
  stop_.store(true);
  epoch_.fetch_add(1);
  epoch_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void Pool::run(const Job& job) {
  const std::lock_guard lock(running_);
  job_ = &job;
  phase_ = size_t(-1);
  busy_.store(true, std::memory_order_release);
  open_next();
  epoch_.fetch_add(1);
  epoch_.notify_all();
  help(0);
}

void Pool::work(unsigned worker) {
  while (!stop_.load()) {
    const uint32_t epoch = epoch_.load();
    help(worker);
    for (int spins = 0; spins < SPINS_AFTER_JOB && epoch_.load(std::memory_order_relaxed) == epoch; ++spins) pause();
    if (!stop_.load()) epoch_.wait(epoch);
  }
}

void Pool::help(unsigned worker) {
  int spins = 0;
  while (busy_.load(std::memory_order_acquire)) {
    if (take(worker))
      spins = 0;
    else if (++spins < SPINS_IN_JOB)
      pause();
    else
      std::this_thread::yield();
  }
}

bool Pool::take(unsigned worker) {
  uint64_t cursor = cursor_.load(std::memory_order_relaxed);
  const uint32_t chunk = uint32_t(cursor), chunks = uint32_t(cursor >> 32);
  if (chunk >= chunks) return false;
  // Success means that the phase is still open, so job_ and phase_ are its own.
  if (!cursor_.compare_exchange_strong(cursor, cursor + 1, std::memory_order_acq_rel)) return true;
  job_->run(phase_, chunk, worker);
  if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == chunks) open_next();
  return true;
}

void Pool::open_next() {
  while (++phase_ < job_->phases()) {
    if (const uint32_t chunks = job_->chunks(phase_)) {
      done_.store(0, std::memory_order_relaxed);
      cursor_.store(uint64_t(chunks) << 32, std::memory_order_release);
      return;
    }
  }
  busy_.store(false, std::memory_order_release);
}

}  // namespace penstock
