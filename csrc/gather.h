// From shards to full tensors.
#pragma once

#include <functional>

#include "parameter.h"

namespace zero3 {

// Parameters of one compute dtype and process group on their way through one collective.
class GatherBucket {
 public:
  // Raises if one of them cannot be gathered.
  explicit GatherBucket(std::vector<ParameterPtr> parameters);
  virtual ~GatherBucket() = default;

  const std::vector<ParameterPtr>& parameters() const { return parameters_; }

  virtual void start() = 0;
  // Waits, and returns the full tensors in the order of the parameters.
  virtual std::vector<at::Tensor> finish(bool fresh) = 0;

 protected:
  void record_start() const;

  const std::vector<ParameterPtr> parameters_;
};

// A gather of parameters that has started: one collective for each (process group, compute dtype)
// among them, in order of appearance. The cast happens before the wire.
class Gather {
 public:
  explicit Gather(std::vector<ParameterPtr> parameters);

  // Waits, and returns the full tensors, [rows, ...] each in the parameter's compute dtype and
  // strides. Where ranks share a copy, they are views of it, unless they are to be `fresh`. Called
  // again, it gathers again.
  std::vector<at::Tensor> finish(bool fresh);

 private:
  void start();

  std::vector<ParameterPtr> parameters_;  // each once
  std::vector<std::unique_ptr<GatherBucket>> buckets_;
};

// Starts and finishes one, whose tensors are all fresh.
std::vector<at::Tensor> gather(const std::vector<ParameterPtr>& parameters);

// Called by refresh(), to make `Parameter::shard` what the model registers now.
void set_refresh(std::function<void(const std::string& fqn)> function);
void refresh(const Parameter& parameter);

}  // namespace zero3
