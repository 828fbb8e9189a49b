// One sharded parameter as the runtime sees it.
//
//   full tensor  [rows, ...]      what the model computes with, in `compute_dtype`
//   chunk        [chunk_rows, ...] ceil(rows / world) rows per rank, the layout of torch.chunk
//   shard        [shard_rows, ...] the rows this rank owns: its chunk without the padding
//
// Only the last ranks' chunks are padded, so the gathered chunks end to end are the full tensor
// followed by padding. If the parameter has an owner, that rank's shard is the full tensor, and
// the other ranks' have no rows.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kernels/quantize.h"
#include "parameter/gathered.h"
#include "parameter/gradient_accumulator.h"

namespace zero3 {

class Channel;
class GatherOrders;
class Transport;

// The fixed properties of a parameter.
struct ParameterSpec {
  std::vector<int64_t> sizes;  // full shape
  std::vector<int64_t> strides;
  at::ScalarType compute_dtype;
  at::Device device;
  int64_t rank;                                 // this rank, among the ranks of the shards
  int64_t world_size;                           // number of these ranks
  std::optional<int64_t> owner = std::nullopt;  // the rank that has all rows, if it is one rank

  int64_t rows() const { return sizes[0]; }
  // Maximum number of rows of a rank.
  int64_t chunk_rows() const { return owner ? rows() : (rows() + world_size - 1) / world_size; }
  int64_t shard_rows() const { return rows_of(rank); }
  int64_t rows_of(int64_t r) const { return first_row_of(r + 1) - first_row_of(r); }
  // The first row of rank r. If it has none, the row after the last one of the ranks before it.
  int64_t first_row_of(int64_t r) const {
    if (owner) return r > *owner ? rows() : 0;
    return std::min(r * chunk_rows(), rows());
  }
  int64_t row_numel() const;
  int64_t chunk_numel() const { return chunk_rows() * row_numel(); }
  // Elements of the full tensor and its padding.
  int64_t padded_numel() const { return owner ? chunk_numel() : world_size * chunk_numel(); }
  int64_t nbytes() const;
  bool is_contiguous() const;
  std::vector<int64_t> sizes_with_rows(int64_t rows) const;
};

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

// Settings and the shard change under the GIL, between forwards and backwards.
struct Parameter : public ParameterSpec {
  // `replicas` connects the ranks with the same shard; null if there are no others.
  Parameter(ParameterSpec spec, std::shared_ptr<Channel> replicas, at::Tensor placeholder);

  std::string fqn;               // for users, and for the keys of messages
  int64_t order = 0;             // order of registration: the same on every rank
  int64_t model_number = 0;      // number of its ShardedModel; reused once that is deleted
  uint64_t presence_id = 0;      // tells models of one transport apart in SharedPresences
  const at::Tensor placeholder;  // tensor that graphs take: full shape, no memory
  const std::shared_ptr<Channel> replicas;
  std::shared_ptr<Transport> transport;  // null until connect()
  Settings settings;
  at::Tensor shard;  // [shard_rows, ...], read at every gather, never written
  Gathered gathered;
  GradientAccumulator gradients;
  // Orders of the model's gathers; null if Python prepares each gather of this parameter.
  std::weak_ptr<GatherOrders> gather_orders;
  // This parameter sharded over some of its ranks between forward and backward; null if it is not.
  // Its shard is undefined outside that interval.
  std::shared_ptr<Parameter> after_forward;

  // Sets the transport, once.
  void connect(std::shared_ptr<Transport> to);
  // The transport of what is gathered in place of the shard.
  const std::shared_ptr<Transport>& payload_transport() const {
    return payload_transport_ ? payload_transport_ : transport;
  }
  void set_payload_transport(std::shared_ptr<Transport> to) { payload_transport_ = std::move(to); }

  // Describes this parameter's chunk in the key of a message.
  std::string chunk_key() const {
    return fqn + "[" + std::to_string(chunk_numel()) + "]" + quantized_as_;
  }

  // Follows the version of `dtensor`, the DTensor around `shard`: an optimizer bumps only that one.
  void follow_version(const at::Tensor& dtensor);
  // Number of changes to the shard that torch's version counters record.
  uint64_t shard_version() const;

  // Whether the running backward, if there is one, cannot have stepped the shard.
  bool may_be_gathered() const;

  // Whether a full tensor gathered now is retained for the next forward or backward.
  bool is_retained_when_gathered(bool in_backward) const {
    return !settings.reshard_after_backward && (in_backward || !settings.reshard_after_forward);
  }
  // Whether the full tensor is retained beyond the end of a forward.
  bool outlives_forward() const;

  // Keeps this rank's rows of `full`, gathered in a forward, for the backward after it.
  void shard_after_forward(const at::Tensor& full);
  void forget_after_forward();
  // The parameter whose shards are gathered now: `parameter` or its `after_forward`.
  static std::shared_ptr<Parameter> source_of(const std::shared_ptr<Parameter>& parameter);

  // A parameter of bytes, whose shard is this one's rows quantized as they are now. In a backward
  // they are those of its forward, unless torch's version counters record a change.
  std::shared_ptr<Parameter> quantized(const QuantizedFormat& format);
  void forget_quantized();  // frees the bytes

  // Whether the shard and its gradients are in host memory, and not on the device that computes.
  bool is_on_host() const { return shard.is_cpu() && !device.is_cpu() && !device.is_meta(); }
  // Whether other ranks add to its gradients.
  bool is_reduced_over_ranks() const { return world_size > 1 || replicas; }
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
  // Notes a use in forward. A recomputation inside a backward repeats a use already noted.
  void add_use(bool first);
  void drop_gradients();

 private:
  c10::VariableVersion version_;
  struct Quantized {
    QuantizedFormat format;
    std::shared_ptr<Parameter> parameter;
    uint64_t version;  // version of the shard that is quantized
  };
  std::vector<Quantized> quantized_;  // one for each format that was asked for
  std::string quantized_as_;          // format of the bytes, if this is such a parameter
  std::shared_ptr<Transport> payload_transport_;
};

using ParameterPtr = std::shared_ptr<Parameter>;

std::vector<std::string> names_of(const std::vector<ParameterPtr>& parameters);
// Profiler name of `what` with `parameters`: "zero3::<what> <the first> and <n> more".
std::string scope_name(const std::vector<ParameterPtr>& parameters, const std::string& what);

}  // namespace zero3
