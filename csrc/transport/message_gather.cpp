// Gathers of ranks that exchange messages.
#include <optional>

#include "kernels/copy.h"
#include "support/host_copies.h"
#include "support/memory.h"
#include "support/profiler_range.h"
#include "support/shard_reads.h"
#include "transport/gather_bucket.h"
#include "transport/messages.h"

namespace zero3 {
namespace {

// Each source travels in memory of its own: the ranks' chunks, which end to end are the full
// tensor followed by padding, or the rows of unequal ranks. Small sources share rows [world, n],
// one chunk after the other, and are copied out of them.
class MessageGather : public GatherBucket {
 public:
  MessageGather(std::shared_ptr<Channel> channel, std::vector<SourcePtr> sources)
      : GatherBucket(std::move(sources)), channel_(std::move(channel)) {
    const auto& traits = channel_->traits;
    const bool may_travel_alone =
        sources_.size() == 1 || traits.is_point_to_point || traits.is_grouped;
    const auto item = static_cast<int64_t>(c10::elementSize(sources_.front()->dtype));
    for (auto& source : sources_) {
      const bool is_worth_it =
          sources_.size() == 1 || source->chunk_numel() * item >= kWorthAMessage;
      const auto& layout = source->layout;
      const bool fits_alone =
          source->is_contiguous() && (layout.is_chunked() || traits.is_point_to_point);
      const bool alone = source->chunk_numel() == 0 || layout.only_rank() ||
                         (may_travel_alone && fits_alone && is_worth_it);
      alone_.push_back(alone ? empty(source->padded_numel()) : at::Tensor());
      if (!alone) shared_numel_ += space_of(*source);
    }
    if (shared_numel_ > 0) {
      const int64_t world_size = sources_.front()->layout.world_size();
      shared_rows_ = empty(world_size * shared_numel_).view({world_size, shared_numel_});
    }
  }

  // Writes this rank's rows, with the cast in the same pass, and starts the gathers: on a CPU each
  // one once it is written, on other devices all at once, beside the computation if shards are in
  // host memory.
  void start() override {
    const Source& first = *sources_.front();
    const std::string kind = std::string("gather ") + c10::toString(first.dtype);
    std::string shared;
    int64_t offset = 0;
    exchange_ = channel_->exchange();
    if (first.device.is_cuda()) started_on_ = current_stream(first.device);
    std::optional<OnCopyStream> beside;
    if (std::ranges::any_of(sources_, [](auto& source) { return source->is_on_host(); }))
      switch_to(beside);
    std::vector<Copy> copies;
    std::vector<Exchange::Piece> pieces;
    const auto send = [&] {
      copy_all(std::exchange(copies, {}), first.dtype);
      exchange_->gather(std::exchange(pieces, {}));
    };
    for (size_t i = 0; i < sources_.size(); ++i) {
      const Source& source = *sources_[i];
      const auto key = " " + source.chunk_key();
      if (alone_[i].defined()) {
        if (source.layout.is_chunked())
          write(source, alone_[i], first.rank * source.chunk_numel(), source.chunk_numel(), copies);
        else
          copies.push_back({my_rows_of(source, full_of(source, alone_[i])), source.shard});
        pieces.push_back({rows_of(source, alone_[i]), kind + key});
      } else {
        const int64_t space = space_of(source);
        write(source, shared_rows_, first.rank * shared_numel_ + offset, space, copies);
        offset += space;
        shared += key;
      }
      if (first.device.is_cpu()) send();
    }
    if (shared_numel_ > 0) pieces.push_back({shared_rows_.unbind(), kind + shared});
    send();
    if (beside) copied_ = beside->record();
    for (auto& source : sources_) finish_reading(source->shard);
    record([this] { return collective(); });
  }

  // Returns fresh tensors in any case.
  std::vector<at::Tensor> finish(bool) override {
    exchange_->wait();
    if (copied_) wait_on_current_stream(*copied_, sources_.front()->device);
    if (started_on_) use_on_current_stream();
    std::vector<at::Tensor> fulls;
    std::vector<Copy> copies;
    int64_t offset = 0;
    for (size_t i = 0; i < sources_.size(); ++i) {
      const Source& source = *sources_[i];
      if (alone_[i].defined()) {
        fulls.push_back(full_of(source, alone_[i]));
        continue;
      }
      auto full = pooled_empty(source.sizes, source.strides, shared_rows_.options());
      for (int64_t rank = 0; rank < source.layout.world_size(); ++rank) {
        const int64_t rows = source.layout.rows_of(rank);
        if (rows == 0) continue;
        copies.push_back(
            {full.narrow(0, source.layout.first_row_of(rank), rows),
             part_of(shared_rows_, rank * shared_numel_ + offset, source.sizes_with_rows(rows))});
      }
      fulls.push_back(full);
      offset += space_of(source);
    }
    copy_all(copies, sources_.front()->dtype);
    return fulls;
  }

 private:
  // Switches to the copy stream, which uses memory that the computation's stream has allocated.
  void switch_to(std::optional<OnCopyStream>& copy_stream) {
    copy_stream.emplace(sources_.front()->device, CopyStream::kShards);
    for (auto& memory : alone_)
      if (memory.defined()) memory.record_stream(copy_stream->stream());
    if (shared_rows_.defined()) shared_rows_.record_stream(copy_stream->stream());
  }

  // A gather that started ahead may be used on another stream than that which allocated its memory.
  void use_on_current_stream() {
    const auto stream = current_stream(started_on_->device());
    if (stream == *started_on_) return;
    for (auto& memory : alone_)
      if (memory.defined()) memory.record_stream(stream);
    if (shared_rows_.defined()) shared_rows_.record_stream(stream);
  }

  // Elements that a rank's chunk takes in shared rows.
  static int64_t space_of(const Source& source) {
    return aligned(source.chunk_numel(), source.dtype);
  }

  // Writes the shard, and zeros behind it, to the `space` elements of `memory` from `offset` on.
  static void write(const Source& source, const at::Tensor& memory, int64_t offset, int64_t space,
                    std::vector<Copy>& copies) {
    const int64_t numel = source.shard_rows() * source.row_numel();
    copies.push_back({part_of(memory, offset, source.shard.sizes()), source.shard});
    if (numel < space) copies.push_back({part_of(memory, offset + numel, {space - numel}), {}});
  }

  // The part of each rank in the memory of a source that travels alone.
  static Rows rows_of(const Source& source, const at::Tensor& memory) {
    Rows rows;
    for (int64_t rank = 0; rank < source.layout.world_size(); ++rank) {
      const auto& layout = source.layout;
      const int64_t numel = source.row_numel();
      rows.push_back(memory.narrow(0, layout.first_padded_row_of(rank) * numel,
                                   layout.padded_rows_of(rank) * numel));
    }
    return rows;
  }
  static at::Tensor my_rows_of(const Source& source, const at::Tensor& full) {
    return full.narrow(0, source.layout.first_row_of(source.rank), source.shard_rows());
  }
  static at::Tensor full_of(const Source& source, const at::Tensor& memory) {
    return memory.as_strided(source.sizes, source.strides);
  }

  at::Tensor empty(int64_t numel) const {
    const Source& first = *sources_.front();
    return pooled_empty({numel}, at::TensorOptions(first.dtype).device(first.device));
  }

  const std::shared_ptr<Channel> channel_;
  std::vector<at::Tensor> alone_;  // memory of each source, flat; undefined if it shares
  at::Tensor shared_rows_;         // [world, shared_numel]
  int64_t shared_numel_ = 0;       // elements per rank
  std::unique_ptr<Exchange> exchange_;
  std::optional<c10::Stream> started_on_;  // on a GPU
  std::optional<c10::Event> copied_;       // the shards, if some were copied from host memory
};

}  // namespace

std::unique_ptr<GatherBucket> Messages::gather_bucket(std::vector<SourcePtr> sources) {
  return std::make_unique<MessageGather>(gathers, std::move(sources));
}

}  // namespace zero3
