// Presences that ranks exchange in messages.
#include <ATen/ops/from_blob.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <mutex>
#include <unordered_map>
#include <utility>

#include "support/memory.h"
#include "transport/channel.h"
#include "transport/presences.h"

namespace zero3 {
namespace {

// Returns a stream for the exchange that the host waits for, so that a GPU does not first run all
// kernels that were launched before; nullopt on a CPU.
std::optional<c10::Stream> side_stream(at::Device device) {
  if (device.is_cpu()) return std::nullopt;
  static std::mutex mutex;
  static auto& streams = *new std::unordered_map<at::Device, c10::Stream>;
  std::lock_guard lock(mutex);
  auto found = streams.find(device);
  if (found == streams.end()) {
    const c10::impl::VirtualGuardImpl of_device(device.type());
    found = streams.emplace(device, of_device.getStreamFromGlobalPool(device)).first;
  }
  return found->second;
}

class MessagePresences : public PresenceGather {
 public:
  MessagePresences(const Channel& channel, at::Device device, const Presences& mine,
                   const std::string& key)
      : stream_(side_stream(device)), exchange_(channel.exchange()) {
    const c10::OptionalStreamGuard guard(stream_);
    const auto nbytes = static_cast<int64_t>(mine.size() * sizeof(Presence));
    rows_ = pooled_empty({channel.world_size, nbytes}, at::TensorOptions(at::kByte).device(device));
    auto* first = const_cast<Presence*>(mine.data());
    rows_[channel.rank].copy_(at::from_blob(first, {nbytes}, at::kByte));
    exchange_->gather({{rows_.unbind(), key}});
  }

  // The side stream must not reuse the memory of rows that a dropped exchange still writes.
  ~MessagePresences() override {
    if (!exchange_ || !stream_) return;
    const c10::OptionalStreamGuard guard(stream_);
    try {
      exchange_->wait();  // on a GPU, the stream and not the host
    } catch (const std::exception&) {
      // The process group is broken.
    }
  }

  std::vector<Presences> finish() override {
    const c10::OptionalStreamGuard guard(stream_);
    std::exchange(exchange_, nullptr)->wait();
    std::vector<Presences> all;
    for (auto& row : rows_.cpu().unbind()) {
      const auto* first = static_cast<const Presence*>(row.const_data_ptr());
      all.emplace_back(first, first + row.numel() / static_cast<int64_t>(sizeof(Presence)));
    }
    return all;
  }

 private:
  const std::optional<c10::Stream> stream_;
  std::unique_ptr<Exchange> exchange_;  // until finish()
  at::Tensor rows_;                     // [world, bytes]
};

}  // namespace

std::unique_ptr<PresenceGather> gather_presences(const Channel& channel,
                                                 const std::vector<ParameterPtr>& parameters,
                                                 const Presences& mine, Occasion occasion) {
  const Parameter& first = *parameters.front();
  const std::string what = occasion == Occasion::kBackward ? "the gradients of a backward"
                                                           : "the gradients of defer_reduction";
  return std::make_unique<MessagePresences>(
      channel, first.device(), mine,
      what + " from " + first.fqn() + " on, " + std::to_string(parameters.size()));
}

}  // namespace zero3
