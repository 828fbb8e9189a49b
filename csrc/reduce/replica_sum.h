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

// A reduced gradient, where the parameter's shard is. If that is host memory, a copy is started.
struct ReducedGradient {
  ReducedGradient(ParameterPtr parameter, const at::Tensor& shard);

  ParameterPtr parameter;
  at::Tensor shard;  // [shard_rows, ...], in the shard's dtype
};

// Sums the shards of several parameters over replicas together, in one wire dtype.
class ReplicaSum {
 public:
  // Of parameters like `like`: replicas get the whole sum, or each its part. See Parts.
  static std::unique_ptr<ReplicaSum> like(const Parameter& like, const PartialGradient& partial);
  virtual ~ReplicaSum() = default;

  bool accepts(const Parameter& parameter, const PartialGradient& partial) const;
  void add(const ParameterPtr& parameter, PartialGradient partial);
  void start();

  // Waits, and appends the reduced gradients to `results`.
  virtual void finish(std::vector<ReducedGradient>& results) = 0;

 protected:
  ReplicaSum(const Parameter& like, const PartialGradient& partial);

  // Elements of each row.
  virtual int64_t row_numel() const = 0;
  // Where partial gradients, or parts of them, lie in `rows_`. Together these cover the rows.
  struct Place {
    size_t of;        // the partial gradient
    at::Tensor to;    // flat: what is written, and padding
    at::Tensor from;  // some of the partial gradient
  };
  virtual std::vector<Place> places() const = 0;
  virtual std::string op() const = 0;

  // Waits for the sum of this rank's row, and returns that.
  at::Tensor sum();
  // Appends a gradient to `results`: the flat `sum` over the rest of its divisor. `like` has its
  // sizes, and perhaps its memory.
  void deliver(size_t i, const at::Tensor& sum, at::Tensor like,
               std::vector<ReducedGradient>& results) const;
  std::string key() const;  // key of the exchange
  Collective collective() const;

  const std::shared_ptr<Channel> channel_;
  const at::TensorOptions options_;  // on the wire
  std::vector<ParameterPtr> parameters_;
  std::vector<PartialGradient> partials_;
  at::Tensor rows_;  // [world, n]
  std::unique_ptr<Exchange> exchange_;

 private:
  // Divisor of a partial gradient before it is sent. A sum over the ranks of the shards may
  // overflow fp16: the wire carries means, and parts of means if the backend sums.
  double divisor_before(const PartialGradient& partial) const;

  const bool has_parts_;
  const int64_t capacity_;  // elements
  // Divisor of the sum over replicas before it is rounded: it may overflow fp16 too.
  const double divisor_between_;
  int64_t numel_ = 0;
};

// All replicas get the whole sum: reduces, then gathers the sums, so that every rank has the same.
class AllReduce : public ReplicaSum {
 public:
  using ReplicaSum::ReplicaSum;
  void finish(std::vector<ReducedGradient>& results) override;

 protected:
  int64_t row_numel() const override;
  // All partials end to end.
  std::vector<Place> places() const override;
  std::string op() const override { return "all_reduce"; }
};

// Each replica gets the rows of its part.
class ReduceScatter : public ReplicaSum {
 public:
  using ReplicaSum::ReplicaSum;
  void finish(std::vector<ReducedGradient>& results) override;

 protected:
  int64_t row_numel() const override;
  // In each row, the parts of that replica, padded to those of the first.
  std::vector<Place> places() const override;
  std::string op() const override { return "reduce_scatter"; }

 private:
  static int64_t space_of(const Parameter& parameter);
};

// The sums over replicas of one backward.
class ReplicaSums {
 public:
  // Maximum number in flight: a further one waits for the oldest. A rank computes meanwhile.
  static constexpr size_t kMaxReplicaSums = 4;

  // Starts to sum the partial gradients of `parameters`. Appends the gradients of sums that finish
  // meanwhile to `results`.
  void start(std::vector<ParameterPtr> parameters, std::vector<ReducedGradient>& results);
  // Waits for all sums.
  void finish(std::vector<ReducedGradient>& results);

 private:
  void finish_oldest(std::vector<ReducedGradient>& results);
  std::vector<std::unique_ptr<ReplicaSum>> in_flight_;
};

}  // namespace zero3
