// From the gradients of several parameters to their shards.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "channel.h"
#include "collective_log.h"
#include "parameter.h"

namespace zero3 {

// Gradients of several parameters that are reduced, and waited for, together.
class Bucket {
 public:
  // By messages; or, if the ranks share memory, by mailboxes, in the backward of such a number.
  // What goes `in_pieces` travels with nothing else.
  static std::unique_ptr<Bucket> make(const Parameter& like, at::ScalarType wire_dtype,
                                      uint64_t backward, bool in_pieces);
  virtual ~Bucket() = default;

  bool accepts(const Parameter& parameter, at::ScalarType wire_dtype) const;
  bool has_room_for(const Parameter& parameter) const;
  bool is_full() const { return used_ >= capacity_; }
  const std::vector<ParameterPtr>& parameters() const { return parameters_; }
  int64_t lowest_order() const;  // of them
  // Of what is to be delivered of each.
  const std::vector<at::ScalarType>& shard_dtypes() const { return shard_dtypes_; }
  at::ScalarType wire_dtype() const { return options_.dtype().toScalarType(); }
  Collective collective() const { return collective_of(parameters_); }

  // Takes `grad`, cast to `through` and that to the wire's dtype. If it is owned, nobody writes to
  // it until finish(); else it may be reused when this returns.
  void add(const ParameterPtr& parameter, const at::Tensor& grad, at::ScalarType through,
           at::ScalarType normalised_dtype, bool owned);
  // The same of left @ right, in the wire's dtype.
  void add_product(const ParameterPtr& parameter, const at::Tensor& left, const at::Tensor& right);
  // The same of zeros.
  void add_zero(const ParameterPtr& parameter, at::ScalarType normalised_dtype);
  void close();  // Nothing more comes.

  // By what the sum over all ranks is still to be divided. Where shards are replicated that is
  // left for when they are summed too.
  double divisor() const { return divide_factor_ / pre_divide_factor_; }

  // Waits. The reduced and scaled shard of each of parameters(), in its dtype of shard_dtypes();
  // or, where it is replicated, not scaled and in one that holds the wire's and fp32.
  virtual std::vector<at::Tensor> finish() = 0;

 protected:
  Bucket(const Parameter& like, at::ScalarType wire_dtype);

  virtual void send(const ParameterPtr& parameter, const at::Tensor& grad, at::ScalarType through,
                    at::ScalarType shard_dtype, bool owned) = 0;
  virtual void send_product(const ParameterPtr& parameter, const at::Tensor& left,
                            const at::Tensor& right, at::ScalarType shard_dtype);
  virtual void send_zero(const ParameterPtr& parameter, at::ScalarType shard_dtype);
  virtual void send_rest() {}

  const Channel channel_;
  const std::string replicate_group_name_;
  const bool is_shared_;
  const int64_t rank_;
  const int64_t world_size_;
  // What it does with some of them, to be named in a profile.
  Collective collective_of(const std::vector<ParameterPtr>& parameters) const;
  double divisor_now() const { return replicate_group_name_.empty() ? divisor() : 1.0; }

  const double divide_factor_;
  const double pre_divide_factor_;
  const at::TensorOptions options_;  // on the wire
  const int64_t capacity_;           // elements a rank

 private:
  // Notes it, and gives the dtype of its shard.
  at::ScalarType note(const ParameterPtr& parameter, at::ScalarType normalised_dtype);

  int64_t used_ = 0;
  std::vector<ParameterPtr> parameters_;
  std::vector<at::ScalarType> shard_dtypes_;
};

}  // namespace zero3
