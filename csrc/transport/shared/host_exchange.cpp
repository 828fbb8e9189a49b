#include "transport/shared/host_exchange.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <string_view>

#include "transport/c10d/process_group.h"

namespace zero3 {
namespace {

// The memory has a WakeWord, a RankState for each rank, and what each rank tells.
RankState* states_in(const at::Tensor& memory) {
  return reinterpret_cast<RankState*>(static_cast<char*>(memory.data_ptr()) + sizeof(WakeWord));
}

}  // namespace

int64_t HostExchange::nbytes(int64_t world_size) {
  return sizeof(WakeWord) + world_size * (sizeof(RankState) + sizeof(Told));
}

HostExchange::HostExchange(const std::string& group_name, int64_t rank, RankNames names,
                           const std::vector<int64_t>& pids, at::Tensor memory,
                           const std::string& rule)
    : memory_(std::move(memory)),
      told_(reinterpret_cast<Told*>(states_in(memory_) + pids.size())),
      waiter_(static_cast<WakeWord*>(memory_.data_ptr()), states_in(memory_), rank,
              std::vector<pid_t>(pids.begin(), pids.end()), timeout_of(group_name), rule) {
  waiter_.name_ranks(std::move(names));
}

std::vector<std::pair<uint64_t, std::string>> HostExchange::exchange(uint64_t number,
                                                                     const std::string& line,
                                                                     const std::string& where) {
  waiter_.begin_anew();
  const uint64_t round = ++round_;
  auto& mine = told_[waiter_.rank()];
  auto& said = mine.said[round % 2];
  said.number = number;
  said.length = std::min(line.size(), kLineBytes);
  std::memcpy(said.line.data(), line.data(), said.length);
  mine.round.store(round, std::memory_order_release);
  waiter_.notify();
  waiter_.wait([&]() -> std::optional<RankWaiter::Missing> {
    auto missing = ranks_where(waiter_.world_size(), [&](int64_t rank) {
      return told_[rank].round.load(std::memory_order_acquire) < round;
    });
    if (missing.empty()) return std::nullopt;
    return {{std::move(missing), "it has not come to " + where}};
  });
  std::vector<std::pair<uint64_t, std::string>> result;
  for (int64_t rank = 0; rank < waiter_.world_size(); ++rank) {
    const auto& theirs = told_[rank].said[round % 2];
    result.emplace_back(theirs.number,
                        std::string_view(theirs.line.data(), std::min(theirs.length, kLineBytes)));
  }
  return result;
}

}  // namespace zero3
