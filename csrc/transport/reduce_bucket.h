// Reduces the gradients of several parameters to their shards.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/macros/Export.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "parameter/parameter.h"
#include "support/collective_log.h"
#include "transport/bucket_key.h"

namespace zero3 {

// Gradients of one key that are reduced, and waited for, together. Exported, as GatherBucket is.
class C10_EXPORT ReduceBucket {
 public:
  virtual ~ReduceBucket() = default;

  const BucketKey& key() const { return key_; }
  bool has_room_for(const Parameter& parameter) const;
  bool is_full() const { return used_ >= capacity_; }
  const std::vector<ParameterPtr>& parameters() const { return parameters_; }
  int64_t lowest_order() const;  // lowest order of parameters()
  // Dtype of the delivered gradient of each of parameters().
  const std::vector<at::ScalarType>& shard_dtypes() const { return shard_dtypes_; }
  at::ScalarType wire_dtype() const { return key_.wire_dtype; }
  Collective collective() const { return collective_of(parameters_); }

  // Adds `grad`, cast to `through` and then to the wire dtype. If `owned`, the bucket takes
  // over the memory of `grad`. Otherwise `grad` may be reused when add() returns.
  void add(const ParameterPtr& parameter, const at::Tensor& grad, at::ScalarType through,
           at::ScalarType normalized_dtype, bool owned);
  // Adds left @ right, both in the wire dtype.
  void add_product(const ParameterPtr& parameter, const at::Tensor& left, const at::Tensor& right);
  // Adds zeros.
  void add_zero(const ParameterPtr& parameter, at::ScalarType normalized_dtype);
  void close();  // no gradients are added after this

  // Divisor still to be applied to the sum over all ranks. Where shards are replicated, ReplicaSum
  // applies it.
  double divisor() const { return key_.divide_factor / pre_divide_factor_; }
  // Part of divisor(), for the sum over the ranks of the shards: makes it their mean, or the result
  // if that is larger.
  double divisor_over_shards() const {
    return std::min(static_cast<double>(world_size_), key_.divide_factor) / pre_divide_factor_;
  }

  // Waits, and returns the reduced and scaled shard of each of parameters(), in its dtype of
  // shard_dtypes(). A replicated shard is not scaled, and its dtype also holds the wire dtype and
  // fp32.
  virtual std::vector<at::Tensor> finish() = 0;

 protected:
  ReduceBucket(const Parameter& like, const BucketKey& key);

  virtual void send(const ParameterPtr& parameter, const at::Tensor& grad, at::ScalarType through,
                    at::ScalarType shard_dtype, bool owned) = 0;
  virtual void send_product(const ParameterPtr& parameter, const at::Tensor& left,
                            const at::Tensor& right, at::ScalarType shard_dtype);
  virtual void send_zero(const ParameterPtr& parameter, at::ScalarType shard_dtype);
  virtual void send_rest() {}

  const BucketKey key_;
  const int64_t rank_;
  const int64_t world_size_;
  // On the wire, unless gradients are encoded.
  at::TensorOptions options() const {
    return at::TensorOptions(key_.wire_dtype).device(key_.device);
  }
  // The collective for some of the parameters, to be named in a profile.
  Collective collective_of(const std::vector<ParameterPtr>& parameters) const;
  double divisor_now() const { return key_.replicas.channel ? 1.0 : divisor(); }

  const double pre_divide_factor_;
  // The tensors that travel are of this dtype: bytes, if gradients are encoded.
  at::ScalarType sent_dtype() const { return key_.codec ? at::kByte : wire_dtype(); }
  // Elements that travel of a row, and of a chunk, of `parameter`.
  int64_t sent_row(const Parameter& parameter) const;
  int64_t sent_chunk(const Parameter& parameter) const {
    return parameter.source->layout.chunk_rows() * sent_row(parameter);
  }
  const int64_t capacity_;  // elements per rank

 private:
  // Elements of `parameter` per rank, on average.
  int64_t space_of(const Parameter& parameter) const;
  // Notes `parameter`, and returns the dtype of its reduced shard.
  at::ScalarType note(const ParameterPtr& parameter, at::ScalarType normalized_dtype);

  int64_t used_ = 0;
  std::vector<ParameterPtr> parameters_;
  std::vector<at::ScalarType> shard_dtypes_;
};

}  // namespace zero3
