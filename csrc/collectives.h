// The collectives the runtime needs, over a c10d process group, and a log of them.
//
// Every communication of this library passes here. Both functions only start the work: the caller
// keeps the tensors and waits.
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

namespace zero3 {

struct Collective {
  std::string op;  // "all_gather" or "reduce_scatter"
  at::ScalarType dtype;
  int64_t nbytes;  // of the full, unsharded buffer
  std::vector<std::string> params;
};

// Records collectives from its construction until stop(). Several may record at once.
class CollectiveLog {
 public:
  static std::shared_ptr<CollectiveLog> start();
  void stop();
  std::vector<Collective> records();
  void add(const Collective& collective);

 private:
  std::mutex mutex_;
  std::vector<Collective> records_;
};

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// full: [world * n], shard: [n], both contiguous, of one dtype; they share no memory.
WorkPtr start_all_gather(const std::string& group_name, at::Tensor full, at::Tensor shard,
                         const std::vector<std::string>& params);

// The sum over ranks. Same shapes; `shard` shares no memory with `full`, which may be overwritten.
WorkPtr start_reduce_scatter(const std::string& group_name, at::Tensor shard, at::Tensor full,
                             const std::vector<std::string>& params);

}  // namespace zero3
