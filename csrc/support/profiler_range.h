// Named ranges in a profile.
#pragma once

#include <memory>
#include <string>

namespace zero3 {

// A range of torch.profiler's from construction to destruction. `make_name` is called only if a
// profiler listens.
class ProfilerRange {
 public:
  template <typename MakeName>
  explicit ProfilerRange(MakeName make_name) : record_(start_if_observed()) {
    if (record_) name(make_name());
  }
  ProfilerRange(const ProfilerRange&) = delete;
  ProfilerRange& operator=(const ProfilerRange&) = delete;

 private:
  struct Record;
  static std::shared_ptr<Record> start_if_observed();
  void name(const std::string& name);

  std::shared_ptr<Record> record_;
};

}  // namespace zero3
