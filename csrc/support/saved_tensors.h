// Hooks for the tensors that autograd saves in an eager forward.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <unordered_set>

namespace zero3 {

// A saved tensor, detached: an output would keep its own node alive.
class SavedTensor {
 public:
  explicit SavedTensor(const at::Tensor& tensor);

  // Throws what autograd throws if the tensor was written to since.
  at::Tensor unpack() const;

 private:
  const at::Tensor tensor_;
  const int64_t version_;
};

// Storages of which a view is not saved itself. Used under the GIL.
class WatchedStorages {
 public:
  void watch(uint64_t address) { addresses_.insert(address); }
  void unwatch(uint64_t address) { addresses_.erase(address); }
  void clear() { addresses_.clear(); }

  // Saves a tensor. Returns nullopt if the tensor may be a view of a watched storage: a wrapper
  // may.
  std::optional<SavedTensor> save(const at::Tensor& tensor) const;

 private:
  std::unordered_set<uint64_t> addresses_;  // of StorageImpls
};

}  // namespace zero3
