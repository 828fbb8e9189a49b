// Announcements that ranks exchange about their gradients: occasions, states, and transfers.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "parameter/parameter.h"

namespace zero3 {

class Channel;

// The occasion on which ranks exchange presences.
enum class Occasion : uint8_t { kBackward, kDeferred };

// State of a parameter's gradient in a backward, on one rank or combined over several.
enum class PresenceState : uint8_t {
  kNothing,
  kGradient,  // arrives in this backward
  kSum,       // a sum of earlier backwards, reduced when this one ends
  kFrozen,    // needs no gradient
  kWithheld,  // not reduced now
  kOnAll,     // combined: all ranks have something, in different ways
  kOnSome,    // combined: some ranks have nothing, for which zeros stand
  kConflict,  // combined: an error on all ranks
};

// One rank's announcement for a parameter.
struct Presence {
  PresenceState state = PresenceState::kNothing;
  int8_t sum_dtype = kNoDtype;  // holds all that arrived, if there is a sum
  // Of kGradient: the gradient's place among those of the backward. Combined: the last of them.
  uint16_t place = 0;

  static constexpr int8_t kNoDtype = -1;
};

// One announcement for each parameter.
using Presences = std::vector<Presence>;

// Gathers the presences of all ranks of one process group. This rank's own are already announced.
class PresenceGather {
 public:
  virtual ~PresenceGather() = default;
  // Waits, and returns the presences of each rank.
  virtual std::vector<Presences> finish() = 0;
};

// Starts a gather of the presences of the ranks of `channel`. `mine` are this rank's, one for each
// of `parameters`.
std::unique_ptr<PresenceGather> gather_presences(const Channel& channel,
                                                 const std::vector<ParameterPtr>& parameters,
                                                 const Presences& mine, Occasion occasion);

}  // namespace zero3
