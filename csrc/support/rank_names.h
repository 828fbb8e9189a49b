// How messages name the ranks of a process group: by their numbers in the job, and by their hosts
// if these are several, as "3" or "3 (host b)".
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace zero3 {

class RankNames {
 public:
  RankNames() = default;  // without names, ranks have their numbers in the group
  explicit RankNames(std::vector<std::string> names)
      : names_(std::make_shared<const std::vector<std::string>>(std::move(names))) {}

  std::string of(int64_t rank) const {
    return names_ ? names_->at(static_cast<size_t>(rank)) : std::to_string(rank);
  }

 private:
  std::shared_ptr<const std::vector<std::string>> names_;
};

}  // namespace zero3
