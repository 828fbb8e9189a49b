// Python bindings of digests. Included by bindings.cpp alone.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "features/digests/weighted_sum.h"

namespace zero3 {

inline void bind_digests(pybind11::module_& m) {
  m.def("weighted_sum", &weighted_sum, pybind11::call_guard<pybind11::gil_scoped_release>());
}

}  // namespace zero3
