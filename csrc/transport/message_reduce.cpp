// Reductions of ranks that exchange messages.
#include "kernels/copy.h"
#include "kernels/sum.h"
#include "support/memory.h"
#include "support/profiler_range.h"
#include "transport/messages.h"
#include "transport/reduce_bucket.h"

namespace zero3 {
namespace {

constexpr int64_t kSlabBytes = 8 << 20;

// The rows of `rank` of a full tensor.
at::Tensor rows_of(const at::Tensor& full, const Parameter& parameter, int64_t rank) {
  const auto& layout = parameter.source->layout;
  return full.narrow(0, layout.first_row_of(rank), layout.rows_of(rank));
}

// Large gradients travel alone, in their own memory if the bucket may take it over. Others are
// packed into slabs, rank-major,
// [world][chunk of p0 | chunk of p1 | ... | free], so that each rank's part is contiguous.
class MessageReduce : public ReduceBucket {
 public:
  MessageReduce(const Channel& channel, const Parameter& like, const BucketKey& key, bool in_pieces)
      : ReduceBucket(like, key),
        in_pieces_(in_pieces),
        is_point_to_point_(channel.traits.is_point_to_point),
        exchange_(channel.exchange()) {}

  std::vector<at::Tensor> finish() override {
    exchange_->wait();
    std::vector<at::Tensor> shards;
    std::vector<Copy> copies;  // copies of sums from a collective
    for (auto& [parameter, shard_dtype, piece, offset, is_alone] : entries_) {
      const int64_t rows = parameter->source->shard_rows();
      const auto sizes = parameter->source->sizes_with_rows(rows);
      const int64_t row = sent_row(*parameter);
      const auto sent_sizes = key_.codec ? std::vector<int64_t>{rows, row} : sizes;
      Rows addends;
      for (auto& addend : exchange_->addends()[*piece])
        addends.push_back(part_of(addend, offset, sent_sizes));
      if (key_.codec) {
        shards.push_back(pooled_empty(sizes, options().dtype(shard_dtype)));
        key_.codec->sum(shards.back(), addends, divisor_now());
        continue;
      }
      const bool takes_over = is_alone && shard_dtype == wire_dtype();
      // Reuses a received addend. This rank's own, the first on the first rank, may be a view of
      // the whole gradient, which would stay alive.
      const auto& memory = addends[addends.size() > 1 && rank_ == 0 ? 1 : 0];
      const auto shard = takes_over ? memory : pooled_empty(sizes, options().dtype(shard_dtype));
      const bool is_there = takes_over && addends.size() == 1 && divisor_now() == 1;
      if (!is_there && addends.size() == 1 && !shard.is_cpu())
        copies.push_back({shard, addends.front()});
      else if (!is_there)
        sum_and_divide(shard, addends, wire_dtype(), divisor_now());
      shards.push_back(shard);
    }
    copy_all(copies, wire_dtype(), divisor_now());
    return shards;
  }

 private:
  struct Entry {
    ParameterPtr parameter;
    at::ScalarType shard_dtype;
    std::optional<size_t> piece;  // set once it is sent
    int64_t offset;               // in a rank's row, in elements
    bool is_alone;                // alone in its piece, whose memory is ours
  };

  // Depends only on the parameter: ranks may compute its gradient in different ways.
  bool goes_alone(const Parameter& parameter) const {
    const auto& layout = parameter.source->layout;
    if (in_pieces_ || layout.only_rank()) return true;
    const int64_t nbytes = sent_chunk(parameter) * c10::elementSize(sent_dtype());
    if (is_point_to_point_) return nbytes >= kWorthAMessage;
    return nbytes * world_size_ >= kSlabBytes && layout.is_chunked() &&
           layout.rows() % world_size_ == 0;
  }

  void send(const ParameterPtr& parameter, const at::Tensor& grad, at::ScalarType through,
            at::ScalarType shard_dtype, bool owned) override {
    if (goes_alone(*parameter)) {
      const ProfilerRange range([&] { return scope_name(collective_of({parameter}), "send"); });
      auto full = grad;
      if (key_.codec) {
        full = encoded(*parameter, grad, through);
      } else if (!owned || !grad.is_contiguous() || grad.scalar_type() != wire_dtype() ||
                 through != wire_dtype() || pre_divide_factor_ != 1.0) {
        full = pooled_empty(parameter->sizes(), options());
        copy_all({{full, grad}}, through, pre_divide_factor_);
      }
      Rows rows;
      for (int64_t rank = 0; rank < world_size_; ++rank)
        rows.push_back(rows_of(full, *parameter, rank).view(-1));
      const auto piece = exchange(rows, parameter->source->chunk_key());
      entries_.push_back({parameter, shard_dtype, piece, 0, /*is_alone=*/true});
      return;
    }
    const int64_t numel = aligned(sent_chunk(*parameter), sent_dtype());
    if (!slab_.defined() || slab_used_ + numel > slab_.size(1)) {
      send_rest();
      const int64_t slab_numel = kSlabBytes / world_size_ / c10::elementSize(sent_dtype());
      const int64_t most = aligned(std::min(capacity_, slab_numel), sent_dtype());
      slab_ = pooled_empty({world_size_, std::max(most, numel)}, options().dtype(sent_dtype()));
    }
    slab_key_ += " " + parameter->source->chunk_key();
    entries_.push_back({parameter, shard_dtype, std::nullopt, slab_used_, /*is_alone=*/false});
    if (key_.codec)
      pack(*parameter, encoded(*parameter, grad, through), at::kByte);
    else
      pack(*parameter, grad, through);
  }

  // Returns the gradient as the codec's bytes, uint8 [rows, row_bytes].
  at::Tensor encoded(Parameter& parameter, const at::Tensor& grad, at::ScalarType through) const {
    const auto exact = grad.to(through);
    if (!parameter.settings.gradient_dtypes.feeds_error_back) return key_.codec->encode(exact);
    auto values = parameter.gradients.take_error();
    if (values.defined())
      values.add_(exact);
    else
      values = pooled_empty(parameter.sizes(), options().dtype(at::kFloat)).copy_(exact);
    auto bytes = key_.codec->encode(values);
    auto sent = pooled_empty(values.sizes(), values.options());
    key_.codec->decode(sent, bytes);
    // A nonfinite error would make all later gradients nonfinite.
    parameter.gradients.keep_error(values.sub_(sent).nan_to_num_(0, 0, 0));
    return bytes;
  }

  // Casts, lays out and copies in one pass over memory.
  void pack(const Parameter& parameter, const at::Tensor& grad, at::ScalarType through) {
    std::vector<Copy> copies;
    const int64_t numel = aligned(sent_chunk(parameter), sent_dtype());
    for (int64_t rank = 0; rank < world_size_; ++rank) {
      const int64_t offset = rank * slab_.size(1) + slab_used_;
      auto source = rows_of(grad, parameter, rank);
      const int64_t owned = source.numel();
      copies.push_back({part_of(slab_, offset, source.sizes()), source});
      if (owned < numel) copies.push_back({part_of(slab_, offset + owned, {numel - owned}), {}});
    }
    copy_all(copies, through, pre_divide_factor_);
    slab_used_ += numel;
  }

  void send_rest() override {
    if (!slab_.defined()) return;
    const ProfilerRange range([&] { return scope_name(collective_of(unsent()), "send"); });
    Rows rows;
    for (int64_t rank = 0; rank < world_size_; ++rank)
      rows.push_back(slab_[rank].narrow(0, 0, slab_used_));
    const auto piece = exchange(rows, std::exchange(slab_key_, {}));
    for (auto& entry : entries_)
      if (!entry.piece) entry.piece = piece;
    slab_.reset();
    slab_used_ = 0;
  }

  // The parameters in the slab.
  std::vector<ParameterPtr> unsent() const {
    std::vector<ParameterPtr> result;
    for (auto& entry : entries_)
      if (!entry.piece) result.push_back(entry.parameter);
    return result;
  }

  // Starts the reduction of a piece, and returns its number.
  size_t exchange(const Rows& rows, const std::string& key) {
    const auto kind = std::string("reduce ") + c10::toString(sent_dtype()) + " ";
    if (key_.codec)
      exchange_->all_to_all(rows, kind + key_.codec->text + " " + key);
    else
      exchange_->reduce(rows, kind + key);
    return pieces_++;
  }

  const bool in_pieces_;
  const bool is_point_to_point_;
  size_t pieces_ = 0;
  at::Tensor slab_;  // the open slab, [world, n]
  std::string slab_key_;
  int64_t slab_used_ = 0;
  std::vector<Entry> entries_;
  const std::unique_ptr<Exchange> exchange_;
};

class MessageBackward : public Backward {
 public:
  explicit MessageBackward(std::shared_ptr<Channel> channel) : channel_(std::move(channel)) {}

  std::unique_ptr<ReduceBucket> reduce_bucket(const Parameter& like, const BucketKey& key,
                                              bool in_pieces) override {
    return std::make_unique<MessageReduce>(*channel_, like, key, in_pieces);
  }

  std::unique_ptr<PresenceGather> gather_presences(const std::vector<ParameterPtr>& parameters,
                                                   const Presences& mine,
                                                   Occasion occasion) override {
    return zero3::gather_presences(*channel_, parameters, mine, occasion);
  }

 private:
  const std::shared_ptr<Channel> channel_;
};

}  // namespace

std::unique_ptr<Backward> Messages::begin_backward() {
  return std::make_unique<MessageBackward>(reductions);
}

}  // namespace zero3
