#include "support/heap.h"

#include <cstdlib>

#ifdef __GLIBC__
#include <unistd.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string_view>
#include <vector>
#endif

namespace zero3 {

#ifdef __GLIBC__
namespace {

// glibc trims the free end of its heap once it exceeds twice the largest freed block that was
// mapped separately, of up to this many bytes.
constexpr size_t kLargestMapped = 32 << 20;
// Size of the block that stands at the end of the heap: too large for most holes below it.
constexpr size_t kStop = 128 << 10;
constexpr uintptr_t kNear = 2 << 20;  // maximum bytes between this block and the end
constexpr size_t kMostHoles = 1024;

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<void, Free>;

uintptr_t address(const Memory& memory) { return reinterpret_cast<uintptr_t>(memory.get()); }
uintptr_t end_of_heap() { return reinterpret_cast<uintptr_t>(sbrk(0)); }

class Heap {
 public:
  void keep() {
    std::lock_guard lock(mutex_);
    if (end_of_heap() == seen_) return;
    if (!stop_) {
      void* volatile largest = std::malloc(kLargestMapped - kStop);  // not elided
      std::free(largest);
    }
    if (!stop_ || end_of_heap() - address(stop_) > kNear) put_stop();
    seen_ = end_of_heap();
  }

  void let_go() {
    std::lock_guard lock(mutex_);
    stop_.reset();
    seen_ = 0;
  }

 private:
  // malloc() fills the holes that fit best first, and then the end of the heap.
  void put_stop() {
    std::vector<Memory> holes;
    while (holes.size() < kMostHoles) {
      Memory block(std::malloc(kStop));
      if (!block || address(block) > end_of_heap()) return;  // not from this heap
      if (end_of_heap() - address(block) <= kNear) {
        stop_ = std::move(block);
        return;
      }
      holes.push_back(std::move(block));
    }
  }

  std::mutex mutex_;
  Memory stop_;
  uintptr_t seen_ = 0;
};

// Never destroyed: a backward may run while the process ends.
Heap& heap() {
  static auto* heap = new Heap;
  return *heap;
}

}  // namespace

void keep_heap() {
  static const char* const asked = std::getenv("ZERO3_KEEP_HEAP");
  static const bool is_wanted = asked == nullptr || std::string_view(asked) != "0";
  if (is_wanted) heap().keep();
}
void let_go_of_heap() { heap().let_go(); }
#else
void keep_heap() {}
void let_go_of_heap() {}
#endif

}  // namespace zero3
