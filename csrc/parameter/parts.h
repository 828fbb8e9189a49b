// A shard that replicas have in parts: each of them a few rows, which its optimizer steps.
//
//   shard  [shard_rows, ...]  of a source, in its dtype: what ranks with other shards gather
//   part   [part_rows, ...]   this replica's rows of the shard, in the parameter's dtype
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>

#include "parameter/codec.h"
#include "parameter/row_layout.h"

namespace zero3 {

class Parts {
 public:
  explicit Parts(RowLayout layout) : layout(std::move(layout)) {}
  virtual ~Parts() = default;

  const RowLayout layout;  // the rows of the shard that each replica has

  // Sets the name of the parameter, for users and for the keys of messages.
  virtual void set_fqn(const std::string& fqn) = 0;
  // Takes `part`, the rows of `dtensor` on this rank, from now on.
  virtual void follow(const at::Tensor& dtensor, at::Tensor part) = 0;
  // Number of changes to the part that torch's version counters record.
  virtual uint64_t version() const = 0;
  // That number for the part of which shard() is made: in a backward, perhaps an older one.
  virtual uint64_t version_of_shard() const = 0;
  // Call when a reduced gradient of the part is delivered, as on all replicas.
  virtual void gradient_arrives() = 0;
  // Sets as which bytes parts travel from the next gather on; null: cast to the source's dtype.
  virtual void encode(const Codec* codec) = 0;
  virtual const Codec* codec() const = 0;
  // Returns the shard, of the parts as they are now, or in a backward as they were in its forward.
  // All replicas call this at the same places.
  virtual at::Tensor shard() = 0;
};

}  // namespace zero3
