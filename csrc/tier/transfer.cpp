#include "tier/transfer.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty_strided.h>

#include <chrono>
#include <utility>

#include "support/error.h"

namespace zero3 {
namespace {

double now() {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(since).count();
}

}  // namespace

Transfer::Transfer(at::Tensor result, std::shared_ptr<FileTier> tier, std::function<void()> copy)
    : result_(std::move(result)), tier_(std::move(tier)), seconds_(launch(std::move(copy))) {}

std::shared_future<double> Transfer::launch(std::function<void()> copy) {
  auto done = std::make_shared<std::promise<double>>();
  at::launch([copy = std::move(copy), done] {
    const double begin = now();
    try {
      copy();
      done->set_value(now() - begin);
    } catch (...) {
      done->set_exception(std::current_exception());
    }
  });
  return done->get_future().share();
}

std::unique_ptr<Transfer> Transfer::store(const at::Tensor& tensor, const at::Tensor& stored) {
  const Slab* slab = slab_of(stored);
  return std::unique_ptr<Transfer>(new Transfer(stored, slab->tier, [tensor, stored, slab] {
    slab->tier->write(tensor.const_data_ptr(), *slab, static_cast<int64_t>(tensor.nbytes()));
  }));
}

std::unique_ptr<Transfer> Transfer::load(const at::Tensor& stored) {
  auto memory = at::empty_strided(stored.sizes(), stored.strides(), stored.options());
  const Slab* slab = slab_of(stored);
  return std::unique_ptr<Transfer>(new Transfer(memory, slab->tier, [stored, memory, slab] {
    slab->tier->read(*slab, memory.mutable_data_ptr(), static_cast<int64_t>(stored.nbytes()));
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
