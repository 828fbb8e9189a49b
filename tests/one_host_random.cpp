// Threads play the ranks of one host. All run one random program, each with delays of its own, and
// compare every gather and every sum with what it should be.
//
// They do what publish.cpp and mailbox.cpp do, with arrays for tensors. What they share is plain
// memory, so that ThreadSanitizer sees whoever reads or writes it too early or too late.
//
// MISTAKE lets ranks write without waiting for those that read: 1 to copies, 2 to mailboxes.

#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <list>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <thread>

#include "../csrc/one_host.h"

#ifndef MISTAKE
#define MISTAKE 0
#endif

namespace {

using namespace zero3;

using Element = uint64_t;
using Random = std::mt19937_64;

constexpr int kParameters = 6;
constexpr int64_t kMaxElements = 300;
constexpr int64_t kMailbox = 12 << 10;  // bytes: five of the largest gradients
constexpr int kOperations = 3400;       // gathers and reductions of each world
constexpr std::chrono::seconds kTimeout{20};

int64_t below(Random& random, int64_t bound) { return static_cast<int64_t>(random() % bound); }

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "%s\n", what.c_str());
  std::_Exit(1);
}

// One element of what `rank` has of a parameter, the first time, the second time, ...
Element value_of(int64_t rank, int64_t parameter, uint64_t time, int64_t index) {
  Element value = 1;
  for (Element part : {Element(rank), Element(parameter), Element(time), Element(index)})
    value = (value ^ (value >> 31) ^ part) * 0x9e3779b97f4a7c15u;
  return value;
}

// What the ranks share. Some parameters have fewer elements than there are ranks.
struct Shared {
  explicit Shared(int64_t world_size, Random random) : world_size(world_size) {
    standings = allocate<Standing>(world_size);
    bell = allocate<Bell>(1);
    mailboxes = allocate<char>(world_size * kMailbox);
    for (int p = 0; p < kParameters; ++p) {
      sizes.push_back(p < 2 ? 1 + below(random, 5) : 1 + below(random, kMaxElements));
      progress.push_back(allocate<Progress>(world_size));
      copies.push_back(allocate<Element>(sizes.back()));
    }
  }

  template <typename T>
  static T* allocate(int64_t count) {
    void* zeros = mmap(nullptr, count * sizeof(T), PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (zeros == MAP_FAILED) fail("no memory");
    return static_cast<T*>(zeros);  // until the program ends
  }

  int64_t chunk(int p) const { return (sizes[p] + world_size - 1) / world_size; }
  int64_t first(int p, int64_t rank) const { return std::min(rank * chunk(p), sizes[p]); }

  int64_t world_size;
  Standing* standings;
  Bell* bell;
  char* mailboxes;
  std::vector<int64_t> sizes;
  std::vector<Progress*> progress;
  std::vector<Element*> copies;
};

struct Letter {
  int parameter;
  uint64_t epoch;
  uint64_t time;
  bool raises;  // its backward will
  bool is_summed = false;
};
using LetterPtr = std::shared_ptr<Letter>;

class Rank {
 public:
  Rank(const Shared& shared, int64_t rank, Random program)
      : shared_(shared),
        rank_(rank),
        program_(program),
        own_(program() + rank),
        host_(shared.bell, rank, std::vector<pid_t>(shared.world_size, getpid()), kTimeout),
        backwards_(shared.standings, rank),
        arena_(kMailbox) {
    for (Progress* progress : shared.progress) {
      publications_.emplace_back(progress, rank, shared.world_size);
      deposits_.emplace_back(progress, shared.standings, rank, shared.world_size);
    }
  }

  void run() {
    while (operations_ < kOperations) {
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
    }
  }

 private:
  // Ranks are fast and slow at different times.
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

  // Up to three buckets at a time, of one parameter or two.
  void forward() {
    std::list<std::vector<int>> in_flight;
    for (int p : some_parameters()) {
      if (!in_flight.empty() && in_flight.back().size() == 1 && below(program_, 3) == 0) {
        in_flight.back().push_back(p);
        continue;
      }
      if (!in_flight.empty()) start(in_flight.back());
      if (in_flight.size() == 3) finish_oldest(in_flight);
      in_flight.push_back({p});
    }
    start(in_flight.back());
    while (!in_flight.empty()) finish_oldest(in_flight);
  }

  void start(const std::vector<int>& bucket) {
    for (int p : bucket) {
      linger();
      publications_[p].arrive();
      backwards_.count_publication();
      ++operations_;
    }
    host_.ring();
    publish_where_possible(bucket);
  }

  void finish_oldest(std::list<std::vector<int>>& in_flight) {
    const auto bucket = in_flight.front();
    in_flight.pop_front();
    host_.wait([&] { return missing(bucket); });
    for (int p : bucket) read(p);
  }

  std::optional<Host::Missing> missing(const std::vector<int>& bucket) {
    publish_where_possible(bucket);
    for (int p : bucket) {
      if (!publications_[p].is_published()) return {{publications_[p].readers(), "arrival"}};
      if (auto writers = publications_[p].writers(); !writers.empty())
        return {{std::move(writers), "rows"}};
    }
    return std::nullopt;
  }

  void publish_where_possible(const std::vector<int>& bucket) {
    bool published = false;
    for (int p : bucket) {
      Publication& publication = publications_[p];
      if (publication.is_published()) continue;
      if (MISTAKE != 1 && !publication.readers().empty()) continue;
      linger();
      for (int64_t i = shared_.first(p, rank_); i < shared_.first(p, rank_ + 1); ++i)
        shared_.copies[p][i] = value_of(rank_, p, publication.epoch(), i);
      linger();
      publication.publish();
      published = true;
    }
    if (published) host_.ring();
  }

  void read(int p) {
    for (int64_t rank = 0; rank < shared_.world_size; ++rank) {
      linger();
      for (int64_t i = shared_.first(p, rank); i < shared_.first(p, rank + 1); ++i)
        if (shared_.copies[p][i] != value_of(rank, p, publications_[p].epoch(), i))
          fail("a gather is wrong");
    }
  }

  // ---- reductions

  // Each parameter may come twice, and another backward may run inside.
  void backward(bool may_nest) {
    auto parameters = some_parameters();
    for (int p : some_parameters()) parameters.push_back(p);
    const uint64_t number = backwards_.begin();
    std::vector<LetterPtr> letters;
    for (int p : parameters) {
      if (publications_[p].epoch() > 0) read(p);
      letters.push_back(post(p, number, /*raises=*/false));
      if (may_nest && below(program_, 16) == 0) backward(/*may_nest=*/false);
    }
    for (auto& letter : letters) finish(letter);
    end(number);
  }

  // Each rank comes as far as it comes, but to its first gradient. All that it would send have room
  // in its mailbox, for nobody may read them before it raises.
  void raising_backward() {
    auto parameters = some_parameters();
    parameters.resize(std::min<size_t>(parameters.size(), 3));
    const int64_t count = 1 + below(own_, parameters.size());
    const uint64_t number = backwards_.begin();
    std::vector<LetterPtr> letters;
    for (size_t i = 0; i < parameters.size(); ++i)
      if (static_cast<int64_t>(i) < count)
        letters.push_back(post(parameters[i], number, /*raises=*/true));
      else
        ++operations_;
    for (auto& letter : letters) drop(letter);
    end(number);
  }

  void end(uint64_t number) {
    linger();
    backwards_.end(number);
    host_.ring();
  }

  uint64_t take(int64_t nbytes) {
    poll();
    auto offset = arena_.take(nbytes);
    if (!offset)
      host_.wait([&]() -> std::optional<Host::Missing> {
        poll(/*all=*/true);
        if ((offset = arena_.take(nbytes))) return std::nullopt;
        if (unread_.empty()) fail("no room");
        return {{unread_.front().readers(), "room"}};
      });
    return *offset;
  }

  LetterPtr post(int p, uint64_t backward, bool raises) {
    const auto time = static_cast<uint64_t>(operations_++);
    const auto offset = take(shared_.sizes[p] * sizeof(Element));
    auto* grad = reinterpret_cast<Element*>(mailbox_of(rank_) + offset);
    for (int64_t i = 0; i < shared_.sizes[p]; ++i) grad[i] = value_of(rank_, p, time, i);
    linger();
    Deposit& deposit = deposits_[p];
    if (!deposit.readers(deposit.latest()).empty())
      host_.wait([&]() -> std::optional<Host::Missing> {
        poll(/*all=*/true);
        auto readers = deposit.readers(deposit.latest());
        if (readers.empty()) return std::nullopt;
        return {{std::move(readers), "reading"}};
      });
    const uint64_t epoch = deposit.next_epoch(backward);
    deposit.put(epoch, {offset, static_cast<int8_t>(p), static_cast<int8_t>(p)});
    auto letter = std::make_shared<Letter>(Letter{p, epoch, time, raises});
    unsummed_.push_back(letter);
    unread_.push_back({offset, epoch, &deposit});
    host_.ring();
    linger();
    poll();
    return letter;
  }

  void finish(const LetterPtr& letter) {
    host_.wait([&]() -> std::optional<Host::Missing> {
      poll(/*all=*/true);
      if (letter->is_summed) return std::nullopt;
      return {{deposits_[letter->parameter].writers(letter->epoch), "a gradient"}};
    });
  }

  void drop(const LetterPtr& letter) {
    if (std::erase(unsummed_, letter) == 0) return;
    linger();
    deposits_[letter->parameter].consume(letter->epoch);
    host_.ring();
  }

  void poll(bool all = false) {
    bool changed = false;
    for (auto it = unsummed_.begin(); it != unsummed_.end();) {
      Letter& letter = **it;
      Deposit& deposit = deposits_[letter.parameter];
      if (deposit.writers(letter.epoch).empty()) {
        sum(letter);
        deposit.consume(letter.epoch);
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
    if (changed) host_.ring();
  }

  void sum(Letter& letter) const {
    const int p = letter.parameter;
    const int64_t first = shared_.first(p, rank_);
    std::vector<Element> sum(shared_.first(p, rank_ + 1) - first);
    std::vector<Element> expected(sum.size());
    for (int64_t rank = 0; rank < shared_.world_size; ++rank) {
      const auto [offset, dtype, wire_dtype] = deposits_[p].of_rank(rank);
      if (dtype != p || wire_dtype != p) fail("a description is wrong");
      const auto* grad = reinterpret_cast<const Element*>(mailbox_of(rank) + offset);
      for (size_t i = 0; i < sum.size(); ++i) {
        sum[i] += grad[first + i];
        expected[i] += value_of(rank, p, letter.time, first + i);
      }
    }
    if (!letter.raises && sum != expected) fail("a sum is wrong");
    letter.is_summed = true;
  }

  char* mailbox_of(int64_t rank) const { return shared_.mailboxes + rank * kMailbox; }

  struct Unread {
    uint64_t offset;
    uint64_t epoch;
    const Deposit* deposit;
    std::vector<int64_t> readers() const { return deposit->readers(epoch); }
  };

  const Shared& shared_;
  const int64_t rank_;
  Random program_;  // the same on all ranks
  Random own_;
  Host host_;
  std::vector<Publication> publications_;
  std::vector<Deposit> deposits_;
  Backwards backwards_;
  Arena arena_;
  std::list<LetterPtr> unsummed_;
  std::list<Unread> unread_;
  int operations_ = 0;
};

void run(int64_t world_size, uint64_t seed) {
  const Random random(seed * 16 + world_size);
  const Shared shared(world_size, random);
  std::vector<std::jthread> threads;
  for (int64_t rank = 0; rank < world_size; ++rank)
    threads.emplace_back([&, rank] {
      try {
        Rank(shared, rank, random).run();
      } catch (const std::exception& error) {
        fail(error.what());
      }
    });
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t seed = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 0;
  for (int64_t world_size : {2, 3, 4}) run(world_size, seed);
}
