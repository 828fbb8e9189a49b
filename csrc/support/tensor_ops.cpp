#include "support/tensor_ops.h"

#include <ATen/ops/div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>

namespace zero3::tensor_ops {

at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return at::empty(sizes, options);
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides,
                         const at::TensorOptions& options) {
  return at::empty_strided(sizes, strides, options);
}

at::Tensor empty_like(const at::Tensor& like, const at::TensorOptions& options) {
  return at::empty_like(like, options);
}

at::Tensor zeros(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return at::zeros(sizes, options);
}

void div_out(const at::Tensor& out, const at::Tensor& dividend, double divisor) {
  at::div_out(const_cast<at::Tensor&>(out), dividend, at::scalar_tensor(divisor, at::kDouble));
}

void mm_out(const at::Tensor& out, const at::Tensor& left, const at::Tensor& right) {
  at::mm_out(const_cast<at::Tensor&>(out), left, right);
}

}  // namespace zero3::tensor_ops
