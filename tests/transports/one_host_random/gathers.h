// Gathers of one rank, as in shared_gather.cpp.
#pragma once

#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "shared.h"
#include "transport/shared/backwards.h"
#include "transport/shared/gather_words.h"
#include "transport/shared/ring.h"

namespace zero3 {

// A view that a forward may keep.
struct View {
  int parameter;
  uint64_t epoch;
  const Element* data;
  std::vector<Element> own;  // the data once the turn is over
};
using ViewPtr = std::shared_ptr<View>;

// As in shared_memory.h.
class Copy {
 public:
  Copy(const Shared& shared, int p, int64_t rank, std::shared_ptr<Ring> ring)
      : words(shared.progress[p], rank, shared.world_size),
        shared_(shared),
        p_(p),
        ring_(std::move(ring)) {
    ring_->admit(shared_.nbytes(p));
  }

  bool is_stale() const { return !turn_ || turn_->is_over; }

  bool arrive(bool even_if_pinned) {
    auto turn = ring_->next(shared_.nbytes(p_), even_if_pinned);
    if (!turn) return false;
    turn_ = std::move(turn);
    views_ = std::make_shared<Views>();
    turn_->leave = [views = views_, size = shared_.sizes[p_]] {
      for (auto& weak : *views)
        if (auto view = weak.lock()) {
          view->own.assign(view->data, view->data + size);
          view->data = view->own.data();
        }
    };
    words.arrive(turn_->history);
    return true;
  }

  Ring::Pin pin() const { return Ring::Pin(turn_); }
  Element* data() const { return reinterpret_cast<Element*>(shared_.copies[p_] + turn_->begin); }

  ViewPtr view() const {
    auto view = std::make_shared<View>(View{p_, words.epoch(), data(), {}});
    views_->push_back(view);
    return view;
  }

  GatherWords words;

 private:
  using Views = std::vector<std::weak_ptr<View>>;

  const Shared& shared_;
  int p_;
  std::shared_ptr<Ring> ring_;
  std::shared_ptr<Ring::Turn> turn_;
  std::shared_ptr<Views> views_;
};

struct Bucket {
  std::vector<int> parameters{};
  bool in_backward = false;
  bool waits_for_room = false;
  size_t started = 0;
  size_t finished = 0;
  std::deque<Ring::Pin> pins{};
};

class Gathers {
 public:
  // `poll` is called by a rank that waits.
  Gathers(Rank& rank, Backwards& backwards, std::function<void()> poll)
      : rank_(rank), backwards_(backwards), poll_(std::move(poll)) {
    const auto ring = std::make_shared<Ring>(rank.shared.capacity);
    for (int p = 0; p < kParameters; ++p)
      copies_.emplace_back(rank.shared, p, rank.number,
                           p < kInTurns ? ring : std::make_shared<Ring>(rank.shared.nbytes(p)));
  }

  // Gathers up to three buckets at a time, of one or two parameters.
  template <typename Visit>
  void gather(const std::vector<int>& parameters, bool in_backward, Visit visit) {
    std::deque<Bucket> buckets;
    for (int p : parameters) {
      const bool joins = !buckets.empty() && buckets.back().parameters.size() == 1 &&
                         buckets.back().parameters[0] != p && below(rank_.program, 3) == 0;
      if (!joins) buckets.push_back({.in_backward = in_backward});
      buckets.back().parameters.push_back(p);
    }
    const size_t most = 1 + below(rank_.program, 3);
    std::list<Bucket> in_flight;
    while (!buckets.empty() || !in_flight.empty()) {
      for (; !buckets.empty() && in_flight.size() < most; buckets.pop_front())
        start(in_flight.emplace_back(std::move(buckets.front())));
      const auto views = finish(in_flight.front());
      in_flight.pop_front();
      for (auto& view : views) visit(view);
    }
  }

  void start(Bucket& bucket) {
    if (!bucket.in_backward) backwards_.count_gather();
    if (waiting_for_room_ == 0) start_some(bucket, /*at_least_one=*/false);
    bucket.waits_for_room = bucket.started < bucket.parameters.size();
    waiting_for_room_ += bucket.waits_for_room;
  }

  void stop_waiting(const Bucket& bucket) { waiting_for_room_ -= bucket.waits_for_room; }

  void read(const View& view) {
    const int p = view.parameter;
    for (int64_t rank = 0; rank < rank_.shared.world_size; ++rank) {
      rank_.linger();
      for (int64_t i = rank_.shared.first(p, rank); i < rank_.shared.first(p, rank + 1); ++i)
        if (view.data[i] != value_of(rank, p, view.epoch, i)) fail("a gather is wrong");
    }
  }

 private:
  std::vector<ViewPtr> finish(Bucket& bucket) {
    std::vector<ViewPtr> views;
    while (bucket.finished < bucket.parameters.size()) {
      start_some(bucket, /*at_least_one=*/bucket.started == bucket.finished);
      rank_.waiter.wait([&] { return missing(bucket); });
      for (; bucket.finished < bucket.started; ++bucket.finished) {
        if (MISTAKE != 3) {
          if (bucket.pins.front().has_failed()) fail("a turn was over too early");
          bucket.pins.pop_front();
        }
        views.push_back(copies_[bucket.parameters[bucket.finished]].view());
      }
    }
    stop_waiting(bucket);
    return views;
  }

  void start_some(Bucket& bucket, bool at_least_one) {
    for (; bucket.started < bucket.parameters.size(); ++bucket.started, at_least_one = false) {
      Copy& copy = copies_[bucket.parameters[bucket.started]];
      if (!bucket.in_backward || copy.is_stale()) {
        rank_.linger();
        if (!copy.arrive(at_least_one)) break;
        ++rank_.operations;
      }
      if (MISTAKE != 3) bucket.pins.push_back(copy.pin());
    }
    rank_.waiter.notify();
    publish_where_possible(bucket, /*waits=*/false);
  }

  std::optional<RankWaiter::Missing> missing(const Bucket& bucket) {
    publish_where_possible(bucket, /*waits=*/true);
    poll_();
    for (size_t i = bucket.finished; i < bucket.started; ++i) {
      const GatherWords& words = copies_[bucket.parameters[i]].words;
      if (!words.is_published()) return {{words.readers(), "arrival"}};
      if (auto writers = words.writers(); !writers.empty()) return {{std::move(writers), "rows"}};
    }
    return std::nullopt;
  }

  // A rank that does not wait yet may be late: others have raised, as this rank will, and go on at
  // other places.
  void publish_where_possible(const Bucket& bucket, bool waits) {
    bool published = false;
    for (size_t k = bucket.finished; k < bucket.started; ++k) {
      const int p = bucket.parameters[k];
      GatherWords& words = copies_[p].words;
      if (words.is_published()) continue;
      if (MISTAKE != 1) {
        if (!words.readers().empty()) continue;
        if (!words.is_at_one_place()) {
          if (waits) fail("a copy is at two places");
          continue;
        }
      }
      rank_.linger();
      for (int64_t i = rank_.shared.first(p, rank_.number);
           i < rank_.shared.first(p, rank_.number + 1); ++i)
        copies_[p].data()[i] = value_of(rank_.number, p, words.epoch(), i);
      rank_.linger();
      words.publish();
      published = true;
    }
    if (published) rank_.waiter.notify();
  }

  Rank& rank_;
  Backwards& backwards_;
  const std::function<void()> poll_;
  std::vector<Copy> copies_;
  int waiting_for_room_ = 0;
};

}  // namespace zero3
