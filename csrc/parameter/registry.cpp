#include "parameter/registry.h"

#include <algorithm>

#include "support/error.h"

namespace zero3 {

Registry& Registry::get() {
  static Registry registry;
  return registry;
}

void Registry::add(const ParameterPtr& parameter) {
  std::lock_guard lock(mutex_);
  if (parameter->order != 0) return;
  parameter->order = ++registered_;
  parameters_.push_back(parameter);
  if (parameter->placeholder.defined())
    by_placeholder_[parameter->placeholder.storage().unsafeGetStorageImpl()] = parameter;
}

ParameterPtr Registry::find_or_null(const at::Tensor& placeholder) {
  if (!placeholder.has_storage()) return nullptr;
  std::lock_guard lock(mutex_);
  auto found = by_placeholder_.find(placeholder.storage().unsafeGetStorageImpl());
  return found == by_placeholder_.end() ? nullptr : found->second.lock();
}

ParameterPtr Registry::find(const at::Tensor& placeholder) {
  auto parameter = find_or_null(placeholder);
  ZERO3_CHECK(parameter, "a tensor ", placeholder.sizes(), " of ", placeholder.scalar_type(),
              " is the placeholder of no live sharded parameter: its model was deleted, or the "
              "tensor is something else");
  return parameter;
}

std::vector<ParameterPtr> Registry::alive() {
  std::lock_guard lock(mutex_);
  std::erase_if(parameters_, [](auto& weak) { return weak.expired(); });
  std::erase_if(by_placeholder_, [](auto& item) { return item.second.expired(); });
  std::vector<ParameterPtr> result;
  for (auto& weak : parameters_)
    if (auto parameter = weak.lock()) result.push_back(std::move(parameter));
  return result;
}

std::set<int64_t> Registry::live_model_numbers() {
  std::set<int64_t> result;
  for (auto& parameter : alive()) result.insert(parameter->model_number);
  return result;
}

std::vector<ParameterPtr> Registry::of_model(int64_t number) {
  auto result = alive();
  std::erase_if(result, [number](const ParameterPtr& p) { return p->model_number != number; });
  return result;
}

}  // namespace zero3
