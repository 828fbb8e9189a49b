// One sharded parameter as the runtime sees it: what is gathered for it, and its gradients.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "parameter/gathered.h"
#include "parameter/gradient_accumulator.h"
#include "parameter/source.h"
#include "parameter/substitutes.h"

namespace zero3 {

class Channel;
class GatherOrders;

// Settings that users may change between steps.
struct Settings {
  GradientDtypes gradient_dtypes;
  double divide_factor = 1;
  int64_t bucket_bytes = 64 << 20;  // size of a full bucket that this parameter opens
  bool requires_gradient_sync = true;
  bool requires_all_reduce = true;              // if the shard is replicated
  bool requires_gradient_on_all_ranks = false;  // false: a missing one counts as zero
  bool reduce_scatter_unused_params = false;    // even if the host has to wait for other ranks
  bool reshard_after_forward = false;           // true only if set explicitly
  bool reshard_after_backward = true;
  bool detects_nonfinite = false;
  bool deferred = false;        // reduce_deferred() reduces the sums, not a backward
  bool delivers_early = false;  // once its bucket is reduced, not when the backward has ended
};

// Settings change under the GIL, between forwards and backwards.
struct Parameter {
  // `replicas` connects the ranks with the same shard; null if there are no others.
  Parameter(SourcePtr source, std::shared_ptr<Channel> replicas, Settings settings);

  const SourcePtr source;   // the shard, in the dtype to compute with
  Substitutes substitutes;  // what is gathered in its place
  const std::shared_ptr<Channel> replicas;
  int64_t order = 0;         // order of registration: the same on every rank
  int64_t model_number = 0;  // number of its ShardedModel; reused once that is deleted
  uint64_t presence_id = 0;  // tells models of one transport apart in SharedPresences
  Settings settings;
  Gathered gathered;
  GradientAccumulator gradients;
  // Orders of the model's gathers; null if Python prepares each gather of this parameter.
  std::weak_ptr<GatherOrders> gather_orders;

  // Makes it a parameter of a model, in which its name is `fqn`.
  void join(int64_t model_number, std::string fqn);

  const std::string& fqn() const { return source->fqn; }
  const std::vector<int64_t>& sizes() const { return source->sizes; }
  at::Device device() const { return source->device; }
  const at::Tensor& placeholder() const { return source->placeholder; }
  const std::shared_ptr<Transport>& transport() const { return source->transport; }

  // What is gathered for it now: its shard, encoded unless `codec` is null, or what a forward has
  // left on fewer ranks.
  SourcePtr source_now(const Codec* codec);

  // Whether the running backward, if there is one, cannot have stepped the shard.
  bool may_be_gathered() const;

  // Whether a full tensor gathered now is retained for the next forward or backward.
  bool is_retained_when_gathered(bool in_backward) const {
    return !settings.reshard_after_backward && (in_backward || !settings.reshard_after_forward);
  }
  // Whether the full tensor is retained beyond the end of a forward.
  bool outlives_forward() const;

  // Whether other ranks add to its gradients.
  bool is_reduced_over_ranks() const { return source->layout.world_size() > 1 || replicas; }
  // Bytes that are sent for one chunk of its gradient.
  int64_t sent_chunk_bytes(at::ScalarType wire_dtype) const;
  // Throws unless `raw` can be its full gradient.
  void check_gradient(const at::Tensor& raw) const;
  // Adds a raw gradient to the unreduced ones.
  void deposit(const at::Tensor& raw);
  // Whether the backward that computes its gradients reduces them.
  bool is_reduced_now() const { return settings.requires_gradient_sync && !settings.deferred; }
  // Whether the running backward was asked for its gradient. A compiled backward computes all
  // gradients regardless.
  bool is_wanted() const;
  void drop_gradients();
};

using ParameterPtr = std::shared_ptr<Parameter>;

std::vector<std::string> names_of(const std::vector<ParameterPtr>& parameters);
// Profiler name of `what` with `parameters`: "zero3::<what> <the first> and <n> more".
std::string scope_name(const std::vector<ParameterPtr>& parameters, const std::string& what);

}  // namespace zero3
