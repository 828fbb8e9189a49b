#include "gather/gather.h"

#include <algorithm>

#include "gather/gather_order.h"
#include "reduce/reduce.h"
#include "support/autograd.h"
#include "support/error.h"
#include "support/memory.h"
#include "support/profiler_range.h"
#include "support/signals.h"
#include "support/user_state.h"
#include "transport/transport.h"

namespace zero3 {

Gather::Gather(std::vector<ParameterPtr> parameters, std::vector<Format> formats)
    : parameters_(std::move(parameters)),
      formats_(formats.empty() ? std::vector<Format>(parameters_.size()) : std::move(formats)),
      has_codes_(parameters_.size()) {
  start();
}

void Gather::start() {
  WithoutUserModes guard;
  ZERO3_CHECK(!handles_signals() || parameters_.empty(), "a signal handler cannot gather '",
              parameters_.front()->fqn,
              "', since other ranks do not: read shards, or set a flag and act between steps");
  is_started_ = true;
  note_skipped_gathers(parameters_);
  std::vector<ParameterPtr> sources;   // for each parameter, the one whose shards are gathered
  std::vector<size_t> missing;         // places among `parameters_`
  std::vector<ParameterPtr> replaced;  // something else is gathered for them
  for (auto& parameter : parameters_) {
    ZERO3_CHECK(parameter->may_be_gathered(), "'", parameter->fqn,
                "' may have been stepped in this backward, which needs it again: leave it out of "
                "step_in_backward");
    unsharded_.push_back(parameter->gathered.full());
    shards_.push_back(parameter->shard);
    versions_.push_back(parameter->shard_version());
    const size_t place = sources.size();
    sources.push_back(Parameter::source_of(parameter));
    const auto& format = formats_[place];
    if (format) {
      // Rows that a forward has left on fewer ranks are rounded already.
      if (sources[place] == parameter) sources[place] = parameter->quantized(*format);
      replaced.push_back(parameter);
    } else if (parameter->gathered.is_unsharded()) {
      continue;
    }
    has_codes_[place] = format && sources[place]->compute_dtype == at::kByte;
    missing.push_back(place);
  }
  count_unpublished(replaced);
  while (!missing.empty()) {
    const auto& first = *sources[missing.front()];
    const auto alike = [&](size_t place) {
      const auto& other = *sources[place];
      return other.compute_dtype == first.compute_dtype && other.transport->joins(*first.transport);
    };
    std::vector<size_t> places;
    std::ranges::copy_if(missing, std::back_inserter(places), alike);
    std::erase_if(missing, alike);
    std::vector<ParameterPtr> members;
    for (auto place : places) members.push_back(sources[place]);
    buckets_.push_back({std::move(places), first.transport->gather_bucket(std::move(members))});
  }
  ranks_meet_ = std::ranges::any_of(buckets_, [](auto& each) { return each.bucket->ranks_meet(); });
  if (ranks_meet_) announce_presences(parameters_);
  for (auto& [_, bucket] : buckets_) {  // once every bucket has accepted its parameters
    const ProfilerRange range([&] { return scope_name(bucket->collective(), "start"); });
    bucket->start();
  }
}

void Gather::snapshot() {
  WithoutUserModes guard;
  for (auto& [_, bucket] : buckets_) bucket->snapshot();
}

bool Gather::is_up_to_date() const {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto& parameter = *parameters_[i];
    if (!parameter.shard.is_same(shards_[i]) || parameter.shard_version() != versions_[i] ||
        !parameter.gathered.full().is_same(unsharded_[i]))
      return false;
  }
  return true;
}

void Gather::follow(std::shared_ptr<void> under_way, std::function<void()> start_next) {
  under_way_ = std::move(under_way);
  start_next_ = std::move(start_next);
}

std::vector<at::Tensor> Gather::finish(bool fresh) {
  const bool is_recorded = at::GradMode::is_enabled();  // eager code records for a backward
  WithoutUserModes guard;
  if (!is_started_) start();
  under_way_.reset();
  if (const auto start_next = std::exchange(start_next_, nullptr)) start_next();
  if (ranks_meet_) exchange_presences(parameters_);
  is_started_ = false;
  auto fulls = std::exchange(unsharded_, {});
  const auto versions = std::exchange(versions_, {});
  shards_.clear();
  for (auto& [places, bucket] : std::exchange(buckets_, {})) {
    const ProfilerRange range([&] { return scope_name(bucket->collective(), "wait"); });
    auto gathered = bucket->finish(fresh);
    for (size_t i = 0; i < gathered.size(); ++i) {
      const auto place = places[i];
      auto& parameter = *parameters_[place];
      fulls[place] = full_of(place, gathered[i]);
      const bool has_backward = is_recorded || parameter.gradients.pending_uses() > 0;
      const bool is_rounded = formats_[place].has_value();
      if (is_rounded && !in_backward() && !has_backward) parameter.forget_quantized();
      retain(parameter, fulls[place], !fresh, versions[place], has_backward, is_rounded);
    }
  }
  return fulls;
}

at::Tensor Gather::full_of(size_t place, const at::Tensor& gathered) const {
  if (!has_codes_[place]) return gathered;
  const Parameter& parameter = *parameters_[place];
  auto full = pooled_empty(parameter.sizes, parameter.strides,
                           gathered.options().dtype(parameter.compute_dtype));
  dequantize(full, gathered, *formats_[place]);
  return full;
}

void Gather::retain(Parameter& parameter, const at::Tensor& full, bool read_only, uint64_t version,
                    bool has_backward, bool is_rounded) {
  if (parameter.after_forward && !in_backward()) {
    if (has_backward)
      parameter.shard_after_forward(full);
    else
      parameter.forget_after_forward();
  }
  if (!is_rounded && parameter.is_retained_when_gathered(in_backward()))
    parameter.gathered.retain(full, read_only, version);
}

std::vector<at::Tensor> Gather::finish_owned() {
  auto fulls = finish(/*fresh=*/true);
  WithoutUserModes guard;
  for (size_t i = 0; i < fulls.size(); ++i)
    if (parameters_[i]->gathered.full().is_same(fulls[i])) fulls[i] = pooled_copy(fulls[i]);
  return fulls;
}

void count_unpublished(const std::vector<ParameterPtr>& parameters) {
  if (in_backward()) return;
  std::vector<Transport*> counted;
  for (auto& parameter : parameters) {
    auto* transport = parameter->transport.get();
    if (std::ranges::any_of(counted, [&](auto* other) { return other->joins(*transport); }))
      continue;
    transport->count_unpublished_forward();
    counted.push_back(transport);
  }
}

void note_skipped_gathers(const std::vector<ParameterPtr>& parameters) {
  auto retained = parameters;
  std::erase_if(retained, [](auto& parameter) {
    return parameter->gathered.state() != Gathered::State::kRetained;
  });
  count_unpublished(retained);
}

void reshard_retained_after_forward(const std::vector<ParameterPtr>& parameters) {
  for (auto& parameter : parameters)
    if (!parameter->outlives_forward()) parameter->gathered.reshard_retained();
}

std::vector<at::Tensor> gather(const std::vector<ParameterPtr>& parameters) {
  return request_gather(parameters)->finish_owned();
}

ForwardEpochs::ForwardEpochs(const std::vector<ParameterPtr>& parameters)
    : fqn_(parameters.empty() ? "" : parameters.front()->fqn) {
  for (auto& parameter : parameters)
    if (parameter->transport->can.publishes)
      epochs_.emplace_back(parameter, parameter->transport->epoch());
}

bool ForwardEpochs::begin_backward() const {
  if (!fqn_.empty()) check_not_compiled(fqn_);
  bool publishes = false;
  for (auto& [weak, epoch] : epochs_)
    if (const auto parameter = weak.lock())
      publishes |= parameter->transport->expect_epoch(*parameter, epoch);
  return publishes;
}

}  // namespace zero3
