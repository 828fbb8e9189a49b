#include "parameter.h"

#include <ATen/ops/isfinite.h>
#include <ATen/ops/isinf.h>
#include <ATen/ops/isnan.h>

#include <algorithm>

#include "apart.h"
#include "autograd.h"
#include "error.h"
#include "memory.h"

namespace zero3 {

int64_t Parameter::row_numel() const {
  int64_t numel = 1;
  for (size_t d = 1; d < sizes.size(); ++d) numel *= sizes[d];
  return numel;
}

std::vector<int64_t> Parameter::sizes_with_rows(int64_t rows) const {
  std::vector<int64_t> result = sizes;
  result[0] = rows;
  return result;
}

uint64_t Parameter::shard_version() const {
  return (version.enabled() ? version.current_version() : 0) +
         (shard.is_inference() ? 0 : shard._version());
}

void Parameter::hold(const at::Tensor& full, bool read_only) {
  gathered = full;
  gathered_version = full.is_inference() ? 0 : full._version();
  is_read_only = read_only;
}

void Parameter::let_go() {
  gathered.reset();
  held_version.reset();
}

bool Parameter::was_written() const {
  return gathered.defined() && !gathered.is_inference() && gathered._version() != gathered_version;
}

void Parameter::make_writable() {
  Apart apart;
  if (gathered.defined() && is_read_only) hold(pooled_copy(gathered));
}

bool Parameter::stays_after_forward() const {
  return held_version && (in_backward() || !reshard_after_forward);
}

void Parameter::shard_after_forward(const at::Tensor& full, uint64_t version) {
  auto& there = *after_forward;
  there.fqn = fqn;
  const auto start = std::min(there.rank * there.chunk_rows(), rows());
  there.shard = pooled_copy(full.narrow(0, start, there.shard_rows()));
  there.held_version = version;
}

void Parameter::forget_after_forward() {
  if (after_forward) after_forward->shard.reset();
}

ParameterPtr Parameter::source_of(const ParameterPtr& parameter) {
  const auto& there = parameter->after_forward;
  const bool is_there = in_backward() && there && there->shard.defined() &&
                        *there->held_version == parameter->shard_version();
  return is_there ? there : parameter;
}

void Parameter::add_partial(PartialGradient added) {
  std::lock_guard lock(accumulation_mutex);
  if (partial) {
    const auto wider = c10::promoteTypes(partial->shard.scalar_type(), added.shard.scalar_type());
    auto sum = partial->shard.to(wider);
    if (partial->divisor != added.divisor) sum = sum.mul(added.divisor / partial->divisor);
    added.shard = sum.add_(added.shard);
    added.wire_dtype = c10::promoteTypes(partial->wire_dtype, added.wire_dtype);
    added.shard_dtype = c10::promoteTypes(partial->shard_dtype, added.shard_dtype);
  }
  partial = std::move(added);
}

std::optional<PartialGradient> Parameter::take_partial() {
  std::lock_guard lock(accumulation_mutex);
  return std::exchange(partial, std::nullopt);
}

void Parameter::detect_nonfinite(const at::Tensor& raw) {
  if (!detects_nonfinite || at::isfinite(raw).all().item<bool>()) return;
  std::lock_guard lock(accumulation_mutex);
  if (!nonfinite) nonfinite = Nonfinite();
  nonfinite->nans += at::isnan(raw).sum().item<int64_t>();
  nonfinite->infinities += at::isinf(raw).sum().item<int64_t>();
  nonfinite->numel += raw.numel();
}

std::optional<Parameter::Nonfinite> Parameter::take_nonfinite() {
  std::lock_guard lock(accumulation_mutex);
  return std::exchange(nonfinite, std::nullopt);
}

bool Parameter::has_sum() {
  std::lock_guard lock(accumulation_mutex);
  return accumulated.defined();
}

bool Parameter::has_accumulated() {
  std::lock_guard lock(accumulation_mutex);
  return accumulated.defined() || partial;
}

void Parameter::drop_accumulated() {
  std::lock_guard lock(accumulation_mutex);
  accumulated.reset();
  arrived_dtype.reset();
  partial.reset();
  nonfinite.reset();
  dropped = true;
  pending_uses = 0;
  forget_after_forward();
}

void Parameter::add_use(bool first) {
  if (in_backward()) return;
  pending_uses = first ? 1 : pending_uses + 1;
}

bool Parameter::is_contiguous() const {
  if (chunk_numel() == 0) return true;
  int64_t expected = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    if (sizes[d] != 1 && strides[d] != expected) return false;
    expected *= sizes[d];
  }
  return true;
}

bool is_wanted(const Parameter& parameter) {
  return !parameter.placeholder.defined() || is_wanted(parameter.placeholder);
}

std::vector<std::string> names_of(const std::vector<ParameterPtr>& parameters) {
  std::vector<std::string> result;
  for (auto& parameter : parameters) result.push_back(parameter->fqn);
  return result;
}

std::string scope_name(const std::string& what, const std::vector<ParameterPtr>& parameters) {
  const auto more = parameters.size() - 1;
  return "zero3::" + what + " " + parameters.front()->fqn +
         (more > 0 ? " and " + std::to_string(more) + " more" : "");
}

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

std::set<int64_t> Registry::live_roots() {
  std::set<int64_t> result;
  for (auto& parameter : alive()) result.insert(parameter->root);
  return result;
}

std::vector<ParameterPtr> Registry::of_root(int64_t root) {
  auto result = alive();
  std::erase_if(result, [root](const ParameterPtr& p) { return p->root != root; });
  return result;
}

}  // namespace zero3
