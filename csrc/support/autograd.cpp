#include "support/autograd.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <functional>
#include <set>
#include <utility>

#include "support/error.h"

namespace zero3 {
namespace {

const void* accumulator_of(const at::Tensor& leaf) {
  if (!leaf.defined()) return nullptr;  // of a parameter in a plan
  return torch::autograd::impl::try_get_grad_accumulator(leaf).get();
}

}  // namespace

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

GradientsToCome::GradientsToCome() {
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  if (nodes == nullptr) return;
  const auto* chosen = torch::autograd::get_current_graph_task_exec_info();
  const auto count = [&](torch::autograd::Node* node) {
    if (chosen != nullptr && !chosen->empty()) {
      const auto found = chosen->find(node);
      if (found == chosen->end() || !found->second.should_execute()) return;
    }
    for (auto& [next, _] : node->next_edges()) {
      if (!next || next->num_outputs() > 0) continue;
      auto& of_leaf = by_accumulator_[next.get()];
      ++of_leaf.number;
      of_leaf.first_use = std::min(of_leaf.first_use, node->sequence_nr());
    }
  };
  for (auto* node : *nodes) count(node);
  // The first node is not among those that edges lead to.
  const auto node = torch::autograd::get_current_node();
  if (node && !nodes->contains(node.get())) count(node.get());
  // A backward runs the nodes of a forward from the last to the first.
  std::set<uint64_t, std::greater<>> uses;
  for (auto& [_, of_leaf] : by_accumulator_) uses.insert(of_leaf.first_use);
  std::unordered_map<uint64_t, size_t> places;
  for (const auto use : uses) places.emplace(use, places.size());
  for (auto& [_, of_leaf] : by_accumulator_) of_leaf.place = places.at(of_leaf.first_use);
}

GradientsToCome::OfLeaf GradientsToCome::find(const at::Tensor& leaf) const {
  const auto found = by_accumulator_.find(accumulator_of(leaf));
  return found == by_accumulator_.end() ? OfLeaf{} : found->second;
}

int64_t GradientsToCome::number_of(const at::Tensor& leaf) const { return find(leaf).number; }

void GradientsToCome::arrives(const at::Tensor& leaf) {
  const auto found = by_accumulator_.find(accumulator_of(leaf));
  if (found != by_accumulator_.end() && found->second.number > 0) --found->second.number;
}

size_t GradientsToCome::place_of(const at::Tensor& leaf) const { return find(leaf).place; }

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
