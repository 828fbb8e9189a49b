// Transports between ranks. They gather shards, reduce gradients, and exchange presences.
//
// Each source holds a Transport. Callers ask for its capabilities, and never for its type.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "parameter/parameter.h"
#include "support/memory.h"
#include "support/rank_names.h"
#include "transport/presences.h"

namespace zero3 {

struct BucketKey;
class GatherBucket;
class ReduceBucket;

struct Capabilities {
  bool gathers_views = false;  // gathers into memory that nobody owns or may write to
  // To publish is to write this rank's rows to a copy that all ranks of the host read. A backward
  // reads what its forward published, and moves bytes only if that is stale or overwritten.
  bool publishes = false;
  bool ranks_meet_in_backward = true;  // a gather in backward needs all ranks
  bool sends_any_dtype = false;  // sends a gradient as it is if the wire dtype holds it exactly
  bool sums_in_fp32 = false;     // or wider, for any wire dtype
  bool bounds_buckets = true;    // to `bucket_bytes`; false: only those with early
                                 // delivery, and those of replicas
  bool sends_messages = true;    // rather than reading other ranks' memory
  bool empty_waits = false;      // empty() may wait for other ranks, if memory is full
  // Ranks may start the reductions of a backward in different orders.
  bool reduces_in_any_order = true;
  // Ranks tell each other at the beginning of a backward which gradients will come. This is cheap
  // if reduces_in_any_order. Otherwise the host waits.
  bool tells_presence = true;
};

// A backward that has begun on the ranks of a transport. It ends with this object.
class Backward {
 public:
  virtual ~Backward() = default;

  // Returns an empty bucket for gradients of `key`, which is that of `like`. With `in_pieces`, each
  // gradient travels alone.
  virtual std::unique_ptr<ReduceBucket> reduce_bucket(const Parameter& like, const BucketKey& key,
                                                      bool in_pieces) = 0;
  // Announces `mine`, this rank's presence for each of `parameters`.
  virtual std::unique_ptr<PresenceGather> gather_presences(
      const std::vector<ParameterPtr>& parameters, const Presences& mine, Occasion occasion) = 0;
};

class Transport {
 public:
  explicit Transport(Capabilities capabilities) : can(capabilities) {}
  virtual ~Transport() = default;
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;

  const Capabilities can;

  // The name that users give.
  virtual std::string name() const = 0;

  // How messages name the ranks of the process group.
  virtual RankNames rank_names() const { return {}; }

  // Whether parameters of both go through the same collectives.
  virtual bool joins(const Transport& other) const = 0;

  // Returns a bucket of sources whose transports join. Its gather is not started.
  virtual std::unique_ptr<GatherBucket> gather_bucket(std::vector<SourcePtr> sources) = 0;
  virtual std::unique_ptr<Backward> begin_backward() = 0;

  // Allocates a gradient that is about to be reduced, in the memory it will be sent from. If that
  // is full, may wait until other ranks have read from it.
  virtual at::Tensor empty(const Parameter& parameter, at::IntArrayRef sizes,
                           const at::TensorOptions& options) {
    return pooled_empty(sizes, options);
  }
  // Index of the parameter among those of its process group, the same on all ranks; 0 if they all
  // share this transport. The first parameter's index tells models apart: see presence_id.
  virtual uint64_t parameter_index() const { return 0; }

  // ---- transports that publish

  // Counts a forward that reads parameters of this transport, and of those that join, without a
  // publication: they are retained, or something else is gathered in their place.
  virtual void count_unpublished_forward() {}
  // Number of publications of the source so far.
  virtual uint64_t epoch() const { return 0; }
  // Call when a backward begins, with the epoch() of its forward. Returns whether a read of the
  // source will publish it again: the shard has changed since, or another forward has run, or
  // another copy has taken the place.
  virtual bool expect_epoch(const Source& source, uint64_t epoch) { return false; }
  // Makes the next read in a backward publish the source again.
  virtual void invalidate() {}
};

}  // namespace zero3
