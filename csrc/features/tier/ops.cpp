// The operators that offload activations, and load them in backward.
#include <ATen/core/enum_tag.h>
#include <torch/library.h>

#include "features/tier/file_tier.h"
#include "features/tier/host_copy.h"
#include "features/tier/transfer.h"
#include "support/error.h"
#include "support/in_flight.h"
#include "support/tensor_ops.h"

namespace zero3 {
namespace {

using at::Tensor;

// `tier` is the number of the file, or none for page-locked host memory beside a device.
Tensor store_start(const Tensor& tensor, std::optional<int64_t> tier,
                   const std::optional<Tensor>& after) {
  ZERO3_CHECK(tier.has_value() == tensor.is_cpu(),
              "zero3::store_start takes a tier for a tensor on the CPU, and none for others");
  if (!tier) return InFlight<HostCopy>::get().add(HostCopy::store(tensor));
  ZERO3_CHECK(is_movable(tensor), "zero3::store_start takes a dense tensor, got sizes ",
              tensor.sizes(), ", strides ", tensor.strides());
  auto stored =
      FileTier::numbered(*tier)->empty(tensor.sizes(), tensor.strides(), tensor.options());
  return InFlight<Transfer>::get().add(Transfer::store(tensor, stored));
}

// `tensor` is an argument so that its memory is not reused before the copy is made. If it is a
// view, a compiler may give each operator a copy of its own. The one that store_start got may have
// been overwritten since, so this one is stored again.
Tensor store_wait(const Tensor& handle, const Tensor& tensor, const std::optional<Tensor>& after) {
  const char* wrong = "zero3::store_wait takes what zero3::store_start returned";
  if (!tensor.is_cpu()) {
    auto copy = InFlight<HostCopy>::get().find(handle);
    ZERO3_CHECK(copy, wrong);
    return copy->is_of(tensor) ? copy->wait() : HostCopy::store(tensor)->wait();
  }
  auto transfer = InFlight<Transfer>::get().find(handle);
  ZERO3_CHECK(transfer, wrong);
  auto stored = transfer->wait();
  return transfer->is_of(tensor) ? stored : Transfer::store(tensor, stored)->wait();
}

// `device` is that of the computation, or empty for the CPU. If a hook of the user's has replaced
// the saved tensor by one that is elsewhere, the wait copies it.
Tensor load_start(const Tensor& stored, const std::optional<Tensor>& after, std::string device) {
  if (!device.empty() && stored.is_cpu())
    return InFlight<HostCopy>::get().add(HostCopy::load(stored, at::Device(device)));
  const bool is_whole = stored.storage_offset() == 0 && is_movable(stored);
  if (!slab_of(stored) || !is_whole) return tensor_ops::zeros({1}, at::kLong);
  return InFlight<Transfer>::get().add(Transfer::load(stored));
}

Tensor load_wait(const Tensor& handle, const Tensor& stored, const std::optional<Tensor>& after,
                 std::string device) {
  if (!device.empty()) {
    auto copy = InFlight<HostCopy>::get().find(handle);
    if (copy) return copy->wait();
    return stored.to(at::Device(device), stored.scalar_type(), /*non_blocking=*/false,
                     /*copy=*/true);
  }
  auto transfer = InFlight<Transfer>::get().find(handle);
  return transfer ? transfer->wait() : stored.clone();
}

void register_kernels(torch::Library& m) {
  m.impl("store_start", store_start);
  m.impl("store_wait", store_wait);
  m.impl("load_start", load_start);
  m.impl("load_wait", load_wait);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(zero3, m) {
  const std::vector<at::Tag> tags{at::Tag::cudagraph_unsafe};
  m.def("store_start(Tensor tensor, int? tier=None, Tensor? after=None) -> Tensor", tags);
  m.def("store_wait(Tensor handle, Tensor tensor, Tensor? after=None) -> Tensor", tags);
  m.def("load_start(Tensor stored, Tensor? after=None, str device='') -> Tensor", tags);
  m.def("load_wait(Tensor handle, Tensor stored, Tensor? after=None, str device='') -> Tensor",
        tags);
}

TORCH_LIBRARY_IMPL(zero3, CPU, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(zero3, CUDA, m) { register_kernels(m); }

}  // namespace zero3
