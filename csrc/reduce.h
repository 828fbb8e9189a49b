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
// dtypes on its way: a sum is never narrower than what arrives or what it is rounded to. The memory
// of what is `owned` may become the sum's.
void accumulate(Parameter& parameter, const at::Tensor& raw, bool owned = false);

// Reduces what these parameters have accumulated, in order, and delivers it.
void reduce_accumulated(const std::vector<ParameterPtr>& parameters);

// Gradients of several parameters on their way through one exchange. Large ones go alone, as they
// are if they are owned; the rest is packed into slabs, rank-major, [world][chunk of p0 | chunk of
// p1 | ... | free], so that each rank's part is one run.
class Bucket {
 public:
  Bucket(const Parameter& like, at::ScalarType wire_dtype);

  bool accepts(const Parameter& parameter, at::ScalarType wire_dtype) const;
  bool has_room_for(const Parameter& parameter) const;
  bool is_full() const;

  // Takes `grad`, cast to `through` and that to the wire's dtype. If it is lent, nobody writes to
  // it until finish(); else it may be reused when this returns.
  void add(const ParameterPtr& parameter, const at::Tensor& grad, at::ScalarType through,
           at::ScalarType normalised_dtype, bool owned);
  void close();  // Nothing more comes.

  // Waits, and appends each parameter's reduced and scaled shard.
  void finish(std::vector<ReducedGradient>& results);

 private:
  struct Entry {
    ParameterPtr parameter;
    at::ScalarType normalised_dtype;
    std::optional<size_t> piece;  // once it is sent
    int64_t offset;               // in a rank's row, in elements
    bool is_alone;                // in its piece, whose memory is ours
  };

  // Decided from the parameter alone: ranks may compute its gradient in ways of their own.
  bool goes_alone(const Parameter& parameter) const;
  // Casts, lays out and copies in one pass over memory.
  void pack(const Parameter& parameter, const at::Tensor& grad, at::ScalarType through);
  void send_slab();
  size_t send(const Rows& rows, const std::string& key);  // gives the number of the piece

  std::string group_name_;
  int64_t rank_;
  int64_t world_size_;
  double divide_factor_;
  double pre_divide_factor_;
  at::TensorOptions options_;  // on the wire
  int64_t capacity_;           // elements a rank
  int64_t used_ = 0;
  size_t pieces_ = 0;
  at::Tensor slab_;  // [world, n], the open one
  std::string slab_key_;
  int64_t slab_used_ = 0;
  std::vector<Entry> entries_;
  Exchange exchange_;
};

class Reduction : public std::enable_shared_from_this<Reduction> {
 public:
  // That of the backward which is running on this thread. Raises outside of a backward.
  static std::shared_ptr<Reduction> current();
  ~Reduction();

  // One raw gradient of the full shape, of any floating dtype and strides. If it is `owned`, its
  // memory is the reduction's from here on.
  void add(const ParameterPtr& parameter, const at::Tensor& raw, bool owned);

  // Sends the sums of these parameters, launches all that is left, waits and delivers.
  void finish(const std::vector<ParameterPtr>& parameters);

 private:
  // `through` is the normalised dtype for a raw gradient, and for a sum of such its own.
  void send(const ParameterPtr& parameter, const at::Tensor& grad, at::ScalarType through,
            at::ScalarType normalised_dtype, bool owned);
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
