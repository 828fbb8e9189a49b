#include "all_reduce.h"

#include <ATen/record_function.h>

#include "copy.h"
#include "memory.h"
#include "sum.h"

namespace zero3 {

AllReduce::AllReduce(const Parameter& like, const PartialGradient& partial)
    : channel_(like.replicate_channel()),
      rank_(like.replica),
      world_size_(like.replicas),
      options_(at::TensorOptions(partial.wire_dtype).device(like.device)),
      capacity_(like.bucket_bytes / static_cast<int64_t>(options_.dtype().itemsize())),
      sends_means_(partial.wire_dtype == at::kHalf && is_point_to_point(channel_)),
      shards_(static_cast<double>(like.world_size)) {}

bool AllReduce::accepts(const Parameter& parameter, const PartialGradient& partial) const {
  return channel_.group_name == parameter.replicate_group_name &&
         options_.dtype() == partial.wire_dtype && options_.device() == parameter.device &&
         numel_ + partial.shard.numel() <= capacity_;
}

void AllReduce::add(const ParameterPtr& parameter, PartialGradient partial) {
  numel_ += partial.shard.numel();
  parameters_.push_back(parameter);
  partials_.push_back(std::move(partial));
}

std::string AllReduce::key() const {
  std::string result = std::string("all-reduce ") + c10::toString(options_.dtype().toScalarType());
  for (auto& parameter : parameters_) result += " " + parameter->chunk_key();
  return result;
}

Collective AllReduce::collective() const {
  const auto nbytes = world_size_ * row_numel() * static_cast<int64_t>(options_.dtype().itemsize());
  return {"all_reduce", options_.dtype().toScalarType(), nbytes,
          world_size_,  names_of(parameters_),           options_.device().is_meta()};
}

void AllReduce::start() {
  RECORD_USER_SCOPE(scope_name(collective(), "start"));
  rows_ = pooled_empty({world_size_, row_numel()}, options_);
  auto rest = rows_.view(-1);
  std::vector<Copy> copies;
  for (auto& partial : partials_) {
    const int64_t count = partial.shard.numel();
    const Copy copy{rest.narrow(0, 0, count).view(partial.shard.sizes()), partial.shard};
    if (sends_means_)
      copy_all({copy}, at::kDouble, mean_of_shards(partial.divisor));
    else
      copies.push_back(copy);
    rest = rest.narrow(0, count, rest.numel() - count);
  }
  copies.push_back({rest, {}});
  copy_all(copies, rows_.scalar_type());
  exchange_ = std::make_unique<Exchange>(channel_, rank_);
  exchange_->reduce(rows_.unbind(), key());
  record([this] { return collective(); });
}

void AllReduce::finish(std::vector<ReducedGradient>& results) {
  RECORD_USER_SCOPE(scope_name(collective(), "wait"));
  exchange_->wait();
  const auto wire_dtype = options_.dtype().toScalarType();
  auto mine = rows_[rank_];
  const auto replicas = static_cast<double>(world_size_);
  sum_and_divide(mine, exchange_->addends().front(), wire_dtype, sends_means_ ? replicas : 1);
  exchange_ = std::make_unique<Exchange>(channel_, rank_);
  exchange_->gather({{rows_, "gather " + key()}});
  exchange_->wait();
  auto rest = rows_.view(-1);
  for (size_t i = 0; i < partials_.size(); ++i) {
    auto& [shard, _, shard_dtype, divisor] = partials_[i];
    const int64_t count = shard.numel();
    const double rest_of_divisor =
        sends_means_ ? divisor / (mean_of_shards(divisor) * replicas) : divisor;
    if (shard.scalar_type() != shard_dtype)
      shard = pooled_empty(shard.sizes(), shard.options().dtype(shard_dtype));
    sum_and_divide(shard, {rest.narrow(0, 0, count).view(shard.sizes())}, wire_dtype,
                   rest_of_divisor);
    rest = rest.narrow(0, count, rest.numel() - count);
    results.push_back({parameters_[i], shard});
  }
}

}  // namespace zero3
