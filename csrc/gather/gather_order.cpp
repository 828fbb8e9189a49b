#include "gather/gather_order.h"

#include <algorithm>
#include <utility>

#include "support/autograd.h"
#include "support/signals.h"
#include "transport/transport.h"

namespace zero3 {

namespace {

// Returns the orders of the model of all `wanted`; null if there are several models, if what
// is gathered is made when it is gathered, or if the backward reads what its forward has published:
// only at its own gather is it known whether that is there still.
std::shared_ptr<GatherOrders> orders_of(const std::vector<Gatherable>& wanted) {
  std::shared_ptr<GatherOrders> orders;
  for (auto& [source, parameter] : wanted) {
    const auto its_orders = parameter ? parameter->gather_orders.lock() : nullptr;
    if (!its_orders || (orders && its_orders != orders)) return nullptr;
    if (in_backward() && source->transport->can.publishes) return nullptr;
    orders = its_orders;
  }
  return orders;
}

}  // namespace

bool GatherOrder::Request::is_for(const std::vector<Gatherable>& wanted,
                                  const std::vector<const Codec*>& their_codecs) const {
  return codecs == their_codecs &&
         std::ranges::equal(parameters, wanted,
                            [](auto& mine, auto& other) { return mine.lock() == other.parameter; });
}

void GatherOrder::begin() {
  end();
  is_running_ = true;
}

void GatherOrder::end() {
  drop_ahead();
  // A gather of a forward that raised may live on with the traceback.
  bytes_under_way_ = std::make_shared<int64_t>(0);
  if (!is_running_) return;
  is_running_ = false;
  // One without requests says nothing of the next: a rank may have run it alone.
  if (position_ > 0) requests_.resize(std::exchange(position_, 0));
  is_new_ = false;
}

void GatherOrder::drop_ahead() {
  ahead_.clear();
  bytes_ahead_ = 0;
}

std::unique_ptr<Gather> GatherOrder::take(const std::vector<Gatherable>& wanted,
                                          const std::vector<const Codec*>& codecs) {
  if (!is_new_ && !(position_ < requests_.size() && requests_[position_].is_for(wanted, codecs))) {
    requests_.resize(position_);
    is_new_ = true;
    drop_ahead();
  }
  if (is_new_) {
    auto& request = requests_.emplace_back(Request{{}, codecs, 0});
    for (auto& [source, parameter] : wanted) {
      request.parameters.push_back(parameter);
      request.nbytes += source->nbytes();
    }
  }
  const auto nbytes = requests_[position_++].nbytes;
  if (ahead_.empty()) return nullptr;
  auto gather = std::move(ahead_.front());
  ahead_.pop_front();
  bytes_ahead_ -= nbytes;
  if (gather->is_up_to_date()) return gather;
  drop_ahead();  // what has changed one shard may have changed others
  return nullptr;
}

std::shared_ptr<void> GatherOrder::under_way() const {
  const auto nbytes = requests_[position_ - 1].nbytes;
  *bytes_under_way_ += nbytes;
  return {nullptr, [all = bytes_under_way_, nbytes](void*) { *all -= nbytes; }};
}

void GatherOrder::start_next(int64_t nbytes) {
  while (!is_new_ && position_ + ahead_.size() < requests_.size()) {
    const auto& next = requests_[position_ + ahead_.size()];
    const auto now = bytes_ahead_ + *bytes_under_way_;
    if (now > 0 && now + next.nbytes > nbytes) return;
    std::vector<Gatherable> wanted;
    for (auto& each : next.parameters) {
      auto parameter = each.lock();
      if (!parameter || !parameter->may_be_gathered()) return;
      wanted.push_back({parameter->source, std::move(parameter)});
    }
    ahead_.push_back(std::make_unique<Gather>(std::move(wanted), next.codecs));
    bytes_ahead_ += next.nbytes;
  }
}

GatherOrder* GatherOrders::current() {
  if (!in_backward()) return forward_.is_running() ? &forward_ : nullptr;
  if (const int backward = running_backward(); backward != running_backward_) {
    running_backward_ = backward;
    forward_.end();
    backward_.begin();
  }
  return &backward_;
}

std::unique_ptr<Gather> request_gather(std::vector<Gatherable> wanted,
                                       std::vector<const Codec*> codecs) {
  codecs.resize(wanted.size());
  const auto orders = orders_of(wanted);
  // A handler of a signal runs on one rank alone: its request, which raises, is none of the order.
  auto* order = orders && !handles_signals() ? orders->current() : nullptr;
  if (order == nullptr) return std::make_unique<Gather>(std::move(wanted), std::move(codecs));
  auto gather = order->take(wanted, codecs);
  if (!gather) gather = std::make_unique<Gather>(std::move(wanted), std::move(codecs));
  gather->follow(order->under_way(), [orders] {
    if (auto* running = orders->current()) running->start_next(orders->bytes_ahead);
  });
  return gather;
}

}  // namespace zero3
