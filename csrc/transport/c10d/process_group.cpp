#include "transport/c10d/process_group.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/ops/cat.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <limits>
#include <mutex>
#include <optional>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "support/error.h"
#include "support/grad_dtype.h"
#include "support/memory.h"
#include "transport/c10d/c10d_collectives.h"
#include "transport/same_forwards.h"

namespace zero3 {

namespace {

using Group = c10d::ProcessGroup;

std::atomic<int64_t> nanoseconds_waited = 0;

// The transfers that an exchange has begun.
struct Transfers {
  struct Part {
    WorkPtr work;
    std::string with;  // the other rank
    std::string key;
  };

  Transfers(c10::intrusive_ptr<Group> of, bool ends_on_host)
      : group(std::move(of)), ends_on_host_(ends_on_host) {}

  const c10::intrusive_ptr<Group> group;
  std::vector<at::Tensor> tensors;  // all tensors that take part
  std::vector<Part> parts;

  // `begin` returns a Work. It throws if a connection has broken.
  template <typename Begin>
  void start(const std::string& with, const std::string& key, Begin begin) {
    // A profiler makes an event when a Work begins. A Work that ends on the host writes its end to
    // the event, which is freed when the profile is over.
    std::optional<at::DisableRecordFunctionGuard> hidden;
    if (ends_on_host_) hidden.emplace();
    attempt(with, key, [&] { parts.push_back({begin(), with, key}); });
  }

  // Throws at the first part that fails. A second call waits for the parts behind it.
  void wait() {
    while (waited_ < parts.size()) {
      auto& [work, with, key] = parts[waited_++];
      attempt(with, key, [&] { work->wait(); });
    }
  }
  bool is_under_way() const { return waited_ < parts.size(); }

 private:
  template <typename Step>
  static void attempt(const std::string& with, const std::string& key, Step step) {
    try {
      step();
    } catch (const std::exception& error) {
      throw_error("an exchange with " + with + " failed (" + beginning_of(key) +
                  "). Either that rank has stopped, or it runs something else: " + same_forwards() +
                  ". " + error.what());
    }
  }

  // A key may name hundreds of parameters.
  static std::string beginning_of(const std::string& key) {
    constexpr size_t kShown = 300;
    return key.size() <= kShown ? key : key.substr(0, key.rfind(' ', kShown)) + " and others";
  }

  const bool ends_on_host_;
  size_t waited_ = 0;  // number of parts
};

// Whether `group` was not destroyed: until then, torch finds it by its name.
bool is_alive(const c10::intrusive_ptr<Group>& group) {
  try {
    return c10d::resolve_process_group(group->getGroupName()) == group;
  } catch (const c10::Error&) {
    return false;
  }
}

// Transfers that nobody waits for any more. gloo never recovers if a message's buffer is gone.
class AbandonedTransfers {
 public:
  static AbandonedTransfers& get() {
    static auto& abandoned = *new AbandonedTransfers;  // never destroyed: statics may add some
    return abandoned;
  }

  void add(std::unique_ptr<Transfers> transfers) {
    std::lock_guard lock(mutex_);
    transfers_.push_back(std::move(transfers));
  }

  // Waits for the transfers of `group`, and drops those of destroyed groups. Throws at the first
  // that fails, and keeps the others: their memory may still be written to.
  void wait(const c10::intrusive_ptr<Group>& group) {
    auto taken = take([&](auto& other) { return other == group; });
    for (auto transfers = taken.begin(); transfers != taken.end(); ++transfers) {
      try {
        (*transfers)->wait();
      } catch (...) {
        std::lock_guard lock(mutex_);
        transfers_.insert(transfers_.begin(), std::move_iterator(transfers),
                          std::move_iterator(taken.end()));
        throw;
      }
    }
    drop_of_destroyed_groups();
  }

  void drop_of_destroyed_groups() {
    take([](auto& group) { return !is_alive(group); });  // destroyed without the lock
  }

 private:
  // Takes the transfers of groups that are `wanted`.
  template <typename Wanted>
  std::vector<std::unique_ptr<Transfers>> take(Wanted wanted) {
    std::lock_guard lock(mutex_);
    const auto rest = std::ranges::stable_partition(
        transfers_, [&](auto& transfers) { return !wanted(transfers->group); });
    std::vector<std::unique_ptr<Transfers>> taken(std::move_iterator(rest.begin()),
                                                  std::move_iterator(rest.end()));
    transfers_.erase(rest.begin(), rest.end());
    return taken;
  }

  std::mutex mutex_;
  std::vector<std::unique_ptr<Transfers>> transfers_;  // in the order of their starts
};

// A Work copies the thread-local state and frees the copy on its own thread, late or never. The
// state includes the hooks of saved tensors, which would keep a whole model alive.
class WithoutSavedTensorHooks {
 public:
  WithoutSavedTensorHooks() { at::SavedTensorDefaultHooks::set_tls_state({}); }
  ~WithoutSavedTensorHooks() { at::SavedTensorDefaultHooks::set_tls_state(state_); }
  WithoutSavedTensorHooks(const WithoutSavedTensorHooks&) = delete;
  WithoutSavedTensorHooks& operator=(const WithoutSavedTensorHooks&) = delete;

 private:
  const at::impl::SavedTensorDefaultHooksTLS state_ = at::SavedTensorDefaultHooks::get_tls_state();
};

// ---- sends and receives

// Messages match by sender and tag, in order. An unmatched message ends in the group's timeout.
int tag_of(const std::string& key) {
  uint64_t hash = 14695981039346656037u;  // FNV-1a: the same on every rank
  for (unsigned char c : key) hash = (hash ^ c) * 1099511628211u;
  return static_cast<int>(hash % std::numeric_limits<int>::max());
}

c10::intrusive_ptr<Group> group_of(const std::string& name) {
  try {
    return c10d::resolve_process_group(name);
  } catch (const c10::Error& error) {
    throw_error(
        "the process group of a sharded model is gone: call destroy_process_group() when "
        "nothing of the model runs any more. " +
        std::string(error.what_without_backtrace()));
  }
}

class ProcessGroupExchange : public Exchange {
 public:
  explicit ProcessGroupExchange(const Channel& channel)
      : rank_(channel.rank),
        rank_names_(channel.rank_names),
        by_messages_(channel.traits.is_point_to_point) {
    auto group = group_of(channel.name);
    AbandonedTransfers::get().wait(group);
    transfers_ = std::make_unique<Transfers>(std::move(group), channel.traits.ends_on_host);
  }

  ~ProcessGroupExchange() override {
    if (transfers_ && transfers_->is_under_way())
      AbandonedTransfers::get().add(std::move(transfers_));
  }

  void gather(const std::vector<Piece>& pieces) override;
  void reduce(const Rows& rows, const std::string& key) override;
  void all_to_all(const Rows& rows, const std::string& key) override;

  void wait() override {
    ZERO3_CHECK(transfers_, "an exchange was waited for twice");
    const auto start = std::chrono::steady_clock::now();
    transfers_->wait();  // if it throws, what is under way is abandoned, and keeps its memory
    transfers_ = nullptr;
    const std::chrono::nanoseconds waited = std::chrono::steady_clock::now() - start;
    nanoseconds_waited += waited.count();
  }

 private:
  // Sends `outgoing(r)` to each other rank r, and receives `incoming(r)` from it. Skips empty
  // tensors.
  template <typename Outgoing, typename Incoming>
  void start_messages(const std::string& key, Outgoing outgoing, Incoming incoming) {
    auto& group = *transfers_->group;
    const int64_t world_size = group.getSize();
    const int tag = tag_of(key);
    const auto start = [&](int64_t with, auto begin) {
      transfers_->start("rank " + rank_names_.of(with), key, begin);
    };
    for (int64_t distance = 1; distance < world_size; ++distance) {
      const int64_t to = (rank_ + distance) % world_size;
      const int64_t from = (rank_ - distance + world_size) % world_size;
      std::vector<at::Tensor> received{incoming(from)};
      if (received[0].numel() > 0)
        start(from, [&] { return group.recv(received, static_cast<int>(from), tag); });
      std::vector<at::Tensor> sent{outgoing(to)};
      if (sent[0].numel() > 0)
        start(to, [&] { return group.send(sent, static_cast<int>(to), tag); });
    }
  }

  at::Tensor keep(const at::Tensor& tensor) { return transfers_->tensors.emplace_back(tensor); }

  const int64_t rank_;
  const RankNames rank_names_;
  const bool by_messages_;                // sends and receives
  std::unique_ptr<Transfers> transfers_;  // until wait()
};

void ProcessGroupExchange::gather(const std::vector<Piece>& pieces) {
  WithoutSavedTensorHooks guard;
  std::vector<at::Tensor> fulls, shards;
  std::string keys;
  for (auto& [rows, key] : pieces) {
    transfers_->tensors.insert(transfers_->tensors.end(), rows.begin(), rows.end());
    if (by_messages_) {
      start_messages(
          key, [&](int64_t) { return rows[rank_]; }, [&](int64_t from) { return rows[from]; });
      continue;
    }
    // A gather moves bytes, and NCCL does not know each dtype, such as int16.
    const auto sent = [](const at::Tensor& tensor) {
      return is_gradient_dtype(tensor.scalar_type()) ? tensor : tensor.view(at::kByte);
    };
    if (const auto root = root_of(rows)) {
      std::vector<at::Tensor> row{sent(rows[*root])};
      transfers_->start("others", key, [&] {
        return transfers_->group->broadcast(row, rooted<c10d::BroadcastOptions>(*root));
      });
      continue;
    }
    const auto run = one_run(rows);
    if (run.numel() == 0) continue;
    fulls.push_back(sent(run));
    shards.push_back(sent(rows[rank_]));
    keys += (keys.empty() ? "" : ", ") + key;
  }
  if (!fulls.empty())
    transfers_->start("others", keys,
                      [&] { return all_gather(*transfers_->group, fulls, shards); });
}

void ProcessGroupExchange::reduce(const Rows& rows, const std::string& key) {
  if (by_messages_) {
    all_to_all(rows, key);
    return;
  }
  WithoutSavedTensorHooks guard;
  Rows& addends = addends_.emplace_back();
  const at::Tensor& own = rows[rank_];
  if (const auto root = root_of(rows)) {
    std::vector<at::Tensor> sum{keep(rows[*root])};
    addends.push_back(own);
    transfers_->start("others", key, [&] {
      return transfers_->group->reduce(sum, rooted<c10d::ReduceOptions>(*root));
    });
  } else {
    auto run = keep(one_run(rows));
    addends.push_back(keep(pooled_empty(own.sizes(), own.options())));
    if (run.numel() > 0)
      transfers_->start("others", key,
                        [&] { return reduce_scatter(*transfers_->group, addends.front(), run); });
  }
}

void ProcessGroupExchange::all_to_all(const Rows& rows, const std::string& key) {
  WithoutSavedTensorHooks guard;
  const at::Tensor& own = rows[rank_];
  if (by_messages_) {
    Rows& addends = addends_.emplace_back();
    for (auto& row : rows) {
      keep(row);
      addends.push_back(keep(row.is_same(own) ? own : pooled_empty(own.sizes(), own.options())));
    }
    start_messages(
        key, [&](int64_t to) { return rows[to]; }, [&](int64_t from) { return addends[from]; });
    return;
  }
  const auto ranks = static_cast<int64_t>(rows.size());
  const bool is_even =
      std::ranges::all_of(rows, [&](auto& row) { return row.numel() == rows.front().numel(); });
  const auto root = root_of(rows);
  auto sent = keep(is_even ? one_run(rows) : root ? rows[*root] : at::cat(rows));
  auto received = keep(pooled_empty({ranks * own.numel()}, own.options()));
  addends_.push_back(received.view({ranks, own.numel()}).unbind());
  std::vector<int64_t> sent_sizes, received_sizes(rows.size(), own.numel());
  for (auto& row : rows) sent_sizes.push_back(row.numel());
  transfers_->start("others", key, [&] {
    return zero3::all_to_all(*transfers_->group, received, sent, received_sizes, sent_sizes);
  });
}

}  // namespace

double seconds_waited() { return 1e-9 * static_cast<double>(nanoseconds_waited); }

std::string backend_name(const std::string& group_name, at::Device device) {
  return group_of(group_name)->getBackend(device.type())->getBackendName();
}

void drop_exchanges_of_destroyed_groups() { AbandonedTransfers::get().drop_of_destroyed_groups(); }

void check_exists(const std::string& group_name) { group_of(group_name); }

std::chrono::milliseconds timeout_of(const std::string& group_name) {
  const auto group = group_of(group_name);
  const auto options =
      group->getBackend(group->getDeviceTypes().front().type())->getBackendOptions();
  return options ? options->timeout : kBackendDefaultTimeout;  // a fake group has none
}

ProcessGroupChannel::ProcessGroupChannel(const std::string& group_name, int64_t rank,
                                         std::vector<std::string> rank_names, int64_t world_size,
                                         at::Device device, bool sends_to_itself)
    : Channel(group_name, rank, world_size,
              traits_of(backend_name(group_name, device), device.is_cpu(), true),
              RankNames(std::move(rank_names))),
      moves_nothing_(world_size == 1 && !sends_to_itself) {}

std::unique_ptr<Exchange> ProcessGroupChannel::exchange() const {
  if (moves_nothing_) {
    check_exists(name);
    return exchange_of_one();
  }
  return std::make_unique<ProcessGroupExchange>(*this);
}

}  // namespace zero3
