// Gathers of parameters over any transport.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "gather/gather_bucket.h"
#include "parameter/parameter.h"

namespace zero3 {

// A started gather of parameters. Parameters that are not held take one collective for each
// (transport, compute dtype), in order of appearance. Shards are cast before they are sent.
class Gather {
 public:
  explicit Gather(std::vector<ParameterPtr> parameters);

  // Lets the shards change before finish(), which still gathers their old values.
  void snapshot();

  // Waits, and returns the full tensors [rows, ...], each in the parameter's compute dtype and
  // strides. Unless `fresh`, they are views where the transport gathers views. A held parameter
  // gives the held tensor itself. A second call gathers again.
  std::vector<at::Tensor> finish(bool fresh);
  // Returns fresh tensors that are not held. Copies a tensor that is held, or kept by this gather.
  std::vector<at::Tensor> finish_apart();

 private:
  void start();

  std::vector<ParameterPtr> parameters_;  // no duplicates
  std::vector<ParameterPtr> sources_;     // for each, the parameter whose shards are gathered
  std::vector<at::Tensor> held_;          // full tensors of held parameters; else undefined
  std::vector<uint64_t> versions_;        // versions of the shards
  std::vector<std::unique_ptr<GatherBucket>> buckets_;
  bool is_started_ = false;
};

// Notes that a forward reads `parameters`, which may be kept since an earlier backward.
void count_held(const std::vector<ParameterPtr>& parameters);

// Starts a gather, and calls finish_apart().
std::vector<at::Tensor> gather(const std::vector<ParameterPtr>& parameters);

// The publications of a forward, which its backward reads.
class Publications {
 public:
  explicit Publications(const std::vector<ParameterPtr>& parameters);

  // Call when the backward begins. Returns whether all ranks have to publish a parameter again.
  bool invalidate_if_republished() const;

 private:
  std::vector<std::pair<std::weak_ptr<Parameter>, uint64_t>> publications_;
};

// Sets the function called by refresh(). It sets `Parameter::shard` to the model's present shard.
void set_refresh(std::function<void(const at::Tensor& placeholder)> function);
void refresh(const Parameter& parameter);

}  // namespace zero3
