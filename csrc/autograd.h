// What the runtime asks of torch's autograd. No other file reads the engine's headers.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>

namespace zero3 {

// The backward that the autograd engine runs on this thread, by number; -1 outside of one.
int running_backward();
inline bool in_backward() { return running_backward() != -1; }

// Calls `function` at the end of the running backward, which owns it until then.
void at_end_of_backward(std::function<void()> function);

// Whether the running backward was asked for the gradient of `leaf`, among others. Under
// torch.autograd.grad or backward(inputs=...) the engine accumulates into chosen leaves only.
bool is_wanted(const at::Tensor& leaf);

// Whether `leaf` is in the graph of the running backward.
bool is_in_graph(const at::Tensor& leaf);

// Makes the engine cast gradients that reach `tensor` to `dtype` (nullopt: leave them as they are)
// before it sums them, as it does for a leaf with that `Tensor.grad_dtype`. Also for non-leaves.
void declare_grad_dtype(const at::Tensor& tensor, std::optional<at::ScalarType> dtype);

// Version counter of `tensor`, which counts writes to it; disabled for a tensor of inference mode.
c10::VariableVersion version_counter_of(const at::Tensor& tensor);

}  // namespace zero3
