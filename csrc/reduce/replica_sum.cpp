#include "reduce/replica_sum.h"

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

std::unique_ptr<ReplicaSum> ReplicaSum::like(const Parameter& like,
                                             const PartialGradient& partial) {
  if (like.source->parts) return std::unique_ptr<ReplicaSum>(new ReduceScatter(like, partial));
  return std::unique_ptr<ReplicaSum>(new AllReduce(like, partial));
}

ReplicaSum::ReplicaSum(const Parameter& like, const PartialGradient& partial)
    : channel_(like.replicas),
      options_(at::TensorOptions(partial.wire_dtype).device(like.device())),
      has_parts_(like.source->parts != nullptr),
      capacity_(like.settings.bucket_bytes / static_cast<int64_t>(options_.dtype().itemsize())),
      divisor_between_(partial.wire_dtype == at::kHalf && channel_->traits.is_point_to_point
                           ? static_cast<double>(channel_->world_size)
                           : 1) {}

bool ReplicaSum::accepts(const Parameter& parameter, const PartialGradient& partial) const {
  return is_same(channel_.get(), parameter.replicas.get()) &&
         has_parts_ == (parameter.source->parts != nullptr) &&
         options_.dtype() == partial.wire_dtype && options_.device() == parameter.device() &&
         numel_ + partial.shard.numel() <= capacity_;
}

void ReplicaSum::add(const ParameterPtr& parameter, PartialGradient partial) {
  numel_ += partial.shard.numel();
  parameters_.push_back(parameter);
  partials_.push_back(std::move(partial));
}

double ReplicaSum::divisor_before(const PartialGradient& partial) const {
  if (options_.dtype() != at::kHalf) return 1;
  const double over_shards = partial.divisor_over_shards;
  if (channel_->traits.is_point_to_point) return over_shards;
  return over_shards * divisor_before_fp16_sum(partial.divisor / over_shards);
}

std::string ReplicaSum::key() const {
  std::string result = op() + " over replicas " + c10::toString(options_.dtype().toScalarType());
  for (auto& parameter : parameters_) result += " " + parameter->source->chunk_key();
  return result;
}

Collective ReplicaSum::collective() const {
  const auto nbytes =
      channel_->world_size * row_numel() * static_cast<int64_t>(options_.dtype().itemsize());
  return {op(),
          options_.dtype().toScalarType(),
          nbytes,
          channel_->world_size,
          names_of(parameters_),
          options_.device().is_meta()};
}

void ReplicaSum::start() {
  const ProfilerRange range([&] { return scope_name(collective(), "start"); });
  rows_ = pooled_empty({channel_->world_size, row_numel()}, options_);
  std::vector<Copy> copies;
  for (auto& [of, to, from] : places()) {
    const int64_t count = from.numel();
    const Copy copy{to.narrow(0, 0, count).view(from.sizes()), from};
    const double divisor = divisor_before(partials_[of]);
    if (divisor == 1)
      copies.push_back(copy);
    else
      copy_all({copy}, at::kDouble, divisor);
    copies.push_back({to.narrow(0, count, to.numel() - count), {}});
  }
  copy_all(copies, rows_.scalar_type());
  exchange_ = channel_->exchange();
  exchange_->reduce(rows_.unbind(), key());
  record([this] { return collective(); });
}

at::Tensor ReplicaSum::sum() {
  exchange_->wait();
  auto mine = rows_[channel_->rank];
  sum_and_divide(mine, exchange_->addends().front(), options_.dtype().toScalarType(),
                 divisor_between_);
  return mine;
}

void ReplicaSum::deliver(size_t i, const at::Tensor& sum, at::Tensor like,
                         std::vector<ReducedGradient>& results) const {
  const auto& partial = partials_[i];
  if (like.scalar_type() != partial.shard_dtype)
    like = pooled_empty(like.sizes(), like.options().dtype(partial.shard_dtype));
  sum_and_divide(like, {sum.view(like.sizes())}, options_.dtype().toScalarType(),
                 partial.divisor / (divisor_before(partial) * divisor_between_));
  results.emplace_back(parameters_[i], like);
}

int64_t AllReduce::row_numel() const {
  int64_t numel = 0;
  for (auto& partial : partials_) numel += partial.shard.numel();
  return (numel + channel_->world_size - 1) / channel_->world_size;
}

std::vector<ReplicaSum::Place> AllReduce::places() const {
  std::vector<Place> result;
  auto rest = rows_.view(-1);
  for (size_t i = 0; i < partials_.size(); ++i) {
    const auto& shard = partials_[i].shard;
    const bool is_last = i + 1 == partials_.size();
    const int64_t count = is_last ? rest.numel() : shard.numel();
    result.push_back({i, rest.narrow(0, 0, count), shard});
    rest = rest.narrow(0, count, rest.numel() - count);
  }
  return result;
}

void AllReduce::finish(std::vector<ReducedGradient>& results) {
  const ProfilerRange range([&] { return scope_name(collective(), "wait"); });
  sum();
  exchange_ = channel_->exchange();
  exchange_->gather({{rows_.unbind(), "gather " + key()}});
  exchange_->wait();
  for (auto& [of, sum, shard] : places())
    deliver(of, sum.narrow(0, 0, shard.numel()), shard, results);
}

int64_t ReduceScatter::row_numel() const {
  int64_t numel = 0;
  for (auto& parameter : parameters_) numel += space_of(*parameter);
  return numel;
}

int64_t ReduceScatter::space_of(const Parameter& parameter) {
  return parameter.source->parts->layout.chunk_rows() * parameter.source->row_numel();
}

std::vector<ReplicaSum::Place> ReduceScatter::places() const {
  std::vector<Place> result;
  for (int64_t rank = 0; rank < channel_->world_size; ++rank) {
    int64_t offset = 0;
    for (size_t i = 0; i < partials_.size(); ++i) {
      const auto& layout = parameters_[i]->source->parts->layout;
      const int64_t space = space_of(*parameters_[i]);
      result.push_back(
          {i, rows_[rank].narrow(0, offset, space),
           partials_[i].shard.narrow(0, layout.first_row_of(rank), layout.rows_of(rank))});
      offset += space;
    }
  }
  return result;
}

void ReduceScatter::finish(std::vector<ReducedGradient>& results) {
  const ProfilerRange range([&] { return scope_name(collective(), "wait"); });
  auto mine = sum();
  for (size_t i = 0; i < partials_.size(); ++i) {
    const auto& layout = parameters_[i]->source->parts->layout;
    auto sizes = partials_[i].shard.sizes().vec();
    sizes[0] = layout.rows_of(channel_->rank);
    const auto part = pooled_empty(sizes, partials_[i].shard.options());
    deliver(i, mine.narrow(0, 0, part.numel()), part, results);
    parameters_[i]->source->parts->gradient_arrives();
    const int64_t space = space_of(*parameters_[i]);
    mine = mine.narrow(0, space, mine.numel() - space);
  }
}

void ReplicaSums::start(std::vector<ParameterPtr> parameters,
                        std::vector<ReducedGradient>& results) {
  // Replicas may have reduced the parameters in different orders.
  std::ranges::sort(parameters, {}, [](auto& parameter) { return parameter->order; });
  std::vector<std::unique_ptr<ReplicaSum>> started;
  for (auto& parameter : parameters) {
    if (!parameter->replicas || !parameter->settings.requires_all_reduce) continue;
    auto partial = parameter->gradients.take_partial();
    if (!partial) continue;
    auto like = std::ranges::find_if(
        started, [&](auto& other) { return other->accepts(*parameter, *partial); });
    if (like == started.end()) like = started.insert(like, ReplicaSum::like(*parameter, *partial));
    (*like)->add(parameter, std::move(*partial));
  }
  for (auto& sum : started) {
    while (in_flight_.size() >= kMaxReplicaSums) finish_oldest(results);
    sum->start();
    in_flight_.push_back(std::move(sum));
  }
}

void ReplicaSums::finish(std::vector<ReducedGradient>& results) {
  while (!in_flight_.empty()) finish_oldest(results);
}

void ReplicaSums::finish_oldest(std::vector<ReducedGradient>& results) {
  in_flight_.front()->finish(results);
  in_flight_.erase(in_flight_.begin());
}

}  // namespace zero3
