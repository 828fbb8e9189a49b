// Presences and reductions of one rank, as in shared_presences.cpp and mailbox.cpp.
#pragma once

#include <list>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "shared.h"
#include "transport/shared/backwards.h"
#include "transport/shared/reduce_words.h"
#include "transport/shared/ring.h"

namespace zero3 {

struct PendingSum {
  int parameter;
  uint64_t epoch;
  uint64_t time;
  bool raises;  // whether the backward will raise
  bool is_summed = false;
};
using PendingSumPtr = std::shared_ptr<PendingSum>;

class Reductions {
 public:
  explicit Reductions(Rank& rank)
      : rank_(rank),
        announcements_(rank.shared.states, rank.number, rank.shared.world_size),
        arena_(kMailbox) {
    for (int p = 0; p < kParameters; ++p)
      words_.emplace_back(rank.shared.progress[p], rank.shared.states, rank.number,
                          rank.shared.world_size, rank.shared.owner(p));
  }

  void announce(uint64_t backward) {
    read_announcements();
    if (MISTAKE != 4)
      rank_.waiter.wait([&]() -> std::optional<RankWaiter::Missing> {
        poll(/*all=*/true);
        auto readers = announcements_.readers();
        if (readers.empty()) return std::nullopt;
        return {{std::move(readers), "reading of announcements"}};
      });
    round_ = announcements_.next(backward);
    for (int p = 0; p < kParameters; ++p) {
      rank_.linger();
      rank_.shared.progress[p][rank_.number].presence.store(presence_of(rank_.number, p, *round_),
                                                            std::memory_order_relaxed);
    }
    announcements_.announce(*round_, value_of(0, 0, *round_, 1));
    rank_.waiter.notify();
  }

  void read_announcements() {
    if (!round_) return;
    rank_.waiter.wait([&]() -> std::optional<RankWaiter::Missing> {
      poll(/*all=*/true);
      auto unannounced = announcements_.unannounced(*round_);
      if (unannounced.empty()) return std::nullopt;
      return {{std::move(unannounced), "an announcement"}};
    });
    for (int64_t rank = 0; rank < rank_.shared.world_size; ++rank) {
      if (announcements_.topic_of(rank) != value_of(0, 0, *round_, 1)) fail("a topic is wrong");
      for (int p = 0; p < kParameters; ++p) {
        rank_.linger();
        const auto presence =
            rank_.shared.progress[p][rank].presence.load(std::memory_order_relaxed);
        if (presence != presence_of(rank, p, *round_)) fail("a presence is wrong");
      }
    }
    acknowledge();
  }

  void acknowledge() {
    announcements_.acknowledge(*round_);
    round_.reset();
    rank_.waiter.notify();
  }

  PendingSumPtr post(int p, uint64_t backward, bool raises) {
    const auto time = static_cast<uint64_t>(rank_.operations++);
    const auto offset = take(rank_.shared.nbytes(p));
    auto* grad = reinterpret_cast<Element*>(mailbox_of(rank_.number) + offset);
    for (int64_t i = 0; i < rank_.shared.sizes[p]; ++i)
      grad[i] = value_of(rank_.number, p, time, i);
    rank_.linger();
    ReduceWords& words = words_[p];
    if (!words.readers(words.latest()).empty())
      rank_.waiter.wait([&]() -> std::optional<RankWaiter::Missing> {
        poll(/*all=*/true);
        auto readers = words.readers(words.latest());
        if (readers.empty()) return std::nullopt;
        return {{std::move(readers), "reading"}};
      });
    const uint64_t epoch = words.next_epoch(backward);
    words.post(epoch, {offset, static_cast<int8_t>(p), static_cast<int8_t>(p)});
    auto pending = std::make_shared<PendingSum>(PendingSum{p, epoch, time, raises});
    if (words.is_read_by(rank_.number))
      unsummed_.push_back(pending);
    else
      pending->is_summed = true;
    unread_.push_back({offset, epoch, &words});
    rank_.waiter.notify();
    rank_.linger();
    poll();
    return pending;
  }

  void finish(const PendingSumPtr& pending) {
    rank_.waiter.wait([&]() -> std::optional<RankWaiter::Missing> {
      poll(/*all=*/true);
      if (pending->is_summed) return std::nullopt;
      return {{words_[pending->parameter].writers(pending->epoch), "a gradient"}};
    });
  }

  void drop(const PendingSumPtr& pending) {
    if (std::erase(unsummed_, pending) == 0) return;
    rank_.linger();
    words_[pending->parameter].consume(pending->epoch);
    rank_.waiter.notify();
  }

  void poll(bool all = false) {
    bool changed = false;
    for (auto it = unsummed_.begin(); it != unsummed_.end();) {
      PendingSum& pending = **it;
      ReduceWords& words = words_[pending.parameter];
      if (words.writers(pending.epoch).empty()) {
        sum(pending);
        words.consume(pending.epoch);
        changed = true;
        it = unsummed_.erase(it);
      } else if (all) {
        ++it;
      } else {
        break;
      }
    }
    for (auto it = unread_.begin(); it != unread_.end();) {
      if (MISTAKE == 2 || it->readers().empty()) {
        arena_.give_back(it->offset);
        it = unread_.erase(it);
      } else if (all) {
        ++it;
      } else {
        break;
      }
    }
    if (changed) rank_.waiter.notify();
  }

 private:
  struct Unread {
    uint64_t offset;
    uint64_t epoch;
    const ReduceWords* words;
    std::vector<int64_t> readers() const { return words->readers(epoch); }
  };

  static uint8_t presence_of(int64_t rank, int p, uint64_t round) {
    return static_cast<uint8_t>(value_of(rank, p, round, 0));
  }

  uint64_t take(int64_t nbytes) {
    poll();
    auto offset = arena_.take(nbytes);
    if (!offset)
      rank_.waiter.wait([&]() -> std::optional<RankWaiter::Missing> {
        poll(/*all=*/true);
        if ((offset = arena_.take(nbytes))) return std::nullopt;
        if (unread_.empty()) fail("no room");
        return {{unread_.front().readers(), "room"}};
      });
    return *offset;
  }

  void sum(PendingSum& pending) const {
    const int p = pending.parameter;
    const int64_t first = rank_.shared.owner(p) ? 0 : rank_.shared.first(p, rank_.number);
    std::vector<Element> sum(
        (rank_.shared.owner(p) ? rank_.shared.sizes[p] : rank_.shared.first(p, rank_.number + 1)) -
        first);
    std::vector<Element> expected(sum.size());
    for (int64_t rank = 0; rank < rank_.shared.world_size; ++rank) {
      const auto [offset, dtype, wire_dtype] = words_[p].of_rank(rank);
      if (dtype != p || wire_dtype != p) fail("a description is wrong");
      const auto* grad = reinterpret_cast<const Element*>(mailbox_of(rank) + offset);
      for (size_t i = 0; i < sum.size(); ++i) {
        sum[i] += grad[first + i];
        expected[i] += value_of(rank, p, pending.time, first + i);
      }
    }
    if (!pending.raises && sum != expected) fail("a sum is wrong");
    pending.is_summed = true;
  }

  char* mailbox_of(int64_t rank) const { return rank_.shared.mailboxes + rank * kMailbox; }

  Rank& rank_;
  std::vector<ReduceWords> words_;
  Announcements announcements_;
  std::optional<uint64_t> round_;  // round that this rank has begun and not acknowledged
  Arena arena_;
  std::list<PendingSumPtr> unsummed_;
  std::list<Unread> unread_;
};

}  // namespace zero3
