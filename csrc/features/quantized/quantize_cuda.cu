#include <ATen/Dispatch.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>

#include "features/quantized/quantize.h"
#include "features/quantized/quantize_dispatch.h"

namespace zero3 {
namespace {

constexpr int kWarp = 32;
constexpr int kThreads = 256;
constexpr int64_t kMostBlocks = int64_t{1} << 30;  // of threads, in a launch

// Rows of quantized and other elements, one after the other.
struct Rows {
  int64_t count;
  int64_t numel;      // elements of a row
  int64_t row_bytes;  // of a quantized row
  int64_t block;      // elements that share a scale
};

// A warp quantizes one block after the other.
template <typename Code, typename From>
__global__ void __launch_bounds__(kThreads)
    quantize_kernel(uint8_t* quantized, const From* values, Rows rows) {
  const int lane = threadIdx.x % kWarp;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * kThreads / kWarp;
  const int64_t blocks = rows.numel / rows.block;
  int64_t number = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
  for (; number < rows.count * blocks; number += warps) {
    const int64_t block = number % blocks;
    uint8_t* row = quantized + number / blocks * rows.row_bytes;
    uint8_t* to = row + block * rows.block;
    const From* from = values + number * rows.block;
    uint32_t largest = 0;
    for (int64_t i = lane; i < rows.block; i += kWarp) {
      const uint32_t magnitude = finite_magnitude(static_cast<float>(from[i]));
      largest = magnitude > largest ? magnitude : largest;
    }
    for (int step = kWarp / 2; step > 0; step /= 2) {
      const uint32_t other = __shfl_xor_sync(0xFFFFFFFF, largest, step);
      largest = other > largest ? other : largest;
    }
    const float scale = scale_of<Code>(largest);
    for (int64_t i = lane; i < rows.block; i += kWarp)
      to[i] = Code::encode(static_cast<float>(from[i]) / scale);
    if (lane == 0) *reinterpret_cast<float*>(row + scale_offset(rows.numel, block)) = scale;
    if (block == 0 && lane < scale_offset(rows.numel, 0) - rows.numel) row[rows.numel + lane] = 0;
  }
}

template <typename Code, typename To>
__global__ void __launch_bounds__(kThreads)
    dequantize_kernel(To* values, const uint8_t* quantized, Rows rows) {
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kThreads;
  int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  for (; i < rows.count * rows.numel; i += threads) {
    const uint8_t* row = quantized + i / rows.numel * rows.row_bytes;
    const int64_t column = i % rows.numel;
    const float scale =
        *reinterpret_cast<const float*>(row + scale_offset(rows.numel, column / rows.block));
    values[i] = static_cast<To>(Code::decode(row[column]) * scale);
  }
}

Rows rows_of(const at::Tensor& values, const at::Tensor& quantized, const QuantizedFormat& format) {
  return {values.size(0), values.numel() / values.size(0), quantized.size(1), format.block};
}

uint32_t blocks_for(int64_t threads) {
  return static_cast<uint32_t>(std::min((threads + kThreads - 1) / kThreads, kMostBlocks));
}

}  // namespace

void quantize_on_cuda(const at::Tensor& quantized, const at::Tensor& values,
                      const QuantizedFormat& format) {
  const c10::cuda::CUDAGuard guard(values.device());
  const auto rows = rows_of(values, quantized, format);
  with_code(format.dtype, [&](auto code) {
    AT_DISPATCH_FLOATING_TYPES_AND2(
        at::kHalf, at::kBFloat16, values.scalar_type(), "quantize", [&] {
          quantize_kernel<decltype(code), scalar_t>
              <<<blocks_for(values.numel() / format.block * kWarp), kThreads, 0,
                 c10::cuda::getCurrentCUDAStream()>>>(quantized.mutable_data_ptr<uint8_t>(),
                                                      values.const_data_ptr<scalar_t>(), rows);
          C10_CUDA_KERNEL_LAUNCH_CHECK();
        });
  });
}

void dequantize_on_cuda(const at::Tensor& values, const at::Tensor& quantized,
                        const QuantizedFormat& format) {
  const c10::cuda::CUDAGuard guard(values.device());
  const auto rows = rows_of(values, quantized, format);
  with_code(format.dtype, [&](auto code) {
    AT_DISPATCH_FLOATING_TYPES_AND2(
        at::kHalf, at::kBFloat16, values.scalar_type(), "dequantize", [&] {
          dequantize_kernel<decltype(code), scalar_t>
              <<<blocks_for(values.numel()), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
                  values.mutable_data_ptr<scalar_t>(), quantized.const_data_ptr<uint8_t>(), rows);
          C10_CUDA_KERNEL_LAUNCH_CHECK();
        });
  });
}

}  // namespace zero3
