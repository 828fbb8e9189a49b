#include "support/profiler_range.h"

#include <ATen/record_function.h>

namespace zero3 {

struct ProfilerRange::Record {
  at::RecordFunction record;
};

std::shared_ptr<ProfilerRange::Record> ProfilerRange::start_if_observed() {
  auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
  if (!callbacks) return nullptr;
  return std::shared_ptr<Record>(new Record{at::RecordFunction(std::move(*callbacks))});
}

void ProfilerRange::name(const std::string& name) { record_->record.before(name); }

}  // namespace zero3
