#include "reduce/reduce.h"

#include <algorithm>
#include <array>
#include <map>
#include <thread>
#include <utility>

#include "parameter/registry.h"
#include "support/autograd.h"
#include "support/error.h"
#include "support/heap.h"
#include "support/memory.h"
#include "support/signals.h"
#include "support/tensor_ops.h"
#include "support/user_state.h"
#include "transport/channel.h"
#include "transport/transport.h"

namespace zero3 {
namespace {

struct Running {
  std::weak_ptr<Reduction> reduction;
  std::thread::id thread;
};
std::mutex running_mutex;
std::map<int, Running> running_reductions;  // by graph task

}  // namespace

void reduce_deferred(const std::vector<ParameterPtr>& parameters) {
  c10::InferenceMode no_inference_mode(false);  // the user's hooks run in the modes of a backward
  c10::NoGradGuard no_grad;
  std::make_shared<Reduction>()->finish_deferred(parameters);
}

void announce_presences(const std::vector<ParameterPtr>& parameters) {
  if (in_backward() && is_in_node()) Reduction::current()->announce(parameters);
}

void exchange_presences(const std::vector<ParameterPtr>& parameters) {
  if (in_backward()) Reduction::current()->exchange(parameters);
}

std::shared_ptr<Reduction> Reduction::current() {
  const int task = running_backward();
  ZERO3_CHECK(!handles_signals(),
              "a signal handler cannot run the backward of a sharded model, since other ranks do "
              "not: set a flag, and act between steps");
  ZERO3_CHECK(task != -1, "zero3::reduce_grad was called outside of a backward");
  const auto running = [task] {  // with the mutex locked
    const auto found = running_reductions.find(task);
    return found == running_reductions.end() ? nullptr : found->second.reduction.lock();
  };
  {
    std::lock_guard lock(running_mutex);
    if (auto reduction = running()) return reduction;
  }
  auto reduction = std::make_shared<Reduction>();  // reads the whole graph
  std::lock_guard lock(running_mutex);
  if (auto other = running()) return other;  // another device's thread was faster
  std::erase_if(running_reductions, [](auto& item) { return item.second.reduction.expired(); });
  running_reductions[task] = {reduction, std::this_thread::get_id()};
  // The engine's task owns the reduction from here on.
  at_end_of_backward([reduction] { reduction->finish_backward(); });
  return reduction;
}

std::vector<std::shared_ptr<Reduction>> Reduction::running_around() {
  std::vector<std::shared_ptr<Reduction>> result;
  std::lock_guard lock(running_mutex);
  for (auto& [task, running] : running_reductions) {
    // A backward inside of another began later. All threads so lock the inner one's mutex first.
    if (task >= running_backward()) break;
    // Never owns a reduction of another thread: if its backward raised now, it would end here.
    if (running.thread != std::this_thread::get_id()) continue;
    if (auto reduction = running.reduction.lock()) result.push_back(std::move(reduction));
  }
  return result;
}

Reduction::~Reduction() {
  // After finish(), there are none. Otherwise the backward raised: the sums of its models'
  // parameters are incomplete, and must not leak into the next backward. The sums of a model that
  // is only gathered are whole: no rank has added to them.
  auto incomplete = reduced_models();
  incomplete.insert(presence_checks_.models_in_graph().begin(),
                    presence_checks_.models_in_graph().end());
  for (int64_t number : incomplete)
    for (auto& parameter : Registry::get().of_model(number)) parameter->drop_gradients();
}

void Reduction::add(const ParameterPtr& parameter, const at::Tensor& raw, bool owned, int64_t use) {
  parameter->check_gradient(raw);
  if (!parameter->is_wanted()) return;
  {
    WithoutUserModes guard;
    if (parameter->settings.detects_nonfinite) parameter->gradients.detect_nonfinite(raw);
    std::lock_guard lock(mutex_);
    add_locked(parameter, raw, owned, use);
  }
  delivery_.deliver_early(std::unique_lock(mutex_));
}

void Reduction::add_locked(const ParameterPtr& parameter, const at::Tensor& raw, bool owned,
                           int64_t use) {
  const bool at_once = use <= 1 && goes_at_once(*parameter);
  arrives(parameter, use);
  if (!parameter->transport()->can.reduces_in_any_order) finish_presence_checks();
  const bool is_sent_last = presence_checks_.is_sent_last(parameter);
  if (at_once && !is_sent_last) {
    const auto selected = select_bucket(*parameter, raw.scalar_type());
    send(parameter, raw, selected.normalized_dtype, selected, owned);
    return;
  }
  parameter->gradients.add(raw, parameter->settings.gradient_dtypes, owned);
  const bool is_last = use <= 1 && to_come_.number_of(parameter->placeholder()) == 0;
  if (parameter->is_reduced_now() && !is_sent_last && is_last) send_accumulated(parameter);
}

void Reduction::arrives(const ParameterPtr& parameter, int64_t use) {
  if (parameter->device().is_cpu()) keep_heap();
  arrived_.push_back(parameter);
  if (parameter->is_reduced_now()) begin_presence_checks(*parameter);
  const auto& leaf = parameter->placeholder();
  // A backward around this one, which began first, may bring more gradients of the parameter.
  if (parameter->settings.delivers_early)
    delivery_.arrives(parameter,
                      use == 0 && to_come_.number_of(leaf) > 0 && running_around().empty());
  if (use <= 1) to_come_.arrives(leaf);
}

void Reduction::add_product(const ParameterPtr& parameter, const at::Tensor& left,
                            const at::Tensor& right) {
  if (!parameter->is_wanted()) return;
  const auto dtype = left.scalar_type();
  const auto selected = select_bucket(*parameter, dtype);
  const std::array sizes{left.size(0), right.size(1)};
  const bool may_be_sent_last =
      !parameter->transport()->can.reduces_in_any_order;  // then computed by itself
  const bool keeps_dtype = selected.normalized_dtype == dtype && selected.key.wire_dtype == dtype &&
                           !parameter->settings.detects_nonfinite &&
                           at::IntArrayRef(sizes) == at::IntArrayRef(parameter->sizes());
  if (keeps_dtype && !may_be_sent_last) {
    const WithoutUserModes guard;
    std::unique_lock lock(mutex_);
    if (goes_at_once(*parameter)) {
      arrives(parameter, /*use=*/0);
      auto& bucket = bucket_for(parameter, selected.key);
      bucket.add_product(parameter, left, right);
      buckets_.launch_if_full(bucket);
      delivery_.deliver_early(std::move(lock));
      return;
    }
  }
  auto grad = empty_for(*parameter, sizes, left.options());
  tensor_ops::mm_out(grad, left, right);
  add(parameter, grad, /*owned=*/true);
}

bool Reduction::goes_at_once(const Parameter& parameter) const {
  return parameter.is_reduced_now() && !parameter.gradients.has_sum() &&
         to_come_.number_of(parameter.placeholder()) <= 1;
}

at::Tensor Reduction::empty_for(const Parameter& parameter, at::IntArrayRef sizes,
                                const at::TensorOptions& options) {
  WithoutUserModes guard;
  bool is_sent = parameter.is_wanted();
  {
    std::lock_guard lock(mutex_);
    is_sent = is_sent && goes_at_once(parameter);
    // empty() may wait for room, and sums other ranks' gradients meanwhile, which may wait for
    // those that this rank lacks.
    if (is_sent && parameter.transport()->can.empty_waits && has_sent_) finish_presence_checks();
  }
  if (!is_sent) return pooled_empty(sizes, options);
  return parameter.transport()->empty(parameter, sizes, options);
}

void Reduction::announce(const std::vector<ParameterPtr>& parameters) {
  WithoutUserModes guard;
  std::lock_guard lock(mutex_);
  begin_presence_checks(parameters);
}

void Reduction::exchange(const std::vector<ParameterPtr>& parameters) {
  WithoutUserModes guard;
  const BelowAutograd below_autograd;  // a recomputed forward records
  finish_presence_checks_around();
  std::lock_guard lock(mutex_);
  begin_presence_checks(parameters);
  finish_presence_checks();
}

void Reduction::begin_presence_checks(const std::vector<ParameterPtr>& parameters) {
  for (auto& parameter : parameters)
    if (presence_checks_.are_due(*parameter)) begin_presence_checks(*parameter);
}

void Reduction::begin_presence_checks(const Parameter& parameter) {
  if (presence_checks_.have_begun(parameter)) return;
  finish_presence_checks_around();
  presence_checks_.begin(parameter);
}

void Reduction::finish_presence_checks() {
  std::vector<ParameterPtr> missing;
  while (const auto* check = presence_checks_.finish_next()) {
    buckets_.set_aside_first_if_mixed();
    std::ranges::copy_if(check->missing(), std::back_inserter(missing), [this](auto& parameter) {
      return !presence_checks_.is_sent_last(parameter);
    });
  }
  for (auto& parameter : missing) send_zero(parameter);  // with all checks finished
}

void Reduction::finish_presence_checks_around() {
  for (auto& reduction : running_around()) {
    std::lock_guard lock(reduction->mutex_);
    reduction->finish_presence_checks();
  }
}

void Reduction::send_accumulated(const ParameterPtr& parameter) {
  finish_presence_checks();  // which may widen its dtype
  const bool is_sent_last = presence_checks_.is_sent_last(parameter);
  if (is_sent_last)
    if (const auto dtype = presence_checks_.dtype_on_all_ranks(parameter))
      parameter->gradients.widen(*dtype);
  if (auto sum = parameter->gradients.take_sum())
    send(parameter, sum->grad, sum->grad.scalar_type(),
         select_bucket(*parameter, sum->arrived_dtype, /*is_normalized=*/true), /*owned=*/true);
  else if (is_sent_last)
    send_zero(parameter);
}

void Reduction::send(const ParameterPtr& parameter, const at::Tensor& grad, at::ScalarType through,
                     const BucketSelection& selected, bool owned) {
  auto& bucket = bucket_for(parameter, selected.key);
  bucket.add(parameter, grad, through, selected.normalized_dtype, owned);
  buckets_.launch_if_full(bucket);
}

void Reduction::send_zero(const ParameterPtr& parameter) {
  const auto dtype =
      presence_checks_.dtype_on_all_ranks(parameter).value_or(parameter->source->dtype);
  const auto selected = select_bucket(*parameter, dtype, /*is_normalized=*/true);
  arrived_.push_back(parameter);
  auto& bucket = bucket_for(parameter, selected.key);
  bucket.add_zero(parameter, selected.normalized_dtype);
  buckets_.launch_if_full(bucket);
}

ReduceBucket& Reduction::bucket_for(const ParameterPtr& parameter, const BucketKey& key) {
  // The first gradient need not wait for other ranks to begin, unless it shares a message.
  const bool shares_message = parameter->sent_chunk_bytes(key.wire_dtype) < kWorthAMessage;
  const bool in_any_order = parameter->transport()->can.reduces_in_any_order;
  if (std::exchange(has_sent_, true) || shares_message || !in_any_order) finish_presence_checks();
  return buckets_.open_for(parameter, key);
}

void Reduction::finish_backward() {
  exchange({});
  std::vector<ParameterPtr> parameters;
  {
    std::lock_guard lock(mutex_);
    // Finishes all parameters of their models: micro-batches may have accumulated without sync.
    for (int64_t number : reduced_models())
      for (auto& parameter : Registry::get().of_model(number)) parameters.push_back(parameter);
    std::ranges::sort(parameters, {}, [](auto& parameter) { return parameter->order; });
    for (auto& parameter : parameters) {
      parameter->substitutes.forget_after_forward();
      parameter->substitutes.forget_encoded();
      if (parameter->settings.reshard_after_backward) parameter->gathered.reshard_retained();
    }
  }
  finish(parameters);
}

void Reduction::finish_deferred(const std::vector<ParameterPtr>& parameters) {
  {
    WithoutUserModes guard;
    std::lock_guard lock(mutex_);
    presence_checks_.exchange_deposited(parameters);
  }
  finish(parameters);
}

void Reduction::finish(const std::vector<ParameterPtr>& parameters) {
  const WithoutUserModes guard;
  const BelowAutograd below_autograd;
  std::unique_lock lock(mutex_);
  presence_checks_.end();
  finish_presence_checks();
  auto synced = parameters;
  std::erase_if(synced, [](auto& parameter) { return !parameter->is_reduced_now(); });
  for (auto& parameter : synced) send_accumulated(parameter);
  buckets_.finish(std::move(synced));
  presence_checks_.clear();
  backwards_.end();
  arrived_.clear();
  const auto moment = is_nested() ? Moment::kNestedEnd : Moment::kEnd;
  auto delivered = delivery_.finish(moment, std::move(lock));
  if (const auto around = running_around(); !around.empty()) {
    std::lock_guard lock_around(around.back()->mutex_);
    around.back()->delivery_.include(std::move(delivered));
  } else {
    Delivery::forget(delivered);
  }
}

std::set<int64_t> Reduction::reduced_models() const {
  auto result = presence_checks_.mixed_models();
  for (auto& parameter : arrived_) result.insert(parameter->model_number);
  return result;
}

}  // namespace zero3
