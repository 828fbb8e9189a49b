// What the ranks of one host tell each other through memory that they share: who may write when.
// docs/one_host.md has the protocol and why it is safe. Nothing here knows of tensors.
//
// Memory of zeros is the beginning of everything. Each word is written by one rank and only grows,
// so that a rank which dies anywhere leaves nothing locked.
#pragma once

#include <sys/types.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace zero3 {

constexpr size_t kCacheLine = 64;

// Whole cache lines, at least one.
inline uint64_t in_cache_lines(uint64_t nbytes) {
  return (std::max<uint64_t>(nbytes, 1) + kCacheLine - 1) / kCacheLine * kCacheLine;
}

// Of one rank with one parameter, or with one block of its gradient: the first has it all.
struct alignas(kCacheLine) Progress {
  // A gather's epochs count the publications of the parameter.
  std::atomic<uint64_t> arrived;    // reads no copy older than this epoch's
  std::atomic<uint64_t> published;  // has written its rows of this epoch's
  std::atomic<uint64_t> history;    // of the turns of a Ring, up to that of the epoch arrived at

  // A reduction's epochs count backwards, and within one the gradients of the parameter.
  std::atomic<uint64_t> deposited;  // has its gradient of this epoch in its mailbox, described by:
  uint64_t offset;                  // in the mailbox, in bytes
  int8_t dtype;
  int8_t wire_dtype;
  std::atomic<uint8_t> presence;   // in the latest of Calls that it has made
  std::atomic<uint64_t> consumed;  // reads no gradient of this epoch
};
static_assert(std::atomic<uint64_t>::is_always_lock_free && sizeof(Progress) == kCacheLine);

// What a rank waits for, in words that others may read while it writes.
using Text = std::array<std::atomic<uint64_t>, 32>;

constexpr int64_t kNobody = -1;

// Of one rank.
struct alignas(kCacheLine) Standing {
  std::atomic<uint64_t> settled;  // reads no gradient of backwards before this one
  std::atomic<uint64_t> called;   // has said what it brings to backwards, up to this call
  std::atomic<uint64_t> model;    // of which it has said so in that call
  std::atomic<uint64_t> heard;    // has read what others said in calls up to this one

  // Of its latest wait that was long.
  std::atomic<uint64_t> waits;    // counts their beginnings and ends: while it is odd, it waits
  std::atomic<uint64_t> looks;    // counts how often it has looked in vain, in all waits
  std::atomic<int64_t> for_rank;  // one that it cannot go on without; or kNobody
  std::atomic<uint64_t> gave_up;  // `waits` when it found that nobody can go on
  Text what;                      // that the other has not done
};

struct alignas(kCacheLine) Bell {
  std::atomic<uint32_t> rung;
  std::atomic<uint32_t> sleepers;
};

// The ranks of one host, as one of them sees them.
class Host {
 public:
  // `standings` and `pids` are those of the ranks.
  Host(Bell* bell, Standing* standings, int64_t rank, std::vector<pid_t> pids,
       std::chrono::milliseconds timeout);

  int64_t rank() const { return rank_; }
  int64_t world_size() const { return static_cast<int64_t>(peers_.size()); }

  // Tells the others that something which they may wait for has changed.
  void ring();

  // Says that this rank begins anew, if it has given up. Throws in a child that was forked from it,
  // which would write what its parent writes.
  void begin_anew();

  // Who is missing, and what is. Nobody: it has come just now.
  struct Missing {
    std::vector<int64_t> ranks;
    std::string what;
    bool needs_all = true;  // of them; else it may go on without some
  };

  // Waits until `missing`, which may itself do work, gives nothing. Throws when the group's timeout
  // has passed, one of those that are missing is dead, or ranks wait for each other.
  void wait(const std::function<std::optional<Missing>()>& missing);

 private:
  struct Peer {
    pid_t pid;
    std::optional<uint64_t> started;  // in the kernel's clock: pids are used again
  };

  class Waiting;

  // From this rank on, each waits for the next, and the last for one of them; how that was seen.
  struct Circle {
    struct Link {
      int64_t rank;
      uint64_t waits;
      uint64_t looks;
    };
    uint32_t rung;
    std::vector<Link> links;
  };

  std::optional<Circle> circle() const;
  // Throws if all in a circle have looked in vain since it was `seen`, and nothing has changed:
  // then nobody in it ever will go on. Else gives what is seen now.
  std::optional<Circle> check_circle(std::optional<Circle> seen);
  void check_others_go_on(const Missing& missing) const;
  std::string text_of(const Circle& circle) const;

  std::string state_of(int64_t rank, bool* is_dead) const;
  [[noreturn]] void fail(const Missing& missing, const std::string& why) const;
  bool is_one_dead(const Missing& missing) const;

  Bell* bell_;
  Standing* standings_;
  int64_t rank_;
  std::vector<Peer> peers_;
  std::chrono::milliseconds timeout_;
  const pid_t pid_;
};

// One parameter's gathers: a copy of it that all ranks read, and each writes its rows of.
class Publication {
 public:
  Publication(Progress* ranks, int64_t rank, int64_t world_size)
      : ranks_(ranks), rank_(rank), world_size_(world_size) {}

  uint64_t epoch() const { return epoch_; }

  // Begins the next epoch, whose copy has a turn with such a history. From here on this rank reads
  // what is there only when there are no writers().
  void arrive(uint64_t history) {
    ranks_[rank_].history.store(history, std::memory_order_relaxed);
    ranks_[rank_].arrived.store(++epoch_, std::memory_order_release);
  }

  // Those that may still read what was at the copy's place before. If there are none, this rank
  // may write its rows, and says so by publish().
  std::vector<int64_t> readers() const { return behind(&Progress::arrived); }

  // Then: whether all have it at one place. They may not if some have gathered what others have
  // not, or have raised, as this one will, and gone on.
  bool is_at_one_place() const {
    const auto mine = ranks_[rank_].history.load(std::memory_order_relaxed);
    return std::all_of(ranks_, ranks_ + world_size_, [&](const Progress& progress) {
      return progress.history.load(std::memory_order_relaxed) == mine;
    });
  }

  void publish() { ranks_[rank_].published.store(epoch_, std::memory_order_release); }
  bool is_published() const {
    return ranks_[rank_].published.load(std::memory_order_relaxed) >= epoch_;
  }

  // Those that have not written their rows.
  std::vector<int64_t> writers() const { return behind(&Progress::published); }

 private:
  std::vector<int64_t> behind(std::atomic<uint64_t> Progress::* word) const {
    std::vector<int64_t> result;
    for (int64_t r = 0; r < world_size_; ++r)
      if ((ranks_[r].*word).load(std::memory_order_acquire) < epoch_) result.push_back(r);
    return result;
  }

  Progress* ranks_;
  int64_t rank_;
  int64_t world_size_;
  uint64_t epoch_ = 0;
};

// Numbers the backwards of a group. All ranks count alike, also where a backward raised on some of
// them before it began there: the next forward, in which they meet, sets them right.
class Backwards {
 public:
  Backwards(Standing* ranks, int64_t rank) : ranks_(ranks), rank_(rank) {}

  void count_publication() {
    ++publications_;
    settle();
  }

  uint64_t begin() {
    const uint64_t number = next();
    latest_ = number;
    running_.insert(number);
    return number;
  }

  // This rank reads nothing of it any more.
  void end(uint64_t number) {
    running_.erase(number);
    settle();
  }

 private:
  static constexpr int kPublicationShift = 12;  // more backwards for one forward than anybody has

  uint64_t next() const { return std::max(latest_ + 1, publications_ << kPublicationShift); }
  void settle() {
    const uint64_t settled = running_.empty() ? next() : *running_.begin();
    ranks_[rank_].settled.store(settled, std::memory_order_release);
  }

  Standing* ranks_;
  int64_t rank_;
  uint64_t publications_ = 0;
  uint64_t latest_ = 0;
  std::set<uint64_t> running_;  // one inside of another
};

// Calls in which each rank says something, and hears what the others say. They are numbered by the
// backwards, and within one counted.
class Calls {
 public:
  Calls(Standing* ranks, int64_t rank, int64_t world_size)
      : ranks_(ranks), rank_(rank), world_size_(world_size) {}

  // Those that may still read what this rank said in its latest call. If there are none, it may
  // write what it says in the next(), and then say() so.
  std::vector<int64_t> readers() const {
    return those([&](const Standing& standing) {
      return standing.heard.load(std::memory_order_acquire) < latest_ &&
             !has_settled(standing, latest_);
    });
  }
  uint64_t next(uint64_t backward) {
    return latest_ = std::max(latest_, backward << kBackwardShift) + 1;
  }
  void say(uint64_t call, uint64_t model) {
    ranks_[rank_].model.store(model, std::memory_order_relaxed);
    ranks_[rank_].called.store(call, std::memory_order_release);
  }

  // Those that have not said it. If there are none, all can be read, until hear().
  std::vector<int64_t> silent(uint64_t call) const {
    return those([&](const Standing& standing) {
      return standing.called.load(std::memory_order_acquire) < call;
    });
  }
  // Then: of which model it was, to that rank.
  uint64_t model_of(int64_t r) const { return ranks_[r].model.load(std::memory_order_relaxed); }
  // Those that never will say it.
  std::vector<int64_t> gone(uint64_t call) const {
    return those([&](const Standing& standing) {
      return has_settled(standing, call) && standing.called.load(std::memory_order_acquire) < call;
    });
  }
  void hear(uint64_t call) { ranks_[rank_].heard.store(call, std::memory_order_release); }

 private:
  static constexpr int kBackwardShift = 8;

  static bool has_settled(const Standing& standing, uint64_t call) {
    return standing.settled.load(std::memory_order_acquire) > call >> kBackwardShift;
  }

  template <typename Predicate>
  std::vector<int64_t> those(Predicate predicate) const {
    std::vector<int64_t> result;
    for (int64_t r = 0; r < world_size_; ++r)
      if (predicate(ranks_[r])) result.push_back(r);
    return result;
  }

  Standing* ranks_;
  int64_t rank_;
  int64_t world_size_;
  uint64_t latest_ = 0;
};

// Reductions of one block of a parameter: each rank's gradient lies in its mailbox until it is
// read.
class Deposit {
 public:
  struct Description {
    uint64_t offset;
    int8_t dtype;
    int8_t wire_dtype;
  };

  // If it has an `owner`, that rank alone reads; else all do.
  Deposit(Progress* ranks, const Standing* standings, int64_t rank, int64_t world_size,
          std::optional<int64_t> owner = std::nullopt)
      : ranks_(ranks), standings_(standings), rank_(rank), world_size_(world_size), owner_(owner) {}

  bool is_read_by(int64_t r) const { return !owner_ || *owner_ == r; }

  // Those that may still read this rank's gradient of `epoch`.
  std::vector<int64_t> readers(uint64_t epoch) const {
    std::vector<int64_t> result;
    for (int64_t r = 0; r < world_size_; ++r)
      if (is_read_by(r) && ranks_[r].consumed.load(std::memory_order_acquire) < epoch &&
          !has_settled(r, epoch))
        result.push_back(r);
    return result;
  }

  // The epoch of the next gradient in this backward. No readers() of the latest must be left.
  uint64_t next_epoch(uint64_t backward) const {
    const uint64_t first = backward << kBackwardShift;
    return std::max(latest_, first) + 1;
  }
  uint64_t latest() const { return latest_; }

  void put(uint64_t epoch, const Description& description) {
    Progress& mine = ranks_[rank_];
    mine.offset = description.offset;
    mine.dtype = description.dtype;
    mine.wire_dtype = description.wire_dtype;
    latest_ = epoch;
    mine.deposited.store(epoch, std::memory_order_release);
  }

  // Those whose gradient of `epoch` is not there.
  std::vector<int64_t> writers(uint64_t epoch) const {
    std::vector<int64_t> result;
    for (int64_t r = 0; r < world_size_; ++r)
      if (ranks_[r].deposited.load(std::memory_order_acquire) < epoch) result.push_back(r);
    return result;
  }

  // Those of them that have gone on without it, and will never have it.
  std::vector<int64_t> deserters(uint64_t epoch) const {
    std::vector<int64_t> result;
    for (int64_t r = 0; r < world_size_; ++r)
      if (has_settled(r, epoch) && ranks_[r].deposited.load(std::memory_order_acquire) < epoch)
        result.push_back(r);
    return result;
  }

  // Once there are no writers().
  Description of_rank(int64_t r) const {
    return {ranks_[r].offset, ranks_[r].dtype, ranks_[r].wire_dtype};
  }

  // This rank has read all that it wants of `epoch`.
  void consume(uint64_t epoch) {
    if (ranks_[rank_].consumed.load(std::memory_order_relaxed) < epoch)
      ranks_[rank_].consumed.store(epoch, std::memory_order_release);
  }

 private:
  static constexpr int kBackwardShift = 16;

  bool has_settled(int64_t r, uint64_t epoch) const {
    return standings_[r].settled.load(std::memory_order_acquire) > epoch >> kBackwardShift;
  }

  Progress* ranks_;
  const Standing* standings_;
  int64_t rank_;
  int64_t world_size_;
  std::optional<int64_t> owner_;
  uint64_t latest_ = 0;
};

// Rows of a gradient that are sent, and summed, at a time: few enough to stay in caches until then.
struct Block {
  int64_t begin;
  int64_t rows;
  std::optional<int64_t> owner;  // the rank whose they are; if it is all of the gradient, none
};
std::vector<Block> blocks_of(int64_t rows, int64_t row_bytes, int64_t world_size);

// Memory that copies take turns in: the newest takes the place of the oldest. All ranks ask for the
// same turns in the same order, and so come to the same places.
class Ring {
 public:
  struct Turn {
    uint64_t begin;  // in bytes
    uint64_t end;
    uint64_t history;             // a digest of all turns so far: ranks with the same are alike
    std::atomic<int> pins = 0;    // of those who will read it: till then it should stay
    bool is_over = false;         // another has its place
    std::function<void()> leave;  // called before: whoever still reads it moves out
  };

  // While it lives, the turn should stay.
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

  // Copies of so many bytes take turns too. What all take together is not exceeded.
  void admit(uint64_t nbytes) { admitted_ += in_cache_lines(nbytes); }

  // Has more memory from now on; turns in what it had are over, and whoever reads them may stay.
  void grow(uint64_t capacity);

  // The next turn; nothing if one that is pinned is in its place, unless that is not to matter.
  std::shared_ptr<Turn> next(uint64_t nbytes, bool even_if_pinned = false);

 private:
  uint64_t capacity_;
  uint64_t admitted_ = 0;
  uint64_t cursor_ = 0;
  uint64_t history_ = 0;
  std::list<std::shared_ptr<Turn>> turns_;
};

// Bytes of a mailbox. The lowest that are free are given out first: what was read a moment ago is
// still in the cache.
class Arena {
 public:
  explicit Arena(uint64_t capacity) : capacity_(capacity) {}

  // An offset, a multiple of the cache line's; nothing if there is no room now.
  std::optional<uint64_t> take(uint64_t nbytes);
  void give_back(uint64_t offset) { taken_.erase(offset); }

 private:
  uint64_t capacity_;
  std::map<uint64_t, uint64_t> taken_;  // from where to where
};

}  // namespace zero3
