#include "reduce.h"

#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <cmath>
#include <unordered_map>

#include "grad_dtype.h"
#include "memory.h"
#include "sum.h"

namespace zero3 {
namespace {

// Bounds communication memory: a further bucket waits for the oldest one.
constexpr size_t kMaxBucketsInFlight = 2;

Deliver deliver;

std::mutex running_mutex;
std::unordered_map<int, std::weak_ptr<Reduction>> running;  // by the engine's graph task

at::ScalarType normalised_dtype_of(const Parameter& parameter, const at::Tensor& raw) {
  return parameter.grad_dtype.value_or(raw.scalar_type());
}

void check_gradient(const Parameter& parameter, const at::Tensor& raw) {
  TORCH_CHECK(raw.layout() == at::kStrided, "zero3: the gradient of '", parameter.fqn, "' is ",
              raw.layout(), ", and only dense gradients can be reduced: use sparse=False");
  TORCH_CHECK(is_gradient_dtype(raw.scalar_type()), "zero3: the gradient of '", parameter.fqn,
              "' is ", raw.scalar_type(),
              ", which cannot be summed and sent: cast it to float32, "
              "float64, bfloat16 or float16");
  TORCH_CHECK(raw.sizes() == at::IntArrayRef(parameter.sizes), "zero3: the gradient of '",
              parameter.fqn, "' has shape ", raw.sizes(), " where the full parameter has ",
              at::IntArrayRef(parameter.sizes));
  TORCH_CHECK(raw.device() == parameter.device, "zero3: the gradient of '", parameter.fqn,
              "' is on ", raw.device(), " where the parameter computes on ", parameter.device);
}

// Under torch.autograd.grad or backward(inputs=...) the engine accumulates into chosen leaves only.
// A compiled backward computes all gradients regardless.
bool is_wanted(const Parameter& parameter) {
  auto* chosen = torch::autograd::get_current_graph_task_exec_info();
  if (chosen == nullptr || chosen->empty() || !parameter.placeholder.defined()) return true;
  auto leaf = torch::autograd::impl::grad_accumulator(parameter.placeholder);
  auto found = chosen->find(leaf.get());
  return found != chosen->end() && found->second.should_execute();
}

// Half the scaling before the sum and half after: fp16 neither overflows nor underflows.
double pre_divide_factor(at::ScalarType wire_dtype, double divide_factor) {
  return wire_dtype == at::kHalf ? std::exp2(std::floor(std::log2(std::sqrt(divide_factor)))) : 1.0;
}

bool is_exact(at::ScalarType from, at::ScalarType to) { return at::promote_types(from, to) == to; }

void copy_divided(const at::Tensor& target, const at::Tensor& source, double divisor) {
  if (divisor == 1.0)
    target.copy_(source);
  else
    at::div_out(const_cast<at::Tensor&>(target), source, at::scalar_tensor(divisor, at::kDouble));
}

// target = source.to(through) / divisor, in the dtype of `target`. Where a cast would have to go
// through memory, it goes by blocks of rows that stay in the cache.
void copy_through(const at::Tensor& target, const at::Tensor& source, at::ScalarType through,
                  double divisor) {
  const bool one_cast = divisor == 1.0 && through == target.scalar_type();
  if (one_cast || is_exact(source.scalar_type(), through)) {
    copy_divided(target, source, divisor);
    return;
  }
  constexpr int64_t kBlock = 16 << 10;  // elements
  const int64_t rows = target.size(0);
  const int64_t step =
      target.is_cpu() ? std::max<int64_t>(kBlock * rows / target.numel(), 1) : rows;
  for (int64_t row = 0; row < rows; row += step) {
    const int64_t count = std::min(step, rows - row);
    copy_divided(target.narrow(0, row, count), source.narrow(0, row, count).to(through), divisor);
  }
}

}  // namespace

void set_deliver(Deliver function) { deliver = std::move(function); }

void accumulate(Parameter& parameter, const at::Tensor& raw) {
  check_gradient(parameter, raw);
  c10::NoGradGuard no_grad;
  c10::InferenceMode lasting(false);  // sums outlive the mode that a gradient was computed in
  const auto dtype = normalised_dtype_of(parameter, raw);
  auto grad = raw.to(dtype);
  auto wider = at::promote_types(parameter.reduce_dtype.value_or(dtype),
                                 parameter.shard_grad_dtype.value_or(dtype));
  wider = at::promote_types(wider, dtype);
  // Whatever arrives is kept, and more may arrive: low-precision ones must not round each other.
  if (!parameter.grad_dtype) wider = at::promote_types(wider, at::kFloat);
  std::lock_guard lock(parameter.accumulation_mutex);
  parameter.arrived_dtype = at::promote_types(parameter.arrived_dtype.value_or(dtype), dtype);
  auto& sum = parameter.accumulated;
  if (sum.defined())
    sum = sum.to(at::promote_types(wider, sum.scalar_type())).add_(grad);
  else
    sum = grad.to(wider, /*non_blocking=*/false, /*copy=*/grad.is_same(raw));
}

void reduce_accumulated(const std::vector<ParameterPtr>& parameters) {
  c10::InferenceMode lasting(false);
  std::make_shared<Reduction>()->finish(parameters);
}

Bucket::Bucket(const Parameter& like, at::ScalarType wire_dtype, int64_t capacity)
    : group_name_(like.reduce_group_name),
      rank_(like.rank),
      world_size_(like.world_size),
      divide_factor_(like.divide_factor),
      pre_divide_factor_(pre_divide_factor(wire_dtype, like.divide_factor)),
      capacity_(capacity),
      buffer_(pooled_empty({world_size_, capacity},
                           at::TensorOptions(wire_dtype).device(like.device))) {}

bool Bucket::accepts(const Parameter& parameter, at::ScalarType wire_dtype) const {
  return group_name_ == parameter.reduce_group_name && divide_factor_ == parameter.divide_factor &&
         buffer_.scalar_type() == wire_dtype && buffer_.device() == parameter.device;
}

bool Bucket::has_room_for(const Parameter& parameter) const {
  return used_ + parameter.chunk_numel() <= capacity_;
}

void Bucket::pack(const ParameterPtr& parameter, const at::Tensor& grad, at::ScalarType through,
                  at::ScalarType normalised_dtype) {
  for (int64_t rank = 0; rank < world_size_; ++rank) {
    auto chunk = buffer_[rank].narrow(0, used_, parameter->chunk_numel());
    const int64_t rows = parameter->rows_of(rank);
    const int64_t owned = rows * parameter->row_numel();
    auto target = chunk.narrow(0, 0, owned).view(parameter->sizes_with_rows(rows));
    auto source = grad.narrow(0, std::min(rank * parameter->chunk_rows(), parameter->rows()), rows);
    if (owned > 0) copy_through(target, source, through, pre_divide_factor_);
    chunk.narrow(0, owned, chunk.numel() - owned).zero_();
  }
  entries_.push_back({parameter, used_, normalised_dtype});
  used_ += parameter->chunk_numel();
}

void Bucket::launch() {
  auto rows = std::exchange(buffer_, {}).narrow(1, 0, used_);
  std::vector<std::string> fqns;
  std::string key = std::string("reduce ") + c10::toString(rows.scalar_type()) + " " +
                    std::to_string(rows.numel());
  for (auto& entry : entries_) {
    fqns.push_back(entry.parameter->fqn);
    key += "|" + entry.parameter->fqn;
  }
  record({"reduce_scatter", rows.scalar_type(), static_cast<int64_t>(rows.nbytes()), fqns});
  exchange_ = start_reduce(group_name_, rank_, rows, key);
}

void Bucket::finish(std::vector<ReducedGradient>& results) {
  exchange_->wait();
  const auto& addends = exchange_->addends();
  const double post_divide_factor = divide_factor_ / pre_divide_factor_;
  for (auto& [parameter, offset, normalised_dtype] : entries_) {
    const int64_t rows = parameter->shard_rows();
    const auto dtype = parameter->shard_grad_dtype.value_or(normalised_dtype);
    auto shard =
        at::empty(parameter->sizes_with_rows(rows), addends.front().options().dtype(dtype));
    std::vector<at::Tensor> parts;
    for (auto& addend : addends)
      parts.push_back(addend.narrow(0, offset, rows * parameter->row_numel()));
    sum_and_divide(shard, parts, post_divide_factor);
    results.push_back({parameter, shard});
  }
}

std::shared_ptr<Reduction> Reduction::current() {
  const int task = torch::autograd::get_current_graph_task_id();
  TORCH_CHECK(task != -1, "zero3::reduce_grad was called outside of a backward");
  std::lock_guard lock(running_mutex);
  auto& slot = running[task];
  auto reduction = slot.lock();
  if (!reduction) {
    std::erase_if(running,
                  [task](auto& item) { return item.first != task && item.second.expired(); });
    reduction = std::make_shared<Reduction>();
    running[task] = reduction;
    // The engine's task owns the reduction from here on.
    torch::autograd::Engine::get_default_engine().queue_callback(
        [reduction] { reduction->finish_backward(); });
  }
  return reduction;
}

Reduction::~Reduction() {
  // After finish() nothing is left here. Else the backward raised: the sums of its model's
  // parameters are half those of this backward, and must not leak into the next one.
  for (int64_t root : roots())
    for (auto& parameter : Registry::get().of_root(root)) parameter->drop_accumulated();
}

void Reduction::add(const ParameterPtr& parameter, const at::Tensor& raw) {
  check_gradient(*parameter, raw);
  if (!is_wanted(*parameter)) return;
  c10::NoGradGuard no_grad;
  std::lock_guard lock(mutex_);
  arrived_.push_back(parameter);
  parameter->pending_uses = std::max<int64_t>(parameter->pending_uses - 1, 0);
  const bool waits = !parameter->requires_gradient_sync || parameter->deferred;
  if (!waits && parameter->pending_uses == 0 && !parameter->accumulated.defined()) {
    const auto dtype = normalised_dtype_of(*parameter, raw);
    send(parameter, raw, dtype, dtype);
    return;
  }
  accumulate(*parameter, raw);
  if (!waits && parameter->pending_uses == 0) send_accumulated(parameter);
}

void Reduction::send_accumulated(const ParameterPtr& parameter) {
  std::unique_lock lock(parameter->accumulation_mutex);
  if (!parameter->accumulated.defined()) return;
  auto sum = std::exchange(parameter->accumulated, {});
  const auto normalised_dtype = *std::exchange(parameter->arrived_dtype, {});
  lock.unlock();
  send(parameter, sum, sum.scalar_type(), normalised_dtype);
}

void Reduction::send(const ParameterPtr& parameter, const at::Tensor& grad, at::ScalarType through,
                     at::ScalarType normalised_dtype) {
  const auto wire_dtype = parameter->reduce_dtype.value_or(normalised_dtype);
  // In elements of each rank.
  const int64_t capacity = parameter->bucket_bytes / parameter->world_size /
                           static_cast<int64_t>(c10::elementSize(wire_dtype));
  if (parameter->chunk_numel() >= capacity) {
    auto own = std::make_unique<Bucket>(*parameter, wire_dtype, parameter->chunk_numel());
    own->pack(parameter, grad, through, normalised_dtype);
    launch(std::move(own));
    return;
  }
  auto bucket = std::ranges::find_if(
      open_, [&](auto& open) { return open->accepts(*parameter, wire_dtype); });
  if (bucket != open_.end() && !(*bucket)->has_room_for(*parameter)) {
    auto full = std::move(*bucket);
    open_.erase(bucket);
    launch(std::move(full));
    bucket = open_.end();
  }
  if (bucket == open_.end()) {
    open_.push_back(std::make_unique<Bucket>(*parameter, wire_dtype, capacity));
    bucket = std::prev(open_.end());
  }
  (*bucket)->pack(parameter, grad, through, normalised_dtype);
}

void Reduction::launch(std::unique_ptr<Bucket> bucket) {
  while (in_flight_.size() >= kMaxBucketsInFlight) finish_oldest();
  bucket->launch();
  in_flight_.push_back(std::move(bucket));
}

void Reduction::finish_oldest() {
  in_flight_.front()->finish(results_);
  in_flight_.erase(in_flight_.begin());
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
  }
  finish(parameters);
}

void Reduction::finish(const std::vector<ParameterPtr>& parameters) {
  c10::NoGradGuard no_grad;
  std::unique_lock lock(mutex_);
  for (auto& parameter : parameters)
    if (parameter->requires_gradient_sync && !parameter->deferred) send_accumulated(parameter);
  while (!open_.empty()) {
    auto bucket = std::move(open_.front());
    open_.erase(open_.begin());
    launch(std::move(bucket));
  }
  while (!in_flight_.empty()) finish_oldest();
  arrived_.clear();
  lock.unlock();  // hooks of the user run now
  if (deliver) deliver(std::exchange(results_, {}));
}

}  // namespace zero3
