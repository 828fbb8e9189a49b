#include "transport/shared/shared_presences.h"

#include <bit>

#include "parameter/registry.h"
#include "support/error.h"

namespace zero3 {
namespace {

// Topic of an announcement: model, occasion and number of parameters, in one word.
uint64_t topic_of(const std::vector<ParameterPtr>& parameters, Occasion occasion) {
  return parameters.front()->presence_id << 32 | parameters.size() << 1 |
         static_cast<uint64_t>(occasion);
}

uint64_t presence_id_in(uint64_t topic) { return topic >> 32; }

std::string text_of(uint64_t topic) {
  const bool is_backward = static_cast<Occasion>(topic & 1) == Occasion::kBackward;
  return std::to_string((topic & 0xffffffff) >> 1) + " parameters " +
         (is_backward ? "in a backward" : "at the end of defer_reduction");
}

}  // namespace

SharedPresences::SharedPresences(const std::vector<ParameterPtr>& parameters, uint64_t backward,
                                 const Presences& mine, Occasion occasion)
    : parameters_(parameters),
      one_host_(SharedMemory::of(*parameters.front()).one_host()),
      topic_(topic_of(parameters, occasion)) {
  // Ends the previous round, of an enclosing backward or another model, if it has not ended.
  if (one_host_->latest_presences != nullptr) one_host_->latest_presences->read();
  one_host_->waiter->wait([&]() -> std::optional<RankWaiter::Missing> {
    one_host_->mailbox->poll_everywhere();
    auto readers = one_host_->announcements.readers();
    if (readers.empty()) return std::nullopt;
    return {{std::move(readers), "it has begun a backward, and sent one gradient or none"}};
  });
  for (size_t i = 0; i < mine.size(); ++i)
    progress(i)[one_host_->waiter->rank()].presence.store(std::bit_cast<uint32_t>(mine[i]),
                                                          std::memory_order_relaxed);
  round_ = one_host_->announcements.next(backward);
  one_host_->announcements.announce(round_, topic_);
  one_host_->waiter->notify();
  one_host_->latest_presences = this;
}

SharedPresences::~SharedPresences() {
  if (one_host_->latest_presences == this) one_host_->latest_presences = nullptr;
  if (all_.empty()) acknowledge();  // this rank will never read the announcements
}

void SharedPresences::read() {
  if (!all_.empty()) return;
  const auto& first = parameters_.front()->fqn();
  one_host_->waiter->wait([&]() -> std::optional<RankWaiter::Missing> {
    one_host_->mailbox->poll_everywhere();
    auto unannounced = one_host_->announcements.unannounced(round_);
    if (unannounced.empty()) return std::nullopt;
    const auto gone = one_host_->announcements.ranks_gone(round_);
    ZERO3_CHECK(
        gone.empty(), one_host_->waiter->name_of_rank(gone.front()),
        " has gone on without a backward of '", first,
        "' and the parameters after it: it has raised there, that rank does not use them, or "
        "its forwards gather more often than here, as eager ones do beside compiled ones. "
        "All ranks must run the same forwards and backwards");
    return {
        {std::move(unannounced), "it has not begun a backward of the model of '" + first + "'"}};
  });
  for (int64_t rank = 0; rank < one_host_->waiter->world_size(); ++rank) check_topic_of(rank);
  for (int64_t rank = 0; rank < one_host_->waiter->world_size(); ++rank) {
    auto& presences = all_.emplace_back();
    for (size_t i = 0; i < parameters_.size(); ++i)
      presences.push_back(
          std::bit_cast<Presence>(progress(i)[rank].presence.load(std::memory_order_relaxed)));
  }
  acknowledge();
}

void SharedPresences::check_topic_of(int64_t rank) const {
  const auto topic = one_host_->announcements.topic_of(rank);
  if (topic == topic_) return;
  const auto& first = *parameters_.front();
  const auto& waiter = *one_host_->waiter;
  const auto here = waiter.name_of_rank(waiter.rank()), there = waiter.name_of_rank(rank);
  if (presence_id_in(topic) == first.presence_id)
    throw_error("ranks do not reduce the same gradients of the model of '" + first.fqn() +
                "': those of " + text_of(topic_) + " on " + here + ", and of " + text_of(topic) +
                " on " + there + ". All ranks must do the same");
  std::string theirs = "another";
  for (int64_t model_number : Registry::get().live_model_numbers())
    for (auto& parameter : Registry::get().of_model(model_number))
      if (theirs == "another" && parameter->presence_id == presence_id_in(topic) &&
          parameter->transport()->joins(*first.transport()))
        theirs = "that of '" + parameter->fqn() + "'";
  throw_error("ranks come to the models of one backward in other orders: to that of '" +
              first.fqn() + "' on " + here + ", and to " + theirs + " on " + there +
              ". Call backward() for each model by itself, in one order on all ranks");
}

void SharedPresences::acknowledge() {
  one_host_->announcements.acknowledge(round_);
  one_host_->waiter->notify();
}

Progress* SharedPresences::progress(size_t i) const {
  return static_cast<Progress*>(SharedMemory::of(*parameters_[i]).progress().data_ptr());
}

}  // namespace zero3
