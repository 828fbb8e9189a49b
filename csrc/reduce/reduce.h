// Reduces raw full gradients to shards.
//
//   raw gradient -> normalized dtype: the leaf's grad_dtype, or the dtype that arrives
//       -> bucket: one for each BucketKey, by the dtype on the wire (by default the normalized one)
//       -> pack: cast to the normalized dtype and then to the wire's, or quantize
//       -> reduce-scatter -> divide, or all-reduce over replicas, if there are any, and then divide
//       -> the parameter's `.grad`
//
// A Reduction belongs to one backward, or to one call of reduce_deferred(). The first gradient,
// gather or recomputed forward of a backward creates it. When the backward has ended, the engine
// runs a callback, which delivers the gradients that were not delivered early. If the backward
// raises, the engine drops the callback, and the Reduction with it: the next backward starts clean.
#pragma once

#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "parameter/parameter.h"
#include "reduce/begun_backwards.h"
#include "reduce/bucket_queue.h"
#include "reduce/delivery.h"
#include "reduce/presence_checks.h"
#include "support/autograd.h"

namespace zero3 {

// Reduces the deposited gradients of `parameters`, in order, and delivers them. Collective.
void reduce_deferred(const std::vector<ParameterPtr>& parameters);

// In a backward, ranks tell each other which gradients they have of the models of `parameters`,
// before they wait for each other in any other way. Both functions have no effect outside a
// backward, and in one that reduces no gradient of these models.
//
// Announces this rank's gradients. Call when a gather starts, and when a backward reaches an output
// of a model: it may run an inner backward before anything else of that model.
void announce_presences(const std::vector<ParameterPtr>& parameters);
// Also waits for the other ranks' announcements, and sends zeros for the gradients that only they
// have. Call before a wait for a gather: other ranks may wait for these zeros first. Also call when
// a forward is recomputed: an inner backward may follow.
void exchange_presences(const std::vector<ParameterPtr>& parameters);

class Reduction {
 public:
  // The reduction of the backward that runs on this thread. Raises outside a backward.
  static std::shared_ptr<Reduction> current();
  ~Reduction();

  // Allocates a gradient that is about to be added, in the memory it will be sent from.
  at::Tensor empty_for(const Parameter& parameter, at::IntArrayRef sizes,
                       const at::TensorOptions& options);

  // Adds a raw gradient of the full shape, in any gradient dtype and strides. If `owned`, the
  // reduction takes over its memory. A graph of another backend is one use to autograd, and may
  // bring several gradients. It numbers them by `use`, from the last to the first: 1 comes last.
  // All others are 0.
  void add(const ParameterPtr& parameter, const at::Tensor& raw, bool owned, int64_t use = 0);

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

 private:
  // Sends the sums of `parameters`, launches the remaining buckets, waits and delivers.
  void finish(const std::vector<ParameterPtr>& parameters);
  // The part of add() that needs the lock.
  void add_locked(const ParameterPtr& parameter, const at::Tensor& raw, bool owned, int64_t use);
  // Notes that a gradient of `parameter` arrives.
  void arrives(const ParameterPtr& parameter, int64_t use);
  // Whether the next gradient of `parameter` is reduced now, and the only one to come. Otherwise
  // all are summed first, so that a backward reduces a parameter once.
  bool goes_at_once(const Parameter& parameter) const;
  // Begins the presence checks of the parameter's model, unless they have begun.
  void begin_presence_checks(const Parameter& parameter);
  // Begins those of the models of `parameters` that this backward reduces.
  void begin_presence_checks(const std::vector<ParameterPtr>& parameters);
  // Waits for the checks, and sends zeros for the gradients that only other ranks have, except for
  // gradients that all ranks send last.
  void finish_presence_checks();
  // Does so for the backwards around the one on this thread: other ranks may not come to the inner
  // one before they have those zeros.
  static void finish_presence_checks_around();
  // `through` is the normalized dtype for a raw gradient, and the sum's own dtype for a sum.
  void send(const ParameterPtr& parameter, const at::Tensor& grad, at::ScalarType through,
            const BucketSelection& selected, bool owned);
  void send_accumulated(const ParameterPtr& parameter);
  void send_zero(const ParameterPtr& parameter);
  // An open bucket of `key` with room for `parameter`.
  ReduceBucket& bucket_for(const ParameterPtr& parameter, const BucketKey& key);
  void finish_backward();
  // Numbers of the models of which some rank has a gradient, as far as is known here.
  std::set<int64_t> reduced_models() const;

  // The reductions of the backwards around the one on this thread, outermost first.
  static std::vector<std::shared_ptr<Reduction>> running_around();

  std::mutex mutex_;  // gradients on two devices arrive on two threads
  GradientsToCome to_come_;
  BegunBackwards backwards_;
  std::vector<ParameterPtr> arrived_;  // of gradients, zeros that stand for one included
  PresenceChecks presence_checks_{backwards_, to_come_};
  bool has_sent_ = false;
  BucketQueue buckets_{backwards_, presence_checks_, delivery_};
  Delivery delivery_;  // last: says that a backward has raised before buckets are dropped
};

}  // namespace zero3
