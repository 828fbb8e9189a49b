#include "tier/host_copy.h"

#include <ATen/ops/empty_strided.h>

#include <utility>

#include "support/host_copies.h"

namespace zero3 {

HostCopy::HostCopy(at::Tensor source, at::Tensor result, at::Device device, c10::Event made)
    : source_(std::move(source)),
      result_(std::move(result)),
      device_(device),
      made_(std::move(made)) {}

HostCopy::~HostCopy() {
  if (source_.defined()) made_.synchronize();  // nobody has waited: something failed
}

std::unique_ptr<HostCopy> HostCopy::store(const at::Tensor& tensor) {
  const auto options = at::TensorOptions(tensor.scalar_type()).pinned_memory(true);
  const auto stored = at::empty_strided(tensor.sizes(), tensor.strides(), options);
  const OnCopyStream stream(tensor.device(), Direction::kToHost);
  stored.copy_(tensor, /*non_blocking=*/true);
  return std::unique_ptr<HostCopy>(new HostCopy(tensor, stored, tensor.device(), stream.record()));
}

std::unique_ptr<HostCopy> HostCopy::load(const at::Tensor& stored, at::Device device) {
  const auto memory =  // of the computation's stream, which the copy is behind
      at::empty_strided(stored.sizes(), stored.strides(),
                        at::TensorOptions(stored.scalar_type()).device(device));
  const OnCopyStream stream(memory.device(), Direction::kToDevice);
  memory.copy_(stored, /*non_blocking=*/true);
  return std::unique_ptr<HostCopy>(new HostCopy(stored, memory, memory.device(), stream.record()));
}

at::Tensor HostCopy::wait() {
  wait_on_current_stream(made_, device_);
  source_.reset();
  return result_;
}

}  // namespace zero3
