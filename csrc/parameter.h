// One sharded parameter as the runtime sees it, and the registry that finds it.
//
//   full tensor  [rows, ...]      what the model computes with, in `compute_dtype`
//   chunk        [chunk_rows, ...] ceil(rows / world) rows a rank, the layout of torch.chunk
//   shard        [shard_rows, ...] the rows this rank really owns: its chunk less the padding
//
// Only the last ranks' chunks are padded, so the gathered chunks end to end are the full tensor
// followed by padding.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "channel.h"

namespace zero3 {

class SharedCopy;

// A gradient [shard_rows, ...] that is reduced over the ranks of the shards, and not yet over those
// that have the same shard.
struct PartialGradient {
  at::Tensor shard;  // not divided; in fp32 or a dtype that holds that and the other two
  at::ScalarType wire_dtype;
  at::ScalarType shard_dtype;  // of what is delivered
  double divisor;              // of that, once it is summed
};

struct Parameter {
  std::string fqn;
  int64_t order = 0;   // of registration: the same on every rank
  int64_t root = 0;    // the sharded model it belongs to; its parameters finish a backward together
  uint64_t model = 0;  // that, by a number which is the same on all ranks that share memory
  std::string group_name;
  std::string reduce_group_name;  // of the same ranks; no gather has to wait for a reduction there
  std::shared_ptr<SharedCopy> shared;  // where the ranks share memory; else they exchange messages
  int64_t rank = 0;                    // in that group
  int64_t world_size = 1;              // of it
  std::string
      replicate_group_name;  // of the ranks with the same shard; empty if there are no others
  int64_t replica = 0;       // this rank in it
  int64_t replicas = 1;      // of it

  std::vector<int64_t> sizes;  // full
  std::vector<int64_t> strides;
  at::ScalarType compute_dtype = at::kFloat;
  at::Device device = at::kCPU;
  std::string simulated_backend;  // of a simulation on the meta device, which has its buffers

  // The leaf's contract: gradients are cast to it; nullopt keeps whatever arrives.
  std::optional<at::ScalarType> grad_dtype;
  std::optional<at::ScalarType> reduce_dtype;  // on the wire; nullopt: the normalised gradient's
  std::optional<at::ScalarType> shard_grad_dtype;  // the optimizer's; nullopt: what arrived
  double divide_factor = 1;
  int64_t bucket_bytes = 64 << 20;  // of a full bucket that this parameter opens
  bool requires_gradient_sync = true;
  bool requires_all_reduce = true;              // where the shard is replicated
  bool requires_gradient_on_all_ranks = false;  // else one that is missing on some is zero there

  at::Tensor placeholder;        // the leaf that graphs take: full shape and no memory
  at::Tensor shard;              // [shard_rows, ...], read at every gather, never written
  c10::VariableVersion version;  // of the DTensor around the shard: an optimizer counts only there
  at::Tensor gathered;           // the full tensor while it is held, else undefined
  int64_t gathered_version = 0;  // of that, when it came
  // Of the shard then, where what was gathered is held from one backward to the next.
  std::optional<uint64_t> held_version;
  bool is_read_only = false;           // the memory of `gathered`
  bool reshard_after_forward = false;  // true only if somebody said so
  // The same parameter, sharded from forward to backward over some of its ranks, if it is to be.
  // Its shard is undefined but between them.
  std::shared_ptr<Parameter> after_forward;
  bool reshard_after_backward = true;

  // Gradients that are not reduced yet: their sum, full, else undefined; and the dtype that holds
  // them all as they arrived. They belong to `accumulation_mutex`, which nobody takes with the GIL.
  at::Tensor accumulated;
  std::optional<at::ScalarType> arrived_dtype;
  std::optional<PartialGradient> partial;  // the sum of those that are not all-reduced yet
  std::mutex accumulation_mutex;
  bool deferred = false;  // sums are reduced by reduce_accumulated(), and not by a backward
  bool dropped = false;   // a backward raised, and took the sums with it

  // What is not finite of the gradients that arrived, if that is looked at.
  struct Nonfinite {
    int64_t nans = 0;
    int64_t infinities = 0;
    int64_t numel = 0;  // of those gradients
  };
  bool detects_nonfinite = false;
  std::optional<Nonfinite> nonfinite;  // belongs to `accumulation_mutex` too

  // Gradients that the latest forward promised and that have not arrived yet. While some are
  // missing, those that arrive are summed, so that a backward reduces a parameter once. Only a
  // hint: a promise that is not kept costs a wait until the end of the backward.
  int64_t pending_uses = 0;

  Channel gather_channel() const { return {group_name, device, simulated_backend}; }
  Channel reduce_channel() const { return {reduce_group_name, device, simulated_backend}; }
  Channel replicate_channel() const { return {replicate_group_name, device, simulated_backend}; }

  int64_t rows() const { return sizes[0]; }
  int64_t chunk_rows() const { return (rows() + world_size - 1) / world_size; }
  int64_t shard_rows() const { return rows_of(rank); }
  int64_t rows_of(int64_t r) const {
    return std::clamp<int64_t>(rows() - r * chunk_rows(), 0, chunk_rows());
  }
  int64_t row_numel() const;
  int64_t chunk_numel() const { return chunk_rows() * row_numel(); }
  bool is_contiguous() const;
  // For messages: what travels of it.
  std::string chunk_key() const { return fqn + "[" + std::to_string(chunk_numel()) + "]"; }
  // Notes a use in forward; `first` forgets those before it. A recomputation inside a backward
  // stands for a use that was noted already.
  void add_use(bool first);
  std::vector<int64_t> sizes_with_rows(int64_t rows) const;
  // Counts the changes to the shard that torch knows of.
  uint64_t shard_version() const;

  void hold(const at::Tensor& full, bool read_only = false);
  void let_go();
  void let_go_of_held() {
    if (held_version) let_go();
  }
  bool was_written() const;  // the full tensor, while it is held
  void make_writable();      // that
  // Whether what is gathered now is to be held for the next forward or backward.
  bool stays_gathered(bool in_backward) const {
    return !reshard_after_backward && (in_backward || !reshard_after_forward);
  }
  bool stays_after_forward() const;
  // Keeps this rank's rows of what was gathered in a forward for the backward after it.
  void shard_after_forward(const at::Tensor& full, uint64_t version);
  void forget_after_forward();
  // What holds the rows that are gathered now: this parameter, or what it is after a forward.
  static std::shared_ptr<Parameter> source_of(const std::shared_ptr<Parameter>& parameter);
  bool is_stale() const { return held_version && *held_version != shard_version(); }

  bool is_replicated() const { return !replicate_group_name.empty(); }
  // Adds to `partial`.
  void add_partial(PartialGradient partial);
  std::optional<PartialGradient> take_partial();

  // Looks at a gradient that has arrived.
  void detect_nonfinite(const at::Tensor& raw);
  std::optional<Nonfinite> take_nonfinite();

  bool has_sum();          // in `accumulated`
  bool has_accumulated();  // that, or a `partial`
  void drop_accumulated();
};

using ParameterPtr = std::shared_ptr<Parameter>;

// Whether the running backward was asked for the gradient of `parameter`, among others: a compiled
// one computes all gradients regardless.
bool is_wanted(const Parameter& parameter);

std::vector<std::string> names_of(const std::vector<ParameterPtr>& parameters);
// What a profile calls `what` is done with them: "zero3::<what> <the first> and <n> more".
std::string scope_name(const std::string& what, const std::vector<ParameterPtr>& parameters);

// Placeholders to parameters, known by the storage, which what is detached or traced of a
// placeholder shares. It owns none of them: a parameter lives as long as its Python owner.
class Registry {
 public:
  static Registry& get();

  // Of a parameter that has its placeholder, if it is to have one. Numbers it, the first time.
  void add(const ParameterPtr& parameter);

  // Raises if no live parameter has this placeholder.
  ParameterPtr find(const at::Tensor& placeholder);
  ParameterPtr find_or_null(const at::Tensor& placeholder);

  // The sharded models that have live parameters.
  std::set<int64_t> live_roots();

  // The live parameters of one sharded model, in order of registration.
  std::vector<ParameterPtr> of_root(int64_t root);

 private:
  std::vector<ParameterPtr> alive();  // in order of registration

  std::mutex mutex_;
  std::vector<std::weak_ptr<Parameter>> parameters_;
  std::unordered_map<const c10::StorageImpl*, std::weak_ptr<Parameter>> by_placeholder_;
  int64_t registered_ = 0;
};

}  // namespace zero3
