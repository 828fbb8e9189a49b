#include "transport/shared/rank_waiter.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <sstream>

#include "support/error.h"
#include "support/signals.h"

namespace zero3 {
namespace {

constexpr int kSpins = 200;  // some tens of microseconds
constexpr int kYields = 20;
constexpr std::chrono::seconds kPatience{60};   // after which a rank tells for whom it waits
constexpr std::chrono::milliseconds kNap{100};  // between two checks of which ranks are alive

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

void futex_wait(std::atomic<uint32_t>* word, uint32_t expected, std::chrono::milliseconds timeout) {
  const timespec relative{timeout.count() / 1000, timeout.count() % 1000 * 1'000'000};
  syscall(SYS_futex, word, FUTEX_WAIT, expected, &relative, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// A process's state letter and start time in /proc.
struct Status {
  char state = '?';  // /proc cannot be read now
  std::optional<uint64_t> started;
};

// Returns nullopt if there is no such process. Other failures, such as too many open files, do not
// mean that the process is dead.
std::optional<Status> status_of(pid_t pid) {
  const int file = open(("/proc/" + std::to_string(pid) + "/stat").c_str(), O_RDONLY | O_CLOEXEC);
  std::array<char, 1024> text;
  const ssize_t size = file < 0 ? -1 : read(file, text.data(), text.size());
  const int error = errno;
  if (file >= 0) close(file);
  if (size < 0 && (error == ENOENT || error == ESRCH)) return std::nullopt;
  if (size <= 0) return Status();
  const std::string line(text.data(), size);
  std::istringstream fields(line.substr(line.rfind(')') + 1));  // names may contain anything
  Status status;
  uint64_t started = 0;
  std::string skipped;
  fields >> status.state;
  for (int field = 4; field < 22; ++field) fields >> skipped;
  fields >> started;
  status.started = started;
  return status;
}

std::string name_of(char state) {
  switch (state) {
    case 'R':
      return "running";
    case 'S':
      return "sleeping";
    case 'D':
      return "waiting for a device";
    case 'T':
    case 't':
      return "stopped";
    case '?':
      return "in a state that /proc does not tell";
    default:
      return std::string("in state ") + state;
  }
}

// Counts as a sleeper of the wake word while it lives.
class Sleeper {
 public:
  explicit Sleeper(WakeWord* wake_word) : wake_word_(wake_word) {
    wake_word_->sleepers.fetch_add(1);
  }
  ~Sleeper() { wake_word_->sleepers.fetch_sub(1); }
  Sleeper(const Sleeper&) = delete;
  Sleeper& operator=(const Sleeper&) = delete;

 private:
  WakeWord* wake_word_;
};

}  // namespace

// A rank's long wait, shown in its RankState.
class RankWaiter::LongWait {
 public:
  explicit LongWait(RankState& state) : state_(state) { state_.waits.fetch_add(1); }
  ~LongWait() { state_.waits.fetch_add(1); }
  LongWait(const LongWait&) = delete;
  LongWait& operator=(const LongWait&) = delete;

  void has_looked(const Missing& missing) {
    const bool is_one = missing.needs_all || missing.ranks.size() == 1;
    const int64_t for_rank = is_one ? missing.ranks.front() : kNobody;
    if (for_rank != state_.for_rank.load() || missing.what != shown_) {
      shown_ = missing.what;
      std::string text = shown_.substr(0, sizeof(Text) - 1);
      text.resize(sizeof(Text));
      for (size_t i = 0; i < state_.what.size(); ++i) {
        uint64_t word;
        std::memcpy(&word, text.data() + i * sizeof(word), sizeof(word));
        state_.what[i].store(word, std::memory_order_relaxed);
      }
      state_.for_rank.store(for_rank);
    }
    state_.looks.fetch_add(1);
  }

 private:
  RankState& state_;
  std::string shown_;
};

RankWaiter::RankWaiter(WakeWord* wake_word, RankState* states, int64_t rank,
                       std::vector<pid_t> pids, std::chrono::milliseconds timeout, std::string rule)
    : wake_word_(wake_word),
      states_(states),
      rank_(rank),
      timeout_(timeout),
      rule_(std::move(rule)),
      pid_(getpid()) {
  for (pid_t pid : pids) {
    const auto status = status_of(pid);
    peers_.push_back({pid, status ? status->started : std::nullopt});
  }
}

void RankWaiter::begin_anew() {
  if (getpid() != pid_)
    throw_error("process " + std::to_string(getpid()) + " was forked from " + name_of_rank(rank_) +
                " of a sharded model, and cannot compute with it: its memory is shared with the "
                "other ranks. Fork before fully_shard, or start new processes with \"spawn\"");
  if (states_[rank_].gave_up.load() != 0) states_[rank_].gave_up.store(0);
}

void RankWaiter::notify() {
  wake_word_->notified.fetch_add(1);
  if (wake_word_->sleepers.load() > 0) futex_wake_all(&wake_word_->notified);
}

void RankWaiter::wait(const std::function<std::optional<Missing>()>& missing) {
  for (int tries = 0; tries < kSpins + kYields; ++tries) {
    if (!missing()) return;
    if (tries < kSpins)
      pause();
    else
      sched_yield();
  }
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + timeout_;
  auto next_look = Clock::now() + kNap;
  const auto tell_at = Clock::now() + std::min<Clock::duration>(kPatience, timeout_ / 2);
  bool has_told = false;
  const Sleeper sleeper(wake_word_);
  LongWait long_wait(states_[rank_]);
  std::optional<Circle> seen;
  while (true) {
    const uint32_t notified = wake_word_->notified.load();
    auto now = missing();
    if (!now) return;
    if (now->ranks.empty()) continue;
    long_wait.has_looked(*now);
    futex_wait(&wake_word_->notified, notified, std::min(kNap, timeout_));
    if (Clock::now() < next_look) continue;
    next_look = Clock::now() + kNap;
    check_signals();
    now = missing();  // this rank may have slept for long
    if (!now) return;
    if (now->ranks.empty()) continue;
    long_wait.has_looked(*now);
    if (is_one_dead(*now)) {
      now = missing();  // the dead rank may have done its part first
      if (!now) return;
      if (!now->ranks.empty() && is_one_dead(*now)) fail(*now, "cannot go on without");
      continue;
    }
    check_others_go_on(*now);
    seen = check_circle(std::move(seen));
    if (!has_told && Clock::now() >= tell_at) {
      std::fprintf(stderr, "zero3: %s still waits for %s. It does so for up to %s\n",
                   name_of_rank(rank_).c_str(), text_of(*now).c_str(), seconds().c_str());
      has_told = true;
    }
    if (Clock::now() >= deadline) fail(*now, "waited " + seconds() + " for");
  }
}

std::optional<RankWaiter::Circle> RankWaiter::circle() const {
  Circle circle{wake_word_->notified.load(), {}};
  int64_t rank = rank_;
  while (true) {
    if (std::ranges::find(circle.links, rank, &Circle::Link::rank) != circle.links.end())
      return circle;
    const RankState& state = states_[rank];
    circle.links.push_back({rank, state.waits.load(), state.looks.load()});
    rank = state.for_rank.load();
    const bool waits = circle.links.back().waits % 2 == 1;
    if (!waits || rank == kNobody) return std::nullopt;  // it computes, or may go on otherwise
  }
}

std::optional<RankWaiter::Circle> RankWaiter::check_circle(std::optional<Circle> seen) {
  auto now = circle();
  if (!now || !seen || now->notified != seen->notified || now->links.size() != seen->links.size())
    return now;
  bool is_stuck = true;
  for (size_t i = 0; i < now->links.size(); ++i) {
    const auto &link = now->links[i], &before = seen->links[i];
    if (link.rank != before.rank || link.waits != before.waits) return now;
    is_stuck &= link.looks >= before.looks + 2;  // the second look began after `seen`
  }
  if (!is_stuck || wake_word_->notified.load() != seen->notified) return seen;
  states_[rank_].gave_up.store(states_[rank_].waits.load());
  throw_error("ranks wait for each other: " + text_of(*now));
}

void RankWaiter::check_others_go_on(const Missing& missing) const {
  for (int64_t rank : missing.ranks) {
    const auto gave_up = states_[rank].gave_up.load();
    if (gave_up == 0 || states_[rank].waits.load() != gave_up + 1) continue;
    states_[rank_].gave_up.store(states_[rank_].waits.load());  // tells its own waiters
    throw_error(name_of_rank(rank) + " has given up, since ranks wait for each other: " +
                text_of({0, {{rank_, 0, 0}, {rank, 0, 0}}}));
  }
}

std::string RankWaiter::text_of(const Circle& circle) const {
  std::string text;
  for (auto& link : circle.links) {
    const RankState& state = states_[link.rank];
    std::array<char, sizeof(Text)> what;
    for (size_t i = 0; i < state.what.size(); ++i) {
      const uint64_t word = state.what[i].load(std::memory_order_relaxed);
      std::memcpy(what.data() + i * sizeof(word), &word, sizeof(word));
    }
    what.back() = '\0';
    const int64_t for_rank = state.for_rank.load();
    const auto whom = for_rank == kNobody ? "others" : name_of_rank(for_rank);
    text += name_of_rank(link.rank) + " waits for " + whom + ", since " + what.data() + "; ";
  }
  return text + rule_;
}

std::string RankWaiter::state_of(int64_t rank, bool* is_dead) const {
  const Peer& peer = peers_[rank];
  const auto status = status_of(peer.pid);
  const bool is_another =
      status && status->started && peer.started && *status->started != *peer.started;
  *is_dead = !status || is_another || status->state == 'Z' || status->state == 'X';
  return name_of_rank(rank) + " (pid " + std::to_string(peer.pid) + ", " +
         (*is_dead ? "dead" : name_of(status->state)) + ")";
}

bool RankWaiter::is_one_dead(const Missing& missing) const {
  return std::ranges::any_of(missing.ranks, [this](int64_t rank) {
    bool is_dead = false;
    state_of(rank, &is_dead);
    return is_dead;
  });
}

std::string RankWaiter::seconds() const { return std::to_string(timeout_.count() / 1000) + " s"; }

std::string RankWaiter::text_of(const Missing& missing) const {
  std::string text;
  for (int64_t rank : missing.ranks) {
    bool is_dead = false;
    text += (text.empty() ? "" : ", ") + state_of(rank, &is_dead);
  }
  return text + ": " + missing.what;
}

void RankWaiter::fail(const Missing& missing, const std::string& why) const {
  throw_error(why + " " + text_of(missing) +
              ". Either that rank has stopped, or it runs something else: " + rule_);
}

}  // namespace zero3
