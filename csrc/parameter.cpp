#include "parameter.h"

#include <ATen/ops/isfinite.h>
#include <ATen/ops/isinf.h>
#include <ATen/ops/isnan.h>

#include <algorithm>
#include <ranges>

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

void Registry::add(const ParameterPtr& parameter, const std::string& fqn) {
  std::lock_guard lock(mutex_);
  auto& slot = parameters_[fqn];
  ZERO3_CHECK(slot.expired(), "two live sharded parameters would be called '", fqn, "'");
  slot = parameter;
  parameter->fqn = fqn;
  if (parameter->order == 0) parameter->order = ++registered_;
}

void Registry::remove(const ParameterPtr& parameter) {
  std::lock_guard lock(mutex_);
  auto found = parameters_.find(parameter->fqn);
  if (found != parameters_.end() && found->second.lock() == parameter) parameters_.erase(found);
}

ParameterPtr Registry::find_or_null(const std::string& fqn) {
  std::lock_guard lock(mutex_);
  auto found = parameters_.find(fqn);
  return found == parameters_.end() ? nullptr : found->second.lock();
}

ParameterPtr Registry::find(const std::string& fqn) {
  auto parameter = find_or_null(fqn);
  ZERO3_CHECK(parameter, "no live sharded parameter is called '", fqn, "'; there are ",
              some_names(),
              ". A compiled graph that asks for it outlived its model, or fully_shard "
              "was called on an enclosing module after compiling: compile again.");
  return parameter;
}

std::string Registry::some_names() {
  constexpr size_t kShown = 3;
  std::lock_guard lock(mutex_);
  std::erase_if(parameters_, [](auto& item) { return item.second.expired(); });
  std::string result = parameters_.empty() ? "none" : "";
  for (auto& [fqn, weak] : parameters_ | std::views::take(kShown))
    result += (result.empty() ? "'" : ", '") + fqn + "'";
  if (parameters_.size() > kShown)
    result += " and " + std::to_string(parameters_.size() - kShown) + " others";
  return result;
}

std::set<int64_t> Registry::live_roots() {
  std::vector<ParameterPtr> alive;  // dies after the lock: the last owner frees tensors
  std::lock_guard lock(mutex_);
  std::erase_if(parameters_, [](auto& item) { return item.second.expired(); });
  std::set<int64_t> result;
  for (auto& [fqn, weak] : parameters_)
    if (auto parameter = weak.lock()) {
      result.insert(parameter->root);
      alive.push_back(std::move(parameter));
    }
  return result;
}

std::vector<ParameterPtr> Registry::of_root(int64_t root) {
  std::vector<ParameterPtr> result;  // dies after the lock: the last owner frees tensors
  {
    std::lock_guard lock(mutex_);
    for (auto& [fqn, weak] : parameters_)
      if (auto parameter = weak.lock()) result.push_back(std::move(parameter));
  }
  std::erase_if(result, [root](const ParameterPtr& p) { return p->root != root; });
  std::ranges::sort(result, {}, [](const ParameterPtr& p) { return p->order; });
  return result;
}

}  // namespace zero3
