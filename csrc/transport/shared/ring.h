// Allocation of the memory that ranks share.
#pragma once

#include <atomic>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>

#include "transport/shared/words.h"

namespace zero3 {

// Memory in which copies take turns: the newest takes the place of the oldest. All ranks ask for
// the same turns in the same order, and so get the same places.
class Ring {
 public:
  struct Turn {
    uint64_t begin;  // in bytes
    uint64_t end;
    uint64_t history;             // digest of all turns so far: equal on ranks with equal turns
    std::atomic<int> pins = 0;    // number of gathers that still need the turn to stay
    bool is_over = false;         // another turn has its place
    std::function<void()> leave;  // called before that: moves the remaining readers out
  };

  // Asks the turn to stay while the pin lives.
  class Pin {
   public:
    explicit Pin(std::shared_ptr<Turn> turn) : turn_(std::move(turn)) { ++turn_->pins; }
    ~Pin() {
      if (turn_) --turn_->pins;
    }
    Pin(Pin&&) = default;
    Pin& operator=(Pin&&) = delete;

    bool has_failed() const { return turn_->is_over; }

   private:
    std::shared_ptr<Turn> turn_;
  };

  explicit Ring(uint64_t capacity) : capacity_(capacity) {}

  // Lets copies of `nbytes` take turns too. Turns never take more than all admitted bytes together.
  void admit(uint64_t nbytes) { admitted_ += in_cache_lines(nbytes); }

  // Moves to larger memory. Turns in the old memory are over, but their readers may stay.
  void grow(uint64_t capacity);

  // Returns the next turn; null if a pinned turn is in its place, unless `even_if_pinned`.
  std::shared_ptr<Turn> next(uint64_t nbytes, bool even_if_pinned = false);

 private:
  uint64_t capacity_;
  uint64_t admitted_ = 0;
  uint64_t cursor_ = 0;
  uint64_t history_ = 0;
  std::list<std::shared_ptr<Turn>> turns_;
};

// Allocates bytes of a mailbox, the lowest free ones first: memory that was read a moment ago is
// still in the cache.
class Arena {
 public:
  explicit Arena(uint64_t capacity) : capacity_(capacity) {}

  // Returns an offset, a multiple of the cache line; nullopt if there is no room now.
  std::optional<uint64_t> take(uint64_t nbytes);
  void give_back(uint64_t offset) { taken_.erase(offset); }

 private:
  uint64_t capacity_;
  std::map<uint64_t, uint64_t> taken_;  // begin of each block -> its end
};

}  // namespace zero3
