// Something that is gathered: a tensor of which each rank has rows. A gather's bucket knows nothing
// else: not whether a parameter, what stands in its place or its quantized rows are gathered.
//
//   full tensor  [rows, ...]        what is gathered, in `dtype`
//   shard        [shard_rows, ...]  the rows of this rank, see RowLayout
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "parameter/parts.h"
#include "parameter/row_layout.h"

namespace zero3 {

class Transport;

// The shard changes under the GIL, between forwards and backwards.
struct Source {
  Source(std::vector<int64_t> sizes, std::vector<int64_t> strides, at::ScalarType dtype,
         at::Device device, int64_t rank, RowLayout layout, at::Tensor placeholder = {});

  const std::vector<int64_t> sizes;  // full shape
  const std::vector<int64_t> strides;
  const at::ScalarType dtype;
  const at::Device device;
  const int64_t rank;  // this rank, among those of `layout`
  const RowLayout layout;
  const at::Tensor placeholder;  // tensor that graphs take: full shape, no memory; else undefined

  std::string fqn;                       // for users, and for the keys of messages
  std::string encoding;                  // for the keys too, if rows are bytes of a codec
  at::Tensor shard;                      // [shard_rows, ...], read at every gather, never written
  std::shared_ptr<Transport> transport;  // null until connect()
  std::shared_ptr<Parts> parts;          // of which the shard is made; null: it is this rank's own

  // Sets the transport, once.
  void connect(std::shared_ptr<Transport> to);
  // Gathers `rows` from now on, or what they are a part of. They are those of `dtensor`, whose
  // version is followed too: an optimizer bumps no other.
  void follow(const at::Tensor& dtensor, at::Tensor rows);
  // Number of changes to the shard, or to this rank's part, that torch's version counters record.
  uint64_t version() const;
  // That number for the rows that a gather reads now: those of a forward, in its backward, if the
  // shard is made of parts.
  uint64_t version_to_gather() const { return parts ? parts->version_of_shard() : version(); }
  // Makes the shard of its parts, if it has any. Call it ahead of a read.
  void bring_up_to_date();

  int64_t rows() const { return sizes[0]; }
  int64_t shard_rows() const { return layout.rows_of(rank); }
  int64_t row_numel() const;
  int64_t chunk_numel() const { return layout.chunk_rows() * row_numel(); }
  // Elements of the full tensor and its padding.
  int64_t padded_numel() const { return layout.padded_rows() * row_numel(); }
  int64_t nbytes() const;
  bool is_contiguous() const;
  std::vector<int64_t> sizes_with_rows(int64_t rows) const;
  // Whether the shard is in host memory, and not on the device that computes.
  bool is_on_host() const { return shard.is_cpu() && !device.is_cpu() && !device.is_meta(); }
  // Describes a rank's rows in the key of a message.
  std::string chunk_key() const {
    return fqn + "[" + std::to_string(chunk_numel()) + "]" + encoding;
  }

 private:
  c10::VariableVersion version_;
};

using SourcePtr = std::shared_ptr<Source>;

}  // namespace zero3
