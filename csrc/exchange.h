// The two exchanges of a group of ranks, over c10d.
//
//   gather   rows [world, n], of which this rank has written its own   ->  all rows written
//   reduce   rows [n], one for each rank                               ->  this rank's of all ranks
//
// On gloo both are sends and receives in place: its all-gather copies twice, and its reduce-scatter
// is an all-reduce. Other backends' own collectives are taken.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "channel.h"

namespace zero3 {

// Tensors [n], each contiguous, one for each rank: n may differ from rank to rank.
using Rows = std::vector<at::Tensor>;

constexpr int64_t kWorthAMessage = 64 << 10;  // bytes; tensors that are smaller share one

// What c10d calls it: "gloo", "nccl".
std::string backend_name(const Channel& channel);

// Whether exchanges are sends and receives, one for each tensor and rank, so that several tensors
// need not share a buffer.
bool is_point_to_point(const Channel& channel);

// Whether one collective gathers several tensors, each in its place.
bool is_grouped(const Channel& channel);

// How long ranks of this group wait for each other.
std::chrono::milliseconds timeout_of(const std::string& group_name);

// Tensors that are gathered or reduced, each from the moment it is given, and waited for together.
// Ranks start exchanges of a group in one order. `key` is the same on all ranks; tensors of
// different keys wait for each other's like, and do not meet.
//
// An exchange that is dropped before its wait, as an exception does, goes on by itself and is
// waited for by the next one of its group: all ranks have dropped it, or one of them is gone.
class Exchange {
 public:
  Exchange(const Channel& channel, int64_t rank);
  ~Exchange();

  struct Piece {
    at::Tensor rows;  // [world, n], contiguous; others must not read it before wait()
    std::string key;
  };

  // Several at once; as one collective where tensors are grouped.
  void gather(const std::vector<Piece>& pieces);

  // All n are one unless the group is point to point. Others must not write to `rows` before
  // wait().
  void reduce(const Rows& rows, const std::string& key);

  // Raises, naming the key, if another rank does not take part in time.
  void wait();

  // After wait(), for each call of reduce(): tensors [n] whose sum it is, in the order of ranks.
  const std::vector<Rows>& addends() const { return addends_; }

 private:
  struct Running;
  friend class Orphans;

  std::unique_ptr<Running> running_;  // until wait()
  std::vector<Rows> addends_;
};

}  // namespace zero3
