// Memory for communication. Freed buffers are kept for later ones of about the same size, so that a
// steady step faults no pages in: on a CPU that takes longer than filling them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/macros/Export.h>

#include <optional>
#include <vector>

namespace zero3 {

// Returns an uninitialized tensor. On a CPU its memory comes from the pool and returns there when
// its storage dies, on any thread. On other devices torch's allocator pools memory itself.
C10_EXPORT at::Tensor pooled_empty(at::IntArrayRef sizes, at::IntArrayRef strides,
                                   const at::TensorOptions& options);
C10_EXPORT at::Tensor pooled_empty(at::IntArrayRef sizes, const at::TensorOptions& options);
at::Tensor pooled_copy(const at::Tensor& tensor);

// Returns the contiguous tensor of `sizes` that begins at element `offset` of `memory`.
at::Tensor part_of(const at::Tensor& memory, int64_t offset, at::IntArrayRef sizes);

// to.copy_(from), which takes longer for small tensors of one dtype on a CPU. Neither autograd nor
// the version of `to` need notice; the tensors do not overlap.
void copy_into(const at::Tensor& to, const at::Tensor& from);

// Returns `tensors` end to end, in one flat tensor. Returns none if there are no tensors, their
// sizes are not those of `like`, their dtypes differ, two begin at one place, or one is empty or
// not plain. A plain tensor is contiguous in CPU memory, is no inference tensor, has no Python
// dispatch, and is not negated or conjugated lazily.
std::optional<at::Tensor> copy_to_flat(const std::vector<at::Tensor>& tensors,
                                       const std::vector<at::Tensor>& like);

// Copies the parts of `flat` back to plain `tensors`, and bumps their versions.
void copy_from_flat(const at::Tensor& flat, const std::vector<at::Tensor>& tensors);

// If the environment has ZERO3_DEBUG=1, fills CPU memory with 0xFF, NaN in floating dtypes, to
// expose reads of unwritten memory. Memory from pooled_empty(), and memory returned to the pool, is
// filled already.
void poison(const at::Tensor& unwritten);

struct PoolStats {
  int64_t in_use;  // bytes
  int64_t peak;    // maximum of `in_use` since its last reset
  int64_t kept;    // bytes kept for reuse
};

PoolStats pool_stats(bool reset_peak);

// Bytes of buffers on the meta device, which have no memory. The peak is since its last reset.
struct MetaBytes {
  int64_t in_use;
  int64_t peak;
};

MetaBytes meta_bytes(bool reset_peak);

// Frees the kept memory, and returns its size in bytes.
int64_t release_pool();

// Limits the kept memory to `nbytes`. The initial limit is 512 MiB.
void limit_pool(int64_t nbytes);

}  // namespace zero3
