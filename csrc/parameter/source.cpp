#include "parameter/source.h"

#include <ATen/TensorGeometry.h>

#include "support/autograd.h"
#include "support/error.h"

namespace zero3 {

Source::Source(std::vector<int64_t> sizes, std::vector<int64_t> strides, at::ScalarType dtype,
               at::Device device, int64_t rank, RowLayout layout, at::Tensor placeholder)
    : sizes(std::move(sizes)),
      strides(std::move(strides)),
      dtype(dtype),
      device(device),
      rank(rank),
      layout(std::move(layout)),
      placeholder(std::move(placeholder)) {
  ZERO3_CHECK(!this->sizes.empty() && this->sizes[0] == this->layout.rows(), "a tensor ",
              at::IntArrayRef(this->sizes), " has no layout of ", this->layout.rows(), " rows");
}

void Source::connect(std::shared_ptr<Transport> to) {
  ZERO3_CHECK(!transport, "'", fqn, "' has a transport already");
  transport = std::move(to);
}

void Source::follow(const at::Tensor& dtensor, at::Tensor rows) {
  if (parts) return parts->follow(dtensor, std::move(rows));
  version_ = version_counter_of(dtensor);
  shard = std::move(rows);
}

uint64_t Source::version() const {
  if (parts) return parts->version();
  return (version_.enabled() ? version_.current_version() : 0) +
         (shard.is_inference() ? 0 : shard._version());
}

void Source::bring_up_to_date() {
  if (parts) shard = parts->shard();
}

int64_t Source::row_numel() const { return c10::multiply_integers(sizes.begin() + 1, sizes.end()); }

int64_t Source::nbytes() const {
  return rows() * row_numel() * static_cast<int64_t>(c10::elementSize(dtype));
}

bool Source::is_contiguous() const { return at::geometry_is_contiguous(sizes, strides); }

std::vector<int64_t> Source::sizes_with_rows(int64_t rows) const {
  std::vector<int64_t> result = sizes;
  result[0] = rows;
  return result;
}

}  // namespace zero3
