// Python bindings of shards that replicas have in parts. Included by bindings.cpp alone.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>

#include "features/hybrid/gathered_parts.h"

namespace zero3 {

inline void bind_hybrid(pybind11::module_& m) {
  m.def("give_parts", [](Source& source, const std::shared_ptr<Channel>& replicas) {
    source.parts = std::make_shared<GatheredParts>(source, replicas);
  });
  pybind11::class_<PartsOfModel, std::shared_ptr<PartsOfModel>>(m, "PartsOfModel")
      .def(pybind11::init())
      .def("add", &PartsOfModel::add)
      .def("begin_forward", &PartsOfModel::begin_forward,
           pybind11::call_guard<pybind11::gil_scoped_release>());
}

}  // namespace zero3
