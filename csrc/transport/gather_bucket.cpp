#include "transport/gather_bucket.h"

#include "support/error.h"

namespace zero3 {

GatherBucket::GatherBucket(std::vector<ParameterPtr> parameters)
    : parameters_(std::move(parameters)) {
  for (auto& parameter : parameters_)
    ZERO3_CHECK(!parameter->shard.is_meta() || parameter->device.is_meta(), "'", parameter->fqn,
                "' is still on the meta device. Materialize the sharded model first: "
                "model.to_empty(device=...), then initialize it or load a checkpoint.");
}

Collective GatherBucket::collective() const {
  const Parameter& first = *parameters_.front();
  const auto item = static_cast<int64_t>(c10::elementSize(first.compute_dtype));
  int64_t nbytes = 0;
  for (auto& parameter : parameters_) nbytes += parameter->padded_numel() * item;
  return {"all_gather",     first.compute_dtype,   nbytes,
          first.world_size, names_of(parameters_), first.device.is_meta()};
}

}  // namespace zero3
