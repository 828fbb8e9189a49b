#include "grad_dtype.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

namespace zero3 {

void declare_grad_dtype(const at::Tensor& tensor, std::optional<at::ScalarType> dtype) {
  auto edge = torch::autograd::impl::gradient_edge(tensor);
  TORCH_CHECK(edge.is_valid(), "zero3: a tensor that needs no gradient has no gradient dtype");
  edge.function->mutable_input_metadata(edge.input_nr).set_grad_dtype(dtype);
}

}  // namespace zero3
