// Large memory on the host: kept from one call to the next, and in huge pages where they are quick to come by.
#pragma once
#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <system_error>
#include <vector>
#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace tsr {

// From this size on memory comes fresh from the system as often as not, and then its first writes are page faults,
// which cost several times the writes themselves.
constexpr int64_t kLargeBytes = int64_t{8} << 20;

// Asks for huge pages: 512 times fewer faults. On some virtual machines, whose host takes free memory back, one of them
// costs more than 512 small ones, so the first of each is timed and decides. Memory must be the caller's to write to.
// Only a hint, without effect on small memory and on systems that do not know it.
inline void prefer_huge_pages(void* memory, int64_t bytes) {
#if defined(MADV_HUGEPAGE) && defined(MADV_NOHUGEPAGE)
  constexpr uintptr_t kHugePage = uintptr_t{2} << 20, kPage = 4096;
  constexpr int kPages = kHugePage / kPage, kTimed = 4;
  if (bytes < kLargeBytes) return;
  // Only whole huge pages inside the memory: its neighbours are someone else's.
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(memory) + kHugePage - 1) & ~(kHugePage - 1);
  const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + static_cast<uintptr_t>(bytes)) & ~(kHugePage - 1);
  const auto touch = [](uintptr_t at) {
    const auto before = std::chrono::steady_clock::now();
    *reinterpret_cast<volatile char*>(at) = 0;
    return std::chrono::steady_clock::now() - before;
  };
  auto small = touch(end - kPage);
  for (int page = 2; page <= kTimed; ++page) small = std::min(small, touch(end - page * kPage));
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
  if (touch(begin) > kPages * small) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_NOHUGEPAGE);
#else
  (void)memory;
  (void)bytes;
#endif
}

// The C library keeps smaller memory itself.
constexpr int64_t kLeastKeptBytes = int64_t{4} << 20;

// Memory of large results and scratch, kept when they are gone: the C library returns it to the system, and the next
// call would pay for its page faults again.
//
// It keeps at most as much as TORCHSPARSE_REC_KEPT_MB says: 256 MB or a sixteenth of what the machine has, unless that
// variable is set, and 0 keeps nothing. It frees what nobody has asked for in ten seconds, and everything while the
// machine has less than an eighth of its memory to spare. Off under sanitizers, which must see the use of freed memory.
class KeptMemory {
 public:
  // bytes 0: not from here.
  struct Block {
    void* memory = nullptr;
    int64_t bytes = 0;
  };

  // As long as the process: results may live until its very end.
  static KeptMemory& instance() {
    static KeptMemory* const kept = new KeptMemory;
    return *kept;
  }

  // At least so many bytes, in cache lines of their own; nothing where such sizes are not kept, or the system has no
  // more.
  Block borrow(int64_t bytes) {
    if (bytes < kLeastKeptBytes || bytes > most_) return {};
    const int64_t size = rounded(bytes);
    // A process forked while another thread held them finds them held for ever, and keeps nothing.
    if (const Hold hold(busy_); hold.is_held) {
      free_old();
      size_t best = idle_.size();
      for (size_t k = 0; k < idle_.size(); ++k) {
        if (idle_[k].bytes < bytes || idle_[k].bytes > 2 * size) continue;
        if (best == idle_.size() || idle_[k].bytes < idle_[best].bytes) best = k;
      }
      if (best < idle_.size()) {
        const Block found = idle_[best];
        remove(best);
        return found;
      }
      if (const Block block = map(size); block.bytes > 0) return block;
      while (!idle_.empty()) unmap(remove(0));
    }
    return map(size);
  }

  void give_back(const Block& block) {
    if (const Hold hold(busy_); hold.is_held) {
      free_old();
      if (!scarce_ && block.bytes <= most_) {
        while (held_ + block.bytes > most_ || idle_.size() == kMostBlocks) unmap(remove(0));
        idle_.push_back({block, Clock::now()});
        held_ += block.bytes;
        return;
      }
    }
    unmap(block);
  }

 private:
  using Clock = std::chrono::steady_clock;
  struct Idle : Block {
    Idle(const Block& block, Clock::time_point since_) : Block(block), since(since_) {}
    Clock::time_point since;
  };
  // Whoever cannot have the members below at once goes on without them. Not a mutex: the pthread_mutex_trylock of glibc
  // 2.34 is another than before.
  struct Hold {
    explicit Hold(std::atomic<bool>& busy_) : busy(busy_), is_held(!busy_.exchange(true, std::memory_order_acquire)) {}
    ~Hold() {
      if (is_held) busy.store(false, std::memory_order_release);
    }
    std::atomic<bool>& busy;
    const bool is_held;
  };
  static constexpr std::chrono::seconds kLongest{10}, kBetweenLooks{1};
  static constexpr size_t kMostBlocks = 256, kPage = 4096;

  // Giving back must not fail: it asks for no memory.
  KeptMemory() { idle_.reserve(kMostBlocks); }

#if defined(__linux__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  static int64_t most_bytes() {
    if (const char* wish = std::getenv("TORCHSPARSE_REC_KEPT_MB")) {
      int64_t megabytes = 0;
      read_number(wish, "", megabytes);
      return std::clamp<int64_t>(megabytes, 0, INT64_MAX >> 21) << 20;
    }
    return std::min<int64_t>(int64_t{256} << 20, sysconf(_SC_PHYS_PAGES) / 16 * sysconf(_SC_PAGESIZE));
  }

  // Blocks begin at different places of a page. A processor looks for a read's value among the writes before it by
  // place in the page, and arrays that are walked together would stay at the same: a third of the time of some kernels.
  static Block map(int64_t bytes) {
    static std::atomic<uint32_t> maps{0};
    const uint32_t place = maps.fetch_add(1, std::memory_order_relaxed) * 13 * 64 % kPage;
    void* memory =
        mmap(nullptr, static_cast<size_t>(bytes) + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return {};
    prefer_huge_pages(memory, bytes);
    return {static_cast<char*>(memory) + place, bytes};
  }

  static void unmap(const Block& block) {
    const uintptr_t place = reinterpret_cast<uintptr_t>(block.memory) % kPage;
    munmap(static_cast<char*>(block.memory) - place, static_cast<size_t>(block.bytes) + kPage);
  }

  // Reads the number after a name and blanks; false where a line has another name. Not by sscanf or strtoll: those of
  // glibc 2.38 are others than before.
  static bool read_number(std::string_view line, std::string_view name, int64_t& number) {
    if (line.substr(0, name.size()) != name) return false;
    const size_t begin = std::min(line.find_first_not_of(' ', name.size()), line.size());
    return std::from_chars(line.data() + begin, line.data() + line.size(), number).ec == std::errc();
  }

  // Whether the machine has little memory to spare.
  static bool is_scarce() {
    std::FILE* file = std::fopen("/proc/meminfo", "r");
    if (file == nullptr) return false;
    char line[128];
    int64_t all = 0, available = 1;
    while (std::fgets(line, sizeof(line), file) != nullptr) {
      read_number(line, "MemTotal:", all);
      if (read_number(line, "MemAvailable:", available)) break;
    }
    std::fclose(file);
    return available < all / 8;
  }
#else
  static int64_t most_bytes() { return 0; }
  static Block map(int64_t) { return {}; }
  static void unmap(const Block&) {}
  static bool is_scarce() { return false; }
#endif

  // Sizes of batches differ a little: one of sixteen sizes between two powers of two.
  static int64_t rounded(int64_t bytes) {
    int64_t step = kLeastKeptBytes / 16;
    while (step * 32 < bytes) step *= 2;
    return (bytes + step - 1) / step * step;
  }

  Block remove(size_t k) {
    const Block block = idle_[k];
    held_ -= block.bytes;
    idle_.erase(idle_.begin() + static_cast<std::ptrdiff_t>(k));
    return block;
  }

  void free_old() {
    const Clock::time_point now = Clock::now();
    if (now - looked_ >= kBetweenLooks) {
      looked_ = now;
      scarce_ = is_scarce();
    }
    while (!idle_.empty() && (scarce_ || now - idle_[0].since >= kLongest)) unmap(remove(0));
  }

  const int64_t most_ = most_bytes();
  std::atomic<bool> busy_{false};
  std::vector<Idle> idle_;  // the oldest first
  int64_t held_ = 0;
  Clock::time_point looked_{};
  bool scarce_ = false;
};

}  // namespace tsr
