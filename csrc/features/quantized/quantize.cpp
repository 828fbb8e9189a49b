#include "features/quantized/quantize.h"

#include <ATen/Dispatch.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <charconv>
#include <cstring>

#include "features/quantized/quantize_dispatch.h"
#include "kernels/copy.h"
#include "kernels/vectorized.h"
#include "support/error.h"
#include "support/memory.h"

namespace zero3 {
namespace {

constexpr int64_t kPart = 512;  // elements in fp32 at a time; they stay in the cache

constexpr std::pair<const char*, at::ScalarType> kNames[] = {
    {"float8_e4m3fn", at::kFloat8_e4m3fn},
    {"float8_e5m2", at::kFloat8_e5m2},
    {"int8", at::kChar},
};

template <typename Code, typename From>
ZERO3_VECTORIZED void quantize_row(uint8_t* to, const From* from, int64_t numel, int64_t block) {
  float values[kPart];
  for (int64_t first = 0; first < numel; first += block) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < block; ++i) {
      const uint32_t magnitude = finite_magnitude(static_cast<float>(from[first + i]));
      largest = magnitude > largest ? magnitude : largest;
    }
    const float scale = scale_of<Code>(largest);
    for (int64_t part = 0; part < block; part += kPart) {
      const int64_t count = std::min(kPart, block - part);
      const From* source = from + first + part;
      uint8_t* target = to + first + part;
      for (int64_t i = 0; i < count; ++i) values[i] = static_cast<float>(source[i]) / scale;
      for (int64_t i = 0; i < count; ++i) target[i] = Code::encode(values[i]);
    }
    std::memcpy(to + scale_offset(numel, first / block), &scale, sizeof(scale));
  }
  std::memset(to + numel, 0, scale_offset(numel, 0) - numel);
}

template <typename Code, typename To>
ZERO3_VECTORIZED void dequantize_row(To* to, const uint8_t* from, int64_t numel, int64_t block) {
  for (int64_t first = 0; first < numel; first += block) {
    float scale;
    std::memcpy(&scale, from + scale_offset(numel, first / block), sizeof(scale));
    for (int64_t i = first; i < first + block; ++i)
      to[i] = static_cast<To>(Code::decode(from[i]) * scale);
  }
}

template <typename Code, typename To>
ZERO3_VECTORIZED void sum_row(To* to, const std::vector<const uint8_t*>& addends, int64_t numel,
                              int64_t block, float divisor) {
  float sums[kPart];
  for (int64_t first = 0; first < numel; first += block) {
    for (int64_t part = 0; part < block; part += kPart) {
      const int64_t count = std::min(kPart, block - part);
      for (size_t k = 0; k < addends.size(); ++k) {
        float scale;
        std::memcpy(&scale, addends[k] + scale_offset(numel, first / block), sizeof(scale));
        const uint8_t* codes = addends[k] + first + part;
        if (k == 0)
          for (int64_t i = 0; i < count; ++i) sums[i] = Code::decode(codes[i]) * scale;
        else
          for (int64_t i = 0; i < count; ++i) sums[i] += Code::decode(codes[i]) * scale;
      }
      To* target = to + first + part;
      for (int64_t i = 0; i < count; ++i) target[i] = static_cast<To>(sums[i] / divisor);
    }
  }
}

}  // namespace

QuantizedFormat QuantizedFormat::parse(const std::string& text) {
  const auto slash = std::min(text.find('/'), text.size());
  const auto named = std::ranges::find_if(
      kNames, [&](auto& item) { return text.compare(0, slash, item.first) == 0; });
  int64_t block = 0;
  if (slash < text.size())
    std::from_chars(text.data() + slash + 1, text.data() + text.size(), block);
  ZERO3_CHECK(named != std::end(kNames) && block > 0, "'", text,
              "' is no format such as float8_e4m3fn/128");
  return {named->second, block};
}

std::string QuantizedFormat::text() const {
  const auto named = std::ranges::find(kNames, dtype, [](auto& item) { return item.second; });
  return std::string(named->first) + "/" + std::to_string(block);
}

int64_t QuantizedFormat::row_bytes(int64_t row_numel) const {
  ZERO3_CHECK(row_numel > 0 && row_numel % block == 0, "rows of ", row_numel,
              " elements have no blocks of ", block);
  return scale_offset(row_numel, row_numel / block);
}

at::Tensor quantize(const at::Tensor& rows, const QuantizedFormat& format) {
  const int64_t numel = c10::multiply_integers(rows.sizes().slice(1));
  const int64_t row_bytes = format.row_bytes(numel);
  auto quantized = pooled_empty({rows.size(0), row_bytes}, rows.options().dtype(at::kByte));
  if (rows.is_meta() || rows.numel() == 0) return quantized;
  const auto source = rows.contiguous();
#if defined(ZERO3_WITH_CUDA)
  if (rows.is_cuda()) {
    quantize_on_cuda(quantized, source, format);
    return quantized;
  }
#endif
  with_code(format.dtype, [&](auto code) {
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, rows.scalar_type(), "quantize", [&] {
      for (int64_t row = 0; row < rows.size(0); ++row)
        quantize_row<decltype(code), scalar_t>(
            quantized.mutable_data_ptr<uint8_t>() + row * row_bytes,
            source.const_data_ptr<scalar_t>() + row * numel, numel, format.block);
    });
  });
  return quantized;
}

void dequantize(const at::Tensor& rows, const at::Tensor& quantized,
                const QuantizedFormat& format) {
  if (rows.is_meta() || rows.numel() == 0) return;
  if (!rows.is_contiguous()) {
    auto contiguous = pooled_empty(rows.sizes(), rows.options());
    dequantize(contiguous, quantized, format);
    rows.copy_(contiguous);
    return;
  }
  const int64_t numel = c10::multiply_integers(rows.sizes().slice(1));
  const int64_t row_bytes = format.row_bytes(numel);
  ZERO3_CHECK(quantized.scalar_type() == at::kByte && quantized.is_contiguous() &&
                  quantized.sizes() == at::IntArrayRef({rows.size(0), row_bytes}),
              "rows ", rows.sizes(), " cannot be read from ", quantized.scalar_type(), " ",
              quantized.sizes());
#if defined(ZERO3_WITH_CUDA)
  if (rows.is_cuda()) {
    dequantize_on_cuda(rows, quantized, format);
    return;
  }
#endif
  with_code(format.dtype, [&](auto code) {
    AT_DISPATCH_FLOATING_TYPES_AND2(
        at::kHalf, at::kBFloat16, rows.scalar_type(), "dequantize", [&] {
          for (int64_t row = 0; row < rows.size(0); ++row)
            dequantize_row<decltype(code), scalar_t>(
                rows.mutable_data_ptr<scalar_t>() + row * numel,
                quantized.const_data_ptr<uint8_t>() + row * row_bytes, numel, format.block);
        });
  });
}

void sum_quantized(const at::Tensor& rows, const std::vector<at::Tensor>& addends,
                   const QuantizedFormat& format, double divisor) {
  if (rows.is_meta() || rows.numel() == 0) return;
  if (!rows.is_cpu()) {
    auto sum = pooled_empty(rows.sizes(), rows.options().dtype(at::kFloat));
    auto addend = pooled_empty(rows.sizes(), sum.options());
    dequantize(sum, addends.front(), format);
    for (size_t k = 1; k < addends.size(); ++k) {
      dequantize(addend, addends[k], format);
      sum.add_(addend);
    }
    copy_all({{rows, sum}}, at::kFloat, divisor);
    return;
  }
  const int64_t numel = c10::multiply_integers(rows.sizes().slice(1));
  const int64_t row_bytes = format.row_bytes(numel);
  with_code(format.dtype, [&](auto code) {
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, rows.scalar_type(), "sum", [&] {
      std::vector<const uint8_t*> sources;
      for (auto& addend : addends) sources.push_back(addend.const_data_ptr<uint8_t>());
      for (int64_t row = 0; row < rows.size(0); ++row) {
        sum_row<decltype(code), scalar_t>(rows.mutable_data_ptr<scalar_t>() + row * numel, sources,
                                          numel, format.block, static_cast<float>(divisor));
        for (auto& source : sources) source += row_bytes;
      }
    });
  });
}

}  // namespace zero3
