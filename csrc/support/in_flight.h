// Work that one operator starts and another waits for.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>

#include <memory>
#include <mutex>
#include <unordered_map>

namespace zero3 {

// Started work, by number. Each belongs to the handle, a tensor [1] of int64, that add() returned.
template <class Work>
class InFlight {
 public:
  static InFlight& get() {
    static auto& started = *new InFlight;  // never destroyed: handles may outlive statics
    return started;
  }

  at::Tensor add(std::unique_ptr<Work> work) {
    struct Owner {
      explicit Owner(std::unique_ptr<Work> w) : work(std::move(w)) {}
      ~Owner() { InFlight::get().remove(number); }
      int64_t number = 0;
      int64_t shown = 0;  // the handle's memory, which a compiler may reuse
      std::shared_ptr<Work> work;
    };
    auto owner = std::make_shared<Owner>(std::move(work));
    {
      std::lock_guard lock(mutex_);
      owner->number = owner->shown = ++started_;
      works_[owner->number] = owner->work;
    }
    return at::from_blob(&owner->shown, {1}, [owner](void*) {}, at::kLong);
  }

  // Returns the work of a handle, or null if there is none.
  std::shared_ptr<Work> find(const at::Tensor& handle) {
    const bool is_handle =
        handle.is_cpu() && handle.scalar_type() == at::kLong && handle.numel() == 1;
    const int64_t number = is_handle ? handle.item<int64_t>() : 0;
    std::lock_guard lock(mutex_);
    auto found = works_.find(number);
    return found == works_.end() ? nullptr : found->second.lock();
  }

 private:
  void remove(int64_t number) {
    std::lock_guard lock(mutex_);
    works_.erase(number);
  }

  std::mutex mutex_;
  int64_t started_ = 0;
  std::unordered_map<int64_t, std::weak_ptr<Work>> works_;
};

}  // namespace zero3
