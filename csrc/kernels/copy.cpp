#include "kernels/copy.h"

#include <algorithm>
#include <cmath>

#include "support/memory.h"
#include "support/tensor_ops.h"

namespace zero3 {
namespace {

void copy_divided(const at::Tensor& to, const at::Tensor& from, double divisor) {
  if (divisor == 1.0)
    copy_into(to, from);
  else
    tensor_ops::div_out(to, from, divisor);
}

// A cast that needs an intermediate tensor goes by blocks of rows that stay in the cache.
void copy_through(const at::Tensor& to, const at::Tensor& from, at::ScalarType through,
                  double divisor) {
  const bool casts_once = is_one_cast(from.scalar_type(), through, to.scalar_type());
  if (divisor == 1.0 ? casts_once : from.scalar_type() == through) {
    copy_divided(to, from, divisor);
    return;
  }
  constexpr int64_t kBlock = 16 << 10;  // elements
  const int64_t rows = to.size(0);
  const int64_t step = to.is_cpu() ? std::max<int64_t>(kBlock * rows / to.numel(), 1) : rows;
  for (int64_t row = 0; row < rows; row += step) {
    const int64_t count = std::min(step, rows - row);
    copy_divided(to.narrow(0, row, count), from.narrow(0, row, count).to(through), divisor);
  }
}

}  // namespace

int64_t aligned(int64_t numel, at::ScalarType dtype) {
  const auto step = 16 / static_cast<int64_t>(c10::elementSize(dtype));
  return (numel + step - 1) / step * step;
}

bool is_exact(at::ScalarType from, at::ScalarType to) { return c10::promoteTypes(from, to) == to; }

bool is_one_cast(at::ScalarType from, at::ScalarType through, at::ScalarType to) {
  return through == to || is_exact(from, through);
}

bool is_power_of_two(double value) {
  int exponent;
  return std::frexp(value, &exponent) == 0.5;
}

void copy_all(const std::vector<Copy>& copies, at::ScalarType through, double divisor) {
#if defined(ZERO3_WITH_CUDA)
  if (!copies.empty() && copies.front().to.is_cuda()) {
    copy_all_on_cuda(copies, through, divisor);
    return;
  }
#endif
  for (auto& [to, from] : copies) {
    if (to.numel() == 0) continue;
    if (from.defined())
      copy_through(to, from, through, divisor);
    else
      to.zero_();
  }
}

}  // namespace zero3
