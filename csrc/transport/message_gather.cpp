// Gathers of ranks that exchange messages.
#include "kernels/copy.h"
#include "support/memory.h"
#include "support/profiler_range.h"
#include "transport/gather_bucket.h"
#include "transport/messages.h"

namespace zero3 {
namespace {

// Each parameter travels in rows [world, chunk], which end to end are the full tensor followed by
// padding. Small parameters share rows, one chunk after the other, and are copied out of them.
class MessageGather : public GatherBucket {
 public:
  MessageGather(std::shared_ptr<Channel> channel, std::vector<ParameterPtr> parameters)
      : GatherBucket(std::move(parameters)), channel_(std::move(channel)) {
    const auto& traits = channel_->traits;
    const bool may_travel_alone =
        parameters_.size() == 1 || traits.is_point_to_point || traits.is_grouped;
    const auto item = static_cast<int64_t>(c10::elementSize(parameters_.front()->compute_dtype));
    for (auto& parameter : parameters_) {
      const bool is_worth_it =
          parameters_.size() == 1 || parameter->chunk_numel() * item >= kWorthAMessage;
      const bool alone = parameter->chunk_numel() == 0 ||
                         (may_travel_alone && parameter->is_contiguous() && is_worth_it);
      own_rows_.push_back(alone ? new_rows(parameter->chunk_numel()) : at::Tensor());
      if (!alone) shared_numel_ += space_of(*parameter);
    }
    if (shared_numel_ > 0) shared_rows_ = new_rows(shared_numel_);
  }

  // Writes this rank's rows, with the cast in the same pass, and starts the gathers: on a CPU each
  // one once it is written, on other devices all at once.
  void start() override {
    const Parameter& first = *parameters_.front();
    const std::string kind = std::string("gather ") + c10::toString(first.compute_dtype);
    std::string shared;
    int64_t offset = 0;
    exchange_ = channel_->exchange();
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

  // Returns fresh tensors in any case.
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
  // Elements that a rank's chunk takes in shared rows.
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

  const std::shared_ptr<Channel> channel_;
  std::vector<at::Tensor> own_rows_;  // rows of each parameter; undefined if it shares
  at::Tensor shared_rows_;            // [world, shared_numel]
  int64_t shared_numel_ = 0;          // elements per rank
  std::unique_ptr<Exchange> exchange_;
};

}  // namespace

std::unique_ptr<GatherBucket> Messages::gather_bucket(std::vector<ParameterPtr> parameters) {
  return std::make_unique<MessageGather>(gathers, std::move(parameters));
}

}  // namespace zero3
