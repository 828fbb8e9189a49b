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

// Communication that has started. One that is dropped before its wait, as an exception does, goes
// on by itself and is waited for at the next start in its group: all ranks have dropped it, or one
// of them is gone.
class Exchange {
 public:
  struct Running;

  Exchange(std::unique_ptr<Running> running, std::vector<at::Tensor> addends);
  ~Exchange();

  Running& running() { return *running_; }

  // Raises, naming the key, if another rank does not take part in time.
  void wait();

  // Of a reduction, after wait(): tensors [n] whose sum it is, in the order of ranks.
  const std::vector<at::Tensor>& addends() const { return addends_; }

 private:
  std::unique_ptr<Running> running_;  // until wait()
  std::vector<at::Tensor> addends_;
};

// Whether exchanges of this group and device are sends and receives, one for each tensor and rank,
// so that several tensors need not share a buffer.
bool is_point_to_point(const std::string& group_name, at::Device device);

// Starts gathering each of `rows`. Ranks start exchanges of a group in one order; `key` is the same
// on all ranks; exchanges of different keys wait for each other's like, and do not meet.
std::unique_ptr<Exchange> start_gather(const std::string& group_name, int64_t rank,
                                       std::vector<at::Tensor> rows, const std::string& key);

// Starts reducing `rows`, the part [world, n] of a buffer whose rows are contiguous.
std::unique_ptr<Exchange> start_reduce(const std::string& group_name, int64_t rank, at::Tensor rows,
                                       const std::string& key);

}  // namespace zero3
