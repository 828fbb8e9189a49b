// A log of the collectives that this rank takes part in.
#pragma once

#include <ATen/core/Tensor.h>

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
  bool is_simulated = false;  // on the meta device: nothing is sent
};

// Records collectives from its construction until stop(), those that are real or those that are
// simulated. Several may record at once.
class CollectiveLog {
 public:
  explicit CollectiveLog(bool simulated) : is_of_simulated_(simulated) {}
  static std::shared_ptr<CollectiveLog> start(bool simulated);
  void stop();
  std::vector<Collective> records();
  std::vector<Collective> take();  // and forgets them
  void add(const Collective& collective);

 private:
  const bool is_of_simulated_;
  std::mutex mutex_;
  std::vector<Collective> records_;
};

// Whether any log records.
bool is_recording();

// Adds a collective to all logs that record.
void add_to_logs(const Collective& collective);

// The same of what `make` gives, which is not called if none does.
template <typename Make>
void record(Make make) {
  if (is_recording()) add_to_logs(make());
}

// What a profile calls a `phase` of it: "zero3::all_gather start [Float, 4096 bytes] a, b".
std::string scope_name(const Collective& collective, const std::string& phase);

}  // namespace zero3
