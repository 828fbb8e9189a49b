// Threads play the ranks of one host. All run the same random program, each with its own delays,
// and compare every gather and every sum with the expected values.
//
// The threads follow shared_gather.cpp and mailbox.cpp, with arrays in place of tensors. They share
// plain memory, so that ThreadSanitizer detects reads and writes that come too early or too late.

#include <algorithm>
#include <list>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "gathers.h"
#include "reductions.h"
#include "shared.h"
#include "transport/shared/backwards.h"

namespace {

using namespace zero3;

// The random program, as one rank runs it.
class Program {
 public:
  // `gathers` are counted already.
  Program(const Shared& shared, int64_t rank, Random program, uint64_t gathers)
      : rank_(shared, rank, program),
        backwards_(shared.states, rank, gathers),
        reductions_(rank_),
        gathers_(rank_, backwards_, [this] { reductions_.poll(/*all=*/true); }) {}

  void run() {
    while (rank_.operations < kOperations) {
      if (below(rank_.program, 8) == 0) raising_forward();
      forward();
      switch (below(rank_.program, 4)) {
        case 0:
          break;  // evaluation
        case 1:
          raising_backward();
          break;
        default:
          for (int64_t i = below(rank_.program, 2); i >= 0; --i) backward(/*may_nest=*/true);
      }
      for (auto& view : kept_) gathers_.read(*view);
      if (below(rank_.own, 2) == 0) kept_.clear();
      if (below(rank_.program, 2) == 0) forget_abandoned();
    }
  }

 private:
  std::vector<int> some_parameters() {
    std::vector<int> result(kParameters);
    std::iota(result.begin(), result.end(), 0);
    std::shuffle(result.begin(), result.end(), rank_.program);
    result.resize(1 + below(rank_.program, kParameters));
    return result;
  }

  void forward() {
    gathers_.gather(some_parameters(), /*in_backward=*/false, [&](const ViewPtr& view) {
      gathers_.read(*view);
      if (below(rank_.own, 4) == 0) kept_.push_back(view);
    });
  }

  // All ranks raise after they have started gathers. The gathers may stay for a while.
  void raising_forward() {
    forget_abandoned();
    auto parameters = some_parameters();
    parameters.resize(std::min<size_t>(parameters.size(), 3));
    for (int p : parameters) gathers_.start(abandoned_.emplace_back(Bucket{.parameters = {p}}));
  }

  void forget_abandoned() {
    for (auto& bucket : abandoned_) gathers_.stop_waiting(bucket);
    abandoned_.clear();
  }

  // Each parameter may come twice, and another backward may run inside this one.
  void backward(bool may_nest) {
    auto parameters = some_parameters();
    for (int p : some_parameters()) parameters.push_back(p);
    const uint64_t number = backwards_.begin();
    reductions_.announce(number);
    std::vector<PendingSumPtr> pending_sums;
    gathers_.gather(parameters, /*in_backward=*/true, [&](const ViewPtr& view) {
      gathers_.read(*view);
      if (!pending_sums.empty()) reductions_.read_announcements();
      pending_sums.push_back(reductions_.post(view->parameter, number, /*raises=*/false));
    });
    if (may_nest && below(rank_.program, 4) == 0) backward(/*may_nest=*/false);
    reductions_.read_announcements();
    for (auto& pending : pending_sums) reductions_.finish(pending);
    end(number);
  }

  // Each rank posts at least one gradient before it raises. A rank's mailbox has room for all of
  // them, since other ranks may raise before they read.
  void raising_backward() {
    auto parameters = some_parameters();
    parameters.resize(std::min<size_t>(parameters.size(), 3));
    const int64_t count = 1 + below(rank_.own, parameters.size());
    const uint64_t number = backwards_.begin();
    if (below(rank_.own, 2) == 0) {
      reductions_.announce(number);
      reductions_.acknowledge();
    }
    std::vector<PendingSumPtr> pending_sums;
    for (size_t i = 0; i < parameters.size(); ++i)
      if (static_cast<int64_t>(i) < count)
        pending_sums.push_back(reductions_.post(parameters[i], number, /*raises=*/true));
      else
        ++rank_.operations;
    for (auto& pending : pending_sums) reductions_.drop(pending);
    end(number);
  }

  void end(uint64_t number) {
    rank_.linger();
    backwards_.end(number);
    rank_.waiter.notify();
  }

  Rank rank_;
  Backwards backwards_;
  Reductions reductions_;
  Gathers gathers_;
  std::vector<ViewPtr> kept_;
  std::list<Bucket> abandoned_;
};

void run(int64_t world_size, uint64_t seed, uint64_t gathers = 0) {
  const Random random(seed * 16 + world_size);
  const Shared shared(world_size, random);
  std::vector<std::jthread> threads;
  for (int64_t rank = 0; rank < world_size; ++rank)
    threads.emplace_back([&, rank] {
      try {
        Program(shared, rank, random, gathers).run();
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
