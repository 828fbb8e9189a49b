// The runtime's interface to torch's autograd. Only autograd.cpp includes the engine's headers.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <string>
#include <unordered_map>

namespace zero3 {

// Number of the backward that the autograd engine runs on this thread; -1 outside a backward.
int running_backward();
inline bool in_backward() { return running_backward() != -1; }
// Whether the engine runs a node of the running backward on this thread. It runs none in callbacks
// at the end of a backward, and under compiled autograd.
bool is_in_node();
// At the end of a backward: whether it ran inside of another, as reentrant checkpoints do.
bool is_nested();

// Raises in a backward unless is_in_node(). Compiled autograd calls a trace of a backward's nodes
// in place of the engine, and nothing at the end of the backward. `fqn` names a parameter of the
// backward.
void check_not_compiled(const std::string& fqn);

// Calls `function` at the end of the running backward. The backward owns `function` until then.
void at_end_of_backward(std::function<void()> function);

// Whether the running backward was asked for the gradient of `leaf`, among others. Under
// torch.autograd.grad or backward(inputs=...) the engine accumulates into chosen leaves only.
bool is_wanted(const at::Tensor& leaf);

// Whether `leaf` is in the graph of the running backward.
bool is_in_graph(const at::Tensor& leaf);

// The gradients of leaves that are still to come in a backward: one for each use that it reaches,
// as far as the graph tells. A node may bring none in the end.
class GradientsToCome {
 public:
  // Of the running backward. None, outside of one.
  GradientsToCome();

  int64_t number_of(const at::Tensor& leaf) const;
  // Call when one has arrived.
  void arrives(const at::Tensor& leaf);

  // Place of a leaf's last gradient among the last ones of all leaves, from 0 on; 0 if none comes.
  // Uses in one compiled graph have one place.
  size_t place_of(const at::Tensor& leaf) const;

 private:
  struct OfLeaf {
    int64_t number = 0;
    uint64_t first_use = UINT64_MAX;  // in the forward, as its node is numbered
    size_t place = 0;
  };
  OfLeaf find(const at::Tensor& leaf) const;

  std::unordered_map<const void*, OfLeaf> by_accumulator_;  // the leaves' nodes
};

// Makes the engine cast gradients that reach `tensor` to `dtype` (nullopt: leave them as they are)
// before it sums them, as for a leaf with that `Tensor.grad_dtype`. Also accepts non-leaves.
void declare_grad_dtype(const at::Tensor& tensor, std::optional<at::ScalarType> dtype);

// Version counter of `tensor`, which counts in-place writes; disabled for an inference tensor.
c10::VariableVersion version_counter_of(const at::Tensor& tensor);

}  // namespace zero3
