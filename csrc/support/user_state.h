// The state of dispatch and autograd in which a thread runs the user's code, and in which it runs
// the runtime's.
#pragma once

#include <c10/core/AutogradState.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace zero3 {

// While an instance lives, this thread runs the runtime's code, which may change the state. The
// outermost instance remembers the state of the user's code.
class RuntimeState {
 public:
  RuntimeState();
  ~RuntimeState();
  RuntimeState(const RuntimeState&) = delete;
  RuntimeState& operator=(const RuntimeState&) = delete;

 private:
  friend class UserState;

  const bool is_outermost_;
  const c10::impl::LocalDispatchKeySet keys_;
  const c10::AutogradState autograd_;
};

// While an instance lives, this thread runs the user's code. Any Python function that the runtime
// calls may run an optimizer, a hook, an all-gather extension or a signal handler.
class UserState {
 public:
  UserState();
  ~UserState();
  UserState(const UserState&) = delete;
  UserState& operator=(const UserState&) = delete;

 private:
  const RuntimeState* const runtime_;  // null if the user's code runs already
  const c10::impl::LocalDispatchKeySet keys_;
  const c10::AutogradState autograd_;
};

// While an instance lives, autograd records nothing and new tensors are not inference tensors, even
// in the user's inference mode. The user's modes, such as selective checkpoints, see no operators.
class WithoutUserModes {
  RuntimeState state_;
  c10::InferenceMode no_inference_mode_{false};  // also enables gradients
  c10::NoGradGuard no_grad_;
  c10::impl::ExcludeDispatchKeyGuard below_modes_{
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
};

// While an instance lives, operators are called below autograd. Writes count no versions.
class BelowAutograd {
  RuntimeState state_;
  c10::impl::ExcludeDispatchKeyGuard below_autograd_{
      c10::autograd_dispatch_keyset_with_ADInplaceOrView};
};

}  // namespace zero3
