// Rows as codes of one byte and scales.
#pragma once

#include <memory>
#include <string>

#include "parameter/codec.h"

namespace zero3 {

// Returns the codec of a QuantizedFormat. Raises if `text` is of none.
std::unique_ptr<const Codec> make_quantized_codec(const std::string& text);

}  // namespace zero3
