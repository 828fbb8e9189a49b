#include "transport/gather_bucket.h"

#include "support/error.h"

namespace zero3 {

GatherBucket::GatherBucket(std::vector<SourcePtr> sources) : sources_(std::move(sources)) {
  for (auto& source : sources_)
    ZERO3_CHECK(!source->shard.is_meta() || source->device.is_meta(), "'", source->fqn,
                "' is still on the meta device. Materialize the sharded model first: "
                "model.to_empty(device=...), then initialize it or load a checkpoint.");
}

Collective GatherBucket::collective() const {
  const Source& first = *sources_.front();
  const auto item = static_cast<int64_t>(c10::elementSize(first.dtype));
  int64_t nbytes = 0;
  std::vector<std::string> names;
  for (auto& source : sources_) {
    nbytes += source->padded_numel() * item;
    names.push_back(source->fqn);
  }
  return {"all_gather",     first.dtype,           nbytes, first.layout.world_size(),
          std::move(names), first.device.is_meta()};
}

}  // namespace zero3
