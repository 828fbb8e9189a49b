#include "features/tier/host_copy.h"

#include <ATen/SavedTensorHooks.h>

#include <utility>

#include "support/host_copies.h"
#include "support/tensor_ops.h"

namespace zero3 {

HostCopy::HostCopy(const at::Tensor& on_device, at::Tensor result, const void* from,
                   c10::Stream stream, c10::Event made)
    : on_device_(on_device),
      result_(std::move(result)),
      from_(from),
      stream_(stream),
      made_(std::move(made)) {}

// If something failed before anybody has waited, the computation's stream is not behind the copy.
HostCopy::~HostCopy() {
  if (!on_device_.defined()) return;
  try {
    on_device_.record_stream(stream_);
  } catch (...) {  // the device has failed, or is gone: so are its copies
  }
}

std::unique_ptr<HostCopy> HostCopy::store(const at::Tensor& tensor) {
  const auto stored =
      tensor_ops::empty_like(tensor, at::TensorOptions().device(at::kCPU).pinned_memory(true));
  const OnCopyStream guard(tensor.device(), CopyStream::kStores);
  start_copy(tensor, stored);
  return std::unique_ptr<HostCopy>(
      new HostCopy(tensor, stored, tensor.const_data_ptr(), guard.stream(), guard.record()));
}

std::unique_ptr<HostCopy> HostCopy::load(const at::Tensor& stored, at::Device device) {
  // Memory of the computation's stream, which the copy is behind.
  const auto loaded =
      tensor_ops::empty_like(stored, at::TensorOptions().device(device).pinned_memory(false));
  const OnCopyStream guard(loaded.device(), CopyStream::kLoads);
  loaded.copy_(stored, /*non_blocking=*/true);
  return std::unique_ptr<HostCopy>(
      new HostCopy(loaded, loaded, stored.const_data_ptr(), guard.stream(), guard.record()));
}

at::Tensor HostCopy::wait() {
  wait_on_current_stream(made_, stream_.device());
  on_device_.reset();
  if (result_.is_cpu() && at::SavedTensorDefaultHooks::get_hooks()) made_.synchronize();
  return result_;
}

}  // namespace zero3
