// Gathers of ranks that share memory: each rank publishes its rows of a copy.
#include <algorithm>

#include "support/autograd.h"
#include "support/error.h"
#include "support/memory.h"
#include "transport/gather_bucket.h"
#include "transport/shared/shared_memory.h"

namespace zero3 {
namespace {

class SharedGather : public GatherBucket {
 public:
  using GatherBucket::GatherBucket;
  ~SharedGather() override;

  bool ranks_meet() const override;
  // Publishes this rank's rows. A backward publishes only if its forward's copy is stale.
  void start() override;
  void snapshot() override;
  bool is_lost() const override { return lost() < pins_.size(); }
  std::vector<at::Tensor> finish(bool fresh) override;

 private:
  // The shard of a source that is published.
  struct Publication {
    at::Tensor shard;
    uint64_t version;
    bool has_changed = false;  // gathered again for that reason alone
  };

  OneHost& one_host() const { return *SharedMemory::of(*sources_.front()).one_host(); }
  // Index of the first source under way whose copy has no place any more; else their number.
  size_t lost() const;
  // Starts as many sources as there is room for.
  void start_some(bool at_least_one);
  void publish_where_possible(bool waits);
  std::optional<RankWaiter::Missing> missing();
  // Why this rank gathers source i again while others may not, if it is for a change.
  std::string why_again(size_t i) const;

  std::vector<Publication> publications_;  // one for each source
  bool in_backward_ = false;
  bool waits_for_room_ = false;
  size_t started_ = 0;
  size_t finished_ = 0;
  std::vector<Ring::Pin> pins_;  // turns of the sources under way
};

SharedGather::~SharedGather() {
  if (waits_for_room_) --one_host().waiting_for_room;
}

bool SharedGather::ranks_meet() const {
  return !in_backward() || std::ranges::any_of(sources_, [](auto& source) {
    return source->transport->can.ranks_meet_in_backward ||
           SharedMemory::of(*source).is_stale(*source);
  });
}

void SharedGather::start() {
  in_backward_ = in_backward();
  for (auto& source : sources_)
    publications_.push_back({source->shard, source->version_to_gather()});
  one_host().waiter->begin_anew();
  if (!in_backward_) one_host().backwards.count_gather();  // now, whenever there is room
  if (one_host().waiting_for_room == 0) start_some(/*at_least_one=*/false);
  waits_for_room_ = started_ < sources_.size();
  if (waits_for_room_) ++one_host().waiting_for_room;
  record([this] { return collective(); });
}

void SharedGather::snapshot() {
  for (size_t i = 0; i < sources_.size(); ++i) {
    const auto& source = *sources_[i];
    auto& shard = publications_[i].shard;
    if (i >= started_ || !SharedMemory::of(source).gather_words.is_published())
      shard = shard.to(source.dtype, /*non_blocking=*/false, /*copy=*/true);
  }
}

std::vector<at::Tensor> SharedGather::finish(bool fresh) {
  ZERO3_CHECK(!is_lost(), "'", sources_[lost()]->fqn,
              "' was gathered, and waited for after others that were gathered later");
  std::vector<at::Tensor> fulls;
  while (finished_ < sources_.size()) {
    // A pinned turn in the way now belongs to a caller that has raised, and will not read it, or to
    // a gather that started ahead, which will start again.
    start_some(/*at_least_one=*/started_ == finished_);
    one_host().waiter->wait([this] { return missing(); });
    for (; finished_ < started_; ++finished_) {
      auto& source = *sources_[finished_];
      auto full = SharedMemory::of(source).view(source);
      if (fresh) full = pooled_copy(full);
      fulls.push_back(full);
    }
    pins_.clear();
  }
  return fulls;
}

size_t SharedGather::lost() const {
  size_t i = 0;
  while (i < pins_.size() && !pins_[i].has_failed() && !SharedMemory::of(*sources_[i]).is_gone())
    ++i;
  return i;
}

void SharedGather::start_some(bool at_least_one) {
  bool arrived = false;
  for (; started_ < sources_.size(); ++started_, at_least_one = false) {
    auto& source = *sources_[started_];
    auto& shared = SharedMemory::of(source);
    if (!in_backward_ || shared.is_stale(source)) {
      publications_[started_].has_changed = in_backward_ && shared.has_changed(source);
      if (!shared.arrive(source, publications_[started_].version, at_least_one)) break;
      arrived = true;
    }
    pins_.push_back(shared.pin());
  }
  if (arrived) one_host().waiter->notify();
  publish_where_possible(/*waits=*/false);
}

void SharedGather::publish_where_possible(bool waits) {
  bool published = false;
  for (size_t i = finished_; i < started_; ++i) {
    auto& source = *sources_[i];
    auto& shared = SharedMemory::of(source);
    const auto& words = shared.gather_words;
    if (words.is_published() || !words.readers().empty()) continue;
    if (!words.is_at_one_place()) {
      ZERO3_CHECK(!waits, "ranks have gathered different things before '", source.fqn,
                  "': something has raised on some of them, or they do not run the same. All ranks "
                  "must run the same forwards and backwards; start them again");
      continue;
    }
    shared.publish(source, publications_[i].shard);
    published = true;
  }
  if (published) one_host().waiter->notify();
}

std::string SharedGather::why_again(size_t i) const {
  if (!publications_[i].has_changed) return "";
  const auto& waiter = *one_host().waiter;
  return ", which has changed on " + waiter.name_of_rank(waiter.rank()) +
         " since its forward: if on no other, change parameters on all ranks, or after backward()";
}

std::optional<RankWaiter::Missing> SharedGather::missing() {
  publish_where_possible(/*waits=*/true);
  one_host().mailbox->poll_everywhere();  // others may wait for it
  for (size_t i = finished_; i < started_; ++i) {
    const auto& words = SharedMemory::of(*sources_[i]).gather_words;
    const auto& fqn = sources_[i]->fqn;
    if (!words.is_published())
      return {{words.readers(), "it has not begun to gather '" + fqn + "'" + why_again(i)}};
    if (auto writers = words.writers(); !writers.empty())
      return {{std::move(writers), "it has not published its rows of '" + fqn + "'"}};
  }
  return std::nullopt;
}

}  // namespace

std::unique_ptr<GatherBucket> SharedMemory::gather_bucket(std::vector<SourcePtr> sources) {
  return std::make_unique<SharedGather>(std::move(sources));
}

}  // namespace zero3
