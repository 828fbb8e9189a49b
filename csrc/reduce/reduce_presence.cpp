// The part of a reduction in which ranks tell each other which gradients they bring.
#include "parameter/registry.h"
#include "reduce/presence_check.h"
#include "reduce/reduce.h"
#include "support/error.h"
#include "transport/reduce_bucket.h"
#include "transport/transport.h"

namespace zero3 {

namespace {

// Whether ranks tell each other, when a backward begins, whether they have its gradient.
bool is_told(const Parameter& parameter) {
  const auto& can = parameter.transport->can;
  const auto& settings = parameter.settings;
  const bool is_wanted =
      settings.reduce_scatter_unused_params || settings.requires_gradient_on_all_ranks;
  return parameter.has_others() && can.tells_presence && (can.reduces_in_any_order || is_wanted);
}

}  // namespace

std::vector<std::unique_ptr<PresenceCheck>> Reduction::presence_checks_of(
    const std::vector<ParameterPtr>& parameters, Occasion occasion) {
  std::vector<std::unique_ptr<PresenceCheck>> checks;
  for (auto& group : PresenceCheck::groups_of(parameters)) {
    auto& backward = backward_of(*group.front());
    checks.push_back(std::make_unique<PresenceCheck>(std::move(group), backward, occasion));
  }
  return checks;
}

void Reduction::begin_presence_checks(int64_t model_number) {
  if (std::ranges::find(checked_, model_number) != checked_.end()) return;
  checked_.push_back(model_number);
  auto parameters = Registry::get().of_model(model_number);
  std::erase_if(parameters, [](auto& parameter) { return !is_told(*parameter); });
  for (auto& parameter : parameters) {
    const auto& dtypes = parameter->settings.gradient_dtypes;
    const bool is_known = dtypes.leaf || dtypes.wire || !parameter->placeholder.requires_grad();
    ZERO3_CHECK(
        is_known || parameter->transport->can.reduces_in_any_order, "'", parameter->fqn,
        "' has grad_dtype=None, so that ranks cannot know in which dtype a gradient that "
        "they lack is reduced: set its grad_dtype, or reduce_dtype of MixedPrecisionPolicy, "
        "or call set_reduce_scatter_unused_params(False) and "
        "set_requires_gradient_on_all_ranks(False)");
  }
  for (auto& check : presence_checks_of(parameters, Occasion::kBackward))
    presence_checks_.push_back(std::move(check));
}

void Reduction::finish_presence_checks() {
  for (size_t i = 0; i < presence_checks_.size(); ++i) {
    auto& check = *presence_checks_[i];
    if (check.is_finished()) continue;
    check.finish();
    move_first_if_mixed();
    for (auto& [parameter, dtype] : check.sums()) parameter->gradients.widen(dtype);
    for (auto& parameter : check.missing())
      if (parameter->transport->can.reduces_in_any_order) send_zero(parameter);
  }
}

void Reduction::send_zero(const ParameterPtr& parameter) {
  auto dtype = parameter->settings.gradient_dtypes.leaf.value_or(parameter->compute_dtype);
  for (auto& check : presence_checks_) dtype = check->sum_dtype_of(parameter).value_or(dtype);
  auto& bucket = bucket_for(parameter, dtype);
  bucket.add_zero(parameter, dtype);
  launch_if_full(bucket);
}

bool Reduction::is_held(const ParameterPtr& parameter) {
  if (parameter->transport->can.reduces_in_any_order) return false;
  finish_presence_checks();
  return is_mixed(parameter);
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
