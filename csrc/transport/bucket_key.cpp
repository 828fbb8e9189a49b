#include "transport/bucket_key.h"

namespace zero3 {

BucketSelection select_bucket(const Parameter& parameter, at::ScalarType dtype,
                              bool is_normalized) {
  const auto& settings = parameter.settings;
  const auto& dtypes = settings.gradient_dtypes;
  // First, the raw gradient is normalized to the parameter's registered grad_dtype.
  const auto normalized_dtype = is_normalized ? dtype : dtypes.normalized(dtype);
  // Then the result selects the bucket.
  return {normalized_dtype,
          {.domain = {parameter.transport()},
           .replicas = {parameter.replicas},
           .wire_dtype = dtypes.wire.value_or(normalized_dtype),
           .codec = dtypes.codec,
           .divide_factor = settings.divide_factor,
           .device = parameter.device(),
           .delivers_early = settings.delivers_early}};
}

}  // namespace zero3
