// Python bindings of sources, parameters and their settings. Included by bindings.cpp alone:
// pybind11 takes ten seconds to compile.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <map>
#include <string>
#include <type_traits>

#include "parameter/parameter.h"
#include "parameter/registry.h"
#include "support/error.h"
#include "transport/channel.h"
#include "transport/transport.h"

namespace zero3 {

// Binds what a class has of its source.
template <typename Class, typename SourceOf>
void def_source(Class& bound, SourceOf source_of) {
  using Self = typename Class::type;
  const auto def = [&](const char* name, auto read) {
    bound.def_property_readonly(name, [=](const Self& self) { return read(source_of(self)); });
  };
  def("sizes", [](const Source& source) { return source.sizes; });
  def("strides", [](const Source& source) { return source.strides; });
  def("dtype", [](const Source& source) { return source.dtype; });
  def("device", [](const Source& source) { return source.device; });
  def("rank", [](const Source& source) { return source.rank; });
  def("world_size", [](const Source& source) { return source.layout.world_size(); });
  def("layout", [](const Source& source) { return source.layout; });
  def("shard_sizes",
      [](const Source& source) { return source.sizes_with_rows(source.shard_rows()); });
  def("placeholder", [](const Source& source) { return source.placeholder; });
  def("transport", [](const Source& source) { return source.transport; });
  def("can", [](const Source& source) {
    ZERO3_CHECK(source.transport, "'", source.fqn, "' has no transport yet");
    return source.transport->can;
  });
  def("fqn", [](const Source& source) { return source.fqn; });
  def("shard", [](const Source& source) { return source.shard; });
}

inline void bind_sources(pybind11::module_& m) {
  pybind11::class_<RowLayout>(m, "RowLayout")
      .def_static("chunked", &RowLayout::chunked, pybind11::arg("rows"),
                  pybind11::arg("world_size"))
      .def_static("by_offsets", &RowLayout::by_offsets, pybind11::arg("offsets"))
      .def_property_readonly("is_chunked", &RowLayout::is_chunked);
  pybind11::class_<Source, SourcePtr> source(m, "Source");
  def_source(source, [](const Source& self) -> Source& { return const_cast<Source&>(self); });
  source
      .def(pybind11::init([](std::vector<int64_t> sizes, std::vector<int64_t> strides,
                             at::ScalarType dtype, at::Device device, int64_t rank,
                             RowLayout layout, const std::optional<at::Tensor>& placeholder,
                             std::shared_ptr<Transport> transport, std::string fqn) {
             auto result =
                 std::make_shared<Source>(std::move(sizes), std::move(strides), dtype, device, rank,
                                          std::move(layout), placeholder.value_or(at::Tensor()));
             result->fqn = std::move(fqn);
             result->transport = std::move(transport);
             return result;
           }),
           pybind11::kw_only(), pybind11::arg("sizes"), pybind11::arg("strides"),
           pybind11::arg("dtype"), pybind11::arg("device"), pybind11::arg("rank"),
           pybind11::arg("layout"), pybind11::arg("placeholder") = std::nullopt,
           pybind11::arg("transport") = nullptr, pybind11::arg("fqn") = "")
      .def("register", [](const SourcePtr& self) { Registry::get().add(self); })
      .def("take", [](Source& self, at::Tensor rows) { self.shard = std::move(rows); });
}

// Reads a list of parameters, and of sources that stand in the place of parameters.
inline std::vector<Gatherable> gatherables(const pybind11::sequence& handles) {
  std::vector<Gatherable> result;
  for (auto each : handles) {
    if (pybind11::isinstance<Parameter>(each)) {
      auto parameter = each.cast<ParameterPtr>();
      result.push_back({parameter->source, std::move(parameter)});
    } else {
      result.push_back({each.cast<SourcePtr>(), nullptr});
    }
  }
  return result;
}

// Binds the fields of Settings, which Python reads one by one, and sets only in new Settings.
class SettingsFields {
 public:
  explicit SettingsFields(pybind11::class_<Settings>& bound) : bound_(bound) {}

  template <auto Field>
  SettingsFields& add(const char* name) {
    bound_.def_property_readonly(name, [](const Settings& self) { return self.*Field; });
    setters()[name] = [](Settings& self, pybind11::handle value) {
      self.*Field = value.cast<std::remove_cvref_t<decltype(self.*Field)>>();
    };
    return *this;
  }

  // Returns `settings` with other values of some fields. Raises TypeError for an unknown name.
  static Settings replace(Settings settings, const pybind11::kwargs& changes) {
    for (auto& [name, value] : changes) {
      const auto found = setters().find(name.cast<std::string>());
      if (found == setters().end())
        throw pybind11::type_error("Settings have no field '" + name.cast<std::string>() + "'");
      found->second(settings, value);
    }
    return settings;
  }

 private:
  using Setter = void (*)(Settings&, pybind11::handle);
  static std::map<std::string, Setter>& setters() {
    static auto& all = *new std::map<std::string, Setter>;
    return all;
  }

  pybind11::class_<Settings>& bound_;
};

inline void bind_settings(pybind11::module_& m) {
  pybind11::class_<Settings> settings(m, "Settings");
  SettingsFields(settings)
      .add<&Settings::gradient_dtypes>("gradient_dtypes")
      .add<&Settings::divide_factor>("divide_factor")
      .add<&Settings::bucket_bytes>("bucket_bytes")
      .add<&Settings::requires_gradient_sync>("requires_gradient_sync")
      .add<&Settings::requires_all_reduce>("requires_all_reduce")
      .add<&Settings::requires_gradient_on_all_ranks>("requires_gradient_on_all_ranks")
      .add<&Settings::reduce_scatter_unused_params>("reduce_scatter_unused_params")
      .add<&Settings::reshard_after_forward>("reshard_after_forward")
      .add<&Settings::reshard_after_backward>("reshard_after_backward")
      .add<&Settings::detects_nonfinite>("detects_nonfinite")
      .add<&Settings::deferred>("deferred")
      .add<&Settings::delivers_early>("delivers_early");
  settings
      .def(pybind11::init([](const pybind11::kwargs& fields) {
        return SettingsFields::replace(Settings(), fields);
      }))
      .def("replace", &SettingsFields::replace);
}

inline void bind_parameters(pybind11::module_& m) {
  bind_sources(m);
  using Dtype = std::optional<at::ScalarType>;
  pybind11::class_<GradientDtypes>(m, "GradientDtypes")
      .def(pybind11::init([](Dtype leaf, Dtype wire, Dtype shard) {
             return GradientDtypes{leaf, wire, shard};
           }),
           pybind11::arg("leaf"), pybind11::arg("wire"), pybind11::arg("shard"))
      .def_readonly("leaf", &GradientDtypes::leaf)
      .def_readonly("wire", &GradientDtypes::wire)
      .def_readonly("shard", &GradientDtypes::shard)
      .def_property_readonly(
          "quantized",
          [](const GradientDtypes& self) { return self.codec ? self.codec->text : std::string(); })
      .def("quantized_like",
           [](GradientDtypes self, const GradientDtypes& other) {
             self.codec = other.codec;
             self.feeds_error_back = other.feeds_error_back;
             return self;
           })
      .def(
          "with_quantized",
          [](GradientDtypes self, const std::string& format, bool feeds_error_back) {
            self.codec = codec_of(format);
            self.feeds_error_back = feeds_error_back;
            return self;
          },
          pybind11::arg("format"), pybind11::arg("feeds_error_back"));
  bind_settings(m);
  pybind11::class_<Parameter, ParameterPtr> parameter(m, "Parameter");
  def_source(parameter, [](const Parameter& self) -> Source& { return *self.source; });
  parameter
      .def(pybind11::init<SourcePtr, std::shared_ptr<Channel>, Settings>(), pybind11::arg("source"),
           pybind11::arg("replicas"), pybind11::arg("settings"))
      .def_readonly("source", &Parameter::source)
      .def_readonly("replicas", &Parameter::replicas)
      .def_readonly("model_number", &Parameter::model_number)
      .def(
          "join",
          [](const ParameterPtr& self, int64_t model_number, std::string fqn) {
            self->join(model_number, std::move(fqn));
            Registry::get().add(self);
          },
          pybind11::arg("model_number"), pybind11::arg("fqn"))
      .def("leave_model", [](Parameter& self) { self.model_number = 0; })
      .def("announce_as", [](Parameter& self, uint64_t id) { self.presence_id = id; })
      .def(
          "connect",
          [](Parameter& self, std::shared_ptr<Transport> to, std::shared_ptr<Transport> others) {
            self.source->connect(std::move(to));
            self.substitutes.transport = std::move(others);
          },
          pybind11::arg("transport"), pybind11::arg("substitutes"))
      .def("encode_parts",
           [](Parameter& self, const std::string& format) {
             ZERO3_CHECK(self.source->parts, "'", self.fqn(), "' is in no parts");
             self.source->parts->encode(codec_of(format));
           })
      .def("encode_parts_like",
           [](Parameter& self, const Parameter& other) {
             if (self.source->parts) self.source->parts->encode(other.source->parts->codec());
           })
      .def_property_readonly("has_parts",
                             [](const Parameter& self) { return self.source->parts != nullptr; })
      .def_property_readonly("substitute_transport",
                             [](const Parameter& self) { return self.substitutes.transport; })
      // A value: Python sets all of it, or nothing.
      .def_property(
          "settings", [](const Parameter& self) { return self.settings; },
          [](Parameter& self, const Settings& settings) { self.settings = settings; })
      .def(
          "follow",
          [](Parameter& self, const at::Tensor& dtensor, at::Tensor rows) {
            self.source->follow(dtensor, std::move(rows));
          },
          pybind11::arg("dtensor"), pybind11::arg("rows"))
      .def_property(
          "after_forward", [](const Parameter& self) { return self.substitutes.after_forward; },
          [](Parameter& self, SourcePtr source) {
            self.substitutes.after_forward = std::move(source);
          })

      // An undefined tensor is None.
      .def_property_readonly("gathered", [](const Parameter& self) { return self.gathered.full(); })
      .def("hold", [](Parameter& self, const at::Tensor& full) { self.gathered.hold(full); })
      .def("reshard", [](Parameter& self) { self.gathered.reshard(); })
      .def("reshard_retained", [](Parameter& self) { self.gathered.reshard_retained(); })
      .def("outlives_forward", &Parameter::outlives_forward)
      .def("was_written", [](const Parameter& self) { return self.gathered.was_written(); })
      .def("is_stale",
           [](const Parameter& self) { return self.gathered.is_stale(self.source->version()); })

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
           [](Parameter& self) -> std::optional<std::tuple<int64_t, int64_t, int64_t, int64_t>> {
             pybind11::gil_scoped_release no_gil;
             const auto found = self.gradients.take_nonfinite();
             if (!found) return std::nullopt;
             return std::make_tuple(found->arrival, found->nans, found->infinities, found->numel);
           });
}

}  // namespace zero3
