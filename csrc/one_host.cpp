#include "one_host.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <sstream>
#include <stdexcept>

namespace zero3 {
namespace {

constexpr int kSpins = 200;  // some tens of microseconds
constexpr int kYields = 20;
constexpr std::chrono::milliseconds kNap{100};  // between two looks at who is alive

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

// What /proc says: one letter, and when the process started; nothing if there is none.
struct Status {
  char state;
  uint64_t started;
};

std::optional<Status> status_of(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  if (!std::getline(file, line)) return std::nullopt;
  std::istringstream fields(line.substr(line.rfind(')') + 1));  // names may contain anything
  Status status{};
  std::string skipped;
  fields >> status.state;
  for (int field = 4; field < 22; ++field) fields >> skipped;
  fields >> status.started;
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
    default:
      return std::string("in state ") + state;
  }
}

// Counted while it lives.
class Sleeper {
 public:
  explicit Sleeper(Bell* bell) : bell_(bell) { bell_->sleepers.fetch_add(1); }
  ~Sleeper() { bell_->sleepers.fetch_sub(1); }
  Sleeper(const Sleeper&) = delete;
  Sleeper& operator=(const Sleeper&) = delete;

 private:
  Bell* bell_;
};

}  // namespace

Host::Host(Bell* bell, int64_t rank, std::vector<pid_t> pids, std::chrono::milliseconds timeout)
    : bell_(bell), rank_(rank), timeout_(timeout) {
  for (pid_t pid : pids) {
    const auto status = status_of(pid);
    peers_.push_back({pid, status ? status->started : 0});
  }
}

void Host::ring() {
  bell_->rung.fetch_add(1);
  if (bell_->sleepers.load() > 0) futex_wake_all(&bell_->rung);
}

void Host::wait(const std::function<std::optional<Missing>()>& missing) {
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
  const Sleeper sleeper(bell_);
  while (true) {
    const uint32_t rung = bell_->rung.load();
    auto now = missing();
    if (!now) return;
    if (now->ranks.empty()) continue;
    futex_wait(&bell_->rung, rung, std::min(kNap, timeout_));
    if (Clock::now() < next_look) continue;
    next_look = Clock::now() + kNap;
    now = missing();  // this rank may have been away for long
    if (!now) return;
    check_alive(*now);
    if (Clock::now() >= deadline)
      fail(*now, "waited " + std::to_string(timeout_.count() / 1000) + " s for");
  }
}

std::string Host::state_of(int64_t rank, bool* is_dead) const {
  const Peer& peer = peers_[rank];
  const auto status = status_of(peer.pid);
  *is_dead =
      !status || status->started != peer.started || status->state == 'Z' || status->state == 'X';
  return "rank " + std::to_string(rank) + " (pid " + std::to_string(peer.pid) + ", " +
         (*is_dead ? "dead" : name_of(status->state)) + ")";
}

void Host::check_alive(const Missing& missing) const {
  for (int64_t rank : missing.ranks) {
    bool is_dead = false;
    state_of(rank, &is_dead);
    if (is_dead) fail(missing, "cannot go on without");
  }
}

void Host::fail(const Missing& missing, const std::string& why) const {
  std::string text = "zero3: " + why + " ";
  for (size_t i = 0; i < missing.ranks.size(); ++i) {
    bool is_dead = false;
    text += (i > 0 ? ", " : "") + state_of(missing.ranks[i], &is_dead);
  }
  throw std::runtime_error(text + ": " + missing.what +
                           ". Either that rank has stopped, or it runs something else: all ranks "
                           "must run the same forwards and backwards");
}

void Ring::grow(uint64_t capacity) {
  for (auto& turn : turns_) turn->is_over = true;
  turns_.clear();
  capacity_ = capacity;
  cursor_ = 0;
}

std::shared_ptr<Ring::Turn> Ring::next(uint64_t nbytes, bool even_if_pinned) {
  nbytes = in_cache_lines(nbytes);
  const uint64_t begin = cursor_ + nbytes <= std::min(capacity_, admitted_) ? cursor_ : 0;
  const uint64_t end = begin + nbytes;
  const auto in_its_place = [&](const std::shared_ptr<Turn>& turn) {
    return turn->begin < end && begin < turn->end;
  };
  for (auto& turn : turns_)
    if (in_its_place(turn) && turn->pins > 0 && !even_if_pinned) return nullptr;
  for (auto& turn : turns_) {
    if (!in_its_place(turn)) continue;
    if (turn->leave) turn->leave();
    turn->is_over = true;
  }
  std::erase_if(turns_, in_its_place);
  cursor_ = end;
  history_ = (history_ ^ nbytes) * 0x9e3779b97f4a7c15u + 1;
  auto turn = std::make_shared<Turn>();
  turn->begin = begin;
  turn->end = end;
  turn->history = history_;
  return turns_.emplace_back(std::move(turn));
}

std::optional<uint64_t> Arena::take(uint64_t nbytes) {
  nbytes = in_cache_lines(nbytes);
  uint64_t begin = 0;
  for (auto& [first, last] : taken_) {
    if (first - begin >= nbytes) break;
    begin = last;
  }
  // Behind the last one, `begin` is where the free rest starts.
  if (begin + nbytes > capacity_) return std::nullopt;
  taken_[begin] = begin + nbytes;
  return begin;
}

}  // namespace zero3
