#include "reduce/bucket_queue.h"

#include <algorithm>
#include <utility>

#include "reduce/begun_backwards.h"
#include "reduce/delivery.h"
#include "reduce/presence_checks.h"
#include "support/error.h"
#include "support/profiler_range.h"

namespace zero3 {

ReduceBucket& BucketQueue::open_for(const ParameterPtr& parameter, const BucketKey& key) {
  const bool is_mixed =
      parameter->transport()->can.reduces_in_any_order && presence_checks_.is_mixed(parameter);
  auto& buckets = is_mixed ? mixed_ : open_;
  auto bucket = std::ranges::find_if(buckets, [&](auto& other) { return key == other->key(); });
  if (!is_mixed && bucket != open_.end() && !(*bucket)->has_room_for(*parameter)) {
    launch_open(bucket);
    bucket = open_.end();
  }
  if (bucket == buckets.end()) {
    buckets.push_back(
        backwards_.of(*parameter).reduce_bucket(*parameter, key, /*in_pieces=*/is_mixed));
    bucket = std::prev(buckets.end());
  }
  return **bucket;
}

void BucketQueue::launch_if_full(const ReduceBucket& bucket) {
  const auto place = std::ranges::find(open_, &bucket, &std::unique_ptr<ReduceBucket>::get);
  if (place != open_.end() && bucket.is_full()) launch_open(place);
}

void BucketQueue::set_aside_first_if_mixed() {
  for (auto* buckets : {&open_, &in_flight_}) {
    const auto bucket = std::ranges::find_if(*buckets, [&](auto& other) {
      return presence_checks_.is_mixed(other->parameters().front());
    });
    if (bucket == buckets->end()) continue;
    ZERO3_CHECK(!mixed_first_, "two gradients were sent before ranks had told what they bring");
    if (buckets == &open_) (*bucket)->close();
    mixed_first_ = std::move(*bucket);
    buckets->erase(bucket);
  }
}

void BucketQueue::finish(std::vector<ParameterPtr> parameters) {
  std::ranges::sort(open_, {}, [](auto& bucket) { return bucket->lowest_order(); });
  while (!open_.empty()) launch_open(open_.begin());
  while (!in_flight_.empty()) finish_oldest();
  if (mixed_first_) in_flight_.push_back(std::move(mixed_first_));
  for (auto& bucket : std::exchange(mixed_, {})) launch(std::move(bucket));
  while (!in_flight_.empty()) finish_oldest();
  // Shards of mixed gradients, and of earlier backwards.
  replica_sums_.start(std::move(parameters), delivery_.results());
  replica_sums_.finish(delivery_.results());
}

void BucketQueue::launch_open(Buckets::iterator place) {
  auto bucket = std::move(*place);
  open_.erase(place);
  launch(std::move(bucket));
}

void BucketQueue::launch(std::unique_ptr<ReduceBucket> bucket) {
  while (in_flight_.size() >= kMaxInFlight) finish_oldest();
  const ProfilerRange range([&] { return scope_name(bucket->collective(), "start"); });
  bucket->close();
  in_flight_.push_back(std::move(bucket));
}

void BucketQueue::finish_oldest() {
  const auto& bucket = *in_flight_.front();
  std::vector<at::Tensor> shards;
  {
    const ProfilerRange range([&] { return scope_name(bucket.collective(), "wait"); });
    shards = in_flight_.front()->finish();
  }
  for (size_t i = 0; i < shards.size(); ++i) {
    const auto& parameter = bucket.parameters()[i];
    if (parameter->replicas)
      parameter->gradients.add_partial({shards[i], bucket.wire_dtype(), bucket.shard_dtypes()[i],
                                        bucket.divisor(), bucket.divisor_over_shards()});
    else
      delivery_.results().emplace_back(parameter, shards[i]);
  }
  auto parameters = bucket.parameters();
  in_flight_.erase(in_flight_.begin());
  // Ranks reach mixed parameters at different times: finish() all-reduces them.
  std::erase_if(parameters, [&](auto& parameter) { return presence_checks_.is_mixed(parameter); });
  replica_sums_.start(std::move(parameters), delivery_.results());
}

}  // namespace zero3
