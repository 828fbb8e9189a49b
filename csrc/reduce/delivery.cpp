#include "reduce/delivery.h"

#include <algorithm>
#include <utility>

namespace zero3 {
namespace {

Deliver deliver;
Interrupted interrupted;

// Returns the numbers of the models of `parameters`, in order of appearance.
std::vector<int64_t> model_numbers_of(const std::vector<ParameterPtr>& parameters) {
  std::vector<int64_t> result;
  for (auto& parameter : parameters)
    if (std::ranges::find(result, parameter->model_number) == result.end())
      result.push_back(parameter->model_number);
  return result;
}

}  // namespace

void set_deliver(Deliver function) { deliver = std::move(function); }
void set_interrupted(Interrupted function) { interrupted = std::move(function); }

Delivery::~Delivery() {
  if (!delivered_.empty() && interrupted) interrupted(model_numbers_of(delivered_));
  forget(delivered_);
}

void Delivery::arrives(const ParameterPtr& parameter, bool is_foreseen) {
  delivers_early_ = true;
  if (!is_foreseen) unforeseen_.push_back(parameter);
}

void Delivery::deliver_early(std::unique_lock<std::mutex> lock) {
  if (!delivers_early_) return;
  const auto waits = [this](auto& result) {
    const auto& settings = result.parameter->settings;
    return !settings.delivers_early || settings.detects_nonfinite ||
           std::ranges::find(unforeseen_, result.parameter) != unforeseen_.end();
  };
  const auto rest = std::ranges::stable_partition(results_, waits);
  const std::vector<ReducedGradient> early(rest.begin(), rest.end());
  results_.erase(rest.begin(), rest.end());
  for (auto& result : early) {
    result.parameter->gradients.is_delivered_early = true;
    delivered_.push_back(result.parameter);
  }
  lock.unlock();
  if (!early.empty() && deliver) deliver(early, Moment::kEarly, {});
}

std::vector<ParameterPtr> Delivery::finish(Moment moment, std::unique_lock<std::mutex> lock) {
  unforeseen_.clear();
  for (auto& result : results_) delivered_.push_back(result.parameter);
  lock.unlock();
  if (deliver) deliver(std::exchange(results_, {}), moment, model_numbers_of(delivered_));
  return std::exchange(delivered_, {});
}

void Delivery::include(std::vector<ParameterPtr> delivered) {
  std::ranges::move(delivered, std::back_inserter(delivered_));
}

void Delivery::forget(const std::vector<ParameterPtr>& delivered) {
  for (auto& parameter : delivered) parameter->gradients.is_delivered_early = false;
}

}  // namespace zero3
