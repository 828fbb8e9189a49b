// Delivers the reduced gradients of a backward.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <vector>

#include "reduce/replica_sum.h"

namespace zero3 {

// The moment at which gradients are delivered: when their bucket is reduced, at the end of a
// backward inside of another one, or at the end of any other.
enum class Moment : uint8_t { kEarly, kNestedEnd, kEnd };
// Receives reduced gradients, in an order that may differ between ranks. At the end of a backward,
// or of a reduce_deferred(), also receives the numbers of all models whose gradients it has
// delivered, early ones included. Called without the GIL.
using Deliver = std::function<void(const std::vector<ReducedGradient>&, Moment,
                                   const std::vector<int64_t>& model_numbers)>;
void set_deliver(Deliver deliver);
// Called without the GIL when a backward that has delivered gradients of these models raises.
// Throws nothing.
using Interrupted = std::function<void(const std::vector<int64_t>& model_numbers)>;
void set_interrupted(Interrupted interrupted);

// The reduced gradients of one backward, and which of them were delivered. Owned by a Reduction,
// whose mutex guards it: deliver_early() and finish() take it locked, and unlock it to deliver.
class Delivery {
 public:
  // After finish(), there is nothing to do. Otherwise the backward raised.
  ~Delivery();

  // Notes that a gradient of `parameter`, which delivers early, arrives. Unless it `is_foreseen`,
  // more may come that were not counted.
  void arrives(const ParameterPtr& parameter, bool is_foreseen);
  // Reduced gradients to be delivered.
  std::vector<ReducedGradient>& results() { return results_; }
  // Delivers those that need not wait for the end of the backward.
  void deliver_early(std::unique_lock<std::mutex> lock);
  // Delivers the rest. Returns all parameters whose gradients were delivered: give them to
  // forget(), or to include() of the backward around this one, which ends for them too.
  std::vector<ParameterPtr> finish(Moment moment, std::unique_lock<std::mutex> lock);
  void include(std::vector<ParameterPtr> delivered);
  static void forget(const std::vector<ParameterPtr>& delivered);

 private:
  std::vector<ReducedGradient> results_;
  std::vector<ParameterPtr> unforeseen_;  // see arrives()
  bool delivers_early_ = false;           // some parameter that has arrived
  std::vector<ParameterPtr> delivered_;   // until the end
};

}  // namespace zero3
