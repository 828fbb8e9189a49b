#include "roll_call.h"

#include <ATen/ops/empty.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <cstring>

#include "autograd.h"
#include "error.h"
#include "exchange.h"
#include "publish.h"

namespace zero3 {
namespace {

// By messages.
class SentRoll : public Roll {
 public:
  SentRoll(const std::string& group_name, int64_t rank, int64_t world_size, const Presences& mine,
           const std::string& key)
      : exchange_({group_name, at::kCPU}, rank),
        rows_(at::empty({world_size, static_cast<int64_t>(mine.size())}, at::kByte)) {
    std::memcpy(rows_[rank].mutable_data_ptr(), mine.data(), mine.size());
    exchange_.gather({{rows_, key}});
  }

  std::vector<Presences> finish() override {
    exchange_.wait();
    std::vector<Presences> lines;
    for (auto& row : rows_.unbind()) {
      const auto* first = static_cast<const Presence*>(row.const_data_ptr());
      lines.emplace_back(first, first + row.numel());
    }
    return lines;
  }

 private:
  Exchange exchange_;
  at::Tensor rows_;  // [world, parameters]
};

// In memory that they share.
class PostedRoll : public Roll {
 public:
  PostedRoll(const std::vector<ParameterPtr>& parameters, uint64_t backward, const Presences& mine)
      : parameters_(parameters), one_host_(parameters.front()->shared->one_host()) {
    // One inside of another backward, or of a second model, that this rank has not heard yet.
    if (one_host_->latest_roll != nullptr) one_host_->latest_roll->hear();
    one_host_->host->wait([&]() -> std::optional<Host::Missing> {
      one_host_->mailbox->poll_everywhere();
      auto readers = one_host_->calls.readers();
      if (readers.empty()) return std::nullopt;
      return {{std::move(readers), "it has begun a backward, and sent one gradient or none"}};
    });
    for (size_t i = 0; i < mine.size(); ++i)
      progress(i)[one_host_->host->rank()].presence.store(static_cast<uint8_t>(mine[i]),
                                                          std::memory_order_relaxed);
    call_ = one_host_->calls.next(backward);
    one_host_->calls.say(call_, parameters_.front()->model);
    one_host_->host->ring();
    one_host_->latest_roll = this;
  }

  ~PostedRoll() override {
    if (one_host_->latest_roll == this) one_host_->latest_roll = nullptr;
    if (lines_.empty()) forget();  // it never will read them
  }

  std::vector<Presences> finish() override {
    hear();
    return lines_;
  }

  void hear() override {
    if (!lines_.empty()) return;
    const auto& first = parameters_.front()->fqn;
    one_host_->host->wait([&]() -> std::optional<Host::Missing> {
      one_host_->mailbox->poll_everywhere();
      auto silent = one_host_->calls.silent(call_);
      if (silent.empty()) return std::nullopt;
      const auto gone = one_host_->calls.gone(call_);
      ZERO3_CHECK(gone.empty(), "rank ", gone.front(), " has gone on without a backward of '",
                  first,
                  "' and the parameters after it: it has raised there, or that rank does not use "
                  "them. All ranks must run the same forwards and backwards");
      return {{std::move(silent), "it has not begun a backward of the model of '" + first + "'"}};
    });
    for (int64_t rank = 0; rank < one_host_->host->world_size(); ++rank) check_model_of(rank);
    for (int64_t rank = 0; rank < one_host_->host->world_size(); ++rank) {
      auto& line = lines_.emplace_back();
      for (size_t i = 0; i < parameters_.size(); ++i)
        line.push_back(
            static_cast<Presence>(progress(i)[rank].presence.load(std::memory_order_relaxed)));
    }
    forget();
  }

 private:
  void check_model_of(int64_t rank) const {
    const auto model = one_host_->calls.model_of(rank);
    if (model == parameters_.front()->model) return;
    std::string theirs = "another";
    for (int64_t root : Registry::get().live_roots())
      for (auto& parameter : Registry::get().of_root(root))
        if (parameter->shared && parameter->shared->one_host() == one_host_ &&
            parameter->model == model && theirs == "another")
          theirs = "that of '" + parameter->fqn + "'";
    throw_error("ranks come to the models of one backward in other orders: to that of '" +
                parameters_.front()->fqn + "' on rank " + std::to_string(one_host_->host->rank()) +
                ", and to " + theirs + " on rank " + std::to_string(rank) +
                ". Call backward() for each model by itself, in one order on all ranks");
  }

  void forget() {
    one_host_->calls.hear(call_);
    one_host_->host->ring();
  }

  Progress* progress(size_t i) const {
    return static_cast<Progress*>(parameters_[i]->shared->progress().data_ptr());
  }

  const std::vector<ParameterPtr> parameters_;
  const std::shared_ptr<OneHost> one_host_;
  uint64_t call_ = 0;
  std::vector<Presences> lines_;
};

Presence presence_of(Parameter& parameter) {
  if (!parameter.placeholder.requires_grad()) return Presence::kFrozen;
  if (!parameter.requires_gradient_sync || parameter.deferred) return Presence::kWithheld;
  if (is_in_graph(parameter.placeholder) && is_wanted(parameter)) return Presence::kGradient;
  return parameter.has_sum() ? Presence::kSum : Presence::kNothing;
}

// Of two ranks, or sets of them.
Presence combine(Presence one, Presence other) {
  if (one == other) return one;
  const auto may_be_mixed = [](Presence presence) {
    return presence == Presence::kNothing || presence == Presence::kGradient ||
           presence == Presence::kSum || presence == Presence::kGradients;
  };
  if (may_be_mixed(one) && may_be_mixed(other)) return Presence::kGradients;
  const auto has_none = [](Presence presence) {
    return presence == Presence::kNothing || presence == Presence::kFrozen;
  };
  return has_none(one) && has_none(other) ? Presence::kFrozen : Presence::kConflict;
}

Presences combine(const std::vector<Presences>& lines) {
  Presences result = lines.front();
  for (auto& line : lines)
    for (size_t i = 0; i < result.size(); ++i) result[i] = combine(result[i], line[i]);
  return result;
}

const char* name_of(Presence presence) {
  switch (presence) {
    case Presence::kGradient:
      return "has a gradient";
    case Presence::kSum:
      return "has one of earlier backwards";
    case Presence::kFrozen:
      return "is frozen (requires_grad=False)";
    case Presence::kWithheld:
      return "is not reduced now (set_requires_gradient_sync(False), or defer_reduction)";
    default:
      return "has no gradient";
  }
}

// "'fqn' has a gradient on rank 0, 2 and is frozen on rank 1"
std::string describe(const std::string& fqn, const std::vector<Presences>& lines, size_t i) {
  std::string text = "'" + fqn + "'";
  for (auto presence : {Presence::kGradient, Presence::kSum, Presence::kNothing, Presence::kFrozen,
                        Presence::kWithheld}) {
    std::string ranks;
    for (size_t rank = 0; rank < lines.size(); ++rank)
      if (lines[rank][i] == presence) ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
    if (ranks.empty()) continue;
    text += std::string(text.back() == '\'' ? " " : ", ") + name_of(presence) + " on rank " + ranks;
  }
  return text;
}

}  // namespace

RollCall::RollCall(std::vector<ParameterPtr> parameters, uint64_t backward)
    : parameters_(std::move(parameters)) {
  RECORD_USER_SCOPE(scope_name("roll_call start", parameters_));
  for (auto& parameter : parameters_) mine_.push_back(presence_of(*parameter));
  const Parameter& first = *parameters_.front();
  if (first.shared)
    roll_ = std::make_unique<PostedRoll>(parameters_, backward, mine_);
  else
    roll_ = std::make_unique<SentRoll>(first.reduce_group_name, first.rank, first.world_size, mine_,
                                       "the gradients of a backward from " + first.fqn);
}

void RollCall::finish() {
  RECORD_USER_SCOPE(scope_name("roll_call wait", parameters_));
  const Parameter& first = *parameters_.front();
  const auto lines = std::exchange(roll_, nullptr)->finish();
  auto all = combine(lines);
  if (first.is_replicated())
    all = combine(SentRoll(first.replicate_group_name, first.replica, first.replicas, all,
                           "the gradients of a backward of replicas from " + first.fqn)
                      .finish());
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto& parameter = parameters_[i];
    if (all[i] != Presence::kGradients && all[i] != Presence::kConflict) continue;
    const auto has_none = [i](const Presences& line) { return line[i] == Presence::kNothing; };
    const bool is_strict = all[i] == Presence::kGradients &&
                           parameter->requires_gradient_on_all_ranks &&
                           (parameter->is_replicated() || std::ranges::any_of(lines, has_none));
    ZERO3_CHECK(
        all[i] != Presence::kConflict && !is_strict,
        "ranks disagree on a gradient: ", describe(parameter->fqn, lines, i),
        first.is_replicated() ? " (of those with other shards; replicas may differ too)" : "",
        is_strict ? "; set_requires_gradient_on_all_ranks(False) lets it count as zero there"
                  : "; let all ranks do the same");
    mixed_.push_back(parameter);
    if (mine_[i] == Presence::kNothing) missing_.push_back(parameter);
  }
}

bool RollCall::is_mixed(const ParameterPtr& parameter) const {
  return std::ranges::find(mixed_, parameter) != mixed_.end();
}

}  // namespace zero3
