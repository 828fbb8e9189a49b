// Sums shards of gradients over the replicas of a mesh, the ranks with the same shard.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "parameter/parameter.h"
#include "support/collective_log.h"
#include "transport/channel.h"

namespace zero3 {

// Maximum number of buckets, and of all-reduces, in flight: a further one waits for the oldest.
// Bounds communication memory.
constexpr size_t kMaxInFlight = 1;

// A reduced gradient, where the parameter's shard is. If that is host memory, a copy is started.
struct ReducedGradient {
  ReducedGradient(ParameterPtr parameter, const at::Tensor& shard);

  ParameterPtr parameter;
  at::Tensor shard;  // [shard_rows, ...], in the shard's dtype
};

// All-reduces the shards of several parameters together, in one wire dtype. Reduces, then gathers
// the sums, so that every rank has the same result.
class AllReduce {
 public:
  AllReduce(const Parameter& like, const PartialGradient& partial);

  bool accepts(const Parameter& parameter, const PartialGradient& partial) const;
  void add(const ParameterPtr& parameter, PartialGradient partial);
  void start();

  // Waits, and appends the reduced gradients to `results`.
  void finish(std::vector<ReducedGradient>& results);

 private:
  std::string key() const;  // key of the exchange
  int64_t row_numel() const { return (numel_ + channel_->world_size - 1) / channel_->world_size; }
  Collective collective() const;

  const std::shared_ptr<Channel> channel_;
  const at::TensorOptions options_;  // on the wire
  const int64_t capacity_;           // elements
  // Divisor of a partial gradient before it is sent. A sum over the ranks of the shards may
  // overflow fp16: the wire carries means, and parts of means if the backend sums.
  double divisor_before(const PartialGradient& partial) const;
  // Divisor of the sum over replicas before it is gathered: it may overflow fp16 too.
  const double divisor_between_;
  int64_t numel_ = 0;
  std::vector<ParameterPtr> parameters_;
  std::vector<PartialGradient> partials_;
  at::Tensor rows_;  // [world, n]: all partials end to end, and padding
  std::unique_ptr<Exchange> exchange_;
};

// The all-reduces of one backward.
class AllReduces {
 public:
  // Starts all-reduces of the partial gradients of `parameters`. Appends the gradients of
  // all-reduces that finish meanwhile to `results`.
  void start(std::vector<ParameterPtr> parameters, std::vector<ReducedGradient>& results);
  // Waits for all all-reduces.
  void finish(std::vector<ReducedGradient>& results);

 private:
  void finish_oldest(std::vector<ReducedGradient>& results);

  std::vector<std::unique_ptr<AllReduce>> in_flight_;
};

}  // namespace zero3
