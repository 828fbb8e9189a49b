// When a backward begins, the ranks of a model tell each other which gradients it brings: what only
// some of them bring is zero on the others.
//
// Ranks that share memory tell it there, others by messages.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "parameter.h"

namespace zero3 {

// What there is of a parameter in a backward, on a rank or on some.
enum class Presence : uint8_t {
  kNothing,
  kGradient,   // it arrives
  kSum,        // one of backwards before, which is reduced when this one ends
  kFrozen,     // it needs none
  kWithheld,   // it is not reduced now
  kGradients,  // on some of them, and on others nothing, or at another time
  kConflict,   // what cannot be made good
};

// A line of the roll: of each parameter.
using Presences = std::vector<Presence>;

// Tells all ranks of one process group what this one has.
class Roll {
 public:
  virtual ~Roll() = default;
  // Waits. Of each rank.
  virtual std::vector<Presences> finish() = 0;
  // Waits, so that this rank may begin another.
  virtual void hear() {}
};

class RollCall {
 public:
  // Begins. `parameters` are those of one model that are reduced by one process group, in order of
  // registration. If its ranks share memory, `backward` is its number there.
  RollCall(std::vector<ParameterPtr> parameters, uint64_t backward);

  bool is_finished() const { return roll_ == nullptr; }

  // Waits. Throws, on all ranks, if they disagree on what cannot be made good.
  void finish();

  // After that: whether only some ranks have a gradient of `parameter`.
  bool is_mixed(const ParameterPtr& parameter) const;
  // Those of them of which this rank has none, in order of registration.
  const std::vector<ParameterPtr>& missing() const { return missing_; }

 private:
  const std::vector<ParameterPtr> parameters_;
  Presences mine_;
  std::unique_ptr<Roll> roll_;  // until finish()
  std::vector<ParameterPtr> mixed_;
  std::vector<ParameterPtr> missing_;
};

}  // namespace zero3
