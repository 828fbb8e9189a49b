// Copies between a device and host memory, beside the computation.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

#include <cstdint>

namespace zero3 {

// Each direction has a stream of its own, so that neither waits for the other.
enum class Direction : uint8_t { kToDevice, kToHost };

// While it lives, the current stream is the device's stream for copies in that direction. What is
// enqueued there waits for what has been enqueued on the stream that is current now.
class OnCopyStream {
 public:
  OnCopyStream(at::Device device, Direction direction);

  c10::Stream stream() const { return guard_.current_stream(); }
  // An event after what has been enqueued.
  c10::Event record() const;

 private:
  const c10::Event before_;  // after what the computation has been given
  const c10::StreamGuard guard_;
};

// Makes the device's current stream wait for `event`; the host does not.
void wait_on_current_stream(const c10::Event& event, at::Device device);

// Starts to copy `tensor` to host memory with the strides of `like`, page-locked if that is. The
// memory of `tensor` is not reused before the copy is made.
at::Tensor copy_to_host(const at::Tensor& tensor, const at::Tensor& like);
// The host waits for all copies of this process in that direction.
void wait_for_host_copies(Direction direction);

}  // namespace zero3
