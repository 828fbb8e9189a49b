// Copies between a device and host memory, beside the computation.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

#include <cstdint>

namespace zero3 {

// The streams for copies of a device. None waits for another.
enum class CopyStream : uint8_t {
  kShards,     // to the device
  kGradients,  // to the host, of shards
  kStores,     // to the host, of activations
  kLoads,      // of those, to the device
};

// While an instance lives, the copy stream is the device's current stream. Its work waits for what
// was enqueued before on the stream that was current.
class OnCopyStream {
 public:
  OnCopyStream(at::Device device, CopyStream stream);

  c10::Stream stream() const { return guard_.current_stream(); }
  // An event after the enqueued work.
  c10::Event record() const;

 private:
  const c10::Event before_;  // after the work that the computation has enqueued
  const c10::StreamGuard guard_;
};

c10::Stream current_stream(at::Device device);

// Makes the device's current stream wait for `event`; the host does not.
void wait_on_current_stream(const c10::Event& event, at::Device device);

// Starts a copy to host memory on the current stream.
void start_copy(const at::Tensor& from, const at::Tensor& to);
// Starts to copy `tensor` to host memory with the strides of `like`, page-locked if that is. The
// memory of `tensor` is not reused before the copy is made.
at::Tensor copy_to_host(const at::Tensor& tensor, const at::Tensor& like);
// The host waits for all copies of this process on these streams.
void wait_for_host_copies(CopyStream stream);

}  // namespace zero3
