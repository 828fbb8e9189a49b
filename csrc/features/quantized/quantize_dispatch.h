// Calls a function with the type of a format's codes.
#pragma once

#include "features/quantized/quantize.h"
#include "features/quantized/quantize_kernel.h"
#include "support/error.h"

namespace zero3 {

template <typename Function>
void with_code(at::ScalarType dtype, Function function) {
  switch (dtype) {
    case at::kFloat8_e4m3fn:
      return function(Float8E4m3fn{});
    case at::kFloat8_e5m2:
      return function(Float8E5m2{});
    case at::kChar:
      return function(Int8{});
    default:
      ZERO3_CHECK(false, "rows cannot be quantized to ", dtype);
  }
}

}  // namespace zero3
