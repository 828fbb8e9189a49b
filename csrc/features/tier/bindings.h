// Python bindings of tiers. Included by bindings.cpp alone.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "features/tier/file_tier.h"
#include "features/tier/transfer.h"
#include "support/shard_reads.h"

namespace zero3 {

inline void bind_tiers(pybind11::module_& m) {
  set_finish_reading(&finish_reading_slab);
  pybind11::class_<TierStats>(m, "TierStats")
      .def_readonly("in_use", &TierStats::in_use)
      .def_readonly("file_bytes", &TierStats::file_bytes)
      .def_readonly("written", &TierStats::written)
      .def_readonly("read", &TierStats::read)
      .def_readonly("transfer_time", &TierStats::transfer_time)
      .def_readonly("wait_time", &TierStats::wait_time);
  pybind11::class_<FileTier, std::shared_ptr<FileTier>>(m, "FileTier")
      .def(pybind11::init(&FileTier::open))
      .def_property_readonly("folder", [](const FileTier& self) { return self.folder; })
      .def_property_readonly("number", [](const FileTier& self) { return self.number; })
      .def_property_readonly("is_in_memory", &FileTier::is_in_memory)
      .def("copy", &FileTier::copy, pybind11::call_guard<pybind11::gil_scoped_release>())
      .def("stats", &FileTier::stats);
  m.def("is_movable", &is_movable);
  m.def("is_in_file", [](const at::Tensor& tensor) { return slab_of(tensor) != nullptr; });
  pybind11::class_<Transfer>(m, "Transfer")
      .def_static("store", &Transfer::store)
      .def_static("load", &Transfer::load)
      .def("wait", &Transfer::wait, pybind11::call_guard<pybind11::gil_scoped_release>());
}

}  // namespace zero3
