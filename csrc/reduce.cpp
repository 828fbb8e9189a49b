#include "reduce.h"

#include <ATen/ops/mm.h>
#include <ATen/record_function.h>

#include <array>
#include <unordered_map>

#include "all_reduce.h"
#include "apart.h"
#include "autograd.h"
#include "bucket.h"
#include "error.h"
#include "exchange.h"
#include "grad_dtype.h"
#include "heap.h"
#include "memory.h"
#include "publish.h"
#include "roll_call.h"

namespace zero3 {
namespace {

Deliver deliver;

std::mutex running_mutex;
std::unordered_map<int, std::weak_ptr<Reduction>> running;  // by the engine's graph task

at::ScalarType normalised_dtype_of(const Parameter& parameter, const at::Tensor& raw) {
  return parameter.grad_dtype.value_or(raw.scalar_type());
}

void check_gradient(const Parameter& parameter, const at::Tensor& raw) {
  ZERO3_CHECK(raw.layout() == at::kStrided, "the gradient of '", parameter.fqn, "' is ",
              raw.layout(), ", and only dense gradients can be reduced: use sparse=False");
  ZERO3_CHECK(is_gradient_dtype(raw.scalar_type()), "the gradient of '", parameter.fqn, "' is ",
              raw.scalar_type(),
              ", which cannot be summed and sent: cast it to float32, "
              "float64, bfloat16 or float16");
  ZERO3_CHECK(raw.sizes() == at::IntArrayRef(parameter.sizes), "the gradient of '", parameter.fqn,
              "' has shape ", raw.sizes(), " where the full parameter has ",
              at::IntArrayRef(parameter.sizes));
  ZERO3_CHECK(raw.device() == parameter.device, "the gradient of '", parameter.fqn, "' is on ",
              raw.device(), " where the parameter computes on ", parameter.device);
}

}  // namespace

void set_deliver(Deliver function) { deliver = std::move(function); }

void accumulate(Parameter& parameter, const at::Tensor& raw, bool owned) {
  check_gradient(parameter, raw);
  Apart apart;
  const auto dtype = normalised_dtype_of(parameter, raw);
  auto grad = raw.to(dtype);
  auto wider = c10::promoteTypes(parameter.reduce_dtype.value_or(dtype),
                                 parameter.shard_grad_dtype.value_or(dtype));
  wider = c10::promoteTypes(wider, dtype);
  // Whatever arrives is kept, and more may arrive: low-precision ones must not round each other.
  if (!parameter.grad_dtype) wider = c10::promoteTypes(wider, at::kFloat);
  std::lock_guard lock(parameter.accumulation_mutex);
  parameter.arrived_dtype = c10::promoteTypes(parameter.arrived_dtype.value_or(dtype), dtype);
  auto& sum = parameter.accumulated;
  if (sum.defined())
    sum = sum.to(c10::promoteTypes(wider, sum.scalar_type())).add_(grad);
  else
    sum = raw.is_meta() ? pooled_empty(raw.sizes(), raw.options().dtype(wider))  // is counted
                        : grad.to(wider, /*non_blocking=*/false,
                                  /*copy=*/grad.is_same(raw) && !owned);
}

void reduce_accumulated(const std::vector<ParameterPtr>& parameters) {
  c10::InferenceMode lasting(false);  // hooks of the user run in what a backward would be
  c10::NoGradGuard no_grad;
  std::make_shared<Reduction>()->finish(parameters);
}

// One that this rank has begun and not ended.
class RunningBackward {
 public:
  explicit RunningBackward(std::shared_ptr<OneHost> one_host)
      : one_host_(std::move(one_host)), number_(one_host_->backwards.begin()) {
    one_host_->host->begin_anew();
  }
  ~RunningBackward() {
    one_host_->backwards.end(number_);
    one_host_->host->ring();
  }
  RunningBackward(const RunningBackward&) = delete;
  RunningBackward& operator=(const RunningBackward&) = delete;

  bool is_of(const OneHost& one_host) const { return one_host_.get() == &one_host; }
  uint64_t number() const { return number_; }

 private:
  std::shared_ptr<OneHost> one_host_;
  uint64_t number_;
};

std::shared_ptr<Reduction> Reduction::current() {
  const int task = running_backward();
  ZERO3_CHECK(task != -1, "zero3::reduce_grad was called outside of a backward");
  std::lock_guard lock(running_mutex);
  auto& slot = running[task];
  auto reduction = slot.lock();
  if (!reduction) {
    std::erase_if(running,
                  [task](auto& item) { return item.first != task && item.second.expired(); });
    reduction = std::make_shared<Reduction>();
    running[task] = reduction;
    // The engine's task owns the reduction from here on.
    at_end_of_backward([reduction] { reduction->finish_backward(); });
  }
  return reduction;
}

Reduction::~Reduction() {
  // After finish() nothing is left here. Else the backward raised: the sums of its model's
  // parameters are half those of this backward, and must not leak into the next one.
  for (int64_t root : roots())
    for (auto& parameter : Registry::get().of_root(root)) parameter->drop_accumulated();
}

void Reduction::add(const ParameterPtr& parameter, const at::Tensor& raw, bool owned) {
  check_gradient(*parameter, raw);
  if (!is_wanted(*parameter)) return;
  Apart apart;
  parameter->detect_nonfinite(raw);
  std::lock_guard lock(mutex_);
  if (arrives(parameter)) {
    const auto dtype = normalised_dtype_of(*parameter, raw);
    send(parameter, raw, dtype, dtype, owned);
    return;
  }
  accumulate(*parameter, raw, owned);
  const bool waits = !parameter->requires_gradient_sync || parameter->deferred;
  if (!waits && parameter->pending_uses == 0) send_accumulated(parameter);
}

bool Reduction::arrives(const ParameterPtr& parameter) {
  if (parameter->device.is_cpu()) keep_heap();
  arrived_.push_back(parameter);
  begin_roll_calls(*parameter);
  const bool at_once = goes_at_once(*parameter);
  parameter->pending_uses = std::max<int64_t>(parameter->pending_uses - 1, 0);
  return at_once;
}

void Reduction::add_product(const ParameterPtr& parameter, const at::Tensor& left,
                            const at::Tensor& right) {
  const auto dtype = left.scalar_type();
  const bool is_sent_so = normalised_dtype_of(*parameter, left) == dtype &&
                          parameter->reduce_dtype.value_or(dtype) == dtype;
  const bool is_looked_at = parameter->detects_nonfinite;
  const std::array sizes{left.size(0), right.size(1)};
  if (!is_sent_so || is_looked_at || !goes_at_once(*parameter) ||
      at::IntArrayRef(sizes) != at::IntArrayRef(parameter->sizes)) {
    auto grad = empty_for(*parameter, sizes, left.options());
    at::mm_out(grad, left, right);
    add(parameter, grad, /*owned=*/true);
    return;
  }
  if (!is_wanted(*parameter)) return;
  Apart apart;
  std::lock_guard lock(mutex_);
  arrives(parameter);
  auto& bucket = bucket_for(parameter, dtype);
  bucket.add_product(parameter, left, right);
  launch_if_full(bucket);
}

bool Reduction::goes_at_once(const Parameter& parameter) const {
  return parameter.requires_gradient_sync && !parameter.deferred && parameter.pending_uses <= 1 &&
         !parameter.accumulated.defined();
}

at::Tensor Reduction::empty_for(const Parameter& parameter, at::IntArrayRef sizes,
                                const at::TensorOptions& options) {
  if (parameter.shared && goes_at_once(parameter) && is_wanted(parameter)) {
    if (has_sent_) {  // others may wait for what this rank misses, and it for them
      Apart apart;
      std::lock_guard lock(mutex_);
      finish_roll_calls();
    }
    const auto dtype = c10::typeMetaToScalarType(options.dtype());
    return parameter.shared->one_host()->mailbox->empty(sizes, dtype, parameter.fqn);
  }
  return pooled_empty(sizes, options);
}

uint64_t Reduction::backward_of(const Parameter& parameter) {
  if (!parameter.shared) return 0;
  const auto& one_host = parameter.shared->one_host();
  auto backward =
      std::ranges::find_if(backwards_, [&](auto& running) { return running->is_of(*one_host); });
  if (backward == backwards_.end()) {
    backwards_.push_back(std::make_unique<RunningBackward>(one_host));
    backward = std::prev(backwards_.end());
  }
  return (*backward)->number();
}

void Reduction::begin_roll_calls(const Parameter& first) {
  if (!first.requires_gradient_sync || first.deferred) return;
  if (std::ranges::find(called_, first.root) != called_.end()) return;
  called_.push_back(first.root);
  std::vector<std::vector<ParameterPtr>> groups;
  for (auto& parameter : Registry::get().of_root(first.root)) {
    const bool has_others = parameter->world_size > 1 || parameter->is_replicated();
    const bool is_asked = has_others && !parameter->device.is_meta();
    if (!is_asked || !is_point_to_point(parameter->reduce_channel())) continue;
    auto group = std::ranges::find_if(groups, [&](auto& other) {
      return other.front()->reduce_group_name == parameter->reduce_group_name &&
             (other.front()->shared == nullptr) == (parameter->shared == nullptr);
    });
    if (group == groups.end()) group = groups.emplace(group);
    group->push_back(parameter);
  }
  for (auto& group : groups) {
    const auto backward = backward_of(*group.front());
    roll_calls_.push_back(std::make_unique<RollCall>(std::move(group), backward));
  }
}

void Reduction::finish_roll_calls() {
  for (size_t i = 0; i < roll_calls_.size(); ++i) {
    auto& call = *roll_calls_[i];
    if (call.is_finished()) continue;
    call.finish();
    defer_first_if_mixed();
    for (auto& parameter : call.missing()) {
      const auto dtype = parameter->grad_dtype.value_or(parameter->compute_dtype);
      bucket_for(parameter, dtype).add_zero(parameter, dtype);
    }
  }
}

void Reduction::defer_first_if_mixed() {
  for (auto* buckets : {&open_, &in_flight_}) {
    const auto bucket = std::ranges::find_if(
        *buckets, [this](auto& other) { return is_mixed(other->parameters().front()); });
    if (bucket == buckets->end()) continue;
    ZERO3_CHECK(!deferred_first_, "two gradients were sent before ranks had told what they bring");
    if (buckets == &open_) (*bucket)->close();
    deferred_first_ = std::move(*bucket);
    buckets->erase(bucket);
  }
}

bool Reduction::is_mixed(const ParameterPtr& parameter) const {
  return std::ranges::any_of(roll_calls_, [&](auto& call) { return call->is_mixed(parameter); });
}

void Reduction::send_accumulated(const ParameterPtr& parameter) {
  std::unique_lock lock(parameter->accumulation_mutex);
  if (!parameter->accumulated.defined()) return;
  auto sum = std::exchange(parameter->accumulated, {});
  const auto normalised_dtype = *std::exchange(parameter->arrived_dtype, {});
  lock.unlock();
  send(parameter, sum, sum.scalar_type(), normalised_dtype, /*owned=*/true);
}

void Reduction::send(const ParameterPtr& parameter, const at::Tensor& grad, at::ScalarType through,
                     at::ScalarType normalised_dtype, bool owned) {
  auto& bucket = bucket_for(parameter, normalised_dtype);
  bucket.add(parameter, grad, through, normalised_dtype, owned);
  launch_if_full(bucket);
}

Bucket& Reduction::bucket_for(const ParameterPtr& parameter, at::ScalarType normalised_dtype) {
  // The first gradient need not wait for the others to begin, unless it is to travel with more.
  const auto wire_dtype = parameter->reduce_dtype.value_or(normalised_dtype);
  const auto nbytes = parameter->chunk_numel() * c10::elementSize(wire_dtype);
  if (std::exchange(has_sent_, true) || nbytes < kWorthAMessage) finish_roll_calls();
  auto& buckets = is_mixed(parameter) ? mixed_ : open_;
  auto bucket = std::ranges::find_if(
      buckets, [&](auto& other) { return other->accepts(*parameter, wire_dtype); });
  if (&buckets == &open_ && bucket != open_.end() && !(*bucket)->has_room_for(*parameter)) {
    auto full = std::move(*bucket);
    open_.erase(bucket);
    launch(std::move(full));
    bucket = open_.end();
  }
  if (bucket == buckets.end()) {
    buckets.push_back(
        Bucket::make(*parameter, wire_dtype, backward_of(*parameter), &buckets == &mixed_));
    bucket = std::prev(buckets.end());
  }
  return **bucket;
}

void Reduction::launch_if_full(const Bucket& bucket) {
  const auto place = std::ranges::find(open_, &bucket, &std::unique_ptr<Bucket>::get);
  if (place == open_.end() || !bucket.is_full()) return;
  auto full = std::move(*place);
  open_.erase(place);
  launch(std::move(full));
}

void Reduction::launch(std::unique_ptr<Bucket> bucket) {
  while (in_flight_.size() >= kMostInFlight) finish_oldest();
  RECORD_USER_SCOPE(scope_name(bucket->collective(), "start"));
  bucket->close();
  in_flight_.push_back(std::move(bucket));
}

void Reduction::finish_oldest() {
  const auto& bucket = *in_flight_.front();
  std::vector<at::Tensor> shards;
  {
    RECORD_USER_SCOPE(scope_name(bucket.collective(), "wait"));
    shards = in_flight_.front()->finish();
  }
  for (size_t i = 0; i < shards.size(); ++i) {
    const auto& parameter = bucket.parameters()[i];
    if (parameter->is_replicated())
      parameter->add_partial(
          {shards[i], bucket.wire_dtype(), bucket.shard_dtypes()[i], bucket.divisor()});
    else
      results_.push_back({parameter, shards[i]});
  }
  auto parameters = bucket.parameters();
  in_flight_.erase(in_flight_.begin());
  // Ranks meet those that are zero on some at places of their own.
  std::erase_if(parameters, [this](auto& parameter) { return is_mixed(parameter); });
  all_reduce(std::move(parameters));
}

void Reduction::all_reduce(std::vector<ParameterPtr> parameters) {
  // Replicas may have met them in orders of their own.
  std::ranges::sort(parameters, {}, [](auto& parameter) { return parameter->order; });
  std::vector<std::unique_ptr<AllReduce>> all_reduces;
  for (auto& parameter : parameters) {
    if (!parameter->is_replicated() || !parameter->requires_all_reduce) continue;
    auto partial = parameter->take_partial();
    if (!partial) continue;
    auto like = std::ranges::find_if(
        all_reduces, [&](auto& other) { return other->accepts(*parameter, *partial); });
    if (like == all_reduces.end())
      like = all_reduces.insert(like, std::make_unique<AllReduce>(*parameter, *partial));
    (*like)->add(parameter, std::move(*partial));
  }
  for (auto& all_reduce : all_reduces) {
    while (all_reduces_.size() >= kMostInFlight) finish_oldest_all_reduce();
    all_reduce->start();
    all_reduces_.push_back(std::move(all_reduce));
  }
}

void Reduction::finish_oldest_all_reduce() {
  all_reduces_.front()->finish(results_);
  all_reduces_.erase(all_reduces_.begin());
}

std::vector<int64_t> Reduction::roots() const {
  std::vector<int64_t> result;
  for (auto& parameter : arrived_)
    if (std::ranges::find(result, parameter->root) == result.end())
      result.push_back(parameter->root);
  return result;
}

void Reduction::finish_backward() {
  std::vector<ParameterPtr> parameters;
  {
    std::lock_guard lock(mutex_);
    // Uses that gave no gradient in this backward.
    for (auto& parameter : arrived_) parameter->pending_uses = 0;
    // All of their models': micro-batches may have been accumulated without sync.
    for (int64_t root : roots())
      for (auto& parameter : Registry::get().of_root(root)) parameters.push_back(parameter);
    for (auto& parameter : parameters) {
      parameter->forget_after_forward();
      if (parameter->reshard_after_backward) parameter->let_go_of_held();
    }
  }
  finish(parameters);
}

void Reduction::finish(const std::vector<ParameterPtr>& parameters) {
  std::optional<Apart> apart(std::in_place);
  std::unique_lock lock(mutex_);
  for (auto& parameter : parameters)
    if (parameter->requires_gradient_sync && !parameter->deferred) send_accumulated(parameter);
  finish_roll_calls();
  std::ranges::sort(open_, {}, [](auto& bucket) { return bucket->lowest_order(); });
  while (!open_.empty()) {
    auto bucket = std::move(open_.front());
    open_.erase(open_.begin());
    launch(std::move(bucket));
  }
  while (!in_flight_.empty()) finish_oldest();
  if (deferred_first_) in_flight_.push_back(std::move(deferred_first_));
  for (auto& bucket : std::exchange(mixed_, {})) launch(std::move(bucket));
  while (!in_flight_.empty()) finish_oldest();
  std::vector<ParameterPtr> synced;
  std::ranges::copy_if(parameters, std::back_inserter(synced), [](auto& parameter) {
    return parameter->requires_gradient_sync && !parameter->deferred;
  });
  all_reduce(std::move(synced));  // of backwards before this one
  while (!all_reduces_.empty()) finish_oldest_all_reduce();
  roll_calls_.clear();
  backwards_.clear();
  arrived_.clear();
  lock.unlock();
  apart.reset();  // hooks of the user run now
  if (deliver) deliver(std::exchange(results_, {}));
}

}  // namespace zero3
