// From shards to full tensors.
#pragma once

#include <functional>

#include "parameter.h"

namespace zero3 {

class GatherBucket;

// A gather of parameters that has started: one collective for each (process group, compute dtype)
// among them, in order of appearance. The cast happens before the wire.
class Gather {
 public:
  explicit Gather(std::vector<ParameterPtr> parameters);
  ~Gather();

  // Waits, and returns the full tensors: each fresh, [rows, ...] in the parameter's compute dtype
  // and strides, sharing memory with no shard. Called again, it gathers again.
  std::vector<at::Tensor> finish();

 private:
  void start();

  std::vector<ParameterPtr> parameters_;  // each once
  std::vector<std::unique_ptr<GatherBucket>> buckets_;
};

// Starts and finishes one.
std::vector<at::Tensor> gather(const std::vector<ParameterPtr>& parameters);

// Called by refresh(), to make `Parameter::shard` what the model registers now.
void set_refresh(std::function<void(const std::string& fqn)> function);
void refresh(const Parameter& parameter);

}  // namespace zero3
