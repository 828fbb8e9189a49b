// When a backward begins, the ranks of a model tell each other which gradients they will have. A
// gradient that only some ranks have is zero on the others.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "parameter/parameter.h"

namespace zero3 {

class Backward;

// Why ranks tell each other what they have.
enum class Occasion : uint8_t { kBackward, kDeposits };

// State of a parameter's gradient in a backward, on one rank or combined over several.
enum class Presence : uint8_t {
  kNothing,
  kGradient,   // arrives in this backward
  kSum,        // a sum of earlier backwards, reduced when this one ends
  kFrozen,     // needs no gradient
  kWithheld,   // not reduced now
  kGradients,  // combined: differs between ranks; zeros replace missing ones
  kConflict,   // combined: an error on all ranks
};

// One rank's announcement for a parameter.
struct Announced {
  Presence presence = Presence::kNothing;
  int8_t sum_dtype = kNoDtype;  // holds all that arrived, if there is a sum

  static constexpr int8_t kNoDtype = -1;
};

// One announcement for each parameter.
using Presences = std::vector<Announced>;

// Gathers the presences of all ranks of one process group. This rank's own are already announced.
class PresenceGather {
 public:
  virtual ~PresenceGather() = default;
  // Waits, and returns the presences of each rank.
  virtual std::vector<Presences> finish() = 0;
};

// Compares the gradients that the ranks of one transport, and their replicas, have in a backward.
class PresenceCheck {
 public:
  // Splits parameters into those that one check compares.
  static std::vector<std::vector<ParameterPtr>> groups_of(
      const std::vector<ParameterPtr>& parameters);

  // Begins the check. `parameters` are of one model, reduced together, in order of registration.
  PresenceCheck(std::vector<ParameterPtr> parameters, Backward& backward, Occasion occasion);

  bool is_finished() const { return gather_ == nullptr; }

  // Waits. Throws, on all ranks, if they disagree in a way that zeros cannot repair.
  void finish();

  // After finish(): whether only some ranks have a gradient of `parameter`.
  bool is_mixed(const ParameterPtr& parameter) const;
  // Mixed parameters of which this rank has no gradient, in order of registration.
  const std::vector<ParameterPtr>& missing() const { return missing_; }
  // Parameters with a sum on some rank, each with a dtype that holds what arrived on any rank.
  const std::vector<std::pair<ParameterPtr, at::ScalarType>>& sums() const { return sums_; }
  std::optional<at::ScalarType> sum_dtype_of(const ParameterPtr& parameter) const;

 private:
  const std::vector<ParameterPtr> parameters_;
  const Occasion occasion_;
  Presences mine_;
  std::unique_ptr<PresenceGather> gather_;  // until finish()
  std::vector<ParameterPtr> mixed_;
  std::vector<ParameterPtr> missing_;
  std::vector<std::pair<ParameterPtr, at::ScalarType>> sums_;
};

}  // namespace zero3
