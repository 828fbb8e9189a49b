#include "publish.h"

#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>
#include <torch/csrc/autograd/graph_task.h>

#include <cerrno>
#include <cstring>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "memory.h"
#include "stream.h"
#include "sum.h"

namespace zero3 {
namespace {

uint64_t version_of(const Parameter& parameter) {
  const auto& [shard, version] = std::tie(parameter.shard, parameter.version);
  return (version.enabled() ? version.current_version() : 0) +
         (shard.is_inference() ? 0 : shard._version());
}

std::chrono::milliseconds timeout_of(const std::string& group_name) {
  return c10d::resolve_process_group(group_name)
      ->getBackend(at::kCPU)
      ->getBackendOptions()
      ->timeout;
}

char* data_of(const at::Tensor& tensor) { return static_cast<char*>(tensor.data_ptr()); }

}  // namespace

int64_t OneHost::control_bytes(int64_t world_size) {
  return sizeof(Bell) + world_size * sizeof(Standing);
}

OneHost::OneHost(const std::string& group_name, int64_t rank, const std::vector<int64_t>& pids,
                 at::Tensor control)
    : control(std::move(control)),
      host(std::make_shared<Host>(reinterpret_cast<Bell*>(data_of(this->control)), rank,
                                  std::vector<pid_t>(pids.begin(), pids.end()),
                                  timeout_of(group_name))),
      standings(reinterpret_cast<Standing*>(data_of(this->control) + sizeof(Bell))),
      backwards(standings, rank) {}

SharedCopy::SharedCopy(std::shared_ptr<OneHost> one_host, int64_t rank, at::Tensor progress,
                       at::Tensor writable, at::Tensor readable)
    : publication(reinterpret_cast<Progress*>(data_of(progress)), rank,
                  one_host->host->world_size()),
      deposit(reinterpret_cast<Progress*>(data_of(progress)), one_host->standings, rank,
              one_host->host->world_size()),
      one_host_(std::move(one_host)),
      progress_(std::move(progress)),
      writable_(std::move(writable)),
      readable_(std::move(readable)) {}

bool SharedCopy::is_stale(const Parameter& parameter) const {
  return publication.epoch() == 0 || version_of(parameter) != published_version_;
}

void SharedCopy::arrive(const Parameter& parameter) {
  for (auto& weak : std::exchange(views_, {})) {
    auto storage = weak.lock();
    if (!storage) continue;
    auto memory = c10::GetCPUAllocator()->allocate(storage->nbytes());
    std::memcpy(memory.get(), storage->data(), storage->nbytes());
    storage->set_data_ptr(std::move(memory));
  }
  published_version_ = version_of(parameter);
  publication.arrive();
}

void SharedCopy::publish(const Parameter& parameter) {
  if (const int64_t rows = parameter.shard_rows(); rows > 0) {
    const auto& shard = parameter.shard;
    auto mine = writable_.narrow(0, parameter.rank * parameter.chunk_rows(), rows);
    const auto nbytes = static_cast<int64_t>(mine.nbytes());
    const bool may_stream =
        nbytes >= kWorthStreaming && mine.is_contiguous() && shard.is_contiguous();
    if (may_stream && mine.dtype() == shard.dtype()) {
      stream(mine.mutable_data_ptr(), shard.const_data_ptr(), nbytes);
      finish_streaming();
    } else if (may_stream && mine.scalar_type() == at::kBFloat16) {
      sum_and_divide(mine, {shard}, shard.scalar_type(), 1);  // a cast, quicker than torch's
    } else {
      mine.copy_(shard);
    }
  }
  publication.publish();
}

at::Tensor SharedCopy::view() {
  auto view = at::for_blob(const_cast<void*>(readable_.const_data_ptr()), readable_.sizes())
                  .strides(readable_.strides())
                  .deleter([mapped = readable_](void*) {})
                  .options(readable_.options())
                  .make_tensor();
  std::erase_if(views_, [](auto& weak) { return weak.expired(); });
  views_.emplace_back(
      c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(view.storage().unsafeGetStorageImpl()));
  return view;
}

void PublishedBucket::start() {
  const bool in_backward = torch::autograd::get_current_graph_task_id() != -1;
  bool arrived = false;
  for (auto& parameter : parameters_) {
    if (in_backward && !parameter->shared->is_stale(*parameter)) continue;
    parameter->shared->arrive(*parameter);
    parameter->shared->one_host()->backwards.count_publication();
    arrived = true;
  }
  if (arrived) parameters_.front()->shared->one_host()->host->ring();
  publish_where_possible();
  record_start();
}

std::vector<at::Tensor> PublishedBucket::finish() {
  parameters_.front()->shared->one_host()->host->wait([this] { return missing(); });
  std::vector<at::Tensor> fulls;
  for (auto& parameter : parameters_) fulls.push_back(parameter->shared->view());
  return fulls;
}

void PublishedBucket::publish_where_possible() {
  bool published = false;
  for (auto& parameter : parameters_) {
    const auto& publication = parameter->shared->publication;
    if (publication.is_published() || !publication.readers().empty()) continue;
    parameter->shared->publish(*parameter);
    published = true;
  }
  if (published) parameters_.front()->shared->one_host()->host->ring();
}

std::optional<Host::Missing> PublishedBucket::missing() {
  publish_where_possible();
  parameters_.front()->shared->one_host()->mailbox->poll();  // others may wait for it
  for (auto& parameter : parameters_) {
    const auto& publication = parameter->shared->publication;
    if (!publication.is_published())
      return {{publication.readers(), "it has not begun to gather '" + parameter->fqn + "'"}};
    if (auto writers = publication.writers(); !writers.empty())
      return {{std::move(writers), "it has not published its rows of '" + parameter->fqn + "'"}};
  }
  return std::nullopt;
}

void make_read_only(const at::Tensor& mapped) {
  TORCH_CHECK(mprotect(mapped.data_ptr(), mapped.nbytes(), PROT_READ) == 0,
              "zero3: mprotect failed: ", std::strerror(errno));
}

}  // namespace zero3
