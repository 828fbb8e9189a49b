#include "parameter/parameter.h"

#include <ATen/TensorGeometry.h>

#include "support/autograd.h"
#include "support/error.h"
#include "support/grad_dtype.h"
#include "support/memory.h"
#include "tier/file_tier.h"

namespace zero3 {

int64_t ParameterSpec::row_numel() const {
  return c10::multiply_integers(sizes.begin() + 1, sizes.end());
}

int64_t ParameterSpec::nbytes() const {
  return rows() * row_numel() * static_cast<int64_t>(c10::elementSize(compute_dtype));
}

bool ParameterSpec::is_contiguous() const { return at::geometry_is_contiguous(sizes, strides); }

std::vector<int64_t> ParameterSpec::sizes_with_rows(int64_t rows) const {
  std::vector<int64_t> result = sizes;
  result[0] = rows;
  return result;
}

Parameter::Parameter(ParameterSpec spec, std::shared_ptr<Channel> replicas, at::Tensor placeholder)
    : ParameterSpec(std::move(spec)),
      placeholder(std::move(placeholder)),
      replicas(std::move(replicas)) {}

void Parameter::connect(std::shared_ptr<Transport> to) {
  ZERO3_CHECK(!transport, "'", fqn, "' has a transport already");
  transport = std::move(to);
}

void Parameter::follow_version(const at::Tensor& dtensor) {
  version_ = version_counter_of(dtensor);
}

uint64_t Parameter::shard_version() const {
  return (version_.enabled() ? version_.current_version() : 0) +
         (shard.is_inference() ? 0 : shard._version());
}

bool Parameter::may_be_gathered() const { return !in_backward() || !gradients.is_delivered_early; }

bool Parameter::outlives_forward() const {
  return gathered.state() == Gathered::State::kRetained &&
         (in_backward() || !settings.reshard_after_forward);
}

void Parameter::shard_after_forward(const at::Tensor& full) {
  auto& there = *after_forward;
  there.fqn = fqn;
  there.shard = pooled_copy(full.narrow(0, there.first_row_of(there.rank), there.shard_rows()));
}

void Parameter::forget_after_forward() {
  if (after_forward) after_forward->shard.reset();
}

ParameterPtr Parameter::source_of(const ParameterPtr& parameter) {
  const auto& there = parameter->after_forward;
  // Whatever this rank has changed since: ranks have to gather from the same others.
  return in_backward() && there && there->shard.defined() ? there : parameter;
}

ParameterPtr Parameter::quantized(const QuantizedFormat& format) {
  auto found = std::ranges::find(quantized_, format, &Quantized::format);
  if (found == quantized_.end()) {
    const auto row_bytes = format.row_bytes(row_numel());
    auto bytes = std::make_shared<Parameter>(
        ParameterSpec{
            {rows(), row_bytes}, {row_bytes, 1}, at::kByte, device, rank, world_size, owner},
        nullptr, at::Tensor());
    bytes->quantized_as_ = " " + format.text();
    bytes->connect(payload_transport());
    found = quantized_.insert(quantized_.end(), {format, std::move(bytes), 0});
  }
  auto& [_, bytes, version] = *found;
  bytes->fqn = fqn;
  if (!in_backward() || !bytes->shard.defined() || version != shard_version()) {
    bytes->shard = quantize(shard, format);
    finish_reading(shard);
    version = shard_version();
  }
  return bytes;
}

void Parameter::forget_quantized() {
  for (auto& each : quantized_) each.parameter->shard.reset();
}

int64_t Parameter::sent_chunk_bytes(at::ScalarType wire_dtype) const {
  const auto& format = settings.gradient_dtypes.quantized;
  const auto item = static_cast<int64_t>(c10::elementSize(wire_dtype));
  return chunk_rows() * (format ? format->row_bytes(row_numel()) : row_numel() * item);
}

bool Parameter::is_wanted() const {
  return !placeholder.defined() || zero3::is_wanted(placeholder);
}

void Parameter::add_use(bool first) {
  if (!in_backward()) gradients.add_use(first);
}

void Parameter::deposit(const at::Tensor& raw) {
  check_gradient(raw);
  if (settings.detects_nonfinite) gradients.detect_nonfinite(raw);
  gradients.add(raw, settings.gradient_dtypes, /*owned=*/false);
}

void Parameter::drop_gradients() {
  gradients.drop();
  forget_after_forward();
  forget_quantized();
}

void Parameter::check_gradient(const at::Tensor& raw) const {
  ZERO3_CHECK(raw.layout() == at::kStrided, "the gradient of '", fqn, "' is ", raw.layout(),
              ", and only dense gradients can be reduced: use sparse=False");
  ZERO3_CHECK(is_gradient_dtype(raw.scalar_type()), "the gradient of '", fqn, "' is ",
              raw.scalar_type(),
              ", which cannot be summed and sent: cast it to float32, "
              "float64, bfloat16 or float16");
  ZERO3_CHECK(raw.sizes() == at::IntArrayRef(sizes), "the gradient of '", fqn, "' has shape ",
              raw.sizes(), " where the full parameter has ", at::IntArrayRef(sizes));
  ZERO3_CHECK(raw.device() == device, "the gradient of '", fqn, "' is on ", raw.device(),
              " where the parameter computes on ", device);
}

std::vector<std::string> names_of(const std::vector<ParameterPtr>& parameters) {
  std::vector<std::string> result;
  for (auto& parameter : parameters) result.push_back(parameter->fqn);
  return result;
}

std::string scope_name(const std::vector<ParameterPtr>& parameters, const std::string& what) {
  const auto more = parameters.size() - 1;
  return "zero3::" + what + " " + parameters.front()->fqn +
         (more > 0 ? " and " + std::to_string(more) + " more" : "");
}

}  // namespace zero3
