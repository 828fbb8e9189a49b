// Logs of the collectives that this rank takes part in.
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
  int64_t nbytes;  // size of the full, unsharded buffers
  int64_t world_size;
  std::vector<std::string> params;
  bool is_on_meta = false;  // nothing is sent there
};

// Records collectives from start() until stop(): either the real ones or those on the meta device.
// Several logs may record at once.
class CollectiveLog {
 public:
  explicit CollectiveLog(bool on_meta) : on_meta_(on_meta) {}
  static std::shared_ptr<CollectiveLog> start(bool on_meta);
  void stop();
  std::vector<Collective> records();
  std::vector<Collective> take();  // returns the records and clears them
  void add(const Collective& collective);

 private:
  const bool on_meta_;
  std::mutex mutex_;
  std::vector<Collective> records_;
};

// Whether any log records.
bool is_recording();

// Adds a collective to all logs that record.
void add_to_logs(const Collective& collective);

// Adds `make()` to all logs that record. Does not call `make` if no log records.
template <typename Make>
void record(Make make) {
  if (is_recording()) add_to_logs(make());
}

// Profiler name of a `phase` of the collective: "zero3::all_gather start [Float, 4096 bytes] a, b".
std::string scope_name(const Collective& collective, const std::string& phase);

}  // namespace zero3
