// Python bindings of parameters, and of their settings. Included by bindings.cpp alone: pybind11
// takes ten seconds to compile.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "parameter/parameter.h"
#include "parameter/registry.h"
#include "support/error.h"
#include "transport/channel.h"
#include "transport/transport.h"

namespace zero3 {

inline void bind_parameters(pybind11::module_& m) {
  using Dtype = std::optional<at::ScalarType>;
  pybind11::class_<GradientDtypes>(m, "GradientDtypes")
      .def(pybind11::init([](Dtype leaf, Dtype wire, Dtype shard) {
             return GradientDtypes{leaf, wire, shard};
           }),
           pybind11::arg("leaf"), pybind11::arg("wire"), pybind11::arg("shard"))
      .def_readonly("leaf", &GradientDtypes::leaf)
      .def_readonly("wire", &GradientDtypes::wire)
      .def_readonly("shard", &GradientDtypes::shard)
      .def_property_readonly("quantized",
                             [](const GradientDtypes& self) {
                               return self.quantized ? self.quantized->text() : std::string();
                             })
      .def("quantized_like",
           [](GradientDtypes self, const GradientDtypes& other) {
             self.quantized = other.quantized;
             self.feeds_error_back = other.feeds_error_back;
             return self;
           })
      .def(
          "with_quantized",
          [](GradientDtypes self, const std::string& format, bool feeds_error_back) {
            self.quantized =
                format.empty() ? std::nullopt : std::optional(QuantizedFormat::parse(format));
            self.feeds_error_back = feeds_error_back;
            return self;
          },
          pybind11::arg("format"), pybind11::arg("feeds_error_back"));
  pybind11::class_<Settings>(m, "Settings")
      .def_readwrite("gradient_dtypes", &Settings::gradient_dtypes)
      .def_readwrite("divide_factor", &Settings::divide_factor)
      .def_readwrite("bucket_bytes", &Settings::bucket_bytes)
      .def_readwrite("requires_gradient_sync", &Settings::requires_gradient_sync)
      .def_readwrite("requires_all_reduce", &Settings::requires_all_reduce)
      .def_readwrite("requires_gradient_on_all_ranks", &Settings::requires_gradient_on_all_ranks)
      .def_readwrite("reduce_scatter_unused_params", &Settings::reduce_scatter_unused_params)
      .def_readwrite("reshard_after_forward", &Settings::reshard_after_forward)
      .def_readwrite("reshard_after_backward", &Settings::reshard_after_backward)
      .def_readwrite("detects_nonfinite", &Settings::detects_nonfinite)
      .def_readwrite("deferred", &Settings::deferred)
      .def_readwrite("delivers_early", &Settings::delivers_early);

  pybind11::class_<Parameter, ParameterPtr>(m, "Parameter")
      .def(pybind11::init([](std::vector<int64_t> sizes, std::vector<int64_t> strides,
                             at::ScalarType compute_dtype, at::Device device, int64_t rank,
                             int64_t world_size, std::optional<int64_t> owner,
                             std::shared_ptr<Channel> replicas,
                             const std::optional<at::Tensor>& placeholder) {
             return std::make_shared<Parameter>(
                 ParameterSpec{std::move(sizes), std::move(strides), compute_dtype, device, rank,
                               world_size, owner},
                 std::move(replicas), placeholder.value_or(at::Tensor()));
           }),
           pybind11::kw_only(), pybind11::arg("sizes"), pybind11::arg("strides"),
           pybind11::arg("compute_dtype"), pybind11::arg("device"), pybind11::arg("rank"),
           pybind11::arg("world_size"), pybind11::arg("owner") = std::nullopt,
           pybind11::arg("replicas") = nullptr, pybind11::arg("placeholder") = std::nullopt)
      .def_readonly("sizes", &Parameter::sizes)
      .def_readonly("strides", &Parameter::strides)
      .def_readonly("compute_dtype", &Parameter::compute_dtype)
      .def_readonly("device", &Parameter::device)
      .def_readonly("rank", &Parameter::rank)
      .def_readonly("world_size", &Parameter::world_size)
      .def_readonly("owner", &Parameter::owner)
      .def_readonly("placeholder", &Parameter::placeholder)
      .def_readonly("replicas", &Parameter::replicas)
      .def_readwrite("fqn", &Parameter::fqn)
      .def_readwrite("model_number", &Parameter::model_number)
      .def_readwrite("presence_id", &Parameter::presence_id)
      .def_property(
          "transport", [](const Parameter& self) { return self.transport; }, &Parameter::connect)
      .def_property("payload_transport", &Parameter::payload_transport,
                    &Parameter::set_payload_transport)
      .def_property_readonly("can",
                             [](const Parameter& self) {
                               ZERO3_CHECK(self.transport, "'", self.fqn, "' has no transport yet");
                               return self.transport->can;
                             })
      .def_property_readonly(
          "settings", [](Parameter& self) { return &self.settings; },
          pybind11::return_value_policy::reference_internal)
      .def_readwrite("shard", &Parameter::shard)
      .def("follow_version", &Parameter::follow_version)
      .def_readwrite("after_forward", &Parameter::after_forward)
      .def("register", [](const ParameterPtr& self) { Registry::get().add(self); })

      // An undefined tensor is None.
      .def_property_readonly("gathered", [](const Parameter& self) { return self.gathered.full(); })
      .def("hold", [](Parameter& self, const at::Tensor& full) { self.gathered.hold(full); })
      .def("reshard", [](Parameter& self) { self.gathered.reshard(); })
      .def("reshard_retained", [](Parameter& self) { self.gathered.reshard_retained(); })
      .def("outlives_forward", &Parameter::outlives_forward)
      .def("was_written", [](const Parameter& self) { return self.gathered.was_written(); })
      .def("is_stale",
           [](const Parameter& self) { return self.gathered.is_stale(self.shard_version()); })

      .def(
          "has_gradients", [](const Parameter& self) { return !self.gradients.is_empty(); },
          pybind11::call_guard<pybind11::gil_scoped_release>())
      .def("deposit", &Parameter::deposit, pybind11::call_guard<pybind11::gil_scoped_release>())
      .def("drop_gradients", &Parameter::drop_gradients,
           pybind11::call_guard<pybind11::gil_scoped_release>())
      .def(
          "forget_error", [](Parameter& self) { self.gradients.take_error(); },
          pybind11::call_guard<pybind11::gil_scoped_release>())
      .def(
          "take_dropped", [](Parameter& self) { return self.gradients.take_dropped(); },
          pybind11::call_guard<pybind11::gil_scoped_release>())
      .def("take_nonfinite",
           [](Parameter& self) -> std::optional<std::tuple<int64_t, int64_t, int64_t>> {
             pybind11::gil_scoped_release no_gil;
             const auto found = self.gradients.take_nonfinite();
             if (!found) return std::nullopt;
             return std::make_tuple(found->nans, found->infinities, found->numel);
           });
}

}  // namespace zero3
