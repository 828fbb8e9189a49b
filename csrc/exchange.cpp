#include "exchange.h"

#include <ATen/SavedTensorHooks.h>

#include <functional>
#include <limits>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "memory.h"

namespace zero3 {
namespace {

using Group = c10d::ProcessGroup;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// ---- sends and receives

// Messages meet by sender and tag, in order. One that meets none ends in the group's timeout.
int tag_of(const std::string& key) {
  return static_cast<int>(std::hash<std::string>{}(key) % std::numeric_limits<int>::max());
}

WorkPtr send(Group& group, at::Tensor row, int64_t to, int tag) {
  std::vector<at::Tensor> message{std::move(row)};
  return group.send(message, static_cast<int>(to), tag);
}

WorkPtr receive(Group& group, at::Tensor row, int64_t from, int tag) {
  std::vector<at::Tensor> message{std::move(row)};
  return group.recv(message, static_cast<int>(from), tag);
}

// `what` is the key of the exchange, for the message.
void wait_all(std::vector<WorkPtr>& works, const std::string& what) {
  try {
    for (auto& work : works) work->wait();
  } catch (const std::exception& error) {
    TORCH_CHECK(false, "zero3: an exchange with another rank failed (", what,
                "). Either that rank has stopped, or it runs something else: all ranks must run "
                "the same forwards and backwards. ",
                error.what());
  }
  works.clear();
}

class Messages : public Exchange {
 public:
  Messages(Group& group, int64_t rank, std::vector<at::Tensor> rows, const std::string& key)
      : key_(key), rows_(std::move(rows)) {
    const int tag = tag_of(key);
    for (auto& row : rows_)
      for (int64_t distance = 1; distance < row.size(0); ++distance) {
        const int64_t to = (rank + distance) % row.size(0);
        const int64_t from = (rank - distance + row.size(0)) % row.size(0);
        works_.push_back(receive(group, row[from], from, tag));
        works_.push_back(send(group, row[rank], to, tag));
      }
  }
  void wait() override { wait_all(works_, key_); }

 private:
  std::string key_;
  std::vector<at::Tensor> rows_;
  std::vector<WorkPtr> works_;
};

class ReducedMessages : public Reduce {
 public:
  ReducedMessages(Group& group, int64_t rank, at::Tensor rows, const std::string& key)
      : key_(key),
        rank_(rank),
        rows_(std::move(rows)),
        received_(pooled_empty({rows_.size(0) - 1, rows_.size(1)}, rows_.options())) {
    const int tag = tag_of(key);
    const int64_t world_size = rows_.size(0);
    for (int64_t distance = 1; distance < world_size; ++distance) {
      const int64_t to = (rank + distance) % world_size;
      const int64_t from = (rank - distance + world_size) % world_size;
      works_.push_back(receive(group, received_[from - (from > rank)], from, tag));
      works_.push_back(send(group, rows_[to], to, tag));
    }
  }
  void wait() override { wait_all(works_, key_); }

  std::vector<at::Tensor> addends() override {
    std::vector<at::Tensor> result;  // in the order of ranks
    for (int64_t r = 0; r < rows_.size(0); ++r)
      result.push_back(r == rank_ ? rows_[r] : received_[r - (r > rank_)]);
    return result;
  }

 private:
  std::string key_;
  int64_t rank_;
  at::Tensor rows_;
  at::Tensor received_;
  std::vector<WorkPtr> works_;
};

// ---- the backend's own collectives

// A Work copies the thread's state and lets go of it on a thread of its own, late or never. Hooks
// of saved tensors are part of that state: with them it would keep a whole model alive.
class WithoutSavedTensorHooks {
 public:
  WithoutSavedTensorHooks() { at::SavedTensorDefaultHooks::set_tls_state({}); }
  ~WithoutSavedTensorHooks() { at::SavedTensorDefaultHooks::set_tls_state(state_); }
  WithoutSavedTensorHooks(const WithoutSavedTensorHooks&) = delete;
  WithoutSavedTensorHooks& operator=(const WithoutSavedTensorHooks&) = delete;

 private:
  const at::impl::SavedTensorDefaultHooksTLS state_ = at::SavedTensorDefaultHooks::get_tls_state();
};

// torch 2.13 renamed the two calls; the templates let one source compile against both names.
template <typename AnyGroup>
WorkPtr all_gather(AnyGroup& group, at::Tensor full, at::Tensor shard) {
  WithoutSavedTensorHooks guard;
  if (c10::isFloat8Type(full.scalar_type())) {  // which backends do not know
    full = full.view(at::kByte);
    shard = shard.view(at::kByte);
  }
  if constexpr (requires { group.all_gather_single(full, shard); })
    return group.all_gather_single(full, shard);
  else
    return group._allgather_base(full, shard);
}

template <typename AnyGroup>
WorkPtr reduce_scatter(AnyGroup& group, at::Tensor shard, at::Tensor full) {
  WithoutSavedTensorHooks guard;
  if constexpr (requires { group.reduce_scatter_single(shard, full); })
    return group.reduce_scatter_single(shard, full);
  else
    return group._reduce_scatter_base(shard, full);
}

class Collectives : public Exchange {
 public:
  Collectives(Group& group, int64_t rank, std::vector<at::Tensor> rows, const std::string& key)
      : key_(key), rows_(std::move(rows)) {
    for (auto& row : rows_) works_.push_back(all_gather(group, row.view(-1), row[rank]));
  }
  void wait() override { wait_all(works_, key_); }

 private:
  std::string key_;
  std::vector<at::Tensor> rows_;
  std::vector<WorkPtr> works_;
};

class ReducedByCollective : public Reduce {
 public:
  ReducedByCollective(Group& group, at::Tensor rows, const std::string& key)
      : key_(key),
        rows_(rows.contiguous().view(-1)),
        reduced_(at::empty({rows.size(1)}, rows.options())),
        works_{reduce_scatter(group, reduced_, rows_)} {}
  void wait() override { wait_all(works_, key_); }
  std::vector<at::Tensor> addends() override { return {reduced_}; }

 private:
  std::string key_;
  at::Tensor rows_;
  at::Tensor reduced_;
  std::vector<WorkPtr> works_;
};

}  // namespace

bool is_point_to_point(const std::string& group_name, at::Device device) {
  auto group = c10d::resolve_process_group(group_name);
  return device.is_cpu() && group->getBackend(device.type())->getBackendName() == "gloo";
}

std::unique_ptr<Exchange> start_gather(const std::string& group_name, int64_t rank,
                                       std::vector<at::Tensor> rows, const std::string& key) {
  auto group = c10d::resolve_process_group(group_name);
  if (is_point_to_point(group_name, rows.front().device()))
    return std::make_unique<Messages>(*group, rank, std::move(rows), key);
  return std::make_unique<Collectives>(*group, rank, std::move(rows), key);
}

std::unique_ptr<Reduce> start_reduce(const std::string& group_name, int64_t rank, at::Tensor rows,
                                     const std::string& key) {
  auto group = c10d::resolve_process_group(group_name);
  if (is_point_to_point(group_name, rows.device()))
    return std::make_unique<ReducedMessages>(*group, rank, std::move(rows), key);
  return std::make_unique<ReducedByCollective>(*group, std::move(rows), key);
}

}  // namespace zero3
