// The backwards of transports that belong to one reduction.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "transport/transport.h"

namespace zero3 {

// Owned by a Reduction, whose mutex guards it. Outlives the checks and buckets that take part.
class BegunBackwards {
 public:
  // The backward of the parameter's transport. Begins it on the first call.
  Backward& of(const Parameter& parameter) {
    auto found = std::ranges::find_if(
        begun_, [&](auto& begun) { return begun.first->joins(*parameter.transport()); });
    if (found == begun_.end())
      found =
          begun_.insert(found, {parameter.transport(), parameter.transport()->begin_backward()});
    return *found->second;
  }
  void end() { begun_.clear(); }

 private:
  std::vector<std::pair<std::shared_ptr<Transport>, std::unique_ptr<Backward>>> begun_;
};

}  // namespace zero3
