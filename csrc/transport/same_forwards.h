// The rule that ranks have broken which wait for each other in vain, and where its usual breaches
// are explained.
#pragma once

namespace zero3 {

inline constexpr char kSameForwards[] =
    "all ranks must run the same forwards and backwards (see docs/debugging.md#a-hang)";

}  // namespace zero3
