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
namespace {

thread_local bool in_recorded_forward = false;

}  // namespace

RecordedForward::RecordedForward() : is_inside_another_(std::exchange(in_recorded_forward, true)) {}

RecordedForward::~RecordedForward() { in_recorded_forward = is_inside_another_; }

Gather::Gather(std::vector<Gatherable> wanted, std::vector<const Codec*> codecs)
    : wanted_(std::move(wanted)),
      codecs_(codecs.empty() ? std::vector<const Codec*>(wanted_.size()) : std::move(codecs)),
      is_encoded_(wanted_.size()) {
  for (auto& each : wanted_)
    if (each.parameter) parameters_.push_back(each.parameter);
  start();
}

void Gather::start() {
  WithoutUserModes guard;
  ZERO3_CHECK(!handles_signals() || wanted_.empty(), "a signal handler cannot gather '",
              wanted_.front().source->fqn,
              "', since other ranks do not: read shards, or set a flag and act between steps");
  is_started_ = true;
  note_skipped_gathers(parameters_);
  std::vector<SourcePtr> sources;      // for each of `wanted_`, the one that is gathered
  std::vector<size_t> missing;         // places among `wanted_`
  std::vector<ParameterPtr> replaced;  // something else is gathered for them
  for (auto& [source, parameter] : wanted_) {
    const size_t place = sources.size();
    const auto* codec = codecs_[place];
    const bool is_there = parameter && !codec && parameter->gathered.is_unsharded();
    if (!is_there) source->bring_up_to_date();
    shards_.push_back(source->shard);
    versions_.push_back(source->version_to_gather());
    if (!parameter) {
      unsharded_.emplace_back();
      sources.push_back(source);
      missing.push_back(place);
      continue;
    }
    ZERO3_CHECK(parameter->may_be_gathered(), "'", source->fqn,
                "' may have been stepped in this backward, which needs it again: leave it out of "
                "step_in_backward");
    unsharded_.push_back(parameter->gathered.full());
    if (codec) {
      replaced.push_back(parameter);
    } else if (is_there) {
      sources.emplace_back();
      continue;
    }
    sources.push_back(parameter->source_now(codec));
    is_encoded_[place] = codec && sources[place]->dtype == at::kByte;
    missing.push_back(place);
  }
  count_unpublished(replaced);
  while (!missing.empty()) {
    const auto& first = *sources[missing.front()];
    const auto alike = [&](size_t place) {
      const auto& other = *sources[place];
      return other.dtype == first.dtype && other.transport->joins(*first.transport);
    };
    std::vector<size_t> places;
    std::ranges::copy_if(missing, std::back_inserter(places), alike);
    std::erase_if(missing, alike);
    std::vector<SourcePtr> members;
    for (auto place : places) members.push_back(sources[place]);
    buckets_.push_back({std::move(places), first.transport->gather_bucket(std::move(members))});
  }
  ranks_meet_ = std::ranges::any_of(buckets_, [](auto& each) { return each.bucket->ranks_meet(); });
  if (ranks_meet_) announce_presences(parameters_);
  for (auto& [_, bucket] : buckets_) {  // once every bucket has accepted its sources
    const ProfilerRange range([&] { return scope_name(bucket->collective(), "start"); });
    bucket->start();
  }
}

void Gather::snapshot() {
  WithoutUserModes guard;
  for (auto& [_, bucket] : buckets_) bucket->snapshot();
}

bool Gather::is_up_to_date() const {
  for (size_t i = 0; i < wanted_.size(); ++i) {
    const auto& parameter = wanted_[i].parameter;
    if (parameter && !parameter->gathered.full().is_same(unsharded_[i])) return false;
  }
  return has_same_shards() && !is_lost();
}

bool Gather::has_same_shards() const {
  for (size_t i = 0; i < wanted_.size(); ++i) {
    const auto& source = wanted_[i].source;
    if (!source->shard.is_same(shards_[i]) || source->version_to_gather() != versions_[i])
      return false;
  }
  return true;
}

bool Gather::is_lost() const {
  return std::ranges::any_of(buckets_, [](auto& each) { return each.bucket->is_lost(); });
}

void Gather::start_again_if_lost() {
  if (!is_started_ || !is_lost() || !has_same_shards()) return;
  buckets_.clear();
  unsharded_.clear();
  versions_.clear();
  shards_.clear();
  start();
}

void Gather::follow(std::shared_ptr<void> under_way, std::function<void()> start_next) {
  under_way_ = std::move(under_way);
  start_next_ = std::move(start_next);
}

std::vector<at::Tensor> Gather::finish(bool fresh) {
  const bool has_backward = at::GradMode::is_enabled() || in_recorded_forward;
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
      fulls[place] = full_of(place, gathered[i]);
      if (!wanted_[place].parameter) continue;
      auto& parameter = *wanted_[place].parameter;
      const bool is_rounded = codecs_[place];
      if (is_rounded && !in_backward() && !has_backward) parameter.substitutes.forget_encoded();
      retain(parameter, fulls[place], !fresh, versions[place], has_backward, is_rounded);
    }
  }
  return fulls;
}

at::Tensor Gather::full_of(size_t place, const at::Tensor& gathered) const {
  if (!is_encoded_[place]) return gathered;
  const Source& source = *wanted_[place].source;
  auto full = pooled_empty(source.sizes, source.strides, gathered.options().dtype(source.dtype));
  codecs_[place]->decode(full, gathered);
  return full;
}

void Gather::retain(Parameter& parameter, const at::Tensor& full, bool read_only, uint64_t version,
                    bool has_backward, bool is_rounded) {
  auto& substitutes = parameter.substitutes;
  if (substitutes.after_forward && !in_backward()) {
    if (has_backward)
      substitutes.shard_after_forward(full);
    else
      substitutes.forget_after_forward();
  }
  if (!is_rounded && parameter.is_retained_when_gathered(in_backward()))
    parameter.gathered.retain(full, read_only, version);
}

std::vector<at::Tensor> Gather::finish_owned() {
  auto fulls = finish(/*fresh=*/true);
  WithoutUserModes guard;
  for (size_t i = 0; i < fulls.size(); ++i)
    if (const auto& parameter = wanted_[i].parameter;
        parameter && parameter->gathered.full().is_same(fulls[i]))
      fulls[i] = pooled_copy(fulls[i]);
  return fulls;
}

void count_unpublished(const std::vector<ParameterPtr>& parameters) {
  if (in_backward()) return;
  std::vector<Transport*> counted;
  for (auto& parameter : parameters) {
    auto* transport = parameter->transport().get();
    if (std::ranges::any_of(counted, [&](auto* other) { return other->joins(*transport); }))
      continue;
    transport->count_unpublished_forward();
    counted.push_back(transport);
  }
}

void note_skipped_gathers(const std::vector<ParameterPtr>& parameters) {
  std::vector<ParameterPtr> retained;
  std::ranges::copy_if(parameters, std::back_inserter(retained), [](auto& parameter) {
    return parameter->gathered.state() == Gathered::State::kRetained;
  });
  count_unpublished(retained);
}

void reshard_retained_after_forward(const std::vector<ParameterPtr>& parameters) {
  for (auto& parameter : parameters)
    if (!parameter->outlives_forward()) parameter->gathered.reshard_retained();
}

at::Tensor gather(Gatherable wanted) {
  std::vector<Gatherable> one;
  one.push_back(std::move(wanted));
  return request_gather(std::move(one))->finish_owned()[0];
}

ForwardEpochs::ForwardEpochs(const std::vector<SourcePtr>& sources)
    : fqn_(sources.empty() ? "" : sources.front()->fqn) {
  for (auto& source : sources)
    if (source->transport->can.publishes) epochs_.emplace_back(source, source->transport->epoch());
}

bool ForwardEpochs::begin_backward() const {
  if (!fqn_.empty()) check_not_compiled(fqn_);
  bool publishes = false;
  for (auto& [weak, epoch] : epochs_)
    if (const auto source = weak.lock())
      publishes |= source->transport->expect_epoch(*source, epoch);
  return publishes;
}

}  // namespace zero3
