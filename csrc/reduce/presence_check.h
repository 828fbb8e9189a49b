// When a backward begins, the ranks of a model tell each other which gradients they will have. If
// only some ranks have a gradient, it counts as zero on the others.
#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "parameter/parameter.h"
#include "transport/presences.h"

namespace zero3 {

class Backward;
class GradientsToCome;

// Compares the gradients that the ranks of one transport, and their replicas, have in a backward.
class PresenceCheck {
 public:
  // Splits `parameters` into groups, each for a check of its own.
  static std::vector<std::vector<ParameterPtr>> groups_of(
      const std::vector<ParameterPtr>& parameters);

  // Begins the check. `parameters` are of one model, reduced together, in order of registration.
  PresenceCheck(std::vector<ParameterPtr> parameters, Backward& backward, Occasion occasion,
                const GradientsToCome& to_come);

  bool is_finished() const { return gather_ == nullptr; }

  // Waits. Throws, on all ranks, if they disagree in a way that zeros cannot repair.
  void finish();

  // After finish(): whether ranks send their gradients of `parameter` at different times, since
  // some have none, or a sum of earlier backwards, or use it at another point of their forwards.
  bool is_mixed(const ParameterPtr& parameter) const;
  const std::vector<ParameterPtr>& mixed() const { return mixed_; }
  // Mixed parameters of which this rank has no gradient, in order of registration.
  const std::vector<ParameterPtr>& missing() const { return missing_; }
  // Parameters with a sum on some rank, each with a dtype that holds all gradients that arrived.
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
