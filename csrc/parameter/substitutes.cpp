#include "parameter/substitutes.h"

#include <algorithm>

#include "support/autograd.h"
#include "support/memory.h"
#include "support/shard_reads.h"

namespace zero3 {

void Substitutes::shard_after_forward(const at::Tensor& full) {
  auto& there = *after_forward;
  there.fqn = own_.fqn;
  there.shard =
      pooled_copy(full.narrow(0, there.layout.first_row_of(there.rank), there.shard_rows()));
}

void Substitutes::forget_after_forward() {
  if (after_forward) after_forward->shard.reset();
}

SourcePtr Substitutes::encoded(const Codec& codec) {
  auto found = std::ranges::find(encoded_, &codec, &Encoded::codec);
  if (found == encoded_.end()) {
    const auto row_bytes = codec.row_bytes(own_.row_numel());
    auto bytes = std::make_shared<Source>(std::vector{own_.rows(), row_bytes},
                                          std::vector<int64_t>{row_bytes, 1}, at::kByte,
                                          own_.device, own_.rank, own_.layout);
    bytes->encoding = " " + codec.text;
    bytes->connect(transport ? transport : own_.transport);
    found = encoded_.insert(encoded_.end(), {&codec, std::move(bytes), 0});
  }
  auto& [_, bytes, version] = *found;
  bytes->fqn = own_.fqn;
  if (!in_backward() || !bytes->shard.defined() || version != own_.version_to_gather()) {
    bytes->shard = codec.encode(own_.shard);
    finish_reading(own_.shard);
    version = own_.version_to_gather();
  }
  return bytes;
}

void Substitutes::forget_encoded() {
  for (auto& each : encoded_) each.source->shard.reset();
}

}  // namespace zero3
