// The rule that ranks have broken which wait for each other in vain.
#pragma once

#include <string>

#include "support/guides.h"

namespace zero3 {

inline std::string same_forwards() {
  return "all ranks must run the same forwards and backwards (see " + guides::kHang + ")";
}

}  // namespace zero3
