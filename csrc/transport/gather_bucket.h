// Gathers the shards of several sources into their full tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/macros/Export.h>

#include <vector>

#include "parameter/source.h"
#include "support/collective_log.h"

namespace zero3 {

// Sources of one dtype and transport, gathered by one collective. Exported, for
// transports outside of this library.
class C10_EXPORT GatherBucket {
 public:
  // Raises if a source cannot be gathered.
  explicit GatherBucket(std::vector<SourcePtr> sources);
  virtual ~GatherBucket() = default;

  Collective collective() const;

  // Before start(): whether all ranks have to take part. A backward may read what its forward has
  // published.
  virtual bool ranks_meet() const { return true; }
  virtual void start() = 0;
  // Lets the shards change from now on: finish() returns their values as of start().
  virtual void snapshot() {}
  // Before finish(): whether it would raise, since gathers that started later have taken its place
  // in memory. Alike on all ranks.
  virtual bool is_lost() const { return false; }
  // Waits, and returns the full tensors in the order of the sources. If `fresh`, each has its
  // own memory.
  virtual std::vector<at::Tensor> finish(bool fresh) = 0;

 protected:
  const std::vector<SourcePtr> sources_;
};

}  // namespace zero3
