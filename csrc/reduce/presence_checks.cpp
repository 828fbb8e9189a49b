#include "reduce/presence_checks.h"

#include <algorithm>

#include "parameter/registry.h"
#include "support/autograd.h"
#include "support/memory.h"

namespace zero3 {
namespace {

// Whether ranks tell each other, when a backward begins, whether they have its gradient.
bool exchanges_presence(const Parameter& parameter) {
  if (!parameter.transport()) return false;
  const auto& can = parameter.transport()->can;
  const auto& settings = parameter.settings;
  const bool is_asked_for =
      settings.reduce_scatter_unused_params || settings.requires_gradient_on_all_ranks;
  return parameter.is_reduced_over_ranks() && can.tells_presence &&
         (can.reduces_in_any_order || is_asked_for);
}

// Whether the running backward reduces a gradient of `parameter`, if it has one on some rank.
bool brings_gradient(const ParameterPtr& parameter) {
  return exchanges_presence(*parameter) && parameter->is_reduced_now() &&
         parameter->placeholder().requires_grad() && parameter->is_wanted();
}

}  // namespace

bool PresenceChecks::are_due(const Parameter& parameter) {
  if (has_ended_) return false;  // hooks of gradients gather too
  const int64_t number = parameter.model_number;
  if (checked_.contains(number) || unreduced_.contains(number)) return false;
  const bool result = std::ranges::any_of(Registry::get().of_model(number), brings_gradient);
  if (!result) unreduced_.insert(number);
  return result;
}

void PresenceChecks::begin(const Parameter& parameter) {
  // Ranks may come to the models in different orders.
  std::set<int64_t> in_graph;
  for (auto& other : Registry::get().alive())
    if (exchanges_presence(*other) && other->is_wanted() && is_in_graph(other->placeholder()))
      in_graph.insert(other->model_number);
  in_graph_.insert(in_graph.begin(), in_graph.end());
  std::vector<int64_t> numbers(in_graph.begin(), in_graph.end());
  // Last, if it is only gathered: a rank whose first action is a gradient has not come to it.
  if (!in_graph.contains(parameter.model_number)) numbers.push_back(parameter.model_number);
  for (const int64_t number : numbers) {
    if (!checked_.insert(number).second) continue;
    auto parameters = Registry::get().of_model(number);
    std::erase_if(parameters, [](auto& other) { return !exchanges_presence(*other); });
    for (auto& check : checks_of(parameters, Occasion::kBackward))
      checks_.push_back(std::move(check));
  }
}

const PresenceCheck* PresenceChecks::finish_next() {
  const auto next = std::ranges::find_if(checks_, [](auto& each) { return !each->is_finished(); });
  if (next == checks_.end()) return nullptr;
  (*next)->finish();
  for (auto& [parameter, dtype] : (*next)->sums()) {
    const auto leaf = parameter->settings.gradient_dtypes.leaf.value_or(dtype);
    parameter->gradients.widen(c10::promoteTypes(leaf, dtype));
  }
  return next->get();
}

void PresenceChecks::exchange_deposited(const std::vector<ParameterPtr>& parameters) {
  auto with_others = parameters;
  std::erase_if(with_others, [](auto& parameter) { return !parameter->is_reduced_over_ranks(); });
  for (auto& check : checks_of(with_others, Occasion::kDeferred)) {
    check->finish();
    for (auto& [parameter, dtype] : check->sums()) {
      const auto options = at::TensorOptions(dtype).device(parameter->device());
      const auto zero = pooled_empty({}, options).zero_();
      if (!parameter->gradients.has_sum()) parameter->deposit(zero.expand(parameter->sizes()));
      parameter->gradients.widen(dtype);
    }
  }
}

bool PresenceChecks::is_mixed(const ParameterPtr& parameter) const {
  return std::ranges::any_of(checks_, [&](auto& check) { return check->is_mixed(parameter); });
}

std::optional<at::ScalarType> PresenceChecks::dtype_on_all_ranks(
    const ParameterPtr& parameter) const {
  auto dtype = parameter->settings.gradient_dtypes.leaf;
  for (auto& check : checks_)
    if (const auto of_sums = check->sum_dtype_of(parameter))
      dtype = c10::promoteTypes(dtype.value_or(*of_sums), *of_sums);
  return dtype;
}

std::set<int64_t> PresenceChecks::mixed_models() const {
  std::set<int64_t> result;
  for (auto& check : checks_)
    for (auto& parameter : check->mixed()) result.insert(parameter->model_number);
  return result;
}

void PresenceChecks::clear() {
  checks_.clear();
  checked_.clear();
  in_graph_.clear();
}

PresenceChecks::Checks PresenceChecks::checks_of(const std::vector<ParameterPtr>& parameters,
                                                 Occasion occasion) {
  Checks checks;
  for (auto& group : PresenceCheck::groups_of(parameters)) {
    auto& backward = backwards_.of(*group.front());
    checks.push_back(
        std::make_unique<PresenceCheck>(std::move(group), backward, occasion, to_come_));
  }
  return checks;
}

}  // namespace zero3
