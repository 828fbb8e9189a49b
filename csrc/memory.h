// Memory for communication. What is freed is kept for the next buffer of about its size, so that a
// steady step faults no page in: on a CPU that takes longer than to fill it.
#pragma once

#include <ATen/core/Tensor.h>

namespace zero3 {

// A tensor of unwritten memory. On a CPU it comes from the pool and goes back when its storage
// dies, on any thread; elsewhere torch's allocator keeps memory itself.
at::Tensor pooled_empty(at::IntArrayRef sizes, at::IntArrayRef strides,
                        const at::TensorOptions& options);
at::Tensor pooled_empty(at::IntArrayRef sizes, const at::TensorOptions& options);
at::Tensor pooled_copy(const at::Tensor& tensor);

// If the environment has ZERO3_DEBUG=1, fills memory of a CPU with 0xFF, which is NaN in floating
// dtypes: whoever reads what nobody has written gives himself away. What pooled_empty gives is
// filled already, and so is what comes back to the pool.
void poison(const at::Tensor& unwritten);

struct PoolStats {
  int64_t in_use;  // bytes
  int64_t peak;    // of `in_use`, since the peak was last reset
  int64_t kept;    // bytes that are not in use
};

PoolStats pool_stats(bool reset_peak);

// Of buffers on the meta device, which have no memory; the peak since it was last reset.
struct SimulatedBytes {
  int64_t in_use;
  int64_t peak;
};

SimulatedBytes simulated_bytes(bool reset_peak);

// Gives back what is kept and not in use, and returns how many bytes that was.
int64_t release_pool();

// Keeps at most so many bytes from now on, 512 MiB before the first call.
void limit_pool(int64_t nbytes);

}  // namespace zero3
