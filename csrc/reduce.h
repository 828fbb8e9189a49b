// From raw full gradients to reduced shards of gradients.
//
//   raw -> grad_dtype -> bucket by (process group, wire dtype, divide factor, device) -> pack
//       -> reduce-scatter -> scale -> all-reduce over replicas, if there are any
//       -> hand the shard to the parameter's `.grad`
//
// The reduce-scatter is an exchange of messages, or goes through the mailboxes of one host.
//
// A reduction belongs to one backward of the autograd engine: it begins with the first gradient
// that arrives and ends in a callback which the engine runs when that backward has ended. A
// backward that raises never runs the callback; its reduction is dropped with the engine's graph
// task, and the next backward starts clean.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "collective_log.h"
#include "parameter.h"

namespace zero3 {

// Bounds communication memory: a further bucket, or all-reduce, waits for the oldest one.
constexpr size_t kMostInFlight = 1;

struct ReducedGradient {
  ParameterPtr parameter;
  at::Tensor shard;  // [shard_rows, ...], in `shard_grad_dtype`
};

// Receives what a backward reduced, in the order in which it was sent. Called without the GIL.
using Deliver = std::function<void(const std::vector<ReducedGradient>&)>;
void set_deliver(Deliver deliver);

// Adds a raw gradient to `Parameter::accumulated`, cast to the leaf's dtype, in the wider of all
// dtypes on its way: a sum is never narrower than what arrives or what it is rounded to. The memory
// of what is `owned` may become the sum's.
void accumulate(Parameter& parameter, const at::Tensor& raw, bool owned = false);

// Reduces what these parameters have accumulated, in order, and delivers it.
void reduce_accumulated(const std::vector<ParameterPtr>& parameters);

class AllReduce;
class Bucket;
class RollCall;
class RunningBackward;

class Reduction : public std::enable_shared_from_this<Reduction> {
 public:
  // That of the backward which is running on this thread. Raises outside of a backward.
  static std::shared_ptr<Reduction> current();
  ~Reduction();

  // Memory for a gradient that is about to be added: where it will be sent from.
  at::Tensor empty_for(const Parameter& parameter, at::IntArrayRef sizes,
                       const at::TensorOptions& options);

  // One raw gradient of the full shape, of any floating dtype and strides. If it is `owned`, its
  // memory is the reduction's from here on.
  void add(const ParameterPtr& parameter, const at::Tensor& raw, bool owned);

  // The same of left @ right, which is computed where it is sent from, in parts if that is better.
  void add_product(const ParameterPtr& parameter, const at::Tensor& left, const at::Tensor& right);

  // Sends the sums of these parameters, launches all that is left, waits and delivers.
  void finish(const std::vector<ParameterPtr>& parameters);

 private:
  // Notes a gradient, and returns whether it goes at once.
  bool arrives(const ParameterPtr& parameter);
  // Whether the next gradient of `parameter` is the only one to come.
  bool goes_at_once(const Parameter& parameter) const;
  // Lets the ranks of the model of `first` tell each other what they bring.
  void begin_roll_calls(const Parameter& first);
  // Sends zeros for what others bring and this rank does not.
  void finish_roll_calls();
  bool is_mixed(const ParameterPtr& parameter) const;  // only some ranks bring it
  // Takes the first gradient, which was sent before that was known, from those that others wait
  // for.
  void defer_first_if_mixed();
  uint64_t backward_of(const Parameter& parameter);  // its number, where ranks share memory
  // `through` is the normalised dtype for a raw gradient, and for a sum of such its own.
  void send(const ParameterPtr& parameter, const at::Tensor& grad, at::ScalarType through,
            at::ScalarType normalised_dtype, bool owned);
  void send_accumulated(const ParameterPtr& parameter);
  // An open one with room for it.
  Bucket& bucket_for(const ParameterPtr& parameter, at::ScalarType normalised_dtype);
  void launch_if_full(const Bucket& bucket);
  void launch(std::unique_ptr<Bucket> bucket);
  void finish_oldest();
  // Sums what these have over their replicas.
  void all_reduce(std::vector<ParameterPtr> parameters);
  void finish_oldest_all_reduce();
  void finish_backward();
  std::vector<int64_t> roots() const;  // of the parameters that arrived, in order

  std::mutex mutex_;  // gradients on two devices arrive on two threads
  std::vector<std::unique_ptr<RunningBackward>>
      backwards_;  // of each OneHost; outlives its buckets
  std::vector<ParameterPtr> arrived_;
  std::vector<int64_t> called_;  // the models whose ranks have told each other
  std::vector<std::unique_ptr<RollCall>> roll_calls_;
  bool has_sent_ = false;
  std::vector<std::unique_ptr<Bucket>> open_;  // in order of opening
  // Of what only some ranks have. They meet in it at places of their own, so that nobody waits for
  // it before the end.
  std::vector<std::unique_ptr<Bucket>> mixed_;
  std::unique_ptr<Bucket> deferred_first_;               // likewise, and launched
  std::vector<std::unique_ptr<Bucket>> in_flight_;       // in order of launching
  std::vector<std::unique_ptr<AllReduce>> all_reduces_;  // in flight too
  std::vector<ReducedGradient> results_;
};

}  // namespace zero3
