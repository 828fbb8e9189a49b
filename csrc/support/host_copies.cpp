#include "support/host_copies.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "support/tensor_ops.h"

namespace zero3 {
namespace {

std::mutex mutex;
std::map<std::pair<c10::DeviceIndex, CopyStream>, c10::Stream> streams;

c10::Stream copy_stream(at::Device device, CopyStream stream) {
  std::lock_guard lock(mutex);
  const std::pair key{device.index(), stream};
  auto found = streams.find(key);
  if (found == streams.end()) {
    const c10::impl::VirtualGuardImpl devices(device.type());
    found = streams.emplace(key, devices.getStreamFromGlobalPool(device)).first;
  }
  return found->second;
}

c10::Event event_on(const c10::Stream& stream) {
  c10::Event event(stream.device_type());
  event.record(stream);
  return event;
}

}  // namespace

c10::Stream current_stream(at::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

OnCopyStream::OnCopyStream(at::Device device, CopyStream stream)
    : before_(event_on(current_stream(device))), guard_(copy_stream(device, stream)) {
  before_.block(guard_.current_stream());
}

c10::Event OnCopyStream::record() const { return event_on(stream()); }

void wait_on_current_stream(const c10::Event& event, at::Device device) {
  event.block(current_stream(device));
}

void start_copy(const at::Tensor& from, const at::Tensor& to) {
  auto source = from;
  if (source.strides() != to.strides())  // else the host would lay it out, and wait
    source = tensor_ops::empty_strided(to.sizes(), to.strides(), from.options()).copy_(from);
  to.copy_(source, /*non_blocking=*/true);
}

at::Tensor copy_to_host(const at::Tensor& tensor, const at::Tensor& like) {
  const OnCopyStream guard(tensor.device(), CopyStream::kGradients);
  const auto options = at::TensorOptions(tensor.scalar_type()).pinned_memory(like.is_pinned());
  auto copy = tensor_ops::empty_strided(like.sizes(), like.strides(), options);
  start_copy(tensor, copy);
  tensor.record_stream(guard.stream());
  return copy;
}

void wait_for_host_copies(CopyStream stream) {
  std::vector<c10::Stream> found;
  {
    std::lock_guard lock(mutex);
    for (auto& [key, each] : streams)
      if (key.second == stream) found.push_back(each);
  }
  for (auto& each : found) each.synchronize();
}

}  // namespace zero3
