#include "reduce/presence_check.h"

#include <algorithm>

#include "support/autograd.h"
#include "support/error.h"
#include "support/guides.h"
#include "support/profiler_range.h"
#include "transport/channel.h"
#include "transport/transport.h"

namespace zero3 {
namespace {

Presence announce(const Parameter& parameter, Occasion occasion, const GradientsToCome& to_come) {
  const auto& placeholder = parameter.placeholder();
  const auto dtype = parameter.gradients.arrived_dtype();
  const auto state = [&] {
    if (!placeholder.requires_grad()) return PresenceState::kFrozen;
    if (!parameter.is_reduced_now()) return PresenceState::kWithheld;
    if (occasion == Occasion::kBackward && is_in_graph(placeholder) && is_wanted(placeholder))
      return PresenceState::kGradient;
    return dtype ? PresenceState::kSum : PresenceState::kNothing;
  }();
  const auto place = std::min<size_t>(to_come.place_of(placeholder), UINT16_MAX);
  return {state, dtype ? static_cast<int8_t>(*dtype) : Presence::kNoDtype,
          static_cast<uint16_t>(place)};
}

// Combines the presences of two ranks, or of two sets of ranks.
PresenceState combine(PresenceState one, PresenceState other) {
  if (one == other) return one;
  const auto has_some = [](PresenceState state) {
    return state == PresenceState::kGradient || state == PresenceState::kSum ||
           state == PresenceState::kOnAll;
  };
  if (has_some(one) && has_some(other)) return PresenceState::kOnAll;
  const auto may_lack = [&](PresenceState state) {
    return has_some(state) || state == PresenceState::kNothing || state == PresenceState::kOnSome;
  };
  if (may_lack(one) && may_lack(other)) return PresenceState::kOnSome;
  const auto has_none = [](PresenceState state) {
    return state == PresenceState::kNothing || state == PresenceState::kFrozen;
  };
  return has_none(one) && has_none(other) ? PresenceState::kFrozen : PresenceState::kConflict;
}

int8_t promote(int8_t one, int8_t other) {
  if (one == Presence::kNoDtype || other == Presence::kNoDtype) return std::max(one, other);
  return static_cast<int8_t>(
      c10::promoteTypes(static_cast<at::ScalarType>(one), static_cast<at::ScalarType>(other)));
}

Presences combine(const std::vector<Presences>& ranks) {
  Presences result = ranks.front();
  for (auto& of_rank : ranks)
    for (size_t i = 0; i < result.size(); ++i)
      result[i] = {combine(result[i].state, of_rank[i].state),
                   promote(result[i].sum_dtype, of_rank[i].sum_dtype),
                   std::max(result[i].place, of_rank[i].place)};
  return result;
}

// Combines the presences of ranks that reach their gradients in one order. Gradients that come in
// another order on some rank are kOnAll.
Presences combine_ordered(const std::vector<Presences>& ranks) {
  auto result = combine(ranks);
  struct Gradient {
    size_t index;
    std::vector<uint16_t> places;  // the last of all, and then that on each rank
  };
  std::vector<Gradient> to_come;
  for (size_t i = 0; i < result.size(); ++i) {
    if (result[i].state != PresenceState::kGradient) continue;
    auto& places = to_come.emplace_back(i).places;
    places.push_back(result[i].place);
    for (auto& of_rank : ranks) places.push_back(of_rank[i].place);
  }
  std::ranges::stable_sort(to_come, {}, &Gradient::places);
  const Gradient* latest = nullptr;
  for (auto& each : to_come) {
    // Gradients of one place come from one graph, in its order.
    if (!latest || latest->places == each.places ||
        std::ranges::equal(latest->places, each.places, std::ranges::less{}))
      latest = &each;
    else
      result[each.index].state = PresenceState::kOnAll;
  }
  return result;
}

const char* name_of(PresenceState state) {
  switch (state) {
    case PresenceState::kGradient:
      return "has a gradient";
    case PresenceState::kSum:
      return "has a sum that is not reduced yet";
    case PresenceState::kFrozen:
      return "is frozen (requires_grad=False)";
    case PresenceState::kWithheld:
      return "is not reduced now (set_requires_gradient_sync(False), or defer_reduction)";
    default:
      return "has no gradient";
  }
}

// "'fqn' has a gradient on rank 0, 2, is frozen (requires_grad=False) on rank 1"
std::string describe(const Parameter& parameter, const std::vector<Presences>& ranks, size_t i) {
  const auto names = parameter.transport()->rank_names();
  std::string text = "'" + parameter.fqn() + "'";
  for (auto state : {PresenceState::kGradient, PresenceState::kSum, PresenceState::kNothing,
                     PresenceState::kFrozen, PresenceState::kWithheld}) {
    std::string which;
    for (size_t rank = 0; rank < ranks.size(); ++rank)
      if (ranks[rank][i].state == state)
        which += (which.empty() ? "" : ", ") + names.of(static_cast<int64_t>(rank));
    if (which.empty()) continue;
    text += std::string(text.back() == '\'' ? " " : ", ") + name_of(state) + " on rank " + which;
  }
  return text;
}

}  // namespace

std::vector<std::vector<ParameterPtr>> PresenceCheck::groups_of(
    const std::vector<ParameterPtr>& parameters) {
  std::vector<std::vector<ParameterPtr>> groups;
  for (auto& parameter : parameters) {
    auto group = std::ranges::find_if(groups, [&](auto& other) {
      return other.front()->model_number == parameter->model_number &&
             other.front()->transport()->joins(*parameter->transport()) &&
             is_same(other.front()->replicas.get(), parameter->replicas.get());
    });
    if (group == groups.end()) group = groups.emplace(group);
    group->push_back(parameter);
  }
  return groups;
}

PresenceCheck::PresenceCheck(std::vector<ParameterPtr> parameters, Backward& backward,
                             Occasion occasion, const GradientsToCome& to_come)
    : parameters_(std::move(parameters)), occasion_(occasion) {
  const ProfilerRange range([&] { return scope_name(parameters_, "presence start"); });
  for (auto& parameter : parameters_) mine_.push_back(announce(*parameter, occasion, to_come));
  gather_ = backward.gather_presences(parameters_, mine_, occasion);
}

void PresenceCheck::finish() {
  const ProfilerRange range([&] { return scope_name(parameters_, "presence wait"); });
  const bool is_replicated = parameters_.front()->replicas != nullptr;
  const bool is_ordered = !parameters_.front()->transport()->can.reduces_in_any_order;
  const auto ranks = std::exchange(gather_, nullptr)->finish();
  const bool has_order = is_replicated || parameters_.front()->transport()->can.sends_messages;
  auto all = has_order ? combine_ordered(ranks) : combine(ranks);
  if (is_replicated)
    all = combine_ordered(
        gather_presences(*parameters_.front()->replicas, parameters_, all, occasion_)->finish());
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto& parameter = parameters_[i];
    const auto [state, sum_dtype, _] = all[i];
    const bool has_sums = sum_dtype != Presence::kNoDtype;
    if (has_sums) sums_.emplace_back(parameter, static_cast<at::ScalarType>(sum_dtype));
    // A parameter that was frozen since has its sum reduced all the same.
    const bool is_mixed = state == PresenceState::kOnAll || state == PresenceState::kOnSome ||
                          state == PresenceState::kConflict ||
                          (state == PresenceState::kFrozen && has_sums);
    if (!is_mixed) continue;
    const bool is_strict =
        state == PresenceState::kOnSome && parameter->settings.requires_gradient_on_all_ranks;
    ZERO3_CHECK(state != PresenceState::kConflict && !is_strict,
                "ranks disagree on a gradient: ", describe(*parameter, ranks, i),
                is_replicated ? " (of those with other shards; replicas may differ too)" : "",
                is_strict
                    ? "; set_requires_gradient_on_all_ranks(False) lets it count as zero there"
                    : "; let all ranks do the same",
                ". See ", is_strict ? guides::kGradientsOnSomeRanks : guides::kDisagreement);
    mixed_.push_back(parameter);
    const auto& dtypes = parameter->settings.gradient_dtypes;
    ZERO3_CHECK(!is_ordered || dtypes.leaf || dtypes.wire, "ranks bring different gradients of '",
                parameter->fqn(),
                "', or in another order, and cannot know each other's dtypes, since its grad_dtype "
                "is None: set grad_dtype, or reduce_dtype of MixedPrecisionPolicy");
    if (mine_[i].state != PresenceState::kGradient && mine_[i].sum_dtype == Presence::kNoDtype)
      missing_.push_back(parameter);
  }
}

bool PresenceCheck::is_mixed(const ParameterPtr& parameter) const {
  return std::ranges::find(mixed_, parameter) != mixed_.end();
}

std::optional<at::ScalarType> PresenceCheck::sum_dtype_of(const ParameterPtr& parameter) const {
  const auto found = std::ranges::find(sums_, parameter, [](auto& sum) { return sum.first; });
  return found == sums_.end() ? std::nullopt : std::optional(found->second);
}

}  // namespace zero3
