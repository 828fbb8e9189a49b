#include "features/hybrid/gathered_parts.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/strides.h>

#include <algorithm>
#include <utility>

#include "support/autograd.h"
#include "support/error.h"
#include "support/memory.h"
#include "support/signals.h"
#include "support/user_state.h"
#include "transport/messages.h"

namespace zero3 {
namespace {

// Makes the shard of `source` a source of its own, whose rows the replicas have.
SourcePtr shard_as_source(const Source& source, const std::shared_ptr<Channel>& replicas) {
  auto sizes = source.sizes_with_rows(source.shard_rows());
  const auto strides = c10::contiguous_strides(sizes);
  auto layout = RowLayout::chunked(sizes[0], replicas->world_size);
  auto result = std::make_shared<Source>(
      std::move(sizes), std::vector<int64_t>(strides.begin(), strides.end()), source.dtype,
      source.device, replicas->rank, std::move(layout));
  result->connect(std::make_shared<Messages>(replicas, replicas));
  return result;
}

}  // namespace

// A gather of some shards, which has started.
class GatheredShards {
 public:
  explicit GatheredShards(std::vector<ParameterPtr> parameters, std::vector<Gatherable> shards)
      : parameters_(parameters.begin(), parameters.end()), gather_(std::move(shards)) {}

  // Waits, and gives each parameter its shard.
  void finish() {
    std::vector<at::Tensor> shards(parameters_.size());  // undefined if it raises
    const auto give = [&] {
      for (size_t i = 0; i < shards.size(); ++i)
        if (const auto parameter = parameters_[i].lock())
          static_cast<GatheredParts&>(*parameter->source->parts).take(shards[i]);
    };
    try {
      shards = gather_.finish(/*fresh=*/true);
    } catch (...) {
      give();
      throw;
    }
    give();
  }

 private:
  std::vector<std::weak_ptr<Parameter>> parameters_;
  Gather gather_;
};

GatheredParts::GatheredParts(const Source& source, const std::shared_ptr<Channel>& replicas)
    : Parts(RowLayout::chunked(source.shard_rows(), replicas->world_size)),
      as_source_(shard_as_source(source, replicas)),
      substitutes_(*as_source_) {}

void GatheredParts::follow(const at::Tensor& dtensor, at::Tensor part) {
  as_source_->follow(dtensor, std::move(part));
  is_outdated_ = true;
}

uint64_t GatheredParts::version_of_shard() const {
  return in_backward() && shard_.defined() ? made_of_ : version();
}

void GatheredParts::gradient_arrives() {
  if (const auto model = model_.lock()) model->gradient_arrives();
}

void GatheredParts::encode(const Codec* codec) {
  if (const auto gathering = gathering_) gathering->finish();
  substitutes_.forget_encoded();
  codec_ = codec;
  is_outdated_ = true;
}

SourcePtr GatheredParts::source_now() {
  return codec_ ? substitutes_.encoded(*codec_) : as_source_;
}

at::Tensor GatheredParts::shard() {
  const bool is_usable = is_fresh() || (in_backward() && shard_.defined());
  if (!is_usable && !gathering_) {
    const auto model = model_.lock();
    ZERO3_CHECK(model, "the model of '", as_source_->fqn, "' was deleted");
    model->start();
  }
  if (const auto gathering = gathering_) gathering->finish();
  return shard_;
}

void GatheredParts::take(at::Tensor gathered) {
  gathering_.reset();
  if (!gathered.defined()) {
    is_outdated_ = true;
  } else if (codec_) {
    shard_ = pooled_empty(as_source_->sizes, gathered.options().dtype(as_source_->dtype));
    codec_->decode(shard_, gathered);
  } else {
    shard_ = std::move(gathered);
  }
  substitutes_.forget_encoded();
}

bool GatheredParts::differs() const {
  const auto& source = *as_source_;
  const int64_t first = layout.first_row_of(source.rank);
  const auto mine = shard_.narrow(0, first, layout.rows_of(source.rank));
  if (!codec_) return !at::equal(mine, source.shard.to(mine.scalar_type()));
  const auto now = at::empty_like(mine);
  codec_->decode(now, codec_->encode(source.shard));
  return !at::equal(mine, now);
}

void PartsOfModel::add(const ParameterPtr& parameter) {
  static_cast<GatheredParts&>(*parameter->source->parts).model_ = weak_from_this();
  parameters_.push_back(parameter);
}

std::vector<PartsOfModel::Member> PartsOfModel::alive() const {
  std::vector<Member> result;
  for (auto& weak : parameters_)
    if (auto parameter = weak.lock()) {
      auto* parts = static_cast<GatheredParts*>(parameter->source->parts.get());
      result.push_back({std::move(parameter), parts});
    }
  return result;
}

void PartsOfModel::begin_forward() {
  if (in_backward() || handles_signals()) return;
  WithoutUserModes guard;
  auto members = alive();
  const bool is_in_sync = std::ranges::all_of(members, [](auto& member) {
    const auto& settings = member.parameter->settings;
    return settings.requires_gradient_sync && !settings.deferred;
  });
  if (has_agreed_ && !is_in_sync) return;
  while (!members.empty()) {
    const auto channel = members.front().parameter->replicas;
    std::vector<Member> connected;
    std::erase_if(members, [&](auto& member) {
      const bool is_among = is_same(member.parameter->replicas.get(), channel.get());
      if (is_among) connected.push_back(member);
      return is_among;
    });
    agree(*channel, connected);
  }
  has_agreed_ = true;
}

void PartsOfModel::agree(const Channel& channel, const std::vector<Member>& members) {
  std::vector<uint8_t> changed;
  for (auto& [_, parts] : members) {
    if (const auto gathering = parts->gathering_) gathering->finish();
    changed.push_back(!parts->is_fresh() || parts->differs());
  }
  // If all parts have changed here, as after a step, nothing that others say matters. They may need
  // to know, but on a GPU this host must not wait for the device.
  const bool listens = std::ranges::find(changed, 0) != changed.end();
  const auto count = static_cast<int64_t>(changed.size());
  const auto& first = *members.front().parameter;
  auto rows = pooled_empty({channel.world_size, count},
                           at::TensorOptions(at::kByte).device(first.device()));
  if (listens)
    rows[channel.rank].copy_(at::from_blob(changed.data(), {count}, at::kByte));
  else
    rows[channel.rank].fill_(1);
  const auto exchange = channel.exchange();
  exchange->gather({{rows.unbind(), "changes of '" + first.fqn() + "' and " +
                                        std::to_string(count - 1) + " more"}});
  exchange->wait();
  if (!listens) {
    for (auto& member : members) member.parts->is_outdated_ = true;
    return;
  }
  rows = rows.cpu();
  const auto* of_all = rows.const_data_ptr<uint8_t>();
  for (int64_t i = 0; i < rows.numel(); ++i)
    if (of_all[i]) members[i % count].parts->is_outdated_ = true;
}

void PartsOfModel::start() {
  std::vector<ParameterPtr> parameters;
  std::vector<Gatherable> shards;
  int64_t nbytes = 0;
  const auto start_bucket = [&] {
    if (shards.empty()) return;
    auto gathering = std::make_shared<GatheredShards>(parameters, std::exchange(shards, {}));
    for (auto& parameter : std::exchange(parameters, {})) {
      auto& parts = static_cast<GatheredParts&>(*parameter->source->parts);
      parts.made_of_ = parts.version();
      parts.is_outdated_ = false;
      parts.gathering_ = gathering;
    }
    nbytes = 0;
  };
  for (auto& [parameter, parts] : alive()) {
    if (const auto gathering = parts->gathering_) gathering->finish();  // a forward raised
    if (parts->is_fresh()) continue;
    parts->shard_.reset();
    parameter->source->shard.reset();
    parameters.push_back(parameter);
    shards.push_back({parts->source_now(), nullptr});
    nbytes += parameter->source->nbytes();  // as of a bucket of gradients
    if (nbytes >= parameter->settings.bucket_bytes) start_bucket();
  }
  start_bucket();
}

}  // namespace zero3
