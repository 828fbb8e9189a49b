// Asynchronous copies between memory and a tier.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <future>
#include <memory>

#include "features/tier/file_tier.h"

namespace zero3 {

// A copy that one of torch's inter-op threads makes, which keeps the memory of both alive, whatever
// `.data` becomes meanwhile.
class Transfer {
 public:
  // Starts to copy `tensor` to `stored`, which is in a file.
  static std::unique_ptr<Transfer> store(const at::Tensor& tensor, const at::Tensor& stored);
  // Starts to copy `stored`, which is in a file, to new memory.
  static std::unique_ptr<Transfer> load(const at::Tensor& stored);

  // Waits for the copy, and returns it. Throws errors of the disk.
  at::Tensor wait();
  // Whether it is a copy of the memory of `tensor`.
  bool is_of(const at::Tensor& tensor) const { return tensor.const_data_ptr() == from_; }

 private:
  Transfer(const at::Tensor& source, at::Tensor result, std::shared_ptr<FileTier> tier,
           std::function<void()> copy);
  static std::shared_future<double> launch(std::function<void()> copy);

  const void* const from_;
  const at::Tensor result_;
  const std::shared_ptr<FileTier> tier_;
  const std::shared_future<double> seconds_;  // that the copy takes
  bool is_counted_ = false;
};

}  // namespace zero3
