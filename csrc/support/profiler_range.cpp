#include "support/profiler_range.h"

#include <ATen/record_function.h>

namespace zero3 {

struct ProfilerRange::Running {
  at::RecordFunction record;
};

std::shared_ptr<ProfilerRange::Running> ProfilerRange::start_if_observed() {
  auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
  if (!callbacks) return nullptr;
  return std::shared_ptr<Running>(new Running{at::RecordFunction(std::move(*callbacks))});
}

void ProfilerRange::name(const std::string& name) { running_->record.before(name); }

}  // namespace zero3
