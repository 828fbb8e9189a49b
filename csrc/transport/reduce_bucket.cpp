#include "transport/reduce_bucket.h"

#include <limits>

#include "kernels/copy.h"
#include "kernels/sum.h"
#include "support/memory.h"
#include "support/tensor_ops.h"
#include "transport/channel.h"
#include "transport/transport.h"

namespace zero3 {
namespace {

double pre_divide_factor(const BucketKey& key) {
  return key.wire_dtype == at::kHalf && !key.domain.transport->can.sums_in_fp32 && !key.codec
             ? divisor_before_fp16_sum(key.divide_factor)
             : 1.0;
}

}  // namespace

ReduceBucket::ReduceBucket(const Parameter& like, const BucketKey& key)
    : key_(key),
      rank_(like.source->rank),
      world_size_(like.source->layout.world_size()),
      pre_divide_factor_(pre_divide_factor(key)),
      // Replicas sum a bucket while the next one is computed.
      capacity_(like.transport()->can.bounds_buckets || key.delivers_early || like.replicas
                    ? like.settings.bucket_bytes / world_size_ /
                          static_cast<int64_t>(c10::elementSize(key.wire_dtype))
                    : std::numeric_limits<int64_t>::max()) {}

bool ReduceBucket::has_room_for(const Parameter& parameter) const {
  return parameters_.empty() || used_ + space_of(parameter) <= capacity_;
}

void ReduceBucket::add(const ParameterPtr& parameter, const at::Tensor& grad,
                       at::ScalarType through, at::ScalarType normalized_dtype, bool owned) {
  const auto shard_dtype = note(parameter, normalized_dtype);
  send(parameter, grad, through, shard_dtype, owned);
}

void ReduceBucket::add_product(const ParameterPtr& parameter, const at::Tensor& left,
                               const at::Tensor& right) {
  send_product(parameter, left, right, note(parameter, wire_dtype()));
}

void ReduceBucket::add_zero(const ParameterPtr& parameter, at::ScalarType normalized_dtype) {
  send_zero(parameter, note(parameter, normalized_dtype));
}

void ReduceBucket::send_zero(const ParameterPtr& parameter, at::ScalarType shard_dtype) {
  const auto zeros = pooled_empty(parameter->sizes(), options()).zero_();
  send(parameter, zeros, wire_dtype(), shard_dtype, /*owned=*/true);
}

void ReduceBucket::send_product(const ParameterPtr& parameter, const at::Tensor& left,
                                const at::Tensor& right, at::ScalarType shard_dtype) {
  auto grad = pooled_empty(parameter->sizes(), left.options());
  tensor_ops::mm_out(grad, left, right);
  send(parameter, grad, wire_dtype(), shard_dtype, /*owned=*/true);
}

at::ScalarType ReduceBucket::note(const ParameterPtr& parameter, at::ScalarType normalized_dtype) {
  used_ += space_of(*parameter);
  parameters_.push_back(parameter);
  auto shard_dtype = parameter->settings.gradient_dtypes.shard.value_or(normalized_dtype);
  shard_dtypes_.push_back(shard_dtype);
  if (parameter->replicas)
    shard_dtype = c10::promoteTypes(c10::promoteTypes(shard_dtype, wire_dtype()), at::kFloat);
  return shard_dtype;
}

int64_t ReduceBucket::space_of(const Parameter& parameter) const {
  return aligned(parameter.source->padded_numel() / world_size_, wire_dtype());
}

int64_t ReduceBucket::sent_row(const Parameter& parameter) const {
  const int64_t numel = parameter.source->row_numel();
  return key_.codec ? key_.codec->row_bytes(numel) : numel;
}

int64_t ReduceBucket::lowest_order() const {
  return (*std::ranges::min_element(parameters_, {}, [](auto& p) { return p->order; }))->order;
}

Collective ReduceBucket::collective_of(const std::vector<ParameterPtr>& parameters) const {
  int64_t numel = 0;
  for (auto& parameter : parameters)
    numel += parameter->source->layout.padded_rows() * sent_row(*parameter);
  const int64_t nbytes = numel * static_cast<int64_t>(c10::elementSize(sent_dtype()));
  return {"reduce_scatter", sent_dtype(),         nbytes,
          world_size_,      names_of(parameters), key_.device.is_meta()};
}

void ReduceBucket::close() {
  send_rest();
  record([this] { return collective(); });
}

}  // namespace zero3
