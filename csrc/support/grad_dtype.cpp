#include "support/grad_dtype.h"

#include <algorithm>

#include "support/error.h"

namespace zero3 {
namespace {

constexpr std::pair<const char*, at::ScalarType> kNames[] = {
    {"float64", at::kDouble},
    {"float32", at::kFloat},
    {"bfloat16", at::kBFloat16},
    {"float16", at::kHalf},
};

}  // namespace

bool is_gradient_dtype(at::ScalarType dtype) {
  return std::ranges::any_of(kNames, [dtype](auto& item) { return item.second == dtype; });
}

std::string contract_name(std::optional<at::ScalarType> grad_dtype) {
  if (!grad_dtype) return "any";
  for (auto& [name, dtype] : kNames)
    if (dtype == *grad_dtype) return name;
  ZERO3_CHECK(false, "gradients cannot be kept in ", *grad_dtype);
}

std::optional<at::ScalarType> contract_dtype(const std::string& name) {
  if (name == "any") return std::nullopt;
  for (auto& [known, dtype] : kNames)
    if (name == known) return dtype;
  ZERO3_CHECK(false, "'", name, "' is not a gradient dtype");
}

}  // namespace zero3
