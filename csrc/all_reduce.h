// Sums shards of gradients over the ranks that have the same ones: the replicas of a mesh.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "collective_log.h"
#include "exchange.h"
#include "parameter.h"
#include "reduce.h"

namespace zero3 {

// Those of several parameters, together, in the dtype of one wire. A reduction and a gather of what
// was reduced, so that it is the same on each rank.
class AllReduce {
 public:
  AllReduce(const Parameter& like, const PartialGradient& partial);

  bool accepts(const Parameter& parameter, const PartialGradient& partial) const;
  void add(const ParameterPtr& parameter, PartialGradient partial);
  void start();

  // Waits, and appends what is to be delivered.
  void finish(std::vector<ReducedGradient>& results);

 private:
  std::string key() const;  // of messages
  int64_t row_numel() const { return (numel_ + world_size_ - 1) / world_size_; }
  Collective collective() const;

  const Channel channel_;
  const int64_t rank_;
  const int64_t world_size_;
  const at::TensorOptions options_;  // on the wire
  const int64_t capacity_;           // elements
  // In fp16 means travel, that of the shards' ranks and then that of the replicas: sums of what
  // fits may not.
  const bool sends_means_;
  const double shards_;
  double mean_of_shards(double divisor) const { return std::min(shards_, divisor); }
  int64_t numel_ = 0;
  std::vector<ParameterPtr> parameters_;
  std::vector<PartialGradient> partials_;
  at::Tensor rows_;  // [world, n]: all partials end to end, and padding
  std::unique_ptr<Exchange> exchange_;
};

}  // namespace zero3
