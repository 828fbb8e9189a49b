// Copies of activations between a device and page-locked host memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <memory>

namespace zero3 {

// A copy on a stream of its own. What it reads and writes is not reused before it is made.
class HostCopy {
 public:
  // Starts to copy `tensor` to host memory. The copy is dense, in the order of its strides.
  static std::unique_ptr<HostCopy> store(const at::Tensor& tensor);
  // Starts to copy `stored`, which is in host memory, to `device`.
  static std::unique_ptr<HostCopy> load(const at::Tensor& stored, at::Device device);
  ~HostCopy();
  HostCopy(const HostCopy&) = delete;
  HostCopy& operator=(const HostCopy&) = delete;

  // Makes the device's current stream wait for the copy, and returns it. The host waits too if a
  // hook may read the copy there.
  at::Tensor wait();
  // Whether it is a copy of the memory of `tensor`.
  bool is_of(const at::Tensor& tensor) const { return tensor.const_data_ptr() == from_; }

 private:
  HostCopy(const at::Tensor& on_device, at::Tensor result, const void* from, c10::Stream stream,
           c10::Event made);

  at::Tensor on_device_;  // until somebody has waited
  const at::Tensor result_;
  const void* const from_;
  const c10::Stream stream_;
  const c10::Event made_;
};

}  // namespace zero3
