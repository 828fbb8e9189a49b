#include "kernels/sum.h"

#include <ATen/Dispatch.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <type_traits>

#include "kernels/copy.h"
#include "kernels/nontemporal_copy.h"
#include "kernels/vectorized.h"

namespace zero3 {
namespace {

constexpr int64_t kBlock = 128;  // elements; their sums stay in registers, or nearly so

template <typename Addend, typename Out>
ZERO3_VECTORIZED void sum_on_cpu(Out* out, const std::vector<const Addend*>& addends, int64_t numel,
                                 bool round, double divisor) {
  constexpr bool is_double = std::is_same_v<Addend, double> || std::is_same_v<Out, double>;
  using Sum = std::conditional_t<is_double, double, float>;
  const bool multiply = is_power_of_two(divisor);
  const Sum factor = static_cast<Sum>(multiply ? 1 / divisor : divisor);
  const bool past_cache = numel * static_cast<int64_t>(sizeof(Out)) >= kWorthNontemporal;
  std::array<Sum, kBlock> sums;
  std::array<Out, kBlock> results;
  for (int64_t start = 0; start < numel; start += kBlock) {
    const int64_t count = std::min(kBlock, numel - start);
    const Addend* first = addends[0] + start;
    Out* target = past_cache ? results.data() : out + start;
    const auto scale = [&](const auto* source) {
      if (multiply)
        for (int64_t i = 0; i < count; ++i)
          target[i] = static_cast<Out>(static_cast<Sum>(source[i]) * factor);
      else
        for (int64_t i = 0; i < count; ++i)
          target[i] = static_cast<Out>(static_cast<Sum>(source[i]) / factor);
    };
    if (addends.size() == 1) {
      scale(first);
    } else {
      for (int64_t i = 0; i < count; ++i)
        sums[i] = static_cast<Sum>(first[i]) + static_cast<Sum>(addends[1][start + i]);
      for (size_t k = 2; k < addends.size(); ++k)
        for (int64_t i = 0; i < count; ++i) sums[i] += static_cast<Sum>(addends[k][start + i]);
      if constexpr (!std::is_same_v<Addend, Sum>)
        if (round)
          for (int64_t i = 0; i < count; ++i)
            sums[i] = static_cast<Sum>(static_cast<Addend>(sums[i]));
      scale(sums.data());
    }
    if (past_cache)
      nontemporal_copy(out + start, target, count * static_cast<int64_t>(sizeof(Out)));
  }
  nontemporal_fence();
}

}  // namespace

void sum_and_divide(const at::Tensor& out, const std::vector<at::Tensor>& addends,
                    at::ScalarType wire_dtype, double divisor) {
  const auto dtype = addends.front().scalar_type();
  if (!out.is_cpu() && addends.size() == 1) {
    copy_all({{out, addends.front()}}, wire_dtype, divisor);
    return;
  }
  const bool is_double = wire_dtype == at::kDouble || out.scalar_type() == at::kDouble;
  if (!out.is_cpu() || (is_double && dtype != wire_dtype)) {
    auto wide = c10::promoteTypes(c10::promoteTypes(wire_dtype, out.scalar_type()), at::kFloat);
    auto sum = addends.front().to(wide);
    for (size_t k = 1; k < addends.size(); ++k) sum = sum.add(addends[k]);
    if (wire_dtype != at::kHalf) sum = sum.to(wire_dtype).to(wide);
    out.copy_(sum.div(divisor));
    return;
  }
  const bool round = dtype == wire_dtype && wire_dtype != at::kHalf;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, dtype, "zero3 sum", [&] {
    using addend_t = scalar_t;
    std::vector<const addend_t*> pointers;
    for (auto& addend : addends) pointers.push_back(addend.const_data_ptr<addend_t>());
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, out.scalar_type(), "zero3 sum", [&] {
      sum_on_cpu(out.mutable_data_ptr<scalar_t>(), pointers, out.numel(), round, divisor);
    });
  });
}

double divisor_before_fp16_sum(double divisor) {
  return std::exp2(std::ceil(std::log2(std::sqrt(std::max(divisor, 1.0)))));
}

}  // namespace zero3
