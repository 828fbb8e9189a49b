// What the runtime computes for itself.
#pragma once

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace zero3 {

// Where one lives, autograd records nothing, tensors outlive the inference mode that the user may
// be in, and modes of the user's that see operators, such as selective checkpoints, see none.
class Apart {
  c10::InferenceMode lasting_{false};  // enables gradients
  c10::NoGradGuard no_grad_;
  c10::impl::ExcludeDispatchKeyGuard below_modes_{
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
};

}  // namespace zero3
