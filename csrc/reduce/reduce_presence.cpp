// The part of a reduction in which ranks tell each other which gradients they bring.
#include <set>

#include "parameter/registry.h"
#include "reduce/presence_check.h"
#include "reduce/reduce.h"
#include "support/autograd.h"
#include "support/error.h"
#include "support/user_state.h"
#include "transport/reduce_bucket.h"
#include "transport/transport.h"

namespace zero3 {

namespace {

// Whether ranks tell each other, when a backward begins, whether they have its gradient.
bool exchanges_presence(const Parameter& parameter) {
  if (!parameter.transport) return false;
  const auto& can = parameter.transport->can;
  const auto& settings = parameter.settings;
  const bool is_asked_for =
      settings.reduce_scatter_unused_params || settings.requires_gradient_on_all_ranks;
  return parameter.is_reduced_over_ranks() && can.tells_presence &&
         (can.reduces_in_any_order || is_asked_for);
}

// Whether the running backward reduces a gradient of `parameter`, if it has one on some rank.
bool brings_gradient(const ParameterPtr& parameter) {
  return exchanges_presence(*parameter) && parameter->is_reduced_now() &&
         parameter->placeholder.requires_grad() && parameter->is_wanted();
}

bool contains(const std::vector<int64_t>& numbers, int64_t number) {
  return std::ranges::find(numbers, number) != numbers.end();
}

}  // namespace

void announce_presences(const std::vector<ParameterPtr>& parameters) {
  if (in_backward() && is_in_node()) Reduction::current()->announce(parameters);
}

void exchange_presences(const std::vector<ParameterPtr>& parameters) {
  if (in_backward()) Reduction::current()->exchange(parameters);
}

std::vector<std::unique_ptr<PresenceCheck>> Reduction::presence_checks_of(
    const std::vector<ParameterPtr>& parameters, Occasion occasion) {
  std::vector<std::unique_ptr<PresenceCheck>> checks;
  for (auto& group : PresenceCheck::groups_of(parameters)) {
    auto& backward = backward_of(*group.front());
    checks.push_back(std::make_unique<PresenceCheck>(std::move(group), backward, occasion));
  }
  return checks;
}

void Reduction::announce(const std::vector<ParameterPtr>& parameters) {
  WithoutUserModes guard;
  std::lock_guard lock(mutex_);
  begin_presence_checks(parameters);
}

void Reduction::exchange(const std::vector<ParameterPtr>& parameters) {
  WithoutUserModes guard;
  const BelowAutograd below_autograd;  // a recomputed forward records
  finish_presence_checks_around();
  std::lock_guard lock(mutex_);
  begin_presence_checks(parameters);
  finish_presence_checks();
}

void Reduction::finish_presence_checks_around() {
  for (auto& reduction : running_around()) {
    std::lock_guard lock(reduction->mutex_);
    reduction->finish_presence_checks();
  }
}

void Reduction::begin_presence_checks(const std::vector<ParameterPtr>& parameters) {
  if (is_ending_) return;  // hooks of gradients gather too
  for (auto& parameter : parameters) {
    const int64_t number = parameter->model_number;
    if (contains(checked_, number) || unreduced_.contains(number)) continue;
    if (std::ranges::any_of(Registry::get().of_model(number), brings_gradient))
      begin_presence_checks(*parameter);
    else
      unreduced_.insert(number);
  }
}

void Reduction::begin_presence_checks(const Parameter& parameter) {
  if (contains(checked_, parameter.model_number)) return;
  finish_presence_checks_around();
  // Ranks may come to the models in different orders.
  std::set<int64_t> in_graph;
  for (auto& other : Registry::get().alive())
    if (exchanges_presence(*other) && other->is_wanted() && is_in_graph(other->placeholder))
      in_graph.insert(other->model_number);
  in_graph_.insert(in_graph.begin(), in_graph.end());
  std::vector<int64_t> numbers(in_graph.begin(), in_graph.end());
  // Last, if it is only gathered: a rank whose first action is a gradient has not come to it.
  if (!in_graph.contains(parameter.model_number)) numbers.push_back(parameter.model_number);
  for (const int64_t number : numbers) {
    if (contains(checked_, number)) continue;
    checked_.push_back(number);
    auto parameters = Registry::get().of_model(number);
    std::erase_if(parameters, [](auto& other) { return !exchanges_presence(*other); });
    for (auto& check : presence_checks_of(parameters, Occasion::kBackward))
      presence_checks_.push_back(std::move(check));
  }
}

void Reduction::finish_presence_checks() {
  std::vector<ParameterPtr> missing;
  for (auto& check : presence_checks_) {
    if (check->is_finished()) continue;
    check->finish();
    move_first_if_mixed();
    for (auto& [parameter, dtype] : check->sums()) {
      const auto leaf = parameter->settings.gradient_dtypes.leaf.value_or(dtype);
      parameter->gradients.widen(c10::promoteTypes(leaf, dtype));
    }
    std::ranges::copy_if(check->missing(), std::back_inserter(missing),
                         [this](auto& parameter) { return !is_held(parameter); });
  }
  for (auto& parameter : missing) send_zero(parameter);  // with all checks finished
}

std::optional<at::ScalarType> Reduction::dtype_on_all_ranks(const ParameterPtr& parameter) const {
  auto dtype = parameter->settings.gradient_dtypes.leaf;
  for (auto& check : presence_checks_)
    if (const auto of_sums = check->sum_dtype_of(parameter))
      dtype = c10::promoteTypes(dtype.value_or(*of_sums), *of_sums);
  return dtype;
}

void Reduction::send_zero(const ParameterPtr& parameter) {
  const auto dtype = dtype_on_all_ranks(parameter).value_or(parameter->compute_dtype);
  const auto selected = select_bucket(*parameter, dtype, /*is_normalized=*/true);
  auto& bucket = bucket_for(parameter, selected.key);
  bucket.add_zero(parameter, selected.normalized_dtype);
  launch_if_full(bucket);
}

bool Reduction::is_held(const ParameterPtr& parameter) const {
  return !parameter->transport->can.reduces_in_any_order && is_mixed(parameter);
}

void Reduction::move_first_if_mixed() {
  for (auto* buckets : {&open_, &in_flight_}) {
    const auto bucket = std::ranges::find_if(
        *buckets, [this](auto& other) { return is_mixed(other->parameters().front()); });
    if (bucket == buckets->end()) continue;
    ZERO3_CHECK(!mixed_first_, "two gradients were sent before ranks had told what they bring");
    if (buckets == &open_) (*bucket)->close();
    mixed_first_ = std::move(*bucket);
    buckets->erase(bucket);
  }
}

bool Reduction::is_mixed(const ParameterPtr& parameter) const {
  return std::ranges::any_of(presence_checks_,
                             [&](auto& check) { return check->is_mixed(parameter); });
}

}  // namespace zero3
