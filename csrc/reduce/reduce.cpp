#include "reduce/reduce.h"

#include <array>
#include <map>
#include <thread>

#include "parameter/registry.h"
#include "reduce/all_reduce.h"
#include "reduce/presence_check.h"
#include "support/autograd.h"
#include "support/error.h"
#include "support/heap.h"
#include "support/memory.h"
#include "support/profiler_range.h"
#include "support/signals.h"
#include "support/tensor_ops.h"
#include "support/user_state.h"
#include "transport/channel.h"
#include "transport/reduce_bucket.h"
#include "transport/transport.h"

namespace zero3 {
namespace {

Deliver deliver;
Interrupted interrupted;

struct Running {
  std::weak_ptr<Reduction> reduction;
  std::thread::id thread;
};
std::mutex running_mutex;
std::map<int, Running> running_reductions;  // by graph task

// Returns the numbers of the models of `parameters`, in order of appearance.
std::vector<int64_t> model_numbers_of(const std::vector<ParameterPtr>& parameters) {
  std::vector<int64_t> result;
  for (auto& parameter : parameters)
    if (std::ranges::find(result, parameter->model_number) == result.end())
      result.push_back(parameter->model_number);
  return result;
}

}  // namespace

void set_deliver(Deliver function) { deliver = std::move(function); }
void set_interrupted(Interrupted function) { interrupted = std::move(function); }

void reduce_deferred(const std::vector<ParameterPtr>& parameters) {
  c10::InferenceMode no_inference_mode(false);  // the user's hooks run in the modes of a backward
  c10::NoGradGuard no_grad;
  std::make_shared<Reduction>()->finish_deferred(parameters);
}

std::shared_ptr<Reduction> Reduction::current() {
  const int task = running_backward();
  ZERO3_CHECK(!handles_signals(),
              "a signal handler cannot run the backward of a sharded model, since other ranks do "
              "not: set a flag, and act between steps");
  ZERO3_CHECK(task != -1, "zero3::reduce_grad was called outside of a backward");
  std::lock_guard lock(running_mutex);
  auto reduction = running_reductions[task].reduction.lock();
  if (!reduction) {
    std::erase_if(running_reductions, [task](auto& item) {
      return item.first != task && item.second.reduction.expired();
    });
    reduction = std::make_shared<Reduction>();
    running_reductions[task] = {reduction, std::this_thread::get_id()};
    // The engine's task owns the reduction from here on.
    at_end_of_backward([reduction] { reduction->finish_backward(); });
  }
  return reduction;
}

std::vector<std::shared_ptr<Reduction>> Reduction::running_around() {
  std::vector<std::shared_ptr<Reduction>> result;
  std::lock_guard lock(running_mutex);
  for (auto& [task, running] : running_reductions) {
    // A backward inside of another began later. All threads so lock the inner one's mutex first.
    if (task >= running_backward()) break;
    // Those of other threads are not owned even for a moment: one that raises may end here then.
    if (running.thread != std::this_thread::get_id()) continue;
    if (auto reduction = running.reduction.lock()) result.push_back(std::move(reduction));
  }
  return result;
}

Reduction::~Reduction() {
  // After finish(), there are none. Otherwise the backward raised: the sums of its models'
  // parameters are incomplete, and must not leak into the next backward. Those of a model that is
  // only gathered are whole: no rank has added to them.
  auto incomplete = std::exchange(in_graph_, {});
  for (auto& parameter : arrived_) incomplete.insert(parameter->model_number);
  for (auto& check : presence_checks_)
    for (auto& parameter : check->mixed()) incomplete.insert(parameter->model_number);
  for (int64_t number : incomplete)
    for (auto& parameter : Registry::get().of_model(number)) parameter->drop_gradients();
  if (!delivered_.empty() && interrupted) interrupted(model_numbers_of(delivered_));
  forget_delivered();
}

void Reduction::add(const ParameterPtr& parameter, const at::Tensor& raw, bool owned) {
  parameter->check_gradient(raw);
  if (!parameter->is_wanted()) return;
  {
    WithoutUserModes guard;
    if (parameter->settings.detects_nonfinite) parameter->gradients.detect_nonfinite(raw);
    std::lock_guard lock(mutex_);
    add_locked(parameter, raw, owned);
  }
  deliver_early();
}

void Reduction::add_locked(const ParameterPtr& parameter, const at::Tensor& raw, bool owned) {
  const bool at_once = goes_at_once(*parameter);
  arrives(parameter);
  if (!parameter->transport->can.reduces_in_any_order) finish_presence_checks();
  const bool held = is_held(parameter);
  if (at_once && !held) {
    const auto selected = select_bucket(*parameter, raw.scalar_type());
    send(parameter, raw, selected.normalized_dtype, selected, owned);
    return;
  }
  parameter->gradients.add(raw, parameter->settings.gradient_dtypes, owned);
  if (parameter->is_reduced_now() && !held && parameter->gradients.pending_uses() == 0)
    send_accumulated(parameter);
}

void Reduction::arrives(const ParameterPtr& parameter) {
  if (parameter->device.is_cpu()) keep_heap();
  arrived_.push_back(parameter);
  if (parameter->is_reduced_now()) begin_presence_checks(*parameter);
  if (parameter->settings.delivers_early) {
    delivers_early_ = true;
    if (!parameter->gradients.is_foreseen()) unforeseen_.push_back(parameter);
  }
  parameter->gradients.arrived();
}

void Reduction::add_product(const ParameterPtr& parameter, const at::Tensor& left,
                            const at::Tensor& right) {
  if (!parameter->is_wanted()) return;
  const auto dtype = left.scalar_type();
  const auto selected = select_bucket(*parameter, dtype);
  const std::array sizes{left.size(0), right.size(1)};
  const bool may_be_held =
      !parameter->transport->can.reduces_in_any_order;  // then computed by itself
  const bool keeps_dtype = selected.normalized_dtype == dtype && selected.key.wire_dtype == dtype &&
                           !parameter->settings.detects_nonfinite &&
                           at::IntArrayRef(sizes) == at::IntArrayRef(parameter->sizes);
  if (keeps_dtype && !may_be_held) {
    const WithoutUserModes guard;
    std::unique_lock lock(mutex_);
    if (goes_at_once(*parameter)) {
      arrives(parameter);
      auto& bucket = bucket_for(parameter, selected.key);
      bucket.add_product(parameter, left, right);
      launch_if_full(bucket);
      lock.unlock();
      deliver_early();
      return;
    }
  }
  auto grad = empty_for(*parameter, sizes, left.options());
  tensor_ops::mm_out(grad, left, right);
  add(parameter, grad, /*owned=*/true);
}

void Reduction::deliver_early() {
  std::vector<ReducedGradient> early;
  {
    std::lock_guard lock(mutex_);
    if (!delivers_early_) return;
    const auto waits = [this](auto& result) {
      const auto& settings = result.parameter->settings;
      return !settings.delivers_early || settings.detects_nonfinite ||
             std::ranges::find(unforeseen_, result.parameter) != unforeseen_.end();
    };
    const auto rest = std::ranges::stable_partition(results_, waits);
    early.assign(rest.begin(), rest.end());
    results_.erase(rest.begin(), rest.end());
    for (auto& result : early) {
      result.parameter->gradients.is_delivered_early = true;
      delivered_.push_back(result.parameter);
    }
  }
  if (!early.empty() && deliver) deliver(early, Moment::kEarly, {});
}

void Reduction::forget_delivered() {
  for (auto& parameter : std::exchange(delivered_, {}))
    parameter->gradients.is_delivered_early = false;
}

bool Reduction::goes_at_once(const Parameter& parameter) const {
  return parameter.is_reduced_now() && parameter.gradients.awaits_one();
}

at::Tensor Reduction::empty_for(const Parameter& parameter, at::IntArrayRef sizes,
                                const at::TensorOptions& options) {
  if (!goes_at_once(parameter) || !parameter.is_wanted()) return pooled_empty(sizes, options);
  if (parameter.transport->can.empty_waits) {
    // There may be no room while other ranks wait for gradients that this rank lacks.
    WithoutUserModes guard;
    std::lock_guard lock(mutex_);
    if (has_sent_) finish_presence_checks();
  }
  return parameter.transport->empty(parameter, sizes, options);
}

Backward& Reduction::backward_of(const Parameter& parameter) {
  auto found = std::ranges::find_if(
      backwards_, [&](auto& begun) { return begun.first->joins(*parameter.transport); });
  if (found == backwards_.end())
    found = backwards_.insert(found, {parameter.transport, parameter.transport->begin_backward()});
  return *found->second;
}

void Reduction::send_accumulated(const ParameterPtr& parameter) {
  finish_presence_checks();  // which may widen its dtype
  const bool held = is_held(parameter);
  if (held)
    if (const auto dtype = dtype_on_all_ranks(parameter)) parameter->gradients.widen(*dtype);
  if (auto sum = parameter->gradients.take_sum())
    send(parameter, sum->grad, sum->grad.scalar_type(),
         select_bucket(*parameter, sum->arrived_dtype, /*is_normalized=*/true), /*owned=*/true);
  else if (held)
    send_zero(parameter);
}

void Reduction::send(const ParameterPtr& parameter, const at::Tensor& grad, at::ScalarType through,
                     const BucketSelection& selected, bool owned) {
  auto& bucket = bucket_for(parameter, selected.key);
  bucket.add(parameter, grad, through, selected.normalized_dtype, owned);
  launch_if_full(bucket);
}

ReduceBucket& Reduction::bucket_for(const ParameterPtr& parameter, const BucketKey& key) {
  // The first gradient need not wait for other ranks to begin, unless it shares a message.
  const auto nbytes = parameter->sent_chunk_bytes(key.wire_dtype);
  const bool in_any_order = parameter->transport->can.reduces_in_any_order;
  if (std::exchange(has_sent_, true) || nbytes < kWorthAMessage || !in_any_order)
    finish_presence_checks();
  auto& buckets = in_any_order && is_mixed(parameter) ? mixed_ : open_;
  auto bucket = std::ranges::find_if(buckets, [&](auto& other) { return key == other->key(); });
  if (&buckets == &open_ && bucket != open_.end() && !(*bucket)->has_room_for(*parameter)) {
    auto full = std::move(*bucket);
    open_.erase(bucket);
    launch(std::move(full));
    bucket = open_.end();
  }
  if (bucket == buckets.end()) {
    buckets.push_back(backward_of(*parameter).reduce_bucket(*parameter, key, &buckets == &mixed_));
    bucket = std::prev(buckets.end());
  }
  return **bucket;
}

void Reduction::launch_if_full(const ReduceBucket& bucket) {
  const auto place = std::ranges::find(open_, &bucket, &std::unique_ptr<ReduceBucket>::get);
  if (place == open_.end() || !bucket.is_full()) return;
  auto full = std::move(*place);
  open_.erase(place);
  launch(std::move(full));
}

void Reduction::launch(std::unique_ptr<ReduceBucket> bucket) {
  while (in_flight_.size() >= kMaxInFlight) finish_oldest();
  const ProfilerRange range([&] { return scope_name(bucket->collective(), "start"); });
  bucket->close();
  in_flight_.push_back(std::move(bucket));
}

void Reduction::finish_oldest() {
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
      results_.emplace_back(parameter, shards[i]);
  }
  auto parameters = bucket.parameters();
  in_flight_.erase(in_flight_.begin());
  // Ranks reach mixed parameters at different times: finish() all-reduces them.
  std::erase_if(parameters, [this](auto& parameter) { return is_mixed(parameter); });
  all_reduces_.start(std::move(parameters), results_);
}

void Reduction::finish_backward() {
  exchange({});
  std::vector<ParameterPtr> parameters;
  {
    std::lock_guard lock(mutex_);
    for (auto& parameter : arrived_) parameter->gradients.end_backward();
    auto of_some_rank = arrived_;
    for (auto& check : presence_checks_)
      of_some_rank.insert(of_some_rank.end(), check->mixed().begin(), check->mixed().end());
    // Finishes all parameters of their models: micro-batches may have accumulated without sync.
    for (int64_t number : model_numbers_of(of_some_rank))
      for (auto& parameter : Registry::get().of_model(number)) parameters.push_back(parameter);
    std::ranges::sort(parameters, {}, [](auto& parameter) { return parameter->order; });
    for (auto& parameter : parameters) {
      parameter->forget_after_forward();
      parameter->forget_quantized();
      if (parameter->settings.reshard_after_backward) parameter->gathered.reshard_retained();
    }
  }
  finish(parameters);
}

void Reduction::finish_deferred(const std::vector<ParameterPtr>& parameters) {
  {
    WithoutUserModes guard;
    std::lock_guard lock(mutex_);
    auto with_others = parameters;
    std::erase_if(with_others, [](auto& parameter) { return !parameter->is_reduced_over_ranks(); });
    for (auto& check : presence_checks_of(with_others, Occasion::kDeferred)) {
      check->finish();
      for (auto& [parameter, dtype] : check->sums()) {
        const auto options = at::TensorOptions(dtype).device(parameter->device);
        const auto zero = pooled_empty({}, options).zero_();
        if (!parameter->gradients.has_sum()) parameter->deposit(zero.expand(parameter->sizes));
        parameter->gradients.widen(dtype);
      }
    }
  }
  finish(parameters);
}

void Reduction::finish(const std::vector<ParameterPtr>& parameters) {
  const WithoutUserModes guard;
  const BelowAutograd below_autograd;
  std::unique_lock lock(mutex_);
  is_ending_ = true;
  finish_presence_checks();
  for (auto& parameter : parameters)
    if (parameter->is_reduced_now()) send_accumulated(parameter);
  std::ranges::sort(open_, {}, [](auto& bucket) { return bucket->lowest_order(); });
  while (!open_.empty()) {
    auto bucket = std::move(open_.front());
    open_.erase(open_.begin());
    launch(std::move(bucket));
  }
  while (!in_flight_.empty()) finish_oldest();
  if (mixed_first_) in_flight_.push_back(std::move(mixed_first_));
  for (auto& bucket : std::exchange(mixed_, {})) launch(std::move(bucket));
  while (!in_flight_.empty()) finish_oldest();
  std::vector<ParameterPtr> synced;
  std::ranges::copy_if(parameters, std::back_inserter(synced),
                       [](auto& parameter) { return parameter->is_reduced_now(); });
  all_reduces_.start(std::move(synced), results_);  // mixed ones, and those of earlier backwards
  all_reduces_.finish(results_);
  presence_checks_.clear();
  backwards_.clear();
  arrived_.clear();
  checked_.clear();
  in_graph_.clear();
  unforeseen_.clear();
  for (auto& result : results_) delivered_.push_back(result.parameter);
  lock.unlock();
  if (deliver)
    deliver(std::exchange(results_, {}), is_nested() ? Moment::kNestedEnd : Moment::kEnd,
            model_numbers_of(delivered_));
  forget_delivered();
}

}  // namespace zero3
