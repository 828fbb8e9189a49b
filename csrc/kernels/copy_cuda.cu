#include <ATen/Dispatch.h>
#include <ATen/ops/full.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "kernels/copy.h"
#include "kernels/copy_kernel.h"
#include "support/error.h"

namespace zero3 {
namespace {

template <typename From, typename To, int kMost>
__global__ void __launch_bounds__(Tiling<From, To>::kThreads)
    copy_kernel(const __grid_constant__ CopyBatch<kMost> batch) {
  copy_tile<From, To>(batch, static_cast<int32_t>(blockIdx.x), static_cast<int>(threadIdx.x));
}

// All `copies` have these dtypes, are contiguous, and are not empty.
template <typename From, typename To, int kMost>
void launch(const std::vector<Copy>& copies, at::ScalarType through, double divisor) {
  using Tile = Tiling<From, To>;
  constexpr int64_t kMostTiles = int64_t{1} << 30;  // tiles of one launch
  const auto stream = c10::cuda::getCurrentCUDAStream();
  CopyBatch<kMost> batch;
  constexpr auto from_dtype = c10::CppTypeToScalarType<From>::value;
  constexpr auto to_dtype = c10::CppTypeToScalarType<To>::value;
  // A quotient is rounded once more, so that the cast to `through` may be left out only if it is
  // exact.
  if (!is_one_cast(from_dtype, through, divisor == 1 ? to_dtype : c10::ScalarType::Undefined))
    batch.through = through;
  batch.multiplies = is_power_of_two(divisor);
  batch.factor = batch.multiplies ? 1 / divisor : divisor;
  int64_t tiles = 0;
  const auto flush = [&] {
    if (batch.count == 0) return;
    batch.items_per_tile = static_cast<float>(batch.count) / static_cast<float>(tiles);
    copy_kernel<From, To, kMost>
        <<<static_cast<uint32_t>(tiles), Tile::kThreads, 0, stream>>>(batch);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    batch.count = 0;
    tiles = 0;
  };
  for (auto& [to, from] : copies) {
    const int64_t own_tiles = (to.numel() + Tile::kTile - 1) / Tile::kTile;
    if (batch.count == kMost || tiles + own_tiles > kMostTiles) flush();
    tiles += own_tiles;
    batch.ends[batch.count] = static_cast<int32_t>(tiles);
    batch.items[batch.count++] = {from.defined() ? from.const_data_ptr() : nullptr,
                                  to.mutable_data_ptr(), to.numel()};
  }
  flush();
}

bool is_floating(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf ||
         dtype == at::kBFloat16;
}

// Copies with torch's kernels.
void copy_by_torch(const Copy& copy, at::ScalarType through, double divisor) {
  if (!copy.from.defined()) {
    copy.to.zero_();
    return;
  }
  if (divisor == 1 && is_one_cast(copy.from.scalar_type(), through, copy.to.scalar_type())) {
    copy.to.copy_(copy.from);
    return;
  }
  const auto from = copy.from.to(through);
  if (divisor == 1) {
    copy.to.copy_(from);
    return;
  }
  // The divisor is a tensor on the GPU: otherwise torch would multiply by the reciprocal.
  const auto wide = from.to(c10::promoteTypes(through, at::kFloat));
  copy.to.copy_(wide.div(at::full({}, divisor, wide.options())));
}

}  // namespace

void copy_all_on_cuda(const std::vector<Copy>& copies, at::ScalarType through, double divisor) {
  std::vector<Copy> ours;
  const c10::cuda::CUDAGuard guard(copies.front().to.device());
  for (auto& [to, from] : copies) {
    ZERO3_CHECK(!from.defined() || from.sizes() == to.sizes(), "a copy of sizes ", from.sizes(),
                " to ", to.sizes());
    if (to.numel() == 0) continue;
    const bool is_on_host = from.defined() && from.is_cpu();
    if (is_on_host && divisor == 1 && from.is_contiguous() &&
        from.scalar_type() == to.scalar_type() &&
        is_one_cast(from.scalar_type(), through, to.scalar_type())) {
      to.copy_(from, /*non_blocking=*/true);
      continue;
    }
    // The device casts and lays out.
    const auto near =
        is_on_host ? from.to(to.device(), from.scalar_type(), /*non_blocking=*/true) : from;
    const bool is_ours =
        to.is_contiguous() && is_floating(to.scalar_type()) &&
        (!near.defined() || (near.is_contiguous() && is_floating(near.scalar_type())));
    if (is_ours)
      ours.push_back({to, near});
    else
      copy_by_torch({to, near}, through, divisor);
  }
  const auto from_dtype = [](const Copy& copy) {
    return copy.from.defined() ? copy.from.scalar_type() : copy.to.scalar_type();
  };
  while (!ours.empty()) {
    const auto first_from = from_dtype(ours.front());
    const auto first_to = ours.front().to.scalar_type();
    std::vector<Copy> alike;
    std::erase_if(ours, [&](const Copy& copy) {
      // Zeros match any source dtype.
      const bool is_alike = copy.to.scalar_type() == first_to &&
                            (!copy.from.defined() || copy.from.scalar_type() == first_from);
      if (is_alike) alike.push_back(copy);
      return is_alike;
    });
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, first_from, "zero3 copy", [&] {
      using from_t = scalar_t;
      AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, first_to, "zero3 copy", [&] {
        if (alike.size() <= kFewCopies)
          launch<from_t, scalar_t, kFewCopies>(alike, through, divisor);
        else
          launch<from_t, scalar_t, kManyCopies>(alike, through, divisor);
      });
    });
  }
}

}  // namespace zero3
