#include "exchange.h"

#include <ATen/SavedTensorHooks.h>

#include <limits>
#include <map>
#include <mutex>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "memory.h"

namespace zero3 {

using Group = c10d::ProcessGroup;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

struct Exchange::Running {
  std::string group_name;
  std::string key;
  std::vector<at::Tensor> tensors;  // that take part
  std::vector<WorkPtr> works;

  void wait() {
    try {
      for (auto& work : works) work->wait();
    } catch (const std::exception& error) {
      TORCH_CHECK(false, "zero3: an exchange with another rank failed (", key,
                  "). Either that rank has stopped, or it runs something else: all ranks must run "
                  "the same forwards and backwards. ",
                  error.what());
    }
  }
};

namespace {

using Running = Exchange::Running;

// Exchanges that nobody waits for any more. gloo never gets over a message whose buffer is gone.
class Orphans {
 public:
  static Orphans& get() {
    static auto& orphans = *new Orphans;  // for ever: some come when statics are destroyed
    return orphans;
  }

  void add(std::unique_ptr<Running> running) {
    std::lock_guard lock(mutex_);
    by_group_[running->group_name].push_back(std::move(running));
  }

  void wait(const std::string& group_name) {
    std::vector<std::unique_ptr<Running>> mine;
    {
      std::lock_guard lock(mutex_);
      if (auto found = by_group_.find(group_name); found != by_group_.end())
        mine = std::exchange(found->second, {});
    }
    for (auto& running : mine) running->wait();
  }

 private:
  std::mutex mutex_;
  std::map<std::string, std::vector<std::unique_ptr<Running>>> by_group_;
};

// ---- sends and receives

// Messages meet by sender and tag, in order. One that meets none ends in the group's timeout.
int tag_of(const std::string& key) {
  uint64_t hash = 14695981039346656037u;  // FNV-1a: the same on every rank
  for (unsigned char c : key) hash = (hash ^ c) * 1099511628211u;
  return static_cast<int>(hash % std::numeric_limits<int>::max());
}

// Sends `outgoing(r)` to each other rank r, and receives `incoming(r)` from it.
template <typename Outgoing, typename Incoming>
void start_messages(Running& running, Group& group, int64_t rank, int64_t world_size,
                    Outgoing outgoing, Incoming incoming) {
  const int tag = tag_of(running.key);
  for (int64_t distance = 1; distance < world_size; ++distance) {
    const int64_t to = (rank + distance) % world_size;
    const int64_t from = (rank - distance + world_size) % world_size;
    std::vector<at::Tensor> received{incoming(from)};
    running.works.push_back(group.recv(received, static_cast<int>(from), tag));
    std::vector<at::Tensor> sent{outgoing(to)};
    running.works.push_back(group.send(sent, static_cast<int>(to), tag));
  }
}

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

}  // namespace

Exchange::Exchange(std::unique_ptr<Running> running, std::vector<at::Tensor> addends)
    : running_(std::move(running)), addends_(std::move(addends)) {}

Exchange::~Exchange() {
  if (running_) Orphans::get().add(std::move(running_));
}

void Exchange::wait() {
  auto running = std::exchange(running_, nullptr);
  TORCH_CHECK(running, "zero3: an exchange was waited for twice");
  running->wait();
}

bool is_point_to_point(const std::string& group_name, at::Device device) {
  auto group = c10d::resolve_process_group(group_name);
  return device.is_cpu() && group->getBackend(device.type())->getBackendName() == "gloo";
}

std::unique_ptr<Exchange> start_gather(const std::string& group_name, int64_t rank,
                                       std::vector<at::Tensor> rows, const std::string& key) {
  Orphans::get().wait(group_name);
  auto group = c10d::resolve_process_group(group_name);
  auto exchange = std::make_unique<Exchange>(
      std::make_unique<Running>(Running{group_name, key, rows, {}}), std::vector<at::Tensor>());
  auto& running = exchange->running();
  for (auto& row : rows) {
    if (row.numel() == 0) continue;
    if (is_point_to_point(group_name, row.device()))
      start_messages(
          running, *group, rank, row.size(0), [&](int64_t) { return row[rank]; },
          [&](int64_t from) { return row[from]; });
    else
      running.works.push_back(all_gather(*group, row.view(-1), row[rank]));
  }
  return exchange;
}

std::unique_ptr<Exchange> start_reduce(const std::string& group_name, int64_t rank, at::Tensor rows,
                                       const std::string& key) {
  Orphans::get().wait(group_name);
  auto group = c10d::resolve_process_group(group_name);
  const int64_t world_size = rows.size(0);
  std::vector<at::Tensor> addends;
  const bool point_to_point = is_point_to_point(group_name, rows.device());
  if (point_to_point) {
    auto received = pooled_empty({world_size - 1, rows.size(1)}, rows.options());
    for (int64_t r = 0; r < world_size; ++r)
      addends.push_back(r == rank ? rows[r] : received[r - (r > rank)]);
  } else {
    rows = rows.contiguous().view(-1);
    addends.push_back(at::empty({rows.numel() / world_size}, rows.options()));
  }
  auto exchange = std::make_unique<Exchange>(
      std::make_unique<Running>(Running{group_name, key, {rows}, {}}), addends);
  auto& running = exchange->running();
  running.tensors.insert(running.tensors.end(), addends.begin(), addends.end());
  if (point_to_point)
    start_messages(
        running, *group, rank, world_size, [&](int64_t to) { return rows[to]; },
        [&](int64_t from) { return addends[from]; });
  else
    running.works.push_back(reduce_scatter(*group, addends.front(), rows));
  return exchange;
}

}  // namespace zero3
