// Sections of the documentation that errors lead to, by their path in this repository.
// deepcompile_zero3/guides.py has those of errors in Python.
#pragma once

#include <string>

namespace zero3::guides {

inline const std::string kHang = "docs/debugging.md#a-hang";
inline const std::string kDisagreement = "docs/debugging.md#ranks-that-disagree";
inline const std::string kGradientsOnSomeRanks = "docs/debugging.md#gradients-on-some-ranks";

}  // namespace zero3::guides
