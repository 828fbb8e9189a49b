// Selects the bucket that reduces a gradient.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>

#include "parameter/codec.h"
#include "transport/channel.h"
#include "transport/transport.h"

namespace zero3 {

// Gradients share a bucket if their keys are equal.
struct BucketKey {
  // A set of transports that join, represented by one of them.
  struct Domain {
    std::shared_ptr<Transport> transport;
    bool operator==(const Domain& other) const { return transport->joins(*other.transport); }
  };
  // The ranks with the same shard; null if there are no others.
  struct Replicas {
    std::shared_ptr<Channel> channel;
    bool operator==(const Replicas& other) const {
      return is_same(channel.get(), other.channel.get());
    }
  };

  Domain domain;
  Replicas replicas;
  at::ScalarType wire_dtype;
  const Codec* codec;  // on the wire, in place of `wire_dtype`; null: none
  double divide_factor;
  at::Device device;
  bool delivers_early;

  bool operator==(const BucketKey&) const = default;
};

// The dtype that a gradient is normalized to, and the bucket that it then goes to.
struct BucketSelection {
  at::ScalarType normalized_dtype;
  BucketKey key;
};

// Selects the bucket of a raw gradient of `parameter`, which arrives in `dtype`; or, if
// `is_normalized`, of a sum of gradients that were normalized as they arrived, and fit `dtype`.
BucketSelection select_bucket(const Parameter& parameter, at::ScalarType dtype,
                              bool is_normalized = false);

}  // namespace zero3
