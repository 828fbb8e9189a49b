// Reduces raw full gradients to shards.
//
//   raw gradient -> normalized dtype: the leaf's grad_dtype, or the dtype that arrives
//       -> bucket: one for each transport, replicas, wire dtype (by default the normalized one),
//          quantized format, divide factor, device and early delivery
//       -> pack: cast to the normalized dtype and then to the wire's, or quantize
//       -> reduce-scatter -> divide, or all-reduce over replicas, if there are any, and then divide
//       -> the parameter's `.grad`
//
// A Reduction belongs to one backward, or to one call of reduce_deferred(). The first gradient of a
// backward creates it, or what comes before: a gather, or a recomputed forward. When the backward
// has ended, the engine runs a callback, which delivers what was not delivered early. If the
// backward raises, the engine drops the callback, and the Reduction with it: the next backward
// starts clean.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <vector>

#include "parameter/parameter.h"
#include "reduce/all_reduce.h"

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

// Reduces the deposited gradients of `parameters`, in order, and delivers them. Collective.
void reduce_deferred(const std::vector<ParameterPtr>& parameters);

// Ranks tell each other which gradients of the models of `parameters` a backward will bring them,
// before anything in it for which ranks wait for each other. Both have no effect outside a
// backward, and in one that reduces no gradient of these models.
//
// Announces this rank's. Call when a gather starts, and when a backward reaches an output of a
// model: it may run another backward before anything else of that model.
void announce_presences(const std::vector<ParameterPtr>& parameters);
// Also waits for the other ranks' announcements, and sends zeros for the gradients that only they
// have. Call before a wait for a gather: others may not come to it while their gradients wait. Also
// call when a forward is recomputed: a backward may follow inside of this one.
void exchange_presences(const std::vector<ParameterPtr>& parameters);

class Backward;
struct BucketKey;
struct BucketSelection;
class PresenceCheck;
enum class Occasion : uint8_t;
class ReduceBucket;
class Transport;

class Reduction {
 public:
  // The reduction of the backward that runs on this thread. Raises outside a backward.
  static std::shared_ptr<Reduction> current();
  ~Reduction();

  // Allocates a gradient that is about to be added, in the memory it will be sent from.
  at::Tensor empty_for(const Parameter& parameter, at::IntArrayRef sizes,
                       const at::TensorOptions& options);

  // Adds a raw gradient of the full shape, in any gradient dtype and strides. If `owned`, the
  // reduction takes over its memory.
  void add(const ParameterPtr& parameter, const at::Tensor& raw, bool owned);

  Reduction() = default;
  Reduction(const Reduction&) = delete;
  Reduction& operator=(const Reduction&) = delete;

  // See announce_presences() and exchange_presences().
  void announce(const std::vector<ParameterPtr>& parameters);
  void exchange(const std::vector<ParameterPtr>& parameters);

  // Adds left @ right. Computes it in the memory it is sent from, and in parts if that is better.
  void add_product(const ParameterPtr& parameter, const at::Tensor& left, const at::Tensor& right);

  // Lets ranks tell each other which parameters have deposited gradients, then calls finish().
  void finish_deferred(const std::vector<ParameterPtr>& parameters);
  // Sends the sums of `parameters`, launches the remaining buckets, waits and delivers.
  void finish(const std::vector<ParameterPtr>& parameters);

 private:
  // The part of add() that needs the lock.
  void add_locked(const ParameterPtr& parameter, const at::Tensor& raw, bool owned);
  // Delivers the reduced gradients that need not wait for the end of the backward.
  void deliver_early();
  void forget_delivered();
  // Notes that a gradient of `parameter` arrives.
  void arrives(const ParameterPtr& parameter);
  // Whether the next gradient of `parameter` is reduced now, and the only one to come.
  bool goes_at_once(const Parameter& parameter) const;
  // Begins checks of `parameters`.
  std::vector<std::unique_ptr<PresenceCheck>> presence_checks_of(
      const std::vector<ParameterPtr>& parameters, Occasion occasion);
  // Begins the checks of a parameter's model, and of all other models in this backward, once.
  void begin_presence_checks(const Parameter& parameter);
  // Begins those of the models of `parameters` that this backward reduces.
  void begin_presence_checks(const std::vector<ParameterPtr>& parameters);
  // Waits for the checks, and sends zeros for the gradients that only other ranks have, unless
  // they are held.
  void finish_presence_checks();
  // Does so for the backwards that the one on this thread runs inside of: their other ranks may not
  // come to this one while gradients of theirs wait.
  static void finish_presence_checks_around();
  void send_zero(const ParameterPtr& parameter);
  // After the checks: whether ranks send the parameter's gradients at different times.
  bool is_mixed(const ParameterPtr& parameter) const;
  // After the checks: whether its gradient is sent at the end of the backward, where all ranks have
  // one order: it is mixed, and ranks have to start reductions in one order.
  bool is_held(const ParameterPtr& parameter) const;
  // A dtype that holds what the ranks have of a mixed parameter; nullopt: as it arrives.
  std::optional<at::ScalarType> dtype_on_all_ranks(const ParameterPtr& parameter) const;
  // Moves the first gradient's bucket to `mixed_first_` if that gradient is mixed: it was sent
  // before that was known.
  void move_first_if_mixed();
  // The backward of the parameter's transport. Begins it on the first call.
  Backward& backward_of(const Parameter& parameter);
  // `through` is the normalized dtype for a raw gradient, and the sum's own dtype for a sum.
  void send(const ParameterPtr& parameter, const at::Tensor& grad, at::ScalarType through,
            const BucketSelection& selected, bool owned);
  void send_accumulated(const ParameterPtr& parameter);
  // An open bucket of `key` with room for `parameter`.
  ReduceBucket& bucket_for(const ParameterPtr& parameter, const BucketKey& key);
  void launch_if_full(const ReduceBucket& bucket);
  void launch(std::unique_ptr<ReduceBucket> bucket);
  void finish_oldest();
  void finish_backward();

  // The backwards that the one that runs on this thread runs inside of, outermost first.
  static std::vector<std::shared_ptr<Reduction>> running_around();

  std::mutex mutex_;  // gradients on two devices arrive on two threads
  bool is_ending_ = false;
  // The backward of each transport. Backwards outlive their buckets.
  std::vector<std::pair<std::shared_ptr<Transport>, std::unique_ptr<Backward>>> backwards_;
  std::vector<ParameterPtr> arrived_;
  std::vector<int64_t> checked_;  // models that have a presence check
  std::set<int64_t> in_graph_;    // checked models of which a parameter is in this backward's graph
  std::set<int64_t> unreduced_;   // models of which this backward reduces no gradient
  std::vector<std::unique_ptr<PresenceCheck>> presence_checks_;
  bool has_sent_ = false;
  std::vector<std::unique_ptr<ReduceBucket>> open_;  // in order of opening
  // Buckets of mixed gradients that are not held. Ranks reach them at different times, so nobody
  // waits for them before the end.
  std::vector<std::unique_ptr<ReduceBucket>> mixed_;
  std::unique_ptr<ReduceBucket> mixed_first_;             // mixed, and already launched
  std::vector<std::unique_ptr<ReduceBucket>> in_flight_;  // in order of launching
  AllReduces all_reduces_;
  std::vector<ReducedGradient> results_;
  // Parameters with a gradient of a use that no forward has noted: more may come.
  std::vector<ParameterPtr> unforeseen_;
  bool delivers_early_ = false;          // some parameter that has arrived
  std::vector<ParameterPtr> delivered_;  // until the end
};

}  // namespace zero3
