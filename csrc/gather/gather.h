// Gathers of parameters, and of what stands in their place, over any transport.
#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "parameter/codec.h"
#include "parameter/registry.h"
#include "transport/gather_bucket.h"

namespace zero3 {

// A started gather. It has one collective for each dtype and set of transports that join, in order
// of appearance. A parameter that has its full tensor takes part only if it is gathered encoded.
// Shards are cast before they are sent, or encoded.
class Gather {
 public:
  // `codecs` of the shards on the wire, one for each of `wanted`, or null; none if it is empty.
  explicit Gather(std::vector<Gatherable> wanted, std::vector<const Codec*> codecs = {});

  // Lets the shards change before finish(), which still gathers their old values.
  void snapshot();

  // Before finish(): whether a gather that started now would give the same, and this one still can.
  bool is_up_to_date() const;
  // Before finish(): starts again if later gathers have taken the place of what this one gathers.
  // If the shards have changed since, it does not, and finish() raises.
  void start_again_if_lost();
  // Holds `under_way` until finish(), which then calls `start_next` before it waits.
  void follow(std::shared_ptr<void> under_way, std::function<void()> start_next);

  // Waits, and returns the full tensors [rows, ...], each in the dtype and strides of its source.
  // Unless `fresh`, they are views where the transport gathers views. A parameter that had a full
  // tensor already gives that tensor, unless it is gathered encoded. A second call
  // gathers again: an operator may run more than once on a handle.
  std::vector<at::Tensor> finish(bool fresh);
  // Like finish(/*fresh=*/true), but copies results that Parameter::gathered has too: the caller
  // may write to them.
  std::vector<at::Tensor> finish_owned();

 private:
  void start();
  bool is_lost() const;
  bool has_same_shards() const;
  // Returns the full tensor of a bucket's result: that result, unless it is encoded.
  at::Tensor full_of(size_t place, const at::Tensor& gathered) const;
  // Retains a full tensor, or shards it after_forward, if later forwards or backwards need it. One
  // that `is_rounded` is for the graph alone that gathered it encoded.
  static void retain(Parameter& parameter, const at::Tensor& full, bool read_only, uint64_t version,
                     bool has_backward, bool is_rounded);

  struct Started {
    std::vector<size_t> places;  // of the bucket's sources among `wanted_`
    std::unique_ptr<GatherBucket> bucket;
  };

  const std::vector<Gatherable> wanted_;  // no duplicates
  std::vector<ParameterPtr> parameters_;  // those of `wanted_`
  const std::vector<const Codec*> codecs_;
  std::vector<bool> is_encoded_;       // for each of `wanted_`, whether bytes are gathered
  std::vector<at::Tensor> unsharded_;  // full tensors that were there; else undefined
  std::vector<at::Tensor> shards_;
  std::vector<uint64_t> versions_;  // of the shards
  std::vector<Started> buckets_;
  bool is_started_ = false;
  bool ranks_meet_ = false;  // for some bucket
  std::shared_ptr<void> under_way_;
  std::function<void()> start_next_;
};

// Tells the transports of `parameters` that a forward reads them without a publication. Counts once
// for all whose transports join, and not in a backward.
void count_unpublished(const std::vector<ParameterPtr>& parameters);

// Tells the transports of the retained `parameters` that a forward reads these without a gather.
void note_skipped_gathers(const std::vector<ParameterPtr>& parameters);

// Call when a forward ends. Reshards the retained `parameters` that do not outlive it.
void reshard_retained_after_forward(const std::vector<ParameterPtr>& parameters);

// While an instance lives, this thread runs a compiled forward that a backward follows: autograd,
// which tells as much of an eager one, is off in it.
class RecordedForward {
 public:
  RecordedForward();
  ~RecordedForward();
  RecordedForward(const RecordedForward&) = delete;
  RecordedForward& operator=(const RecordedForward&) = delete;

 private:
  const bool is_inside_another_;
};

// Starts a gather, and calls finish_owned().
at::Tensor gather(Gatherable wanted);

// The epochs of the publications that a forward has read.
class ForwardEpochs {
 public:
  explicit ForwardEpochs(const std::vector<SourcePtr>& sources);

  // Call when the backward of this forward begins. Returns whether a read will publish again, for
  // which all ranks have to meet. Raises under compiled autograd, before that reads a parameter.
  bool begin_backward() const;

 private:
  std::string fqn_;  // of a source, or "" if there are none
  std::vector<std::pair<std::weak_ptr<Source>, uint64_t>> epochs_;
};

}  // namespace zero3
