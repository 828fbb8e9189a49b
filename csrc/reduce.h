// From raw full gradients to reduced shards of gradients.
//
//   raw -> grad_dtype -> bucket by (process group, wire dtype, divide factor, device) -> pack
//       -> reduce-scatter -> scale -> hand the shard to the parameter's `.grad`
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
#include "exchange.h"
#include "parameter.h"

namespace zero3 {

struct ReducedGradient {
  ParameterPtr parameter;
  at::Tensor shard;  // [shard_rows, ...], in `shard_grad_dtype`
};

// Receives what a backward reduced, in the order in which it was sent. Called without the GIL.
using Deliver = std::function<void(const std::vector<ReducedGradient>&)>;
void set_deliver(Deliver deliver);

// Adds a raw gradient to `Parameter::accumulated`, cast to the leaf's dtype, in the wider of all
// dtypes on its way: a sum is never narrower than what arrives or what it is rounded to.
void accumulate(Parameter& parameter, const at::Tensor& raw);

// Reduces what these parameters have accumulated, in order, and delivers it.
void reduce_accumulated(const std::vector<ParameterPtr>& parameters);

// Gradients of several parameters on their way through one reduce-scatter. The buffer is
// rank-major, [world][chunk of p0 | chunk of p1 | ... | free], so that each rank's part is one run.
class Bucket {
 public:
  Bucket(const Parameter& like, at::ScalarType wire_dtype, int64_t capacity);

  bool accepts(const Parameter& parameter, at::ScalarType wire_dtype) const;
  bool has_room_for(const Parameter& parameter) const;

  // Casts `grad` to `through` and that to the wire's, lays it out and copies it in one pass over
  // memory. `grad` may be reused when this returns.
  void pack(const ParameterPtr& parameter, const at::Tensor& grad, at::ScalarType through,
            at::ScalarType normalised_dtype);
  void launch();

  // Waits, and appends each parameter's reduced and scaled shard.
  void finish(std::vector<ReducedGradient>& results);

 private:
  struct Entry {
    ParameterPtr parameter;
    int64_t offset;  // in a rank's run, in elements
    at::ScalarType normalised_dtype;
  };

  std::string group_name_;
  int64_t rank_;
  int64_t world_size_;
  double divide_factor_;
  double pre_divide_factor_;
  int64_t capacity_;  // elements a rank
  int64_t used_ = 0;
  at::Tensor buffer_;  // [world, capacity]
  std::vector<Entry> entries_;
  std::unique_ptr<Exchange> exchange_;
};

class Reduction : public std::enable_shared_from_this<Reduction> {
 public:
  // That of the backward which is running on this thread. Raises outside of a backward.
  static std::shared_ptr<Reduction> current();
  ~Reduction();

  // One raw gradient of the full shape, of any floating dtype and strides.
  void add(const ParameterPtr& parameter, const at::Tensor& raw);

  // Sends the sums of these parameters, launches all that is left, waits and delivers.
  void finish(const std::vector<ParameterPtr>& parameters);

 private:
  // `through` is the normalised dtype for a raw gradient, and for a sum of such its own.
  void send(const ParameterPtr& parameter, const at::Tensor& grad, at::ScalarType through,
            at::ScalarType normalised_dtype);
  void send_accumulated(const ParameterPtr& parameter);
  void launch(std::unique_ptr<Bucket> bucket);
  void finish_oldest();
  void finish_backward();
  std::vector<int64_t> roots() const;  // of the parameters that arrived, in order

  std::mutex mutex_;  // gradients on two devices arrive on two threads
  std::vector<ParameterPtr> arrived_;
  std::vector<std::unique_ptr<Bucket>> open_;       // in order of opening
  std::vector<std::unique_ptr<Bucket>> in_flight_;  // in order of launching
  std::vector<ReducedGradient> results_;
};

}  // namespace zero3
