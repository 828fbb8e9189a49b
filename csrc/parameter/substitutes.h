// What is gathered in place of a parameter's shard, made of that shard or of the gathered tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "parameter/codec.h"
#include "parameter/source.h"

namespace zero3 {

class Substitutes {
 public:
  explicit Substitutes(const Source& own) : own_(own) {}

  // The transport of encoded rows. They are decoded after the gather, so that reading them in
  // shared memory would save no copy. Null: that of the parameter.
  std::shared_ptr<Transport> transport;
  // The parameter sharded over some of its ranks between forward and backward; null if it is not.
  // Its shard is undefined outside that interval.
  SourcePtr after_forward;

  // Keeps this rank's rows of `full`, gathered in a forward, for the backward after it.
  void shard_after_forward(const at::Tensor& full);
  void forget_after_forward();

  // A source of bytes: the shard's rows as they are now, encoded. In a backward they are those of
  // its forward, unless torch's version counters record a change.
  SourcePtr encoded(const Codec& codec);
  void forget_encoded();  // frees the bytes

 private:
  struct Encoded {
    const Codec* codec;
    SourcePtr source;
    uint64_t version;  // version of the shard that is encoded
  };

  const Source& own_;             // the parameter's
  std::vector<Encoded> encoded_;  // one for each codec that was asked for
};

}  // namespace zero3
