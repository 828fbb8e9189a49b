#include "bucket.h"

#include <ATen/ops/mm.h>
#include <ATen/record_function.h>

#include <cmath>
#include <limits>

#include "copy.h"
#include "exchange.h"
#include "mailbox.h"
#include "memory.h"
#include "publish.h"
#include "sum.h"

namespace zero3 {
namespace {

constexpr int64_t kSlabBytes = 8 << 20;

// Where a backend sums in fp16, half the scaling is before the sum and half after, so that it
// neither overflows nor underflows. We sum in fp32.
double pre_divide_factor(const Parameter& like, at::ScalarType wire_dtype) {
  const bool by_us = like.shared || is_point_to_point(like.reduce_channel());
  return wire_dtype == at::kHalf && !by_us
             ? std::exp2(std::ceil(std::log2(std::sqrt(std::max(like.divide_factor, 1.0)))))
             : 1.0;
}

// The rows that `rank` owns of a full tensor.
at::Tensor rows_of(const at::Tensor& full, const Parameter& parameter, int64_t rank) {
  const int64_t start = std::min(rank * parameter.chunk_rows(), parameter.rows());
  return full.narrow(0, start, parameter.rows_of(rank));
}

}  // namespace

Bucket::Bucket(const Parameter& like, at::ScalarType wire_dtype)
    : channel_(like.reduce_channel()),
      replicate_group_name_(like.replicate_group_name),
      is_shared_(like.shared != nullptr),
      rank_(like.rank),
      world_size_(like.world_size),
      divide_factor_(like.divide_factor),
      pre_divide_factor_(pre_divide_factor(like, wire_dtype)),
      options_(at::TensorOptions(wire_dtype).device(like.device)),
      // Mailboxes have a bound of their own.
      capacity_(is_shared_ ? std::numeric_limits<int64_t>::max()
                           : like.bucket_bytes / world_size_ /
                                 static_cast<int64_t>(options_.dtype().itemsize())) {}

bool Bucket::accepts(const Parameter& parameter, at::ScalarType wire_dtype) const {
  return channel_.group_name == parameter.reduce_group_name &&
         replicate_group_name_ == parameter.replicate_group_name &&
         is_shared_ == (parameter.shared != nullptr) && divide_factor_ == parameter.divide_factor &&
         this->wire_dtype() == wire_dtype && options_.device() == parameter.device;
}

bool Bucket::has_room_for(const Parameter& parameter) const {
  return parameters_.empty() || used_ + aligned(parameter.chunk_numel(), wire_dtype()) <= capacity_;
}

void Bucket::add(const ParameterPtr& parameter, const at::Tensor& grad, at::ScalarType through,
                 at::ScalarType normalised_dtype, bool owned) {
  const auto shard_dtype = note(parameter, normalised_dtype);
  send(parameter, grad, through, shard_dtype, owned);
}

void Bucket::add_product(const ParameterPtr& parameter, const at::Tensor& left,
                         const at::Tensor& right) {
  send_product(parameter, left, right, note(parameter, wire_dtype()));
}

void Bucket::add_zero(const ParameterPtr& parameter, at::ScalarType normalised_dtype) {
  send_zero(parameter, note(parameter, normalised_dtype));
}

void Bucket::send_zero(const ParameterPtr& parameter, at::ScalarType shard_dtype) {
  const auto zeros = pooled_empty(parameter->sizes, options_).zero_();
  send(parameter, zeros, wire_dtype(), shard_dtype, /*owned=*/true);
}

void Bucket::send_product(const ParameterPtr& parameter, const at::Tensor& left,
                          const at::Tensor& right, at::ScalarType shard_dtype) {
  auto grad = pooled_empty(parameter->sizes, left.options());
  at::mm_out(grad, left, right);
  send(parameter, grad, wire_dtype(), shard_dtype, /*owned=*/true);
}

at::ScalarType Bucket::note(const ParameterPtr& parameter, at::ScalarType normalised_dtype) {
  used_ += aligned(parameter->chunk_numel(), wire_dtype());
  parameters_.push_back(parameter);
  auto shard_dtype = parameter->shard_grad_dtype.value_or(normalised_dtype);
  shard_dtypes_.push_back(shard_dtype);
  if (parameter->is_replicated())
    shard_dtype = c10::promoteTypes(c10::promoteTypes(shard_dtype, wire_dtype()), at::kFloat);
  return shard_dtype;
}

int64_t Bucket::lowest_order() const {
  return (*std::ranges::min_element(parameters_, {}, [](auto& p) { return p->order; }))->order;
}

Collective Bucket::collective_of(const std::vector<ParameterPtr>& parameters) const {
  int64_t numel = 0;
  for (auto& parameter : parameters) numel += parameter->chunk_numel() * world_size_;
  const int64_t nbytes = numel * static_cast<int64_t>(options_.dtype().itemsize());
  return {"reduce_scatter", wire_dtype(),         nbytes,
          world_size_,      names_of(parameters), options_.device().is_meta()};
}

void Bucket::close() {
  send_rest();
  record([this] { return collective(); });
}

namespace {

// By messages. Large gradients go alone, as they are if they are owned; the rest is packed into
// slabs, rank-major, [world][chunk of p0 | chunk of p1 | ... | free], so that each rank's part is
// one run.
class ExchangedGradients : public Bucket {
 public:
  ExchangedGradients(const Parameter& like, at::ScalarType wire_dtype, bool in_pieces)
      : Bucket(like, wire_dtype),
        in_pieces_(in_pieces),
        is_point_to_point_(is_point_to_point(channel_)),
        exchange_(channel_, rank_) {}

  std::vector<at::Tensor> finish() override {
    exchange_.wait();
    std::vector<at::Tensor> shards;
    std::vector<Copy> copies;  // of what a collective has summed
    for (auto& [parameter, shard_dtype, piece, offset, is_alone] : entries_) {
      const auto sizes = parameter->sizes_with_rows(parameter->shard_rows());
      const int64_t numel = parameter->shard_rows() * parameter->row_numel();
      Rows addends;
      for (auto& addend : exchange_.addends()[*piece])
        addends.push_back(addend.narrow(0, offset, numel).view(sizes));
      at::Tensor shard;
      if (is_alone && world_size_ > 1 && shard_dtype == wire_dtype())
        shard = addends[addends.size() > 1 && rank_ == 0 ? 1 : 0];  // what was received
      else
        shard = pooled_empty(sizes, options_.dtype(shard_dtype));
      if (addends.size() == 1 && !shard.is_cpu()) {
        const auto& sum = addends.front();
        const bool is_there = sum.data_ptr() == shard.data_ptr() && divisor_now() == 1;
        if (!is_there) copies.push_back({shard, sum});
      } else {
        sum_and_divide(shard, addends, wire_dtype(), divisor_now());
      }
      shards.push_back(shard);
    }
    copy_all(copies, wire_dtype(), divisor_now());
    return shards;
  }

 private:
  struct Entry {
    ParameterPtr parameter;
    at::ScalarType shard_dtype;
    std::optional<size_t> piece;  // once it is sent
    int64_t offset;               // in a rank's row, in elements
    bool is_alone;                // in its piece, whose memory is ours
  };

  // Decided from the parameter alone: ranks may compute its gradient in ways of their own.
  bool goes_alone(const Parameter& parameter) const {
    if (in_pieces_) return true;
    const int64_t nbytes = parameter.chunk_numel() * options_.dtype().itemsize();
    if (is_point_to_point_) return nbytes >= kWorthAMessage;
    return nbytes * world_size_ >= kSlabBytes && parameter.rows() % world_size_ == 0;
  }

  void send(const ParameterPtr& parameter, const at::Tensor& grad, at::ScalarType through,
            at::ScalarType shard_dtype, bool owned) override {
    if (goes_alone(*parameter)) {
      RECORD_USER_SCOPE(scope_name(collective_of({parameter}), "send"));
      auto full = grad;
      if (!owned || !grad.is_contiguous() || grad.scalar_type() != wire_dtype() ||
          through != wire_dtype() || pre_divide_factor_ != 1.0) {
        full = pooled_empty(parameter->sizes, options_);
        copy_all({{full, grad}}, through, pre_divide_factor_);
      }
      Rows rows;
      for (int64_t rank = 0; rank < world_size_; ++rank)
        rows.push_back(rows_of(full, *parameter, rank).view(-1));
      const auto piece = exchange(rows, parameter->chunk_key());
      entries_.push_back({parameter, shard_dtype, piece, 0, /*is_alone=*/true});
      return;
    }
    const int64_t numel = aligned(parameter->chunk_numel(), wire_dtype());
    if (!slab_.defined() || slab_used_ + numel > slab_.size(1)) {
      send_rest();
      const int64_t slab_numel = kSlabBytes / world_size_ / options_.dtype().itemsize();
      const int64_t most = aligned(std::min(capacity_, slab_numel), wire_dtype());
      slab_ = pooled_empty({world_size_, std::max(most, numel)}, options_);
    }
    slab_key_ += " " + parameter->chunk_key();
    entries_.push_back({parameter, shard_dtype, std::nullopt, slab_used_, /*is_alone=*/false});
    pack(*parameter, grad, through);
  }

  // Casts, lays out and copies in one pass over memory.
  void pack(const Parameter& parameter, const at::Tensor& grad, at::ScalarType through) {
    std::vector<Copy> copies;
    for (int64_t rank = 0; rank < world_size_; ++rank) {
      auto chunk =
          slab_[rank].narrow(0, slab_used_, aligned(parameter.chunk_numel(), wire_dtype()));
      auto source = rows_of(grad, parameter, rank);
      const int64_t owned = source.numel();
      copies.push_back({chunk.narrow(0, 0, owned).view(source.sizes()), source});
      copies.push_back({chunk.narrow(0, owned, chunk.numel() - owned), {}});
    }
    copy_all(copies, through, pre_divide_factor_);
    slab_used_ += aligned(parameter.chunk_numel(), wire_dtype());
  }

  void send_rest() override {
    if (!slab_.defined()) return;
    RECORD_USER_SCOPE(scope_name(collective_of(unsent()), "send"));
    Rows rows;
    for (int64_t rank = 0; rank < world_size_; ++rank)
      rows.push_back(slab_[rank].narrow(0, 0, slab_used_));
    const auto piece = exchange(rows, std::exchange(slab_key_, {}));
    for (auto& entry : entries_)
      if (!entry.piece) entry.piece = piece;
    slab_.reset();
    slab_used_ = 0;
  }

  // Those in the slab.
  std::vector<ParameterPtr> unsent() const {
    std::vector<ParameterPtr> result;
    for (auto& entry : entries_)
      if (!entry.piece) result.push_back(entry.parameter);
    return result;
  }

  // Gives the number of the piece.
  size_t exchange(const Rows& rows, const std::string& key) {
    exchange_.reduce(rows, std::string("reduce ") + c10::toString(wire_dtype()) + " " + key);
    return pieces_++;
  }

  const bool in_pieces_;
  const bool is_point_to_point_;
  size_t pieces_ = 0;
  at::Tensor slab_;  // [world, n], the open one
  std::string slab_key_;
  int64_t slab_used_ = 0;
  std::vector<Entry> entries_;
  Exchange exchange_;
};

// By mailboxes. A gradient lies there in the wire's dtype, or in its own if that is narrower. It is
// written, and summed, block by block.
class PostedGradients : public Bucket {
 public:
  PostedGradients(const Parameter& like, at::ScalarType wire_dtype, uint64_t backward)
      : Bucket(like, wire_dtype), mailbox_(like.shared->one_host()->mailbox), backward_(backward) {}

  ~PostedGradients() override {
    for (auto& letter : letters_) mailbox_->drop(letter);
  }

  std::vector<at::Tensor> finish() override {
    for (auto& letter : letters_) mailbox_->finish(letter);
    return shards_;
  }

 private:
  void send(const ParameterPtr& parameter, const at::Tensor& grad, at::ScalarType through,
            at::ScalarType shard_dtype, bool owned) override {
    const bool as_it_is = pre_divide_factor_ == 1.0 && is_exact(through, wire_dtype());
    const auto dtype = as_it_is ? through : wire_dtype();
    const bool is_there = owned && mailbox_->holds(grad) && grad.scalar_type() == dtype &&
                          grad.is_contiguous() && pre_divide_factor_ == 1.0 &&
                          is_exact(dtype, through);
    post(parameter, shard_dtype, [&](const Block& block) {
      const auto rows = grad.narrow(0, block.begin, block.rows);
      if (is_there) return rows;
      auto posted = mailbox_->empty(rows.sizes(), dtype, parameter->fqn);
      copy_all({{posted, rows}}, through, pre_divide_factor_);
      return posted;
    });
  }

  void send_product(const ParameterPtr& parameter, const at::Tensor& left, const at::Tensor& right,
                    at::ScalarType shard_dtype) override {
    if (pre_divide_factor_ != 1.0) {
      Bucket::send_product(parameter, left, right, shard_dtype);
      return;
    }
    post(parameter, shard_dtype, [&](const Block& block) {
      auto posted = mailbox_->empty({block.rows, right.size(1)}, wire_dtype(), parameter->fqn);
      at::mm_out(posted, left.narrow(0, block.begin, block.rows), right);
      return posted;
    });
  }

  // Takes no memory: others may wait for that of this rank, and it for theirs.
  void send_zero(const ParameterPtr& parameter, at::ScalarType shard_dtype) override {
    post(parameter, shard_dtype, [](const Block&) { return at::Tensor(); });
  }

  // `write` gives the rows of a block, in the mailbox.
  template <typename Write>
  void post(const ParameterPtr& parameter, at::ScalarType shard_dtype, Write write) {
    RECORD_USER_SCOPE(scope_name(collective_of({parameter}), "send"));
    shards_.push_back(pooled_empty(parameter->sizes_with_rows(parameter->shard_rows()),
                                   options_.dtype(shard_dtype)));
    const auto& blocks = parameter->shared->blocks;
    for (size_t i = 0; i < blocks.size(); ++i) {
      auto letter = mailbox_->post(parameter, i, write(blocks[i]), backward_, wire_dtype(),
                                   divisor_now(), shards_.back());
      if (letter) letters_.push_back(std::move(letter));
      mailbox_->poll();
    }
  }

  const std::shared_ptr<Mailbox> mailbox_;
  const uint64_t backward_;
  std::vector<at::Tensor> shards_;
  std::vector<LetterPtr> letters_;
};

}  // namespace

std::unique_ptr<Bucket> Bucket::make(const Parameter& like, at::ScalarType wire_dtype,
                                     uint64_t backward, bool in_pieces) {
  if (like.shared) return std::make_unique<PostedGradients>(like, wire_dtype, backward);
  return std::make_unique<ExchangedGradients>(like, wire_dtype, in_pieces);
}

}  // namespace zero3
