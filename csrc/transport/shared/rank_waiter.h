// Waits of the ranks of one host for each other.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "support/rank_names.h"
#include "transport/shared/words.h"

namespace zero3 {

// Lets one rank wait for the other ranks of its host, and wakes those that wait.
class RankWaiter {
 public:
  // `states` and `pids` have one entry for each rank. `rule` is what ranks have broken that wait in
  // vain, for messages.
  RankWaiter(WakeWord* wake_word, RankState* states, int64_t rank, std::vector<pid_t> pids,
             std::chrono::milliseconds timeout, std::string rule);

  // Sets how messages name the ranks.
  void name_ranks(RankNames names) { names_ = std::move(names); }
  const RankNames& names() const { return names_; }
  std::string name_of_rank(int64_t rank) const { return "rank " + names_.of(rank); }

  int64_t rank() const { return rank_; }
  int64_t world_size() const { return static_cast<int64_t>(peers_.size()); }

  // Tells the other ranks that something they may wait for has changed.
  void notify();

  // Clears this rank's `gave_up`. Throws in a child that was forked from this process: the child
  // would write its parent's words.
  void begin_anew();

  // The missing ranks, and what they have not done. No ranks: they have done it meanwhile.
  struct Missing {
    std::vector<int64_t> ranks;
    std::string what;
    bool needs_all = true;  // false: this rank may go on without some of them
  };

  // Waits until `missing`, which may itself do work, returns nullopt. Tells on stderr, once, for
  // whom it waits after half of the timeout, or a minute. Throws if the group's timeout
  // has passed, a missing rank is dead, or ranks wait for each other.
  void wait(const std::function<std::optional<Missing>()>& missing);

 private:
  struct Peer {
    pid_t pid;
    std::optional<uint64_t> started;  // in the kernel's clock: pids are reused
  };

  class LongWait;

  // Ranks from this one on: each waits for the next, and the last for one of them. Also records the
  // counters read meanwhile.
  struct Circle {
    struct Link {
      int64_t rank;
      uint64_t waits;
      uint64_t looks;
    };
    uint32_t notified;
    std::vector<Link> links;
  };

  std::optional<Circle> circle() const;
  // Throws if all ranks of a circle have looked in vain since it was `seen`, and nothing has
  // changed: none of them can ever go on. Otherwise returns the circle to compare with next time.
  std::optional<Circle> check_circle(std::optional<Circle> seen);
  void check_others_go_on(const Missing& missing) const;
  std::string text_of(const Circle& circle) const;
  std::string text_of(const Missing& missing) const;
  std::string seconds() const;  // of the timeout

  std::string state_of(int64_t rank, bool* is_dead) const;
  [[noreturn]] void fail(const Missing& missing, const std::string& why) const;
  bool is_one_dead(const Missing& missing) const;

  WakeWord* wake_word_;
  RankState* states_;
  int64_t rank_;
  std::vector<Peer> peers_;
  RankNames names_;
  std::chrono::milliseconds timeout_;
  const std::string rule_;
  const pid_t pid_;
};

}  // namespace zero3
