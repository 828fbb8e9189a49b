// Transports between ranks. They gather shards, reduce gradients, and exchange presences.
//
// Each parameter holds a Transport. Callers ask for its capabilities, and never for its type.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "parameter/parameter.h"
#include "reduce/presence.h"
#include "support/memory.h"

namespace zero3 {

class GatherBucket;
class ReduceBucket;

struct Capabilities {
  bool gathers_views = false;  // gathers into memory that nobody owns or may write to
  bool publishes = false;      // a backward reads its forward's publication, and moves nothing
  bool ranks_meet_in_backward = true;  // a gather in backward needs all ranks
  bool sends_any_dtype = false;  // sends a gradient as it is if the wire dtype holds it exactly
  bool sums_in_fp32 = false;     // or wider, for any wire dtype
  bool bounds_buckets = true;  // to `bucket_bytes`; false: one bucket takes any number of gradients
  bool sends_messages = true;  // rather than reading other ranks' memory
  bool empty_waits = false;    // empty() may wait until other ranks have read what fills memory
  bool tells_presence = false;  // when a backward begins, at negligible cost
};

// A backward that has begun on the ranks of a transport. It ends with this object.
class Backward {
 public:
  virtual ~Backward() = default;

  // Returns an empty bucket for gradients like that of `like`. With `in_pieces`, each gradient
  // travels alone.
  virtual std::unique_ptr<ReduceBucket> reduce(const Parameter& like, at::ScalarType wire_dtype,
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

  // Whether parameters of both go through the same collectives.
  virtual bool joins(const Transport& other) const = 0;

  // Returns a bucket of parameters whose transports join, not started yet.
  virtual std::unique_ptr<GatherBucket> gather(std::vector<ParameterPtr> parameters) = 0;
  virtual std::unique_ptr<Backward> begin_backward() = 0;

  // Allocates a gradient that is about to be reduced, in the memory it will be sent from. May wait
  // until other ranks have read what fills that memory.
  virtual at::Tensor empty(const Parameter& parameter, at::IntArrayRef sizes,
                           const at::TensorOptions& options) {
    return pooled_empty(sizes, options);
  }
  // A number by which several models can be told apart, the same on all ranks.
  virtual uint64_t number() const { return 0; }

  // ---- transports that publish

  // Notes that a forward computes with the kept tensor, and gathers nothing.
  virtual void skip_gather() {}
  // Number of publications of the parameter so far.
  virtual uint64_t publication() const { return 0; }
  // Call when a backward begins whose forward had this `publication`. After a later publication,
  // the backward publishes the parameter again when it reads it. Returns whether it will publish.
  virtual bool expect(const Parameter& parameter, uint64_t publication) { return false; }
  // Makes the next backward that reads the parameter publish it again.
  virtual void invalidate() {}
};

}  // namespace zero3
