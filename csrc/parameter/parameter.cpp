#include "parameter/parameter.h"

#include "support/autograd.h"
#include "support/error.h"
#include "support/grad_dtype.h"

namespace zero3 {

Parameter::Parameter(SourcePtr of, std::shared_ptr<Channel> replicas, Settings settings)
    : source(std::move(of)),
      substitutes(*source),
      replicas(std::move(replicas)),
      settings(settings) {}

void Parameter::join(int64_t number, std::string fqn) {
  model_number = number;
  source->fqn = std::move(fqn);
  if (source->parts) source->parts->set_fqn(source->fqn);
}

SourcePtr Parameter::source_now(const Codec* codec) {
  const auto& there = substitutes.after_forward;
  // Whatever this rank has changed since: ranks have to gather from the same others. Rows there are
  // rounded already.
  if (in_backward() && there && there->shard.defined()) return there;
  return codec ? substitutes.encoded(*codec) : source;
}

bool Parameter::may_be_gathered() const { return !in_backward() || !gradients.is_delivered_early; }

bool Parameter::outlives_forward() const {
  return gathered.state() == Gathered::State::kRetained &&
         (in_backward() || !settings.reshard_after_forward);
}

int64_t Parameter::sent_chunk_bytes(at::ScalarType wire_dtype) const {
  const auto* codec = settings.gradient_dtypes.codec;
  const auto item = static_cast<int64_t>(c10::elementSize(wire_dtype));
  const int64_t row = source->row_numel();
  return source->layout.chunk_rows() * (codec ? codec->row_bytes(row) : row * item);
}

bool Parameter::is_wanted() const {
  return !placeholder().defined() || zero3::is_wanted(placeholder());
}

void Parameter::deposit(const at::Tensor& raw) {
  check_gradient(raw);
  if (settings.detects_nonfinite) gradients.detect_nonfinite(raw);
  gradients.add(raw, settings.gradient_dtypes, /*owned=*/false);
}

void Parameter::drop_gradients() {
  gradients.drop();
  substitutes.forget_after_forward();
  substitutes.forget_encoded();
}

void Parameter::check_gradient(const at::Tensor& raw) const {
  ZERO3_CHECK(raw.layout() == at::kStrided, "the gradient of '", fqn(), "' is ", raw.layout(),
              ", and only dense gradients can be reduced: use sparse=False");
  ZERO3_CHECK(is_gradient_dtype(raw.scalar_type()), "the gradient of '", fqn(), "' is ",
              raw.scalar_type(),
              ", which cannot be summed and sent: cast it to float32, "
              "float64, bfloat16 or float16");
  ZERO3_CHECK(raw.sizes() == at::IntArrayRef(sizes()), "the gradient of '", fqn(), "' has shape ",
              raw.sizes(), " where the full parameter has ", at::IntArrayRef(sizes()));
  ZERO3_CHECK(raw.device() == device(), "the gradient of '", fqn(), "' is on ", raw.device(),
              " where the parameter computes on ", device());
}

std::vector<std::string> names_of(const std::vector<ParameterPtr>& parameters) {
  std::vector<std::string> result;
  for (auto& parameter : parameters) result.push_back(parameter->fqn());
  return result;
}

std::string scope_name(const std::vector<ParameterPtr>& parameters, const std::string& what) {
  const auto more = parameters.size() - 1;
  return "zero3::" + what + " " + parameters.front()->fqn() +
         (more > 0 ? " and " + std::to_string(more) + " more" : "");
}

}  // namespace zero3
