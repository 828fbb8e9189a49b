#include "gather.h"

#include <c10/core/GradMode.h>

#include <algorithm>

#include "collective_log.h"
#include "exchange.h"
#include "memory.h"
#include "publish.h"

namespace zero3 {
namespace {

std::function<void(const std::string&)> refresh_function;

void check_gatherable(const Parameter& parameter) {
  TORCH_CHECK(!parameter.shard.is_meta(), "zero3: '", parameter.fqn,
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

void GatherBucket::record_start() const {
  int64_t nbytes = 0;
  std::vector<std::string> fqns;
  for (auto& parameter : parameters_) {
    nbytes += parameter->world_size * bytes_of_chunk(*parameter);
    fqns.push_back(parameter->fqn);
  }
  record({"all_gather", parameters_.front()->compute_dtype, nbytes, fqns});
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
    const bool may_travel_alone =
        parameters_.size() == 1 || is_point_to_point(first.group_name, first.device);
    for (auto& parameter : parameters_) {
      const bool alone = may_travel_alone && parameter->is_contiguous() &&
                         (parameters_.size() == 1 || parameter->chunk_numel() == 0 ||
                          bytes_of_chunk(*parameter) >= kWorthAMessage);
      own_rows_.push_back(alone ? new_rows(parameter->chunk_numel()) : at::Tensor());
      if (!alone) shared_numel_ += parameter->chunk_numel();
    }
    if (shared_numel_ > 0) shared_rows_ = new_rows(shared_numel_);
  }

  // Writes this rank's rows, the cast in the same pass, and starts.
  void start() override {
    const Parameter& first = *parameters_.front();
    const std::string kind = std::string("gather ") + c10::toString(first.compute_dtype);
    std::string shared;
    int64_t offset = 0;
    exchange_ = std::make_unique<Exchange>(first.group_name, first.rank);
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const Parameter& parameter = *parameters_[i];
      const auto key = " " + parameter.chunk_key();
      if (own_rows_[i].defined()) {
        write(parameter, own_rows_[i][first.rank]);
        exchange_->gather(own_rows_[i], kind + key);
      } else {
        write(parameter, shared_rows_[first.rank].narrow(0, offset, parameter.chunk_numel()));
        offset += parameter.chunk_numel();
        shared += key;
      }
    }
    if (shared_numel_ > 0) exchange_->gather(shared_rows_, kind + shared);
    record_start();
  }

  // Always fresh.
  std::vector<at::Tensor> finish(bool) override {
    exchange_->wait();
    std::vector<at::Tensor> fulls;
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
        full.narrow(0, rank * parameter.chunk_rows(), rows)
            .copy_(shared_rows_[rank]
                       .narrow(0, offset, rows * parameter.row_numel())
                       .view(parameter.sizes_with_rows(rows)));
      }
      fulls.push_back(full);
      offset += parameter.chunk_numel();
    }
    return fulls;
  }

 private:
  static void write(const Parameter& parameter, const at::Tensor& chunk) {
    const int64_t owned = parameter.shard_rows() * parameter.row_numel();
    chunk.narrow(0, 0, owned).view(parameter.shard.sizes()).copy_(parameter.shard);
    chunk.narrow(0, owned, chunk.numel() - owned).zero_();
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

void set_refresh(std::function<void(const std::string& fqn)> function) {
  refresh_function = std::move(function);
}

void refresh(const Parameter& parameter) {
  if (refresh_function) refresh_function(parameter.fqn);
}

Gather::Gather(std::vector<ParameterPtr> parameters) : parameters_(std::move(parameters)) {
  start();
}

void Gather::start() {
  c10::NoGradGuard no_grad;
  for (size_t first = 0; first < parameters_.size(); ++first) {
    const auto alike = [&](const Parameter& other) {
      return other.group_name == parameters_[first]->group_name &&
             other.compute_dtype == parameters_[first]->compute_dtype &&
             (other.shared == nullptr) == (parameters_[first]->shared == nullptr);
    };
    const auto before = parameters_.begin() + first;
    if (std::any_of(parameters_.begin(), before, [&](auto& p) { return alike(*p); })) continue;
    std::vector<ParameterPtr> members;
    std::ranges::copy_if(parameters_, std::back_inserter(members),
                         [&](auto& p) { return alike(*p); });
    buckets_.push_back(bucket_of(std::move(members)));
  }
  for (auto& bucket : buckets_) bucket->start();  // once nothing is left to refuse
}

std::vector<at::Tensor> Gather::finish(bool fresh) {
  c10::NoGradGuard no_grad;
  if (buckets_.empty()) start();
  std::vector<at::Tensor> fulls(parameters_.size());
  for (auto& bucket : std::exchange(buckets_, {})) {
    auto gathered = bucket->finish(fresh);
    for (size_t i = 0; i < gathered.size(); ++i) {
      auto found = std::ranges::find(parameters_, bucket->parameters()[i]);
      fulls[found - parameters_.begin()] = gathered[i];
    }
  }
  return fulls;
}

std::vector<at::Tensor> gather(const std::vector<ParameterPtr>& parameters) {
  return Gather(parameters).finish(/*fresh=*/true);
}

}  // namespace zero3
