// Copies between a device and host memory, beside the computation.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

#include <cstdint>

namespace zero3 {

enum class Direction : uint8_t {
  kToDevice,
  kToHost
};  // each has a stream: neither waits for the other

// While it lives, the current stream is the device's stream for copies in that direction. What is
// enqueued there waits for what was enqueued on the stream that was current.
class OnCopyStream {
 public:
  OnCopyStream(at::Device device, Direction direction);

  c10::Stream stream() const { return guard_.current_stream(); }
  // An event after what has been enqueued.
  c10::Event record() const;

 private:
  const c10::StreamGuard guard_;
};

// Starts to copy `tensor` to host memory, page-locked if `pinned`. The memory of `tensor` is not
// reused before the copy is made.
at::Tensor copy_to_host(const at::Tensor& tensor, bool pinned);
// The host waits for the copies that copy_to_host() has started.
void wait_for_copies_to_host(at::Device device);

}  // namespace zero3
