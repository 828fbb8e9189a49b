#include "support/collective_log.h"

#include <algorithm>
#include <atomic>
#include <utility>

namespace zero3 {
namespace {

std::mutex active_mutex;
std::vector<std::weak_ptr<CollectiveLog>> active_logs;
std::atomic<size_t> number_of_logs = 0;  // size of `active_logs`

}  // namespace

std::shared_ptr<CollectiveLog> CollectiveLog::start(bool on_meta) {
  auto log = std::make_shared<CollectiveLog>(on_meta);
  std::lock_guard lock(active_mutex);
  active_logs.push_back(log);
  number_of_logs = active_logs.size();
  return log;
}

void CollectiveLog::stop() {
  std::lock_guard lock(active_mutex);
  std::erase_if(active_logs, [this](auto& weak) {
    auto log = weak.lock();
    return !log || log.get() == this;
  });
  number_of_logs = active_logs.size();
}

std::vector<Collective> CollectiveLog::records() {
  std::lock_guard lock(mutex_);
  return records_;
}

std::vector<Collective> CollectiveLog::take() {
  std::lock_guard lock(mutex_);
  return std::exchange(records_, {});
}

void CollectiveLog::add(const Collective& collective) {
  if (collective.is_on_meta != on_meta_) return;
  std::lock_guard lock(mutex_);
  records_.push_back(collective);
}

bool is_recording() { return number_of_logs.load(std::memory_order_relaxed) > 0; }

void add_to_logs(const Collective& collective) {
  std::vector<std::shared_ptr<CollectiveLog>> logs;
  {
    std::lock_guard lock(active_mutex);
    for (auto& weak : active_logs)
      if (auto log = weak.lock()) logs.push_back(log);
  }
  for (auto& log : logs) log->add(collective);
}

std::string scope_name(const Collective& collective, const std::string& phase) {
  const std::string dtype = c10::toString(collective.dtype);
  std::string name = "zero3::" + collective.op + " " + phase + " [" + dtype + ", " +
                     std::to_string(collective.nbytes) + " bytes]";
  for (size_t i = 0; i < collective.params.size(); ++i)
    name += (i > 0 ? ", " : " ") + collective.params[i];
  return name;
}

}  // namespace zero3
