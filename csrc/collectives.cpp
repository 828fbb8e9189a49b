#include "collectives.h"

#include <ATen/SavedTensorHooks.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace zero3 {
namespace {

std::mutex active_mutex;
std::vector<std::weak_ptr<CollectiveLog>> active_logs;

void record(const char* op, const at::Tensor& full, const std::vector<std::string>& params) {
  std::vector<std::shared_ptr<CollectiveLog>> logs;
  {
    std::lock_guard lock(active_mutex);
    for (auto& weak : active_logs)
      if (auto log = weak.lock()) logs.push_back(log);
  }
  for (auto& log : logs)
    log->add({op, full.scalar_type(), static_cast<int64_t>(full.nbytes()), params});
}

// torch 2.13 renamed the two calls; the templates let one source compile against both names.
template <typename Group>
WorkPtr all_gather(Group& group, at::Tensor& full, at::Tensor& shard) {
  if constexpr (requires { group.all_gather_single(full, shard); })
    return group.all_gather_single(full, shard);
  else
    return group._allgather_base(full, shard);
}

template <typename Group>
WorkPtr reduce_scatter(Group& group, at::Tensor& shard, at::Tensor& full) {
  if constexpr (requires { group.reduce_scatter_single(shard, full); })
    return group.reduce_scatter_single(shard, full);
  else
    return group._reduce_scatter_base(shard, full);
}

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

}  // namespace

std::shared_ptr<CollectiveLog> CollectiveLog::start() {
  auto log = std::make_shared<CollectiveLog>();
  std::lock_guard lock(active_mutex);
  active_logs.push_back(log);
  return log;
}

void CollectiveLog::stop() {
  std::lock_guard lock(active_mutex);
  std::erase_if(active_logs, [this](auto& weak) {
    auto log = weak.lock();
    return !log || log.get() == this;
  });
}

std::vector<Collective> CollectiveLog::records() {
  std::lock_guard lock(mutex_);
  return records_;
}

void CollectiveLog::add(const Collective& collective) {
  std::lock_guard lock(mutex_);
  records_.push_back(collective);
}

WorkPtr start_all_gather(const std::string& group_name, at::Tensor full, at::Tensor shard,
                         const std::vector<std::string>& params) {
  record("all_gather", full, params);
  WithoutSavedTensorHooks guard;
  if (c10::isFloat8Type(full.scalar_type())) {  // gloo does not know them
    full = full.view(at::kByte);
    shard = shard.view(at::kByte);
  }
  return all_gather(*c10d::resolve_process_group(group_name), full, shard);
}

WorkPtr start_reduce_scatter(const std::string& group_name, at::Tensor shard, at::Tensor full,
                             const std::vector<std::string>& params) {
  record("reduce_scatter", full, params);
  WithoutSavedTensorHooks guard;
  return reduce_scatter(*c10d::resolve_process_group(group_name), shard, full);
}

}  // namespace zero3
