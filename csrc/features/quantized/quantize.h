// Quantization of rows by blocks: a code of one byte for each element, and a scale for each block.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace zero3 {

struct QuantizedFormat {
  at::ScalarType dtype;  // of the codes: float8_e4m3fn, float8_e5m2 or int8
  int64_t block;         // elements of a row that share a scale

  bool operator==(const QuantizedFormat&) const = default;

  // Reads a text such as "float8_e4m3fn/128".
  static QuantizedFormat parse(const std::string& text);
  std::string text() const;

  // Bytes of a row of `row_numel` elements, a multiple of `block`: the codes, zeros up to a
  // multiple of four bytes, and the scales in fp32.
  int64_t row_bytes(int64_t row_numel) const;
};

// Quantizes each row of `rows` [n, ...], in a floating dtype, and returns uint8 [n, row_bytes].
at::Tensor quantize(const at::Tensor& rows, const QuantizedFormat& format);

// Writes the values of `quantized` [n, row_bytes] to `rows` [n, ...].
void dequantize(const at::Tensor& rows, const at::Tensor& quantized, const QuantizedFormat& format);

// Sets `rows` to the sum of the dequantized `addends`, in fp32 and in their order, over `divisor`.
void sum_quantized(const at::Tensor& rows, const std::vector<at::Tensor>& addends,
                   const QuantizedFormat& format, double divisor);

// These on a GPU, for contiguous tensors. Only defined with ZERO3_WITH_CUDA.
void quantize_on_cuda(const at::Tensor& quantized, const at::Tensor& rows,
                      const QuantizedFormat& format);
void dequantize_on_cuda(const at::Tensor& rows, const at::Tensor& quantized,
                        const QuantizedFormat& format);

}  // namespace zero3
