// Isolates the runtime's own computations from the user's modes.
#pragma once

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace zero3 {

// While an instance lives, autograd records nothing and new tensors are not inference tensors, even
// in the user's inference mode. The user's modes, such as selective checkpoints, see no operators.
class WithoutUserModes {
  c10::InferenceMode no_inference_mode_{false};  // also enables gradients
  c10::NoGradGuard no_grad_;
  c10::impl::ExcludeDispatchKeyGuard below_modes_{
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
};

}  // namespace zero3
