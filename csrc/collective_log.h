// A log of the collectives that this rank takes part in.
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace zero3 {

struct Collective {
  std::string op;  // "all_gather", "reduce_scatter" or "all_reduce"
  at::ScalarType dtype;
  int64_t nbytes;  // of the full, unsharded buffers
  int64_t world_size;
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

// Adds a collective to all logs that record.
void record(const Collective& collective);

// What a profile calls a `phase` of it: "zero3::all_gather start [Float, 4096 bytes] a, b".
std::string scope_name(const Collective& collective, const std::string& phase);

}  // namespace zero3
