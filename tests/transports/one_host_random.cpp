// Threads play the ranks of one host. All run the same random program, each with its own delays,
// and compare every gather and every sum with the expected values.
//
// The threads follow shared_gather.cpp and mailbox.cpp, with arrays in place of tensors. They share
// plain memory, so that ThreadSanitizer detects reads and writes that come too early or too late.
//
// MISTAKE makes ranks write without waiting for readers: 1 to copies, 2 to mailboxes, 3 to places
// of copies whose gathers they have started themselves, 4 to presences.

#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <list>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <thread>

#include "transport/shared/backwards.h"
#include "transport/shared/gather_words.h"
#include "transport/shared/rank_waiter.h"
#include "transport/shared/reduce_words.h"
#include "transport/shared/ring.h"

#ifndef MISTAKE
#define MISTAKE 0
#endif

namespace {

using namespace zero3;

using Element = uint64_t;
using Random = std::mt19937_64;

constexpr int kParameters = 8;
constexpr int kInTurns = 6;  // share a ring; each other parameter has its own place
constexpr int64_t kMaxElements = 300;
constexpr int64_t kMailbox = 12 << 10;  // bytes: five of the largest gradients
constexpr int kOperations = 3400;       // gathers and reductions of each world
constexpr std::chrono::seconds kTimeout{20};

int64_t below(Random& random, int64_t bound) { return static_cast<int64_t>(random() % bound); }

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "%s\n", what.c_str());
  std::_Exit(1);
}

// An element of the part of a parameter that `rank` has at a given time.
Element value_of(int64_t rank, int64_t parameter, uint64_t time, int64_t index) {
  Element value = 1;
  for (Element part : {Element(rank), Element(parameter), Element(time), Element(index)})
    value = (value ^ (value >> 31) ^ part) * 0x9e3779b97f4a7c15u;
  return value;
}

// The ranks' shared memory. Some parameters have fewer elements than there are ranks.
struct Shared {
  explicit Shared(int64_t world_size, Random random) : world_size(world_size) {
    states = allocate<RankState>(world_size);
    wake_word = allocate<WakeWord>(1);
    mailboxes = allocate<char>(world_size * kMailbox);
    for (int p = 0; p < kParameters; ++p) {
      sizes.push_back(p < 2 ? 1 + below(random, 5) : 1 + below(random, kMaxElements));
      progress.push_back(allocate<Progress>(world_size));
    }
    const int64_t largest = *std::max_element(sizes.begin(), sizes.begin() + kInTurns);
    capacity = 2 * (largest * sizeof(Element) + kCacheLine);
    ring = allocate<char>(capacity);
    for (int p = 0; p < kParameters; ++p)
      copies.push_back(p < kInTurns ? ring : allocate<char>(nbytes(p)));
  }

  template <typename T>
  static T* allocate(int64_t count) {
    void* zeros = mmap(nullptr, count * sizeof(T), PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (zeros == MAP_FAILED) fail("no memory");
    return static_cast<T*>(zeros);  // never freed
  }

  int64_t nbytes(int p) const { return sizes[p] * sizeof(Element); }
  int64_t chunk(int p) const { return (sizes[p] + world_size - 1) / world_size; }
  // The rank that has all rows of a parameter, if any.
  std::optional<int64_t> owner(int p) const {
    return p % 2 == 1 ? std::optional(p % world_size) : std::nullopt;
  }
  int64_t first(int p, int64_t rank) const { return std::min(rank * chunk(p), sizes[p]); }

  int64_t world_size;
  RankState* states;
  WakeWord* wake_word;
  char* mailboxes;
  std::vector<int64_t> sizes;
  std::vector<Progress*> progress;
  int64_t capacity;  // bytes of the ring
  char* ring;
  std::vector<char*> copies;  // the memory of each parameter's copies
};

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

struct PendingSum {
  int parameter;
  uint64_t epoch;
  uint64_t time;
  bool raises;  // whether the backward will raise
  bool is_summed = false;
};
using PendingSumPtr = std::shared_ptr<PendingSum>;

class Rank {
 public:
  // `gathers` are counted already.
  Rank(const Shared& shared, int64_t rank, Random program, uint64_t gathers)
      : shared_(shared),
        rank_(rank),
        program_(program),
        own_(program() + rank),
        waiter_(shared.wake_word, shared.states, rank,
                std::vector<pid_t>(shared.world_size, getpid()), kTimeout, "a rule"),
        backwards_(shared.states, rank, gathers),
        announcements_(shared.states, rank, shared.world_size),
        arena_(kMailbox) {
    const auto ring = std::make_shared<Ring>(shared.capacity);
    for (int p = 0; p < kParameters; ++p) {
      copies_.emplace_back(shared, p, rank,
                           p < kInTurns ? ring : std::make_shared<Ring>(shared.nbytes(p)));
      reduce_words_.emplace_back(shared.progress[p], shared.states, rank, shared.world_size,
                                 shared.owner(p));
    }
  }

  void run() {
    while (operations_ < kOperations) {
      if (below(program_, 8) == 0) raising_forward();
      forward();
      switch (below(program_, 4)) {
        case 0:
          break;  // evaluation
        case 1:
          raising_backward();
          break;
        default:
          for (int64_t i = below(program_, 2); i >= 0; --i) backward(/*may_nest=*/true);
      }
      for (auto& view : kept_) read(*view);
      if (below(own_, 2) == 0) kept_.clear();
      if (below(program_, 2) == 0) forget_abandoned();
    }
  }

 private:
  // Delays ranks at different times.
  void linger() {
    const auto dice = below(own_, 64);
    if (dice < 8) sched_yield();
    if (dice == 63) usleep(below(own_, 100));
  }

  std::vector<int> some_parameters() {
    std::vector<int> result(kParameters);
    std::iota(result.begin(), result.end(), 0);
    std::shuffle(result.begin(), result.end(), program_);
    result.resize(1 + below(program_, kParameters));
    return result;
  }

  // ---- gathers

  void forward() {
    gather(some_parameters(), /*in_backward=*/false, [&](const ViewPtr& view) {
      read(*view);
      if (below(own_, 4) == 0) kept_.push_back(view);
    });
  }

  // All ranks raise after they have started gathers. The gathers may stay for a while.
  void raising_forward() {
    forget_abandoned();
    auto parameters = some_parameters();
    parameters.resize(std::min<size_t>(parameters.size(), 3));
    for (int p : parameters) start(abandoned_.emplace_back(Bucket{.parameters = {p}}));
  }

  void forget_abandoned() {
    for (auto& bucket : abandoned_) stop_waiting(bucket);
    abandoned_.clear();
  }

  // Gathers up to three buckets at a time, of one or two parameters.
  template <typename Visit>
  void gather(const std::vector<int>& parameters, bool in_backward, Visit visit) {
    std::deque<Bucket> buckets;
    for (int p : parameters) {
      const bool joins = !buckets.empty() && buckets.back().parameters.size() == 1 &&
                         buckets.back().parameters[0] != p && below(program_, 3) == 0;
      if (!joins) buckets.push_back({.in_backward = in_backward});
      buckets.back().parameters.push_back(p);
    }
    const size_t most = 1 + below(program_, 3);
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

  std::vector<ViewPtr> finish(Bucket& bucket) {
    std::vector<ViewPtr> views;
    while (bucket.finished < bucket.parameters.size()) {
      start_some(bucket, /*at_least_one=*/bucket.started == bucket.finished);
      waiter_.wait([&] { return missing(bucket); });
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
        linger();
        if (!copy.arrive(at_least_one)) break;
        ++operations_;
      }
      if (MISTAKE != 3) bucket.pins.push_back(copy.pin());
    }
    waiter_.notify();
    publish_where_possible(bucket, /*waits=*/false);
  }

  std::optional<RankWaiter::Missing> missing(const Bucket& bucket) {
    publish_where_possible(bucket, /*waits=*/true);
    poll(/*all=*/true);
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
      linger();
      for (int64_t i = shared_.first(p, rank_); i < shared_.first(p, rank_ + 1); ++i)
        copies_[p].data()[i] = value_of(rank_, p, words.epoch(), i);
      linger();
      words.publish();
      published = true;
    }
    if (published) waiter_.notify();
  }

  void read(const View& view) {
    const int p = view.parameter;
    for (int64_t rank = 0; rank < shared_.world_size; ++rank) {
      linger();
      for (int64_t i = shared_.first(p, rank); i < shared_.first(p, rank + 1); ++i)
        if (view.data[i] != value_of(rank, p, view.epoch, i)) fail("a gather is wrong");
    }
  }

  // ---- reductions

  // Each parameter may come twice, and another backward may run inside this one.
  void backward(bool may_nest) {
    auto parameters = some_parameters();
    for (int p : some_parameters()) parameters.push_back(p);
    const uint64_t number = backwards_.begin();
    announce(number);
    std::vector<PendingSumPtr> pending_sums;
    gather(parameters, /*in_backward=*/true, [&](const ViewPtr& view) {
      read(*view);
      if (!pending_sums.empty()) read_announcements();
      pending_sums.push_back(post(view->parameter, number, /*raises=*/false));
    });
    if (may_nest && below(program_, 4) == 0) backward(/*may_nest=*/false);
    read_announcements();
    for (auto& pending : pending_sums) finish(pending);
    end(number);
  }

  // Each rank posts at least one gradient before it raises. A rank's mailbox has room for all of
  // them, since other ranks may raise before they read.
  void raising_backward() {
    auto parameters = some_parameters();
    parameters.resize(std::min<size_t>(parameters.size(), 3));
    const int64_t count = 1 + below(own_, parameters.size());
    const uint64_t number = backwards_.begin();
    if (below(own_, 2) == 0) {
      announce(number);
      acknowledge();
    }
    std::vector<PendingSumPtr> pending_sums;
    for (size_t i = 0; i < parameters.size(); ++i)
      if (static_cast<int64_t>(i) < count)
        pending_sums.push_back(post(parameters[i], number, /*raises=*/true));
      else
        ++operations_;
    for (auto& pending : pending_sums) drop(pending);
    end(number);
  }

  void end(uint64_t number) {
    linger();
    backwards_.end(number);
    waiter_.notify();
  }

  // Follows shared_presences.cpp.
  void announce(uint64_t backward) {
    read_announcements();
    if (MISTAKE != 4)
      waiter_.wait([&]() -> std::optional<RankWaiter::Missing> {
        poll(/*all=*/true);
        auto readers = announcements_.readers();
        if (readers.empty()) return std::nullopt;
        return {{std::move(readers), "reading of announcements"}};
      });
    round_ = announcements_.next(backward);
    for (int p = 0; p < kParameters; ++p) {
      linger();
      shared_.progress[p][rank_].presence.store(presence_of(rank_, p, *round_),
                                                std::memory_order_relaxed);
    }
    announcements_.announce(*round_, value_of(0, 0, *round_, 1));
    waiter_.notify();
  }

  void read_announcements() {
    if (!round_) return;
    waiter_.wait([&]() -> std::optional<RankWaiter::Missing> {
      poll(/*all=*/true);
      auto unannounced = announcements_.unannounced(*round_);
      if (unannounced.empty()) return std::nullopt;
      return {{std::move(unannounced), "an announcement"}};
    });
    for (int64_t rank = 0; rank < shared_.world_size; ++rank) {
      if (announcements_.topic_of(rank) != value_of(0, 0, *round_, 1)) fail("a topic is wrong");
      for (int p = 0; p < kParameters; ++p) {
        linger();
        const auto presence = shared_.progress[p][rank].presence.load(std::memory_order_relaxed);
        if (presence != presence_of(rank, p, *round_)) fail("a presence is wrong");
      }
    }
    acknowledge();
  }

  void acknowledge() {
    announcements_.acknowledge(*round_);
    round_.reset();
    waiter_.notify();
  }

  static uint8_t presence_of(int64_t rank, int p, uint64_t round) {
    return static_cast<uint8_t>(value_of(rank, p, round, 0));
  }

  uint64_t take(int64_t nbytes) {
    poll();
    auto offset = arena_.take(nbytes);
    if (!offset)
      waiter_.wait([&]() -> std::optional<RankWaiter::Missing> {
        poll(/*all=*/true);
        if ((offset = arena_.take(nbytes))) return std::nullopt;
        if (unread_.empty()) fail("no room");
        return {{unread_.front().readers(), "room"}};
      });
    return *offset;
  }

  PendingSumPtr post(int p, uint64_t backward, bool raises) {
    const auto time = static_cast<uint64_t>(operations_++);
    const auto offset = take(shared_.nbytes(p));
    auto* grad = reinterpret_cast<Element*>(mailbox_of(rank_) + offset);
    for (int64_t i = 0; i < shared_.sizes[p]; ++i) grad[i] = value_of(rank_, p, time, i);
    linger();
    ReduceWords& words = reduce_words_[p];
    if (!words.readers(words.latest()).empty())
      waiter_.wait([&]() -> std::optional<RankWaiter::Missing> {
        poll(/*all=*/true);
        auto readers = words.readers(words.latest());
        if (readers.empty()) return std::nullopt;
        return {{std::move(readers), "reading"}};
      });
    const uint64_t epoch = words.next_epoch(backward);
    words.post(epoch, {offset, static_cast<int8_t>(p), static_cast<int8_t>(p)});
    auto pending = std::make_shared<PendingSum>(PendingSum{p, epoch, time, raises});
    if (words.is_read_by(rank_))
      unsummed_.push_back(pending);
    else
      pending->is_summed = true;
    unread_.push_back({offset, epoch, &words});
    waiter_.notify();
    linger();
    poll();
    return pending;
  }

  void finish(const PendingSumPtr& pending) {
    waiter_.wait([&]() -> std::optional<RankWaiter::Missing> {
      poll(/*all=*/true);
      if (pending->is_summed) return std::nullopt;
      return {{reduce_words_[pending->parameter].writers(pending->epoch), "a gradient"}};
    });
  }

  void drop(const PendingSumPtr& pending) {
    if (std::erase(unsummed_, pending) == 0) return;
    linger();
    reduce_words_[pending->parameter].consume(pending->epoch);
    waiter_.notify();
  }

  void poll(bool all = false) {
    bool changed = false;
    for (auto it = unsummed_.begin(); it != unsummed_.end();) {
      PendingSum& pending = **it;
      ReduceWords& words = reduce_words_[pending.parameter];
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
    if (changed) waiter_.notify();
  }

  void sum(PendingSum& pending) const {
    const int p = pending.parameter;
    const int64_t first = shared_.owner(p) ? 0 : shared_.first(p, rank_);
    std::vector<Element> sum((shared_.owner(p) ? shared_.sizes[p] : shared_.first(p, rank_ + 1)) -
                             first);
    std::vector<Element> expected(sum.size());
    for (int64_t rank = 0; rank < shared_.world_size; ++rank) {
      const auto [offset, dtype, wire_dtype] = reduce_words_[p].of_rank(rank);
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

  char* mailbox_of(int64_t rank) const { return shared_.mailboxes + rank * kMailbox; }

  struct Unread {
    uint64_t offset;
    uint64_t epoch;
    const ReduceWords* words;
    std::vector<int64_t> readers() const { return words->readers(epoch); }
  };

  const Shared& shared_;
  const int64_t rank_;
  Random program_;  // the same on all ranks
  Random own_;
  RankWaiter waiter_;
  std::vector<Copy> copies_;
  std::vector<ViewPtr> kept_;
  std::list<Bucket> abandoned_;
  int waiting_for_room_ = 0;
  std::vector<ReduceWords> reduce_words_;
  Backwards backwards_;
  Announcements announcements_;
  std::optional<uint64_t> round_;  // round that this rank has begun and not acknowledged
  Arena arena_;
  std::list<PendingSumPtr> unsummed_;
  std::list<Unread> unread_;
  int operations_ = 0;
};

void run(int64_t world_size, uint64_t seed, uint64_t gathers = 0) {
  const Random random(seed * 16 + world_size);
  const Shared shared(world_size, random);
  std::vector<std::jthread> threads;
  for (int64_t rank = 0; rank < world_size; ++rank)
    threads.emplace_back([&, rank] {
      try {
        Rank(shared, rank, random, gathers).run();
      } catch (const std::exception& error) {
        fail(error.what());
      }
    });
}

// Counts gathers up to the limit: words stay in order, and there is an error behind it.
void run_to_the_limit() {
  RankState state{};
  Backwards backwards(&state, 0, kMostGathers - 1);
  const uint64_t before = backwards.begin();
  backwards.end(before);
  backwards.count_gather();
  const uint64_t last = backwards.begin();
  Progress progress{};
  ReduceWords words(&progress, &state, 0, 1);
  const uint64_t earlier = words.next_epoch(before);
  if (last <= before || words.next_epoch(last) <= earlier || words.next_epoch(last) >> 63 == 0)
    fail("epochs start again");
  backwards.end(last);
  if (state.oldest_backward <= last) fail("the oldest backward starts again");
  try {
    backwards.count_gather();
  } catch (const std::exception& error) {
    if (std::string(error.what()).find("start them again") != std::string::npos) return;
  }
  fail("gathers are counted for ever");
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t seed = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 0;
  for (int64_t world_size : {2, 3, 4}) run(world_size, seed);
  run(2, seed, kMostGathers - kOperations);
  run_to_the_limit();
}
