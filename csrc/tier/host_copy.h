// Copies of activations between a device and page-locked host memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <memory>

namespace zero3 {

// A copy on a stream of its own. It keeps what it reads and writes alive until it has been waited
// for, or made.
class HostCopy {
 public:
  // Starts to copy `tensor` to host memory, with its strides.
  static std::unique_ptr<HostCopy> store(const at::Tensor& tensor);
  // Starts to copy `stored`, which is in host memory, to `device`.
  static std::unique_ptr<HostCopy> load(const at::Tensor& stored, at::Device device);
  ~HostCopy();
  HostCopy(const HostCopy&) = delete;
  HostCopy& operator=(const HostCopy&) = delete;

  // Makes the device's current stream wait for the copy, and returns it. The host does not wait.
  at::Tensor wait();

 private:
  HostCopy(at::Tensor source, at::Tensor result, at::Device device, c10::Event made);

  at::Tensor source_;
  const at::Tensor result_;
  const at::Device device_;
  const c10::Event made_;
};

}  // namespace zero3
