#include "parameter/registry.h"

#include <algorithm>

#include "support/error.h"

namespace zero3 {
namespace {

void check_found(bool is_found, const at::Tensor& placeholder) {
  ZERO3_CHECK(is_found, "a tensor ", placeholder.sizes(), " of ", placeholder.scalar_type(),
              " is the placeholder of no live sharded parameter: its model was deleted, or the "
              "tensor is something else");
}

}  // namespace

Registry& Registry::get() {
  static Registry registry;
  return registry;
}

void Registry::add(const ParameterPtr& parameter) {
  std::lock_guard lock(mutex_);
  if (parameter->order != 0) return;
  parameter->order = ++registered_;
  parameters_[parameter->order] = parameter;
  if (const auto& placeholder = parameter->placeholder(); placeholder.defined())
    by_placeholder_[placeholder.storage().unsafeGetStorageImpl()] = {parameter, {}};
}

void Registry::add(const SourcePtr& source) {
  std::lock_guard lock(mutex_);
  by_placeholder_[source->placeholder.storage().unsafeGetStorageImpl()] = {{}, source};
}

Gatherable Registry::find_gatherable_or_null(const at::Tensor& placeholder) {
  if (!placeholder.has_storage()) return {};
  std::lock_guard lock(mutex_);
  auto found = by_placeholder_.find(placeholder.storage().unsafeGetStorageImpl());
  if (found == by_placeholder_.end()) return {};
  if (auto parameter = found->second.parameter.lock()) return {parameter->source, parameter};
  return {found->second.source.lock(), nullptr};
}

ParameterPtr Registry::find_or_null(const at::Tensor& placeholder) {
  return find_gatherable_or_null(placeholder).parameter;
}

Gatherable Registry::find_gatherable(const at::Tensor& placeholder) {
  auto found = find_gatherable_or_null(placeholder);
  check_found(found.source != nullptr, placeholder);
  return found;
}

ParameterPtr Registry::find(const at::Tensor& placeholder) {
  auto parameter = find_or_null(placeholder);
  check_found(parameter != nullptr, placeholder);
  return parameter;
}

ParameterPtr Registry::find_for_gradient(const at::Tensor& whose) {
  const bool is_ordinal = whose.scalar_type() == at::kLong && whose.is_cpu() && whose.dim() == 1 &&
                          whose.numel() == 1 && whose.storage().nbytes() != 0;
  if (!is_ordinal) return find(whose);
  const auto ordinal = *whose.const_data_ptr<int64_t>();
  std::lock_guard lock(mutex_);
  auto found = parameters_.find(ordinal);
  auto parameter = found == parameters_.end() ? nullptr : found->second.lock();
  ZERO3_CHECK(parameter, "a gradient is that of the sharded parameter number ", ordinal,
              " of this process, and there is no such parameter: its model was deleted");
  return parameter;
}

std::vector<ParameterPtr> Registry::alive() {
  std::lock_guard lock(mutex_);
  std::erase_if(parameters_, [](auto& item) { return item.second.expired(); });
  std::erase_if(by_placeholder_, [](auto& item) {
    return item.second.parameter.expired() && item.second.source.expired();
  });
  std::vector<ParameterPtr> result;
  for (auto& [order, weak] : parameters_)
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
