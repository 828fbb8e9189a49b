#include "features/tier/transfer.h"

#include <ATen/Parallel.h>

#include <chrono>
#include <utility>

#include "support/error.h"
#include "support/signals.h"
#include "support/tensor_ops.h"

namespace zero3 {
namespace {

double now() {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(since).count();
}

// Returns the slab of a tensor that is all of one.
const Slab* checked_slab_of(const at::Tensor& stored) {
  const Slab* slab = slab_of(stored);
  ZERO3_CHECK(slab && stored.storage_offset() == 0 && is_movable(stored),
              "a copy to a file, or from it, takes a whole dense tensor there");
  slab->tier->check_process();
  return slab;
}

}  // namespace

Transfer::Transfer(const at::Tensor& source, at::Tensor result, std::shared_ptr<FileTier> tier,
                   std::function<void()> copy)
    : from_(source.const_data_ptr()),
      result_(std::move(result)),
      tier_(std::move(tier)),
      seconds_(launch(std::move(copy))) {}

std::shared_future<double> Transfer::launch(std::function<void()> copy) {
  auto done = std::make_shared<std::promise<double>>();
  at::launch([copy = std::move(copy), done]() mutable {
    const double begin = now();
    std::exception_ptr error;
    try {
      copy();
    } catch (...) {
      error = std::current_exception();
    }
    copy = nullptr;  // lets go of the tensors before anybody goes on
    if (error)
      done->set_exception(error);
    else
      done->set_value(now() - begin);
  });
  return done->get_future().share();
}

std::unique_ptr<Transfer> Transfer::store(const at::Tensor& tensor, const at::Tensor& stored) {
  const Slab* slab = checked_slab_of(stored);
  ZERO3_CHECK(is_movable(tensor) && tensor.sizes() == stored.sizes() &&
                  tensor.strides() == stored.strides() && tensor.dtype() == stored.dtype(),
              "a tensor in a file was ", stored.dtype(), " ", stored.sizes(), ", strides ",
              stored.strides(), ", and is ", tensor.dtype(), " ", tensor.sizes(), ", strides ",
              tensor.strides(), " now: an optimizer has to keep its states as they are");
  return std::unique_ptr<Transfer>(
      new Transfer(tensor, stored, slab->tier,
                   [source = tensor.storage(), data = tensor.const_data_ptr(),
                    nbytes = static_cast<int64_t>(tensor.nbytes()), storage = stored.storage(),
                    slab] { slab->tier->write(data, *slab, nbytes); }));
}

std::unique_ptr<Transfer> Transfer::load(const at::Tensor& stored) {
  const Slab* slab = checked_slab_of(stored);
  auto memory = tensor_ops::empty_strided(stored.sizes(), stored.strides(), stored.options());
  return std::unique_ptr<Transfer>(
      new Transfer(stored, memory, slab->tier, [storage = stored.storage(), memory, slab] {
        slab->tier->read(*slab, memory.mutable_data_ptr(), static_cast<int64_t>(memory.nbytes()));
      }));
}

at::Tensor Transfer::wait() {
  const double begin = now();
  while (seconds_.wait_for(std::chrono::milliseconds(200)) != std::future_status::ready)
    check_signals();
  const double took = seconds_.get();
  if (!is_counted_) tier_->count_time(took, now() - begin);
  is_counted_ = true;
  return result_;
}

}  // namespace zero3
