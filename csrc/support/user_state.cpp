#include "support/user_state.h"

#include <utility>

namespace zero3 {
namespace {

thread_local const RuntimeState* outermost = nullptr;

}  // namespace

RuntimeState::RuntimeState()
    : is_outermost_(outermost == nullptr),
      keys_(c10::impl::tls_local_dispatch_key_set()),
      autograd_(c10::AutogradState::get_tls_state()) {
  if (is_outermost_) outermost = this;
}

RuntimeState::~RuntimeState() {
  if (is_outermost_) outermost = nullptr;
}

UserState::UserState()
    : runtime_(std::exchange(outermost, nullptr)),
      keys_(c10::impl::tls_local_dispatch_key_set()),
      autograd_(c10::AutogradState::get_tls_state()) {
  if (runtime_ == nullptr) return;
  c10::impl::_force_tls_local_dispatch_key_set(runtime_->keys_);
  c10::AutogradState::set_tls_state(runtime_->autograd_);
}

UserState::~UserState() {
  if (runtime_ == nullptr) return;
  c10::impl::_force_tls_local_dispatch_key_set(keys_);
  c10::AutogradState::set_tls_state(autograd_);
  outermost = runtime_;
}

}  // namespace zero3
