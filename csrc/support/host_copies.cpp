#include "support/host_copies.h"

#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <map>
#include <mutex>
#include <utility>

namespace zero3 {
namespace {

c10::Stream copy_stream(at::Device device, Direction direction) {
  static std::mutex mutex;
  static std::map<std::pair<c10::DeviceIndex, Direction>, c10::Stream> streams;
  std::lock_guard lock(mutex);
  const std::pair key{device.index(), direction};
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

OnCopyStream::OnCopyStream(at::Device device, Direction direction)
    : guard_(copy_stream(device, direction)) {
  event_on(guard_.original_stream()).block(stream());
}

c10::Event OnCopyStream::record() const { return event_on(stream()); }

at::Tensor copy_to_host(const at::Tensor& tensor, bool pinned) {
  const OnCopyStream guard(tensor.device(), Direction::kToHost);
  const auto options = at::TensorOptions(tensor.scalar_type()).pinned_memory(pinned);
  auto copy = at::empty(tensor.sizes(), options);
  copy.copy_(tensor, /*non_blocking=*/true);
  tensor.record_stream(guard.stream());
  return copy;
}

void wait_for_copies_to_host(at::Device device) {
  copy_stream(device, Direction::kToHost).synchronize();
}

}  // namespace zero3
