// The buckets of a reduction, from the first gradient of each to its reduced shards.
#pragma once

#include <memory>
#include <vector>

#include "reduce/replica_sum.h"
#include "transport/reduce_bucket.h"

namespace zero3 {

class BegunBackwards;
class Delivery;
class PresenceChecks;

// Maximum number of buckets in flight: a further one waits for the oldest. Bounds communication
// memory.
constexpr size_t kMaxInFlight = 1;

// Owned by a Reduction, which calls it with its mutex locked. Some gradients are mixed: ranks send
// them at different times, see PresenceCheck.
class BucketQueue {
 public:
  BucketQueue(BegunBackwards& backwards, const PresenceChecks& presence_checks, Delivery& delivery)
      : backwards_(backwards), presence_checks_(presence_checks), delivery_(delivery) {}

  // Returns an open bucket of `key` with room for `parameter`. Launches one that has no room.
  ReduceBucket& open_for(const ParameterPtr& parameter, const BucketKey& key);
  // Call when a gradient was added to `bucket`.
  void launch_if_full(const ReduceBucket& bucket);
  // Sets the bucket of the first gradient aside if that is mixed: it was sent before ranks knew so.
  void set_aside_first_if_mixed();
  // Launches all buckets that are left, and waits for them. All-reduces the shards of `parameters`
  // that have replicas.
  void finish(std::vector<ParameterPtr> parameters);

 private:
  using Buckets = std::vector<std::unique_ptr<ReduceBucket>>;
  void launch_open(Buckets::iterator place);
  void launch(std::unique_ptr<ReduceBucket> bucket);
  void finish_oldest();

  BegunBackwards& backwards_;
  const PresenceChecks& presence_checks_;
  Delivery& delivery_;
  Buckets open_;  // in order of opening
  // Buckets of mixed gradients, where reductions have no order. Ranks reach them at different
  // times, so nobody waits for them before the end.
  Buckets mixed_;
  std::unique_ptr<ReduceBucket> mixed_first_;  // mixed, and already launched
  Buckets in_flight_;                          // in order of launching
  ReplicaSums replica_sums_;
};

}  // namespace zero3
