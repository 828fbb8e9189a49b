#include "support/autograd.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include "support/error.h"

namespace zero3 {

int running_backward() { return torch::autograd::get_current_graph_task_id(); }

bool is_nested() { return torch::autograd::get_current_node() != nullptr; }

bool is_in_node() {
  const auto node = torch::autograd::get_current_node();
  if (node == nullptr) return false;
  // Compiled autograd inside of a backward leaves the node of that one.
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  if (nodes == nullptr || nodes->empty() || nodes->contains(node.get())) return true;
  // No edge leads to the first node, but its own ones do to nodes of the graph.
  return std::ranges::any_of(node->next_edges(),
                             [&](auto& edge) { return nodes->contains(edge.function.get()); });
}

void check_not_compiled(const std::string& fqn) {
  ZERO3_CHECK(!in_backward() || is_in_node(), "a backward of '", fqn,
              "' runs outside of the autograd engine's nodes, and would lose the gradients of "
              "sharded parameters. If compiled autograd runs it, call backward() outside of "
              "functions that torch.compile compiles, or set "
              "torch._dynamo.config.compiled_autograd = False. If a callback at the end of another "
              "backward does (queue_callback), use a hook, or do so once backward() has returned");
}

void at_end_of_backward(std::function<void()> function) {
  torch::autograd::Engine::get_default_engine().queue_callback(std::move(function));
}

bool is_wanted(const at::Tensor& leaf) {
  const auto* chosen = torch::autograd::get_current_graph_task_exec_info();
  if (chosen == nullptr || chosen->empty()) return true;
  const auto accumulator = torch::autograd::impl::grad_accumulator(leaf);
  const auto found = chosen->find(accumulator.get());
  return found != chosen->end() && found->second.should_execute();
}

bool is_in_graph(const at::Tensor& leaf) {
  if (!leaf.defined()) return false;  // of a parameter in a plan
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(leaf);
  return accumulator && nodes != nullptr && nodes->contains(accumulator.get());
}

void declare_grad_dtype(const at::Tensor& tensor, std::optional<at::ScalarType> dtype) {
  auto edge = torch::autograd::impl::gradient_edge(tensor);
  ZERO3_CHECK(edge.is_valid(), "a tensor that needs no gradient has no gradient dtype");
  edge.function->mutable_input_metadata(edge.input_nr).set_grad_dtype(dtype);
}

c10::VariableVersion version_counter_of(const at::Tensor& tensor) {
  if (tensor.is_inference()) return c10::VariableVersion(c10::VariableVersion::DISABLED);
  return torch::autograd::impl::version_counter(tensor);
}

}  // namespace zero3
