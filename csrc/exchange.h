// The two exchanges of a group of ranks, over c10d.
//
//   gather   rows [world, n], of which this rank has written its own   ->  all rows written
//   reduce   rows [world, n], one for each rank                        ->  this rank's of all ranks
//
// On gloo both are sends and receives in place: its all-gather copies twice, and its reduce-scatter
// is an all-reduce. Other backends' own collectives are taken.
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <string>
#include <vector>

namespace zero3 {

// Communication that has started. It owns the tensors that take part.
class Exchange {
 public:
  virtual ~Exchange() = default;
  virtual void wait() = 0;
};

// A reduction that has started.
class Reduce : public Exchange {
 public:
  // After wait(): tensors [n] whose sum is the reduction's, the same on every run.
  virtual std::vector<at::Tensor> addends() = 0;
};

// Whether exchanges of this group and device are sends and receives, one for each tensor and rank,
// so that several tensors need not share a buffer.
bool is_point_to_point(const std::string& group_name, at::Device device);

// Starts gathering each of `rows`. Ranks start exchanges of a group in one order; `key` is the same
// on all ranks, and two exchanges of different keys never meet.
std::unique_ptr<Exchange> start_gather(const std::string& group_name, int64_t rank,
                                       std::vector<at::Tensor> rows, const std::string& key);

// Starts reducing `rows`, the part [world, n] of a buffer whose rows are contiguous.
std::unique_ptr<Reduce> start_reduce(const std::string& group_name, int64_t rank, at::Tensor rows,
                                     const std::string& key);

}  // namespace zero3
