// From shards to full tensors.
#pragma once

#include <functional>

#include "collective_log.h"
#include "parameter.h"

namespace zero3 {

// Parameters of one compute dtype and process group on their way through one collective.
class GatherBucket {
 public:
  // Raises if one of them cannot be gathered.
  explicit GatherBucket(std::vector<ParameterPtr> parameters);
  virtual ~GatherBucket() = default;

  const std::vector<ParameterPtr>& parameters() const { return parameters_; }
  Collective collective() const;

  virtual void start() = 0;
  // Lets shards change from here on, and gives what they were at the start.
  virtual void snapshot() {}
  // Waits, and returns the full tensors in the order of the parameters.
  virtual std::vector<at::Tensor> finish(bool fresh) = 0;

 protected:
  const std::vector<ParameterPtr> parameters_;
};

// A gather of parameters that has started: one collective for each (process group, compute dtype)
// among those that are not held already, in order of appearance. The cast happens before the wire.
class Gather {
 public:
  explicit Gather(std::vector<ParameterPtr> parameters);

  // Lets the shards change before finish(), which gives what they were.
  void snapshot();

  // Waits, and returns the full tensors, [rows, ...] each in the parameter's compute dtype and
  // strides. Where ranks share a copy, they are views of it, unless they are to be `fresh`. Those
  // that are held are the very tensors. Called again, it gathers again.
  std::vector<at::Tensor> finish(bool fresh);
  // Fresh, and nobody else has them: whoever holds one gets a copy of his own.
  std::vector<at::Tensor> finish_apart();

 private:
  void start();

  std::vector<ParameterPtr> parameters_;  // each once
  std::vector<ParameterPtr> sources_;     // of each, what its rows are gathered from
  std::vector<at::Tensor> held_;          // of those that are; else undefined
  std::vector<uint64_t> versions_;        // of the shards
  std::vector<std::unique_ptr<GatherBucket>> buckets_;
  bool is_started_ = false;
};

// To be called when a forward reads `parameters`, which may be held from a backward before it.
void count_held(const std::vector<ParameterPtr>& parameters);

// Starts one, and finishes it apart.
std::vector<at::Tensor> gather(const std::vector<ParameterPtr>& parameters);

// Called by refresh(), to make `Parameter::shard` what the model registers now.
void set_refresh(std::function<void(const at::Tensor& placeholder)> function);
void refresh(const Parameter& parameter);

}  // namespace zero3
