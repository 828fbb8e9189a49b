// Python bindings of quantized rows. Included by bindings.cpp alone.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "features/quantized/quantized_codec.h"

namespace zero3 {

inline void bind_quantized(pybind11::module_& m) {
  set_make_codec(&make_quantized_codec);
  m.def("quantize", [](const at::Tensor& rows, const std::string& format) {
    return make_quantized_codec(format)->encode(rows);
  });
  m.def("dequantize",
        [](const at::Tensor& rows, const at::Tensor& quantized, const std::string& format) {
          make_quantized_codec(format)->decode(rows, quantized);
        });
}

}  // namespace zero3
