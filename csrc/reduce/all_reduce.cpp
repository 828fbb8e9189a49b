#include "reduce/all_reduce.h"

#include "kernels/copy.h"
#include "kernels/sum.h"
#include "support/host_copies.h"
#include "support/memory.h"
#include "support/profiler_range.h"

namespace zero3 {

ReducedGradient::ReducedGradient(ParameterPtr of, const at::Tensor& reduced)
    : parameter(std::move(of)),
      shard(parameter->source->is_on_host() ? copy_to_host(reduced, parameter->source->shard)
                                            : reduced) {}

AllReduce::AllReduce(const Parameter& like, const PartialGradient& partial)
    : channel_(like.replicas),
      options_(at::TensorOptions(partial.wire_dtype).device(like.device())),
      capacity_(like.settings.bucket_bytes / static_cast<int64_t>(options_.dtype().itemsize())),
      divisor_between_(partial.wire_dtype == at::kHalf && channel_->traits.is_point_to_point
                           ? static_cast<double>(channel_->world_size)
                           : 1) {}

bool AllReduce::accepts(const Parameter& parameter, const PartialGradient& partial) const {
  return is_same(channel_.get(), parameter.replicas.get()) &&
         options_.dtype() == partial.wire_dtype && options_.device() == parameter.device() &&
         numel_ + partial.shard.numel() <= capacity_;
}

void AllReduce::add(const ParameterPtr& parameter, PartialGradient partial) {
  numel_ += partial.shard.numel();
  parameters_.push_back(parameter);
  partials_.push_back(std::move(partial));
}

double AllReduce::divisor_before(const PartialGradient& partial) const {
  if (options_.dtype() != at::kHalf) return 1;
  const double over_shards = partial.divisor_over_shards;
  if (channel_->traits.is_point_to_point) return over_shards;
  return over_shards * divisor_before_fp16_sum(partial.divisor / over_shards);
}

std::string AllReduce::key() const {
  std::string result = std::string("all-reduce ") + c10::toString(options_.dtype().toScalarType());
  for (auto& parameter : parameters_) result += " " + parameter->source->chunk_key();
  return result;
}

Collective AllReduce::collective() const {
  const auto nbytes =
      channel_->world_size * row_numel() * static_cast<int64_t>(options_.dtype().itemsize());
  return {"all_reduce",         options_.dtype().toScalarType(), nbytes,
          channel_->world_size, names_of(parameters_),           options_.device().is_meta()};
}

void AllReduce::start() {
  const ProfilerRange range([&] { return scope_name(collective(), "start"); });
  rows_ = pooled_empty({channel_->world_size, row_numel()}, options_);
  auto rest = rows_.view(-1);
  std::vector<Copy> copies;
  for (auto& partial : partials_) {
    const int64_t count = partial.shard.numel();
    const Copy copy{rest.narrow(0, 0, count).view(partial.shard.sizes()), partial.shard};
    const double divisor = divisor_before(partial);
    if (divisor == 1)
      copies.push_back(copy);
    else
      copy_all({copy}, at::kDouble, divisor);
    rest = rest.narrow(0, count, rest.numel() - count);
  }
  copies.push_back({rest, {}});
  copy_all(copies, rows_.scalar_type());
  exchange_ = channel_->exchange();
  exchange_->reduce(rows_.unbind(), key());
  record([this] { return collective(); });
}

void AllReduce::finish(std::vector<ReducedGradient>& results) {
  const ProfilerRange range([&] { return scope_name(collective(), "wait"); });
  exchange_->wait();
  const auto wire_dtype = options_.dtype().toScalarType();
  auto mine = rows_[channel_->rank];
  sum_and_divide(mine, exchange_->addends().front(), wire_dtype, divisor_between_);
  exchange_ = channel_->exchange();
  exchange_->gather({{rows_.unbind(), "gather " + key()}});
  exchange_->wait();
  auto rest = rows_.view(-1);
  for (size_t i = 0; i < partials_.size(); ++i) {
    auto& partial = partials_[i];
    auto& shard = partial.shard;
    const int64_t count = shard.numel();
    const double rest_of_divisor = partial.divisor / (divisor_before(partial) * divisor_between_);
    if (shard.scalar_type() != partial.shard_dtype)
      shard = pooled_empty(shard.sizes(), shard.options().dtype(partial.shard_dtype));
    sum_and_divide(shard, {rest.narrow(0, 0, count).view(shard.sizes())}, wire_dtype,
                   rest_of_divisor);
    rest = rest.narrow(0, count, rest.numel() - count);
    results.emplace_back(parameters_[i], shard);
  }
}

void AllReduces::start(std::vector<ParameterPtr> parameters,
                       std::vector<ReducedGradient>& results) {
  // Replicas may have reduced the parameters in different orders.
  std::ranges::sort(parameters, {}, [](auto& parameter) { return parameter->order; });
  std::vector<std::unique_ptr<AllReduce>> started;
  for (auto& parameter : parameters) {
    if (!parameter->replicas || !parameter->settings.requires_all_reduce) continue;
    auto partial = parameter->gradients.take_partial();
    if (!partial) continue;
    auto like = std::ranges::find_if(
        started, [&](auto& other) { return other->accepts(*parameter, *partial); });
    if (like == started.end())
      like = started.insert(like, std::make_unique<AllReduce>(*parameter, *partial));
    (*like)->add(parameter, std::move(*partial));
  }
  for (auto& all_reduce : started) {
    while (in_flight_.size() >= kMaxInFlight) finish_oldest(results);
    all_reduce->start();
    in_flight_.push_back(std::move(all_reduce));
  }
}

void AllReduces::finish(std::vector<ReducedGradient>& results) {
  while (!in_flight_.empty()) finish_oldest(results);
}

void AllReduces::finish_oldest(std::vector<ReducedGradient>& results) {
  in_flight_.front()->finish(results);
  in_flight_.erase(in_flight_.begin());
}

}  // namespace zero3
