#include "support/saved_tensors.h"

#include <c10/util/Exception.h>

namespace zero3 {

namespace {

int64_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : tensor._version();
}

}  // namespace

SavedTensor::SavedTensor(const at::Tensor& tensor)
    : tensor_(tensor.detach()), version_(version_of(tensor)) {}

at::Tensor SavedTensor::unpack() const {
  const auto now = version_of(tensor_);
  TORCH_CHECK(
      now == version_,
      "one of the variables needed for gradient computation has been modified by an inplace "
      "operation: a tensor ",
      tensor_.sizes(), " of ", tensor_.dtype(), " is at version ", now, "; expected version ",
      version_, " instead");
  return tensor_;
}

std::optional<SavedTensor> WatchedStorages::save(const at::Tensor& tensor) const {
  const auto* impl = tensor.unsafeGetTensorImpl();
  if (impl->is_python_dispatch() || !impl->has_storage()) return std::nullopt;
  const auto address = reinterpret_cast<uint64_t>(impl->unsafe_storage().unsafeGetStorageImpl());
  if (addresses_.contains(address)) return std::nullopt;
  return SavedTensor(tensor);
}

}  // namespace zero3
