#include "gather/gather.h"

#include <algorithm>

#include "support/apart.h"
#include "support/autograd.h"
#include "support/error.h"
#include "support/memory.h"
#include "support/profiler_range.h"
#include "transport/transport.h"

namespace zero3 {
namespace {

std::function<void(const at::Tensor&)> refresh_function;

}  // namespace

GatherBucket::GatherBucket(std::vector<ParameterPtr> parameters)
    : parameters_(std::move(parameters)) {
  for (auto& parameter : parameters_)
    ZERO3_CHECK(!parameter->shard.is_meta() || parameter->device.is_meta(), "'", parameter->fqn,
                "' is still on the meta device. Materialise the sharded model first: "
                "model.to_empty(device=...), then initialise it or load a checkpoint.");
}

Collective GatherBucket::collective() const {
  const Parameter& first = *parameters_.front();
  const auto item = static_cast<int64_t>(c10::elementSize(first.compute_dtype));
  int64_t nbytes = 0;
  for (auto& parameter : parameters_) nbytes += first.world_size * parameter->chunk_numel() * item;
  return {"all_gather",     first.compute_dtype,   nbytes,
          first.world_size, names_of(parameters_), first.device.is_meta()};
}

void set_refresh(std::function<void(const at::Tensor& placeholder)> function) {
  refresh_function = std::move(function);
}

void refresh(const Parameter& parameter) {
  if (refresh_function) refresh_function(parameter.placeholder);
}

Gather::Gather(std::vector<ParameterPtr> parameters) : parameters_(std::move(parameters)) {
  start();
}

void Gather::start() {
  Apart apart;
  is_started_ = true;
  count_held(parameters_);
  std::vector<ParameterPtr> missing;
  for (auto& parameter : parameters_) {
    held_.push_back(parameter->gathered.full());
    versions_.push_back(parameter->shard_version());
    sources_.push_back(Parameter::source_of(parameter));
    if (!parameter->gathered.is_held()) missing.push_back(sources_.back());
  }
  while (!missing.empty()) {
    const auto first = missing.front();
    const auto alike = [&](auto& other) {
      return other->compute_dtype == first->compute_dtype &&
             other->transport->joins(*first->transport);
    };
    std::vector<ParameterPtr> members;
    std::ranges::copy_if(missing, std::back_inserter(members), alike);
    std::erase_if(missing, alike);
    buckets_.push_back(first->transport->gather(std::move(members)));
  }
  for (auto& bucket : buckets_) {  // once every bucket has accepted its parameters
    const ProfilerRange range([&] { return scope_name(bucket->collective(), "start"); });
    bucket->start();
  }
}

void Gather::snapshot() {
  Apart apart;
  for (auto& bucket : buckets_) bucket->snapshot();
}

std::vector<at::Tensor> Gather::finish(bool fresh) {
  const bool is_recorded = at::GradMode::is_enabled();  // eager code records for a backward
  Apart apart;
  if (!is_started_) start();
  is_started_ = false;
  auto fulls = std::exchange(held_, {});
  const auto versions = std::exchange(versions_, {});
  const auto sources = std::exchange(sources_, {});
  for (auto& bucket : std::exchange(buckets_, {})) {
    const ProfilerRange range([&] { return scope_name(bucket->collective(), "wait"); });
    auto gathered = bucket->finish(fresh);
    for (size_t i = 0; i < gathered.size(); ++i) {
      const auto place = std::ranges::find(sources, bucket->parameters()[i]) - sources.begin();
      const auto& parameter = parameters_[place];
      fulls[place] = gathered[i];
      if (parameter->after_forward && !in_backward()) {
        if (is_recorded || parameter->gradients.promised() > 0)
          parameter->shard_after_forward(gathered[i], versions[place]);
        else
          parameter->forget_after_forward();
      }
      if (parameter->stays_gathered(in_backward()))
        parameter->gathered.keep(gathered[i], /*read_only=*/!fresh, versions[place]);
    }
  }
  return fulls;
}

std::vector<at::Tensor> Gather::finish_apart() {
  auto fulls = finish(/*fresh=*/true);
  Apart apart;
  for (size_t i = 0; i < fulls.size(); ++i)
    if (parameters_[i]->gathered.full().is_same(fulls[i])) fulls[i] = pooled_copy(fulls[i]);
  return fulls;
}

void count_held(const std::vector<ParameterPtr>& parameters) {
  if (in_backward()) return;
  for (auto& parameter : parameters)
    if (parameter->gathered.state() == Gathered::State::kKept) parameter->transport->skip_gather();
}

std::vector<at::Tensor> gather(const std::vector<ParameterPtr>& parameters) {
  return Gather(parameters).finish_apart();
}

Publications::Publications(const std::vector<ParameterPtr>& parameters) {
  for (auto& parameter : parameters)
    if (parameter->transport->can.publishes)
      publications_.emplace_back(parameter, parameter->transport->publication());
}

bool Publications::invalidate_if_republished() const {
  bool is_stale = false;
  for (auto& [weak, publication] : publications_)
    if (const auto parameter = weak.lock())
      is_stale |= parameter->transport->expect(*parameter, publication);
  return is_stale;
}

}  // namespace zero3
