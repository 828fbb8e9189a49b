#include "gather.h"

#include <ATen/record_function.h>

#include <algorithm>

#include "apart.h"
#include "autograd.h"
#include "copy.h"
#include "error.h"
#include "exchange.h"
#include "memory.h"
#include "publish.h"

namespace zero3 {
namespace {

std::function<void(const at::Tensor&)> refresh_function;

void check_gatherable(const Parameter& parameter) {
  ZERO3_CHECK(!parameter.shard.is_meta() || parameter.device.is_meta(), "'", parameter.fqn,
              "' is still on the meta device. Materialise the sharded model first: "
              "model.to_empty(device=...), then initialise it or load a checkpoint.");
}

int64_t bytes_of_chunk(const Parameter& parameter) {
  return parameter.chunk_numel() * static_cast<int64_t>(c10::elementSize(parameter.compute_dtype));
}

}  // namespace

GatherBucket::GatherBucket(std::vector<ParameterPtr> parameters)
    : parameters_(std::move(parameters)) {
  for (auto& parameter : parameters_) check_gatherable(*parameter);
}

Collective GatherBucket::collective() const {
  int64_t nbytes = 0;
  for (auto& parameter : parameters_) nbytes += parameter->world_size * bytes_of_chunk(*parameter);
  const Parameter& first = *parameters_.front();
  return {"all_gather",     first.compute_dtype,   nbytes,
          first.world_size, names_of(parameters_), first.device.is_meta()};
}

namespace {

// By messages. Each parameter travels in rows [world, chunk]: those of one end to end are the full
// tensor, followed by padding. Small ones share rows, one chunk after the other, and are copied out
// of them.
class ExchangedBucket : public GatherBucket {
 public:
  explicit ExchangedBucket(std::vector<ParameterPtr> parameters)
      : GatherBucket(std::move(parameters)) {
    const Parameter& first = *parameters_.front();
    const auto channel = first.gather_channel();
    const bool may_travel_alone =
        parameters_.size() == 1 || is_point_to_point(channel) || is_grouped(channel);
    for (auto& parameter : parameters_) {
      const bool is_worth_it =
          parameters_.size() == 1 || bytes_of_chunk(*parameter) >= kWorthAMessage;
      const bool alone = parameter->chunk_numel() == 0 ||
                         (may_travel_alone && parameter->is_contiguous() && is_worth_it);
      own_rows_.push_back(alone ? new_rows(parameter->chunk_numel()) : at::Tensor());
      if (!alone) shared_numel_ += space_of(*parameter);
    }
    if (shared_numel_ > 0) shared_rows_ = new_rows(shared_numel_);
  }

  // Writes this rank's rows, the cast in the same pass, and starts: on a CPU each when it is
  // written, on others all at once.
  void start() override {
    const Parameter& first = *parameters_.front();
    const std::string kind = std::string("gather ") + c10::toString(first.compute_dtype);
    std::string shared;
    int64_t offset = 0;
    exchange_ = std::make_unique<Exchange>(first.gather_channel(), first.rank);
    std::vector<Copy> copies;
    std::vector<Exchange::Piece> pieces;
    const auto send = [&] {
      copy_all(std::exchange(copies, {}), first.compute_dtype);
      exchange_->gather(std::exchange(pieces, {}));
    };
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const Parameter& parameter = *parameters_[i];
      const auto key = " " + parameter.chunk_key();
      if (own_rows_[i].defined()) {
        write(parameter, own_rows_[i][first.rank], copies);
        pieces.push_back({own_rows_[i], kind + key});
      } else {
        const int64_t space = space_of(parameter);
        write(parameter, shared_rows_[first.rank].narrow(0, offset, space), copies);
        offset += space;
        shared += key;
      }
      if (first.device.is_cpu()) send();
    }
    if (shared_numel_ > 0) pieces.push_back({shared_rows_, kind + shared});
    send();
    record([this] { return collective(); });
  }

  // Always fresh.
  std::vector<at::Tensor> finish(bool) override {
    exchange_->wait();
    std::vector<at::Tensor> fulls;
    std::vector<Copy> copies;
    int64_t offset = 0;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const Parameter& parameter = *parameters_[i];
      if (own_rows_[i].defined()) {
        fulls.push_back(own_rows_[i].as_strided(parameter.sizes, parameter.strides));
        continue;
      }
      auto full = pooled_empty(parameter.sizes, parameter.strides, shared_rows_.options());
      for (int64_t rank = 0; rank < parameter.world_size; ++rank) {
        const int64_t rows = parameter.rows_of(rank);
        if (rows == 0) break;
        copies.push_back({full.narrow(0, rank * parameter.chunk_rows(), rows),
                          shared_rows_[rank]
                              .narrow(0, offset, rows * parameter.row_numel())
                              .view(parameter.sizes_with_rows(rows))});
      }
      fulls.push_back(full);
      offset += space_of(parameter);
    }
    copy_all(copies, parameters_.front()->compute_dtype);
    return fulls;
  }

 private:
  // Of a rank's chunk among others.
  static int64_t space_of(const Parameter& parameter) {
    return aligned(parameter.chunk_numel(), parameter.compute_dtype);
  }

  static void write(const Parameter& parameter, const at::Tensor& chunk,
                    std::vector<Copy>& copies) {
    const int64_t owned = parameter.shard_rows() * parameter.row_numel();
    copies.push_back({chunk.narrow(0, 0, owned).view(parameter.shard.sizes()), parameter.shard});
    copies.push_back({chunk.narrow(0, owned, chunk.numel() - owned), {}});
  }

  at::Tensor new_rows(int64_t numel) const {
    const Parameter& first = *parameters_.front();
    return pooled_empty({first.world_size, numel},
                        at::TensorOptions(first.compute_dtype).device(first.device));
  }

  std::vector<at::Tensor> own_rows_;  // of each parameter; undefined for those that share
  at::Tensor shared_rows_;            // [world, shared_numel]
  int64_t shared_numel_ = 0;          // a rank's
  std::unique_ptr<Exchange> exchange_;
};

std::unique_ptr<GatherBucket> bucket_of(std::vector<ParameterPtr> parameters) {
  if (parameters.front()->shared) return std::make_unique<PublishedBucket>(std::move(parameters));
  return std::make_unique<ExchangedBucket>(std::move(parameters));
}

}  // namespace

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
    held_.push_back(parameter->gathered);
    versions_.push_back(parameter->shard_version());
    sources_.push_back(Parameter::source_of(parameter));
    if (!parameter->gathered.defined()) missing.push_back(sources_.back());
  }
  while (!missing.empty()) {
    const Parameter& first = *missing.front();
    const auto alike = [&](auto& other) {
      return other->group_name == first.group_name && other->compute_dtype == first.compute_dtype &&
             (other->shared == nullptr) == (first.shared == nullptr);
    };
    std::vector<ParameterPtr> members;
    std::ranges::copy_if(missing, std::back_inserter(members), alike);
    std::erase_if(missing, alike);
    buckets_.push_back(bucket_of(std::move(members)));
  }
  for (auto& bucket : buckets_) {  // once nothing is left to refuse
    RECORD_USER_SCOPE(scope_name(bucket->collective(), "start"));
    bucket->start();
  }
}

void Gather::snapshot() {
  Apart apart;
  for (auto& bucket : buckets_) bucket->snapshot();
}

std::vector<at::Tensor> Gather::finish(bool fresh) {
  const bool is_recorded = at::GradMode::is_enabled();  // for a backward, by eager code
  Apart apart;
  if (!is_started_) start();
  is_started_ = false;
  auto fulls = std::exchange(held_, {});
  const auto versions = std::exchange(versions_, {});
  const auto sources = std::exchange(sources_, {});
  for (auto& bucket : std::exchange(buckets_, {})) {
    RECORD_USER_SCOPE(scope_name(bucket->collective(), "wait"));
    auto gathered = bucket->finish(fresh);
    for (size_t i = 0; i < gathered.size(); ++i) {
      const auto place = std::ranges::find(sources, bucket->parameters()[i]) - sources.begin();
      const auto& parameter = parameters_[place];
      fulls[place] = gathered[i];
      if (parameter->after_forward && !in_backward()) {
        if (is_recorded || parameter->pending_uses > 0)
          parameter->shard_after_forward(gathered[i], versions[place]);
        else
          parameter->forget_after_forward();
      }
      if (!parameter->stays_gathered(in_backward())) continue;
      parameter->hold(gathered[i], /*read_only=*/!fresh);
      parameter->held_version = versions[place];
    }
  }
  return fulls;
}

std::vector<at::Tensor> Gather::finish_apart() {
  auto fulls = finish(/*fresh=*/true);
  Apart apart;
  for (size_t i = 0; i < fulls.size(); ++i)
    if (parameters_[i]->gathered.is_same(fulls[i])) fulls[i] = pooled_copy(fulls[i]);
  return fulls;
}

// Backwards are numbered by the forwards before them.
void count_held(const std::vector<ParameterPtr>& parameters) {
  if (in_backward()) return;
  for (auto& parameter : parameters)
    if (parameter->held_version && parameter->shared) {
      const auto& one_host = parameter->shared->one_host();
      one_host->host->begin_anew();
      one_host->backwards.count_publication();
    }
}

std::vector<at::Tensor> gather(const std::vector<ParameterPtr>& parameters) {
  return Gather(parameters).finish_apart();
}

}  // namespace zero3
