// Gathers of ranks that exchange messages.
#include <optional>

#include "kernels/copy.h"
#include "support/host_copies.h"
#include "support/memory.h"
#include "support/profiler_range.h"
#include "tier/file_tier.h"
#include "transport/gather_bucket.h"
#include "transport/messages.h"

namespace zero3 {
namespace {

// Each parameter travels in memory of its own: the ranks' chunks, which end to end are the full
// tensor followed by padding, or all of what one rank owns. Small parameters share rows [world, n],
// one chunk after the other, and are copied out of them.
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
      const bool alone = parameter->chunk_numel() == 0 || parameter->owner ||
                         (may_travel_alone && parameter->is_contiguous() && is_worth_it);
      alone_.push_back(alone ? empty(parameter->padded_numel()) : at::Tensor());
      if (!alone) shared_numel_ += space_of(*parameter);
    }
    if (shared_numel_ > 0) {
      const int64_t world_size = parameters_.front()->world_size;
      shared_rows_ = empty(world_size * shared_numel_).view({world_size, shared_numel_});
    }
  }

  // Writes this rank's rows, with the cast in the same pass, and starts the gathers: on a CPU each
  // one once it is written, on other devices all at once, beside the computation if shards are in
  // host memory.
  void start() override {
    const Parameter& first = *parameters_.front();
    const std::string kind = std::string("gather ") + c10::toString(first.compute_dtype);
    std::string shared;
    int64_t offset = 0;
    exchange_ = channel_->exchange();
    std::optional<OnCopyStream> beside;
    if (std::ranges::any_of(parameters_, [](auto& parameter) { return parameter->is_on_host(); }))
      switch_to(beside);
    std::vector<Copy> copies;
    std::vector<Exchange::Piece> pieces;
    const auto send = [&] {
      copy_all(std::exchange(copies, {}), first.compute_dtype);
      exchange_->gather(std::exchange(pieces, {}));
    };
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const Parameter& parameter = *parameters_[i];
      const auto key = " " + parameter.chunk_key();
      if (alone_[i].defined()) {
        if (parameter.owner)
          copies.push_back({full_of(parameter, alone_[i]).narrow(0, 0, parameter.shard_rows()),
                            parameter.shard});
        else
          write(parameter, alone_[i], first.rank * parameter.chunk_numel(), parameter.chunk_numel(),
                copies);
        pieces.push_back({rows_of(parameter, alone_[i]), kind + key});
      } else {
        const int64_t space = space_of(parameter);
        write(parameter, shared_rows_, first.rank * shared_numel_ + offset, space, copies);
        offset += space;
        shared += key;
      }
      if (first.device.is_cpu()) send();
    }
    if (shared_numel_ > 0) pieces.push_back({shared_rows_.unbind(), kind + shared});
    send();
    if (beside) copied_ = beside->record();
    for (auto& parameter : parameters_) finish_reading(parameter->shard);
    record([this] { return collective(); });
  }

  // Returns fresh tensors in any case.
  std::vector<at::Tensor> finish(bool) override {
    exchange_->wait();
    if (copied_) wait_on_current_stream(*copied_, parameters_.front()->device);
    std::vector<at::Tensor> fulls;
    std::vector<Copy> copies;
    int64_t offset = 0;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const Parameter& parameter = *parameters_[i];
      if (alone_[i].defined()) {
        fulls.push_back(full_of(parameter, alone_[i]));
        continue;
      }
      auto full = pooled_empty(parameter.sizes, parameter.strides, shared_rows_.options());
      for (int64_t rank = 0; rank < parameter.world_size; ++rank) {
        const int64_t rows = parameter.rows_of(rank);
        if (rows == 0) break;
        copies.push_back({full.narrow(0, parameter.first_row_of(rank), rows),
                          part_of(shared_rows_, rank * shared_numel_ + offset,
                                  parameter.sizes_with_rows(rows))});
      }
      fulls.push_back(full);
      offset += space_of(parameter);
    }
    copy_all(copies, parameters_.front()->compute_dtype);
    return fulls;
  }

 private:
  // Switches to the copy stream, which uses memory that the computation's stream has allocated.
  void switch_to(std::optional<OnCopyStream>& copy_stream) {
    copy_stream.emplace(parameters_.front()->device, CopyStream::kShards);
    for (auto& memory : alone_)
      if (memory.defined()) memory.record_stream(copy_stream->stream());
    if (shared_rows_.defined()) shared_rows_.record_stream(copy_stream->stream());
  }

  // Elements that a rank's chunk takes in shared rows.
  static int64_t space_of(const Parameter& parameter) {
    return aligned(parameter.chunk_numel(), parameter.compute_dtype);
  }

  // Writes the shard, and zeros behind it, to the `space` elements of `memory` from `offset` on.
  static void write(const Parameter& parameter, const at::Tensor& memory, int64_t offset,
                    int64_t space, std::vector<Copy>& copies) {
    const int64_t numel = parameter.shard_rows() * parameter.row_numel();
    copies.push_back({part_of(memory, offset, parameter.shard.sizes()), parameter.shard});
    if (numel < space) copies.push_back({part_of(memory, offset + numel, {space - numel}), {}});
  }

  // The part of each rank in the memory of a parameter that travels alone.
  static Rows rows_of(const Parameter& parameter, const at::Tensor& memory) {
    Rows rows;
    for (int64_t rank = 0; rank < parameter.world_size; ++rank) {
      const int64_t n = parameter.owner ? parameter.rows_of(rank) * parameter.row_numel()
                                        : parameter.chunk_numel();
      rows.push_back(memory.narrow(0, parameter.owner ? 0 : rank * n, n));
    }
    return rows;
  }
  static at::Tensor full_of(const Parameter& parameter, const at::Tensor& memory) {
    return memory.as_strided(parameter.sizes, parameter.strides);
  }

  at::Tensor empty(int64_t numel) const {
    const Parameter& first = *parameters_.front();
    return pooled_empty({numel}, at::TensorOptions(first.compute_dtype).device(first.device));
  }

  const std::shared_ptr<Channel> channel_;
  std::vector<at::Tensor> alone_;  // memory of each parameter, flat; undefined if it shares
  at::Tensor shared_rows_;         // [world, shared_numel]
  int64_t shared_numel_ = 0;       // elements per rank
  std::unique_ptr<Exchange> exchange_;
  std::optional<c10::Event> copied_;  // the shards, if some were copied from host memory
};

}  // namespace

std::unique_ptr<GatherBucket> Messages::gather_bucket(std::vector<ParameterPtr> parameters) {
  return std::make_unique<MessageGather>(gathers, std::move(parameters));
}

}  // namespace zero3
