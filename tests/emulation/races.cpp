#include "races.h"

#include <dlfcn.h>

#include <cstdio>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>

#include "emulation.h"

namespace tsr::emulated {
namespace {

// ---- The state of a launch ------------------------------------------------------------------------------------------

bool instrumented = false;
Order* running = nullptr;
const Fiber* running_fiber = nullptr;

// Memory is divided into cells of eight bytes. A cell has lists of the accesses to it, one for each kind.
constexpr unsigned kWrite = 1, kAtomic = 2, kKinds = 4;
const char* const kNames[kKinds] = {"read", "write", "atomic read", "atomic write"};
constexpr uintptr_t kCellBytes = 8, kPageCells = 512;

struct Access {
  const void* site;  // the instruction behind it
  uint32_t thread, step;
  uint32_t next;   // of the list; 0: none
  unsigned bytes;  // of the cell, a bit for each
};
struct Page {
  uint32_t lists[kPageCells][kKinds];
};
struct Range {
  uintptr_t begin, end;
};

struct Launch {
  uint32_t threads = 0;  // of a block
  std::vector<Access> accesses;
  std::unordered_map<uintptr_t, std::unique_ptr<Page>> pages;
  std::vector<Range> shared;
  std::unordered_map<const void*, Known> handed_over;  // by atomic writes to an address
  std::set<std::pair<const void*, const void*>> found;
  std::string text;
} launch;

uint32_t* lists_of(uintptr_t cell) {
  std::unique_ptr<Page>& page = launch.pages[cell / kPageCells];
  if (page == nullptr) page = std::make_unique<Page>();
  return page->lists[cell % kPageCells];
}

// The first step of `thread` that is not known to come before the next access of `order`'s thread.
uint32_t known(const Order& order, uint32_t thread) {
  if (thread == order.thread) return order.step + 1;
  uint32_t result = thread < order.all.size() ? order.all[thread] : 0;
  const uint32_t at = thread - order.block_begin, own = order.thread - order.block_begin;
  if (at >= launch.threads) return result;
  result = std::max(result, order.block);
  return at / 32 == own / 32 ? std::max(result, order.lanes[at % 32]) : result;
}

void merge(Known& into, const Known& from) {
  if (into.size() < from.size()) into.resize(from.size());
  for (size_t i = 0; i < from.size(); ++i) into[i] = std::max(into[i], from[i]);
}

// Ends the thread's step; returns all steps that come before this end.
Known end_step(Order& order) {
  Known result(std::max<size_t>(order.all.size(), order.block_begin + launch.threads));
  for (uint32_t t = 0; t < result.size(); ++t) result[t] = known(order, t);
  ++order.step;
  return result;
}

// ---- Reports --------------------------------------------------------------------------------------------------------

// The source line of the instruction before `site`; for a function that stands for one instruction, its caller's line.
std::string line_of(const void* site) {
  Dl_info library{};
  if (dladdr(site, &library) == 0) return "?";
  char offset[32];
  std::snprintf(offset, sizeof(offset), "%#tx",
                static_cast<const char*>(site) - 1 - static_cast<char*>(library.dli_fbase));
  FILE* const lines = popen(message("addr2line -i -e '", library.dli_fname, "' ", offset).c_str(), "r");
  if (lines == nullptr) return "?";
  std::string result = "?";
  const auto stands_for_one = [&] {
    const bool is_emulation =
        result.find("/emulation/") != std::string::npos && result.find(".cu:") == std::string::npos;
    return result == "?" || is_emulation || result.find("/atomics.cuh:") != std::string::npos;
  };
  for (char line[4096]; std::fgets(line, sizeof(line), lines) != nullptr;) {
    if (stands_for_one()) result.assign(line, std::strcspn(line, " \n"));
  }
  pclose(lines);
  return result;
}

std::string described(unsigned kind, const void* site, uint32_t thread) {
  return message(kNames[kind], " at ", line_of(site), " by thread ", thread % launch.threads, " of block ",
                 thread / launch.threads);
}

// Reports each pair of lines once, and not more than a few pairs.
void tell(uintptr_t cell, const Access& first, unsigned first_kind, unsigned kind, const void* site) {
  constexpr size_t kMost = 8;
  if (launch.found.size() == kMost || !launch.found.emplace(first.site, site).second) return;
  const uintptr_t address = cell * kCellBytes;
  const bool is_shared = std::any_of(launch.shared.begin(), launch.shared.end(),
                                     [&](const Range& range) { return range.begin <= address && address < range.end; });
  launch.text +=
      message("\n  ", is_shared ? "shared" : "global", " memory: ", described(first_kind, first.site, first.thread),
              ", ", described(kind, site, running->thread));
}

// ---- Accesses -------------------------------------------------------------------------------------------------------

// Notes that the running thread accesses some bytes of a cell.
void access_cell(uintptr_t cell, unsigned bytes, unsigned kind, const void* site) {
  const Order& me = *running;
  uint32_t* const lists = lists_of(cell);
  const Access& latest = launch.accesses[lists[kind]];
  if (lists[kind] != 0 && latest.thread == me.thread && latest.step == me.step && (bytes & ~latest.bytes) == 0) return;
  for (unsigned other = 0; other < kKinds; ++other) {
    if (((other | kind) & kWrite) == 0 || (other & kind & kAtomic) != 0) continue;
    for (uint32_t* link = &lists[other]; *link != 0;) {
      Access& access = launch.accesses[*link];
      const bool ordered = access.step < known(me, access.thread);
      if (!ordered && (access.bytes & bytes) != 0) tell(cell, access, other, kind, site);
      // An access that will race with one before this plain write will race with the write, too.
      if (ordered && kind == kWrite && (access.bytes & ~bytes) == 0) {
        *link = access.next;
      } else {
        link = &access.next;
      }
    }
  }
  launch.accesses.push_back({site, me.thread, me.step, lists[kind], bytes});
  lists[kind] = static_cast<uint32_t>(launch.accesses.size() - 1);
}

// A thread's stack belongs to it alone, and its coordinates are only read.
bool is_private(const void* address) {
  return running_fiber->has(address) || address == &threadIdx.x || address == &blockIdx.x || address == &blockDim.x ||
         address == &gridDim.x;
}

void access(const volatile void* address, size_t bytes, unsigned kind, const void* site) {
  if (running == nullptr || is_private(const_cast<const void*>(address))) return;
  const uintptr_t end = reinterpret_cast<uintptr_t>(address) + bytes;
  for (uintptr_t at = end - bytes; at < end;) {
    const uintptr_t offset = at % kCellBytes, n = std::min(end - at, kCellBytes - offset);
    access_cell(at / kCellBytes, ((1u << n) - 1) << offset, kind, site);
    at += n;
  }
}

// `memory_order` is one of __ATOMIC_RELAXED to __ATOMIC_SEQ_CST. A read-modify-write hands on what it has read.
void access_atomically(const volatile void* address, size_t bytes, bool reads, bool writes, int memory_order,
                       const void* site) {
  if (running == nullptr) return;
  access(address, bytes, kAtomic | (writes ? kWrite : 0), site);
  Order& me = *running;
  const void* const key = const_cast<const void*>(address);
  const auto found = launch.handed_over.find(key);
  const bool acquires = memory_order != __ATOMIC_RELAXED && memory_order != __ATOMIC_RELEASE;
  if (reads && found != launch.handed_over.end()) merge(acquires ? me.all : me.seen, found->second);
  if (!writes) return;
  if (!reads && found != launch.handed_over.end()) launch.handed_over.erase(found);
  const bool releases = memory_order >= __ATOMIC_RELEASE;
  if (releases || !me.fenced.empty()) merge(launch.handed_over[key], releases ? end_step(me) : me.fenced);
}

void fence() {
  if (running == nullptr) return;
  merge(running->all, running->seen);
  running->seen.clear();
  running->fenced = end_step(*running);
}

}  // namespace

// ---- Called by the emulation ----------------------------------------------------------------------------------------

void start_races(int64_t threads_of_block) {
  launch.threads = static_cast<uint32_t>(threads_of_block);
  launch.accesses.assign(1, {});
  launch.pages.clear();
  launch.shared.clear();
  launch.handed_over.clear();
  launch.found.clear();
  launch.text.clear();
}

void finish_races() {
  if (!launch.text.empty()) refuse("no order between", launch.text);
}

void start_order(Order& order, int64_t block, int64_t thread) {
  order = {};
  order.block_begin = static_cast<uint32_t>(block) * launch.threads;
  order.thread = order.block_begin + static_cast<uint32_t>(thread);
}

void watch(Order* order, const Fiber* fiber) {
  running = order;
  running_fiber = fiber;
}

void order_block(const std::vector<Order*>& threads) {
  if (!instrumented) return;
  uint32_t step = 0;
  Known all;
  for (const Order* const thread : threads) {
    step = std::max(step, thread->step + 1);
    merge(all, thread->all);
  }
  for (Order* const thread : threads) {
    thread->step = thread->block = step;
    thread->all = all;
  }
}

void order_lanes(const std::vector<Order*>& lanes) {
  if (!instrumented) return;
  std::array<uint32_t, 32> steps{};
  Known all;
  for (const Order* const thread : lanes) {
    if (thread == nullptr) continue;
    for (int i = 0; i < 32; ++i) steps[i] = std::max(steps[i], thread->lanes[i]);
    merge(all, thread->all);
  }
  for (int i = 0; i < 32; ++i) {
    if (lanes[i] != nullptr) steps[i] = ++lanes[i]->step;
  }
  for (Order* const thread : lanes) {
    if (thread == nullptr) continue;
    thread->lanes = steps;
    thread->all = all;
  }
}

void start_shared(const void* begin, size_t bytes) {
  if (!instrumented) return;
  const uintptr_t at = reinterpret_cast<uintptr_t>(begin);
  launch.shared.push_back({at, at + bytes});
  for (uintptr_t cell = at / kCellBytes; cell * kCellBytes < at + bytes; ++cell) {
    std::fill_n(lists_of(cell), kKinds, 0);
  }
}

}  // namespace tsr::emulated

// ---- Called by code that g++ compiled -------------------------------------------------------------------------------

using tsr::emulated::access;
using tsr::emulated::access_atomically;
using tsr::emulated::kWrite;

#define TSR_SITE __builtin_return_address(0)

extern "C" {

void __tsan_init() { tsr::emulated::instrumented = true; }
void __tsan_vptr_update(void**, void*) {}
void __tsan_read_range(void* at, size_t bytes) { access(at, bytes, 0, TSR_SITE); }
void __tsan_write_range(void* at, size_t bytes) { access(at, bytes, kWrite, TSR_SITE); }

#define TSR_ACCESSES(bytes)                                                   \
  void __tsan_read##bytes(void* at) { access(at, bytes, 0, TSR_SITE); }       \
  void __tsan_write##bytes(void* at) { access(at, bytes, kWrite, TSR_SITE); } \
  void __tsan_volatile_read##bytes(void* at) {                                \
    access_atomically(at, bytes, true, false, __ATOMIC_RELAXED, TSR_SITE);    \
  }                                                                           \
  void __tsan_volatile_write##bytes(void* at) { access_atomically(at, bytes, false, true, __ATOMIC_RELAXED, TSR_SITE); }
TSR_ACCESSES(1)
TSR_ACCESSES(2)
TSR_ACCESSES(4)
TSR_ACCESSES(8)
TSR_ACCESSES(16)

// All functions that the kernels and the host's code beside them call, also from other threads of the host.
#define TSR_ATOMICS(T, bits)                                             \
  T __tsan_atomic##bits##_load(const volatile T* at, int order) {        \
    access_atomically(at, sizeof(T), true, false, order, TSR_SITE);      \
    return __atomic_load_n(at, __ATOMIC_SEQ_CST);                        \
  }                                                                      \
  void __tsan_atomic##bits##_store(volatile T* at, T value, int order) { \
    access_atomically(at, sizeof(T), false, true, order, TSR_SITE);      \
    __atomic_store_n(at, value, __ATOMIC_SEQ_CST);                       \
  }                                                                      \
  T __tsan_atomic##bits##_exchange(volatile T* at, T value, int order) { \
    access_atomically(at, sizeof(T), true, true, order, TSR_SITE);       \
    return __atomic_exchange_n(at, value, __ATOMIC_SEQ_CST);             \
  }
TSR_ATOMICS(uint8_t, 8)
TSR_ATOMICS(uint16_t, 16)
TSR_ATOMICS(uint32_t, 32)
TSR_ATOMICS(uint64_t, 64)
uint32_t __tsan_atomic32_fetch_add(volatile uint32_t* at, uint32_t value, int) {
  return __atomic_fetch_add(at, value, __ATOMIC_SEQ_CST);
}
void __tsan_atomic_thread_fence(int) { tsr::emulated::fence(); }
}
