// Runs launches: blocks of fibers, resumed in a given order, waiting for each other as on hardware.
#include "emulation.h"

#include <algorithm>
#include <exception>
#include <numeric>
#include <random>

#include "fiber.h"
#include "memory.h"
#include "races.h"

dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace tsr::emulated {
namespace {

constexpr int64_t kMaxThreads = 1024;
constexpr int64_t kMaxGridBlocks = (int64_t{1} << 31) - 1;
constexpr size_t kMaxSharedBytes = 48 << 10;
constexpr int64_t kBlocksInFlight = 3;

enum class State { kReady, kAtBarrier, kInCollective, kReturned };

void thread_main();

struct Thread {
  Fiber fiber{&thread_main};
  State state = State::kReturned;
  Site site{};
  // The barrier or collective that the thread waits in, and its result.
  Collective kind{};
  unsigned mask = 0;
  uint64_t value = 0;
  Votes votes{};
  Lanes lanes{};
  Order order;
};

struct Block {
  int64_t index = -1;  // in the grid; -1: none
  std::vector<std::unique_ptr<Thread>> threads;
  SharedMemory shared;
};

struct Engine {
  int order = 0;  // 0 ascending, 1 descending, 2 random
  std::mt19937_64 random;
  std::vector<Block> blocks{static_cast<size_t>(kBlocksInFlight)};
  int64_t thread_count = 0;
  size_t dynamic_bytes = 0;
  const std::function<void()>* body = nullptr;
  Block* block = nullptr;    // of the running thread
  Thread* thread = nullptr;  // the running one
  std::exception_ptr error;
  int64_t launches = 0;
} engine;

void thread_main() {
  for (;;) {
    try {
      (*engine.body)();
    } catch (...) {
      engine.error = std::current_exception();
    }
    engine.thread->state = State::kReturned;
    Fiber::leave();
  }
}

std::vector<int64_t> shuffled(int64_t n) {
  std::vector<int64_t> order(static_cast<size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  if (engine.order == 1) std::reverse(order.begin(), order.end());
  if (engine.order == 2) std::shuffle(order.begin(), order.end(), engine.random);
  return order;
}

void start_block(Block& block, int64_t index) {
  block.index = index;
  block.shared.clear();
  while (static_cast<int64_t>(block.threads.size()) < engine.thread_count) {
    block.threads.push_back(std::make_unique<Thread>());
  }
  for (int64_t t = 0; t < engine.thread_count; ++t) {
    block.threads[t]->state = State::kReady;
    start_order(block.threads[t]->order, index, t);
  }
}

void resume(Block& block, int64_t t) {
  engine.block = &block;
  engine.thread = block.threads[t].get();
  threadIdx.x = static_cast<unsigned>(t);
  blockIdx.x = static_cast<unsigned>(block.index);
  watch(&engine.thread->order, &engine.thread->fiber);
  engine.thread->fiber.resume();
  watch(nullptr, nullptr);
  if (engine.error) std::rethrow_exception(std::exchange(engine.error, nullptr));
}

bool same_site(const Site& a, const Site& b) { return a.line == b.line && std::strcmp(a.file, b.file) == 0; }

// Lets the block's threads pass the barrier that all of them have reached, except those that have returned.
bool release_barrier(Block& block) {
  const Thread* first = nullptr;
  Votes votes{};
  for (int64_t t = 0; t < engine.thread_count; ++t) {
    const Thread& thread = *block.threads[t];
    if (thread.state == State::kReturned) continue;
    if (thread.state != State::kAtBarrier) return false;
    if (first == nullptr) first = &thread;
    votes.set += thread.value != 0;
    ++votes.threads;
    if (!same_site(first->site, thread.site)) {
      refuse("threads of one block wait at different barriers, at ", first->site.file, ":", first->site.line, " and ",
             thread.site.file, ":", thread.site.line);
    }
  }
  if (first == nullptr) return false;
  std::vector<Order*> orders;
  for (int64_t t = 0; t < engine.thread_count; ++t) {
    Thread& thread = *block.threads[t];
    orders.push_back(&thread.order);
    if (thread.state != State::kAtBarrier) continue;
    thread.votes = votes;
    thread.state = State::kReady;
  }
  order_block(orders);
  return true;
}

// The threads of `first`'s warp in its mask, or nothing while one of them has not reached the same collective.
std::vector<Thread*> participants(Block& block, int64_t warp, const Thread& first) {
  std::vector<Thread*> lanes(32, nullptr);
  for (int64_t lane = 0; lane < 32 && warp + lane < engine.thread_count; ++lane) {
    Thread& thread = *block.threads[warp + lane];
    if ((first.mask >> lane & 1) == 0 || thread.state == State::kReturned) continue;
    if (thread.state != State::kInCollective || thread.mask != first.mask || thread.kind != first.kind ||
        !same_site(thread.site, first.site)) {
      return {};
    }
    lanes[lane] = &thread;
  }
  return lanes;
}

void complete(const std::vector<Thread*>& lanes) {
  Lanes result{};
  std::vector<Order*> synchronised(32, nullptr);
  for (int lane = 0; lane < 32; ++lane) {
    if (lanes[lane] == nullptr) continue;
    result.present |= 1u << lane;
    result.values[lane] = lanes[lane]->value;
    if (lanes[lane]->kind == Collective::kSync) synchronised[lane] = &lanes[lane]->order;
  }
  for (Thread* const thread : lanes) {
    if (thread == nullptr) continue;
    thread->lanes = result;
    thread->state = State::kReady;
  }
  order_lanes(synchronised);
}

bool release_collectives(Block& block) {
  bool released = false;
  for (int64_t t = 0; t < engine.thread_count; ++t) {
    if (block.threads[t]->state != State::kInCollective) continue;
    const std::vector<Thread*> lanes = participants(block, t / 32 * 32, *block.threads[t]);
    if (lanes.empty()) continue;
    complete(lanes);
    released = true;
  }
  return released;
}

// Called when no thread can go on: reports what the first of them waits for.
[[noreturn]] void refuse_deadlock() {
  for (const Block& block : engine.blocks) {
    if (block.index < 0) continue;
    for (int64_t t = 0; t < engine.thread_count; ++t) {
      const Thread& thread = *block.threads[t];
      if (thread.state == State::kReturned) continue;
      refuse("thread ", t, " of block ", block.index, " waits for ever at ", thread.site.file, ":", thread.site.line,
             thread.state == State::kAtBarrier ? ": not all threads of its block come to this barrier"
                                               : ": not all lanes of its mask come to this call with the same mask");
    }
  }
  refuse("no thread can go on");
}

bool finished(const Block& block) {
  return std::all_of(block.threads.begin(), block.threads.begin() + engine.thread_count,
                     [](const auto& thread) { return thread->state == State::kReturned; });
}

// Looks once at every thread in flight, in the order that was set.
bool sweep() {
  bool progress = false;
  for (const int64_t at : shuffled(kBlocksInFlight * engine.thread_count)) {
    Block& block = engine.blocks[at / engine.thread_count];
    const int64_t t = at % engine.thread_count;
    if (block.index < 0 || block.threads[t]->state != State::kReady) continue;
    progress = true;
    // In random order threads do not run evenly either: some are skipped.
    if (engine.order == 2 && engine.random() % 4 == 0) continue;
    resume(block, t);
  }
  for (Block& block : engine.blocks) {
    if (block.index < 0) continue;
    progress = release_collectives(block) || progress;
    progress = release_barrier(block) || progress;
    if (finished(block)) {
      block.shared.check();
      block.index = -1;
    }
  }
  return progress;
}

void run_grid(int64_t blocks) {
  const std::vector<int64_t> order = shuffled(blocks);
  for (size_t next = 0;;) {
    bool any = false;
    for (Block& block : engine.blocks) {
      if (block.index < 0 && next < order.size()) start_block(block, order[next++]);
      any = any || block.index >= 0;
    }
    if (!any) return;
    if (!sweep()) refuse_deadlock();
  }
}

}  // namespace

Votes barrier(bool predicate, Site site) {
  Thread& self = *engine.thread;
  self.state = State::kAtBarrier;
  self.site = site;
  self.value = predicate;
  Fiber::leave();
  return self.votes;
}

const Lanes& collective(Collective kind, unsigned mask, uint64_t value, Site site) {
  if ((mask >> lane() & 1) == 0) refuse("lane ", lane(), " is not in its own mask at ", site.file, ":", site.line);
  Thread& self = *engine.thread;
  self.state = State::kInCollective;
  self.site = site;
  self.kind = kind;
  self.mask = mask;
  self.value = value;
  Fiber::leave();
  return self.lanes;
}

void switch_point() { Fiber::leave(); }

void count_launches(int64_t launches) { engine.launches += launches; }

void* shared_array(const void* key, size_t bytes) {
  SharedMemory& shared = engine.block->shared;
  void* const array = shared.get(key, bytes);
  if (shared.bytes() + engine.dynamic_bytes > kMaxSharedBytes) {
    refuse("a block takes ", shared.bytes() + engine.dynamic_bytes, " bytes of shared memory, the limit is ",
           kMaxSharedBytes);
  }
  return array;
}

void* dynamic_shared_bytes() { return engine.block->shared.get(nullptr, engine.dynamic_bytes); }

void run(int64_t blocks, int64_t threads, size_t shared_bytes, const std::function<void()>& body) {
  if (blocks < 1 || blocks > kMaxGridBlocks) refuse("a launch of ", blocks, " blocks");
  if (threads < 1 || threads > kMaxThreads) refuse("a block of ", threads, " threads: the limit is ", kMaxThreads);
  if (shared_bytes > kMaxSharedBytes) refuse(shared_bytes, " bytes of shared memory: the limit is ", kMaxSharedBytes);
  gridDim = {static_cast<unsigned>(blocks)};
  blockDim = {static_cast<unsigned>(threads)};
  engine.thread_count = threads;
  engine.dynamic_bytes = shared_bytes;
  engine.body = &body;
  ++engine.launches;
  start_races(threads);
  try {
    run_grid(blocks);
  } catch (...) {
    // Abandoned threads are somewhere in the middle of their stacks: they cannot be used again.
    for (Block& block : engine.blocks) {
      block.index = -1;
      block.threads.clear();
    }
    throw;
  }
  check_guards();
  finish_races();
}

}  // namespace tsr::emulated

#define TSR_EXPORT extern "C" __attribute__((visibility("default")))

// 0 ascending, 1 descending, 2 random from the seed.
TSR_EXPORT void tsr_emulated_set_order(int order, uint64_t seed) {
  tsr::emulated::engine.order = order;
  tsr::emulated::engine.random.seed(seed);
}

// How many kernels and memory sets have been run: tests check that there were some, and not many.
TSR_EXPORT int64_t tsr_emulated_launches() { return tsr::emulated::engine.launches; }
