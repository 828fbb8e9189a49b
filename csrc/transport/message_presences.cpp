// Presences that ranks exchange in messages.
#include <ATen/ops/from_blob.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "support/memory.h"
#include "transport/channel.h"
#include "transport/presences.h"

namespace zero3 {
namespace {

// A stream on which a GPU does what the host waits for, instead of after all that was launched
// before; nullopt on a CPU.
std::optional<c10::Stream> side_stream(at::Device device) {
  if (device.is_cpu()) return std::nullopt;
  return c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
}

class MessagePresences : public PresenceGather {
 public:
  MessagePresences(const Channel& channel, at::Device device, const Presences& mine,
                   const std::string& key)
      : stream_(side_stream(device)), exchange_(channel.exchange()) {
    const c10::OptionalStreamGuard guard(stream_);
    const auto nbytes = static_cast<int64_t>(mine.size() * sizeof(Announced));
    rows_ = pooled_empty({channel.world_size, nbytes}, at::TensorOptions(at::kByte).device(device));
    auto* first = const_cast<Announced*>(mine.data());
    rows_[channel.rank].copy_(at::from_blob(first, {nbytes}, at::kByte));
    exchange_->gather({{rows_.unbind(), key}});
  }

  std::vector<Presences> finish() override {
    const c10::OptionalStreamGuard guard(stream_);
    exchange_->wait();
    std::vector<Presences> all;
    for (auto& row : rows_.cpu().unbind()) {
      const auto* first = static_cast<const Announced*>(row.const_data_ptr());
      all.emplace_back(first, first + row.numel() / static_cast<int64_t>(sizeof(Announced)));
    }
    return all;
  }

 private:
  const std::optional<c10::Stream> stream_;
  const std::unique_ptr<Exchange> exchange_;
  at::Tensor rows_;  // [world, bytes]
};

}  // namespace

std::unique_ptr<PresenceGather> gather_presences(const Channel& channel,
                                                 const std::vector<ParameterPtr>& parameters,
                                                 const Presences& mine, Occasion occasion) {
  const Parameter& first = *parameters.front();
  const std::string what = occasion == Occasion::kBackward ? "the gradients of a backward"
                                                           : "the gradients of defer_reduction";
  return std::make_unique<MessagePresences>(
      channel, first.device, mine,
      what + " from " + first.fqn + " on, " + std::to_string(parameters.size()));
}

}  // namespace zero3
