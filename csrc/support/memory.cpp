#include "support/memory.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <list>
#include <memory>
#include <mutex>
#include <string_view>

#include "support/tensor_ops.h"

namespace zero3 {
namespace {

constexpr int64_t kSmall = 64 << 10;           // bytes; malloc itself keeps smaller blocks
constexpr int64_t kWorthADispatch = 64 << 10;  // bytes; torch copies larger tensors as quickly
constexpr double kMostWaste = 1.125;           // maximum size of a block, relative to the request

struct Block {
  c10::DataPtr memory;
  int64_t nbytes;
};

bool is_debug() {
  static const bool is_debug = [] {
    const char* value = std::getenv("ZERO3_DEBUG");
    return value != nullptr && std::string_view(value) == "1";
  }();
  return is_debug;
}

void poison(void* memory, int64_t nbytes) {
  if (is_debug() && nbytes > 0) std::memset(memory, 0xFF, nbytes);
}

class Pool {
 public:
  Block take(int64_t nbytes) {
    std::lock_guard lock(mutex_);
    auto best = kept_.end();
    for (auto block = kept_.begin(); block != kept_.end(); ++block)
      if (block->nbytes >= nbytes && block->nbytes <= kMostWaste * nbytes &&
          (best == kept_.end() || block->nbytes < best->nbytes))
        best = block;
    Block block;
    if (best == kept_.end()) {
      block = {allocate(nbytes), nbytes};
    } else {
      block = std::move(*best);
      kept_.erase(best);
      kept_bytes_ -= block.nbytes;
    }
    in_use_ += nbytes;
    peak_ = std::max(peak_, in_use_);
    return block;
  }

  void give_back(Block block, int64_t nbytes) {
    poison(block.memory.get(), nbytes);  // a late reader must not find the old data
    std::list<Block> freed;              // after the lock is released
    std::lock_guard lock(mutex_);
    in_use_ -= nbytes;
    kept_bytes_ += block.nbytes;
    kept_.push_back(std::move(block));
    while (kept_bytes_ > most_kept_) drop_oldest(freed);
  }

  void limit(int64_t nbytes) {
    std::list<Block> freed;
    std::lock_guard lock(mutex_);
    most_kept_ = nbytes;
    while (kept_bytes_ > most_kept_) drop_oldest(freed);
  }

  PoolStats stats(bool reset_peak) {
    std::lock_guard lock(mutex_);
    const PoolStats stats{in_use_, peak_, kept_bytes_};
    if (reset_peak) peak_ = in_use_;
    return stats;
  }

  int64_t release() {
    std::list<Block> freed;
    std::lock_guard lock(mutex_);
    const auto nbytes = kept_bytes_;
    while (!kept_.empty()) drop_oldest(freed);
    return nbytes;
  }

 private:
  c10::DataPtr allocate(int64_t nbytes) {
    if (kept_.empty()) return c10::GetCPUAllocator()->allocate(nbytes);
    try {
      return c10::GetCPUAllocator()->allocate(nbytes);
    } catch (const c10::Error&) {  // the kept blocks may be the missing memory
      kept_.clear();
      kept_bytes_ = 0;
      return c10::GetCPUAllocator()->allocate(nbytes);
    }
  }

  void drop_oldest(std::list<Block>& freed) {
    kept_bytes_ -= kept_.front().nbytes;
    freed.splice(freed.end(), kept_, kept_.begin());
  }

  std::mutex mutex_;
  std::list<Block> kept_;  // the oldest first
  int64_t kept_bytes_ = 0;
  int64_t in_use_ = 0;
  int64_t peak_ = 0;
  int64_t most_kept_ = 512 << 20;
};

// Tensors own the pool too: some outlive the statics of this library.
const std::shared_ptr<Pool>& pool() {
  static const auto pool = std::make_shared<Pool>();
  return pool;
}

class MetaCounter {
 public:
  void take(int64_t nbytes) {
    std::lock_guard lock(mutex_);
    bytes_.in_use += nbytes;
    bytes_.peak = std::max(bytes_.peak, bytes_.in_use);
  }

  void give_back(int64_t nbytes) {
    std::lock_guard lock(mutex_);
    bytes_.in_use -= nbytes;
  }

  MetaBytes bytes(bool reset_peak) {
    std::lock_guard lock(mutex_);
    const auto result = bytes_;
    if (reset_peak) bytes_.peak = bytes_.in_use;
    return result;
  }

 private:
  std::mutex mutex_;
  MetaBytes bytes_{};
};

const std::shared_ptr<MetaCounter>& meta_counter() {
  static const auto counter = std::make_shared<MetaCounter>();
  return counter;
}

at::Tensor take_on_meta(at::IntArrayRef sizes, at::IntArrayRef strides,
                        const at::TensorOptions& options, int64_t nbytes) {
  meta_counter()->take(nbytes);
  return at::for_blob(nullptr, sizes)
      .strides(strides)
      .deleter([nbytes, owner = meta_counter()](void*) { owner->give_back(nbytes); })
      .options(options)
      .target_device(at::kMeta)
      .make_tensor();
}

at::Tensor take(at::IntArrayRef sizes, at::IntArrayRef strides, const at::TensorOptions& options) {
  const int64_t item = options.dtype().itemsize();
  const int64_t nbytes = at::detail::computeStorageNbytes(sizes, strides, item);
  if (options.device().is_meta()) return take_on_meta(sizes, strides, options, nbytes);
  if (!options.device().is_cpu() || nbytes < kSmall)
    return tensor_ops::empty_strided(sizes, strides, options);
  auto block = std::make_shared<Block>(pool()->take(nbytes));
  return at::for_blob(block->memory.get(), sizes)
      .strides(strides)
      .deleter(
          [block, nbytes, owner = pool()](void*) { owner->give_back(std::move(*block), nbytes); })
      .options(options)
      .resizeable_storage()
      .allocator(c10::GetCPUAllocator())
      .make_tensor();
}

bool is_in_memory_of_cpu(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.layout() == at::kStrided &&
         !tensor.key_set().has(c10::DispatchKey::Python) && tensor.is_contiguous() &&
         tensor.numel() > 0 && !tensor.is_neg() && !tensor.is_conj() && !tensor._is_zerotensor();
}

}  // namespace

at::Tensor pooled_empty(at::IntArrayRef sizes, at::IntArrayRef strides,
                        const at::TensorOptions& options) {
  auto tensor = take(sizes, strides, options);
  poison(tensor);
  return tensor;
}

at::Tensor pooled_empty(at::IntArrayRef sizes, const at::TensorOptions& options) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (int64_t dim = sizes.size(); dim-- > 0; stride *= sizes[dim]) strides[dim] = stride;
  return pooled_empty(sizes, strides, options);
}

at::Tensor pooled_copy(const at::Tensor& tensor) {
  auto result = pooled_empty(tensor.sizes(), tensor.strides(), tensor.options());
  copy_into(result, tensor);
  return result;
}

at::Tensor part_of(const at::Tensor& memory, int64_t offset, at::IntArrayRef sizes) {
  auto part = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(memory.storage()), memory.key_set(), memory.dtype());
  part.unsafeGetTensorImpl()->set_storage_offset(memory.storage_offset() + offset);
  part.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return part;
}

void copy_into(const at::Tensor& to, const at::Tensor& from) {
  const bool as_bytes = to.is_cpu() && from.is_cpu() && to.dtype() == from.dtype() &&
                        to.sizes() == from.sizes() && to.is_contiguous() && from.is_contiguous() &&
                        !from.is_neg() && !from.is_conj() && !from._is_zerotensor();
  const auto nbytes = static_cast<int64_t>(to.nbytes());
  if (!as_bytes || nbytes >= kWorthADispatch)
    to.copy_(from);
  else if (nbytes > 0)
    std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), nbytes);
}

std::optional<at::Tensor> copy_to_flat(const std::vector<at::Tensor>& tensors,
                                       const std::vector<at::Tensor>& like) {
  if (tensors.empty()) return {};
  if (!std::ranges::equal(tensors, like, {}, &at::Tensor::sizes, &at::Tensor::sizes)) return {};
  int64_t numel = 0;
  std::vector<const void*> places;
  for (auto& tensor : tensors) {
    if (!is_in_memory_of_cpu(tensor) || tensor.is_inference()) return {};
    if (tensor.dtype() != tensors.front().dtype()) return {};
    numel += tensor.numel();
    places.push_back(tensor.const_data_ptr());
  }
  std::ranges::sort(places);
  if (std::ranges::adjacent_find(places) != places.end()) return {};
  auto flat = at::detail::empty_cpu({numel}, tensors.front().scalar_type());
  auto* to = static_cast<char*>(flat.mutable_data_ptr());
  for (auto& tensor : tensors) {
    std::memcpy(to, tensor.const_data_ptr(), tensor.nbytes());
    to += tensor.nbytes();
  }
  return flat;
}

void copy_from_flat(const at::Tensor& flat, const std::vector<at::Tensor>& tensors) {
  size_t nbytes = 0;
  for (auto& tensor : tensors) {
    TORCH_INTERNAL_ASSERT(is_in_memory_of_cpu(tensor) && tensor.dtype() == flat.dtype());
    nbytes += tensor.nbytes();
  }
  TORCH_INTERNAL_ASSERT(is_in_memory_of_cpu(flat) && nbytes == flat.nbytes());
  auto* from = static_cast<const char*>(flat.const_data_ptr());
  for (auto& tensor : tensors) {
    tensor.unsafeGetTensorImpl()->bump_version();  // raises where torch would
    std::memcpy(tensor.mutable_data_ptr(), from, tensor.nbytes());
    from += tensor.nbytes();
  }
}

void poison(const at::Tensor& unwritten) {
  if (!unwritten.is_cpu()) return;
  poison(unwritten.mutable_data_ptr(), static_cast<int64_t>(unwritten.storage().nbytes()));
}

PoolStats pool_stats(bool reset_peak) { return pool()->stats(reset_peak); }

MetaBytes meta_bytes(bool reset_peak) { return meta_counter()->bytes(reset_peak); }

int64_t release_pool() { return pool()->release(); }

void limit_pool(int64_t nbytes) { pool()->limit(nbytes); }

}  // namespace zero3
