// The operators. Graphs contain all_gather_start, all_gather_wait or all_gather_views, and
// reduce_grad, reduce_mm or reduce_rows. Models call unshard, or unshard_as for a tensor that is
// made of payloads; graphs of other backends may call unshard_with_ordinal.
#include "ops.h"

#include <ATen/core/enum_tag.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <tuple>
#include <vector>

#include "gather/gather.h"
#include "gather/gather_order.h"
#include "parameter/registry.h"
#include "reduce/reduce.h"
#include "support/autograd.h"
#include "support/error.h"
#include "support/grad_dtype.h"
#include "support/in_flight.h"
#include "support/memory.h"
#include "support/user_state.h"

namespace zero3 {
namespace {

using at::Tensor;

std::function<void(const Tensor& placeholder)> prepare_unshard;

// An op that starts a collective or waits for one takes the handle or token of the op before it, so
// that no scheduler can swap two of them on one rank.
Tensor token(const Tensor& like) { return at::empty({0}, like.options()); }

std::shared_ptr<Gather> gather_of(const Tensor& handle) {
  auto gather = InFlight<Gather>::get().find(handle);
  ZERO3_CHECK(gather,
              "zero3::all_gather_wait and zero3::all_gather_views take what "
              "zero3::all_gather_start returned");
  return gather;
}

// The token that orders what follows a wait.
Tensor token_after(at::TensorList placeholders) {
  ZERO3_CHECK(!placeholders.empty(),
              "a wait for a gather takes the placeholders of what it gathered");
  return token(placeholders[0]);
}

Tensor all_gather_start(at::TensorList placeholders, const std::optional<Tensor>& after,
                        std::string formats) {
  std::vector<Gatherable> wanted;
  for (auto& placeholder : placeholders)
    wanted.push_back(Registry::get().find_gatherable(placeholder));
  return InFlight<Gather>::get().add(
      request_gather(std::move(wanted), codecs_of(formats, placeholders.size())));
}

// Returns fresh memory: a compiler may write to it after its last use.
std::vector<Tensor> all_gather_wait(const Tensor& handle, at::TensorList placeholders,
                                    const std::optional<Tensor>& after) {
  const auto after_this = token_after(placeholders);
  auto result = gather_of(handle)->finish_owned();
  result.push_back(after_this);
  return result;
}

// Returns memory that the graph does not own.
std::vector<Tensor> all_gather_views(const Tensor& handle, at::TensorList placeholders,
                                     const std::optional<Tensor>& after) {
  const auto after_this = token_after(placeholders);
  auto result = gather_of(handle)->finish(/*fresh=*/false);
  result.push_back(after_this);
  return result;
}

// An empty contract means that the user calls, inside defer_reduction, and not a graph.
void check_reducible(const Parameter& parameter, const std::string& contract) {
  const auto expected = contract_name(parameter.settings.gradient_dtypes.leaf);
  ZERO3_CHECK(contract.empty() || contract == expected, "the contract of '", parameter.fqn(),
              "' (grad_dtype) was ", contract, " in the forward of this backward and is ", expected,
              " now: set grad_dtype before the forward");
  ZERO3_CHECK(in_backward() || !contract.empty(), "zero3::reduce_grad('", parameter.fqn(),
              "') was called outside of a backward: call it inside of defer_reduction(model)");
  ZERO3_CHECK(in_backward(), "the gradient of '", parameter.fqn(),
              "' was computed in forward. It does not depend on that of the loss, and this backend "
              "moved it there: use backend='zero3', or eager");
  check_not_compiled(parameter.fqn());
}

Tensor reduce_grad(const Tensor& grad, const Tensor& whose, const std::optional<Tensor>& after,
                   int64_t use, std::string contract) {
  auto parameter = Registry::get().find_for_gradient(whose);
  const BelowAutograd guard;
  if (parameter->settings.deferred && contract.empty()) {
    parameter->deposit(grad);
  } else {
    check_reducible(*parameter, contract);
    Reduction::current()->add(parameter, grad, /*owned=*/false, use);
  }
  return token(grad);
}

Tensor reduce_mm(at::TensorList factors, const Tensor& placeholder,
                 const std::optional<Tensor>& after, int64_t use, std::string contract) {
  ZERO3_CHECK(factors.size() == 2, "zero3::reduce_mm takes two matrices, got ", factors.size());
  auto parameter = Registry::get().find(placeholder);
  check_reducible(*parameter, contract);
  const BelowAutograd guard;
  Reduction::current()->add_product(parameter, factors[0], factors[1]);
  return token(factors[0]);
}

Tensor reduce_rows(at::TensorList rows, const Tensor& placeholder,
                   const std::optional<Tensor>& after, int64_t use, std::string contract) {
  ZERO3_CHECK(rows.size() == 2, "zero3::reduce_rows takes indices and values, got ", rows.size());
  auto parameter = Registry::get().find(placeholder);
  check_reducible(*parameter, contract);
  const BelowAutograd guard;
  auto reduction = Reduction::current();
  auto grad = reduction->empty_for(*parameter, parameter->sizes(), rows[1].options());
  auto indices = rows[0].reshape({-1}).clamp(0, grad.size(0) - 1);  // rows of zeros may lie outside
  grad.zero_().index_add_(0, indices, rows[1].reshape({-1, grad.size(1)}));
  reduction->add(parameter, grad, /*owned=*/true);
  return token(grad);
}

// Returns fresh memory: a compiler may write to an operator's result.
Tensor unshard(const Tensor& placeholder, std::string contract, bool saves_placeholder) {
  auto wanted = Registry::get().find_gatherable(placeholder);
  if (prepare_unshard) prepare_unshard(wanted.source->placeholder);
  return gather(std::move(wanted));
}

// Returns the parameter's ordinal too, which a graph saves in place of the placeholder.
std::tuple<Tensor, Tensor> unshard_with_ordinal(const Tensor& placeholder, std::string contract) {
  const auto order = Registry::get().find(placeholder)->order;
  return {unshard(placeholder, std::move(contract), false), at::full({1}, order, at::kLong)};
}

// Returns a view that shares the version counter, so that a write to the view is noticed.
Tensor view_of(const Tensor& gathered) {
  return Tensor(gathered.unsafeGetTensorImpl()->shallow_copy_and_detach(
      version_counter_of(gathered), /*allow_tensor_metadata_change=*/true));
}

Tensor call_unshard(const Tensor& placeholder, const std::string& contract) {
  static auto op = c10::Dispatcher::singleton()
                       .findSchemaOrThrow("zero3::unshard", "")
                       .typed<Tensor(const Tensor&, std::string, bool)>();
  return op.call(placeholder, contract, false);
}

std::tuple<Tensor, Tensor> call_unshard_with_ordinal(const Tensor& placeholder,
                                                     const std::string& contract) {
  static auto op = c10::Dispatcher::singleton()
                       .findSchemaOrThrow("zero3::unshard_with_ordinal", "")
                       .typed<std::tuple<Tensor, Tensor>(const Tensor&, std::string)>();
  return op.call(placeholder, contract);
}

void call_reduce_grad(const Tensor& grad, const Tensor& whose, int64_t use,
                      const std::string& contract) {
  static auto op = c10::Dispatcher::singleton()
                       .findSchemaOrThrow("zero3::reduce_grad", "")
                       .typed<Tensor(const Tensor&, const Tensor&, const std::optional<Tensor>&,
                                     int64_t, std::string)>();
  op.call(grad, whose, std::nullopt, use, contract);
}

bool is_traced(const Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->is_python_dispatch() ||
         tensor.key_set().has(c10::DispatchKey::Functionalize);
}

// Returns a gradient in plain memory. A tensor subclass runs each operator on its inner tensors:
// one with several of them would reduce as many gradients of one use.
Tensor plain_gradient(const Tensor& grad, const Tensor& whose) {
  if (is_traced(whose) || !grad.unsafeGetTensorImpl()->is_python_dispatch()) return grad;
  const std::vector<int64_t> strides = at::infer_dense_strides(grad.sizes(), grad.strides());
  return at::empty_strided(grad.sizes(), strides, at::device(grad.device()).dtype(grad.dtype()))
      .copy_(grad);
}

// Number of this use of a traced placeholder, from 1 on. A compiler merges two equal nodes, but the
// same gradient for two uses must count twice. To autograd, they are one use, of the graph.
int64_t next_traced_use(const Tensor& placeholder) {
  struct Uses {
    c10::weak_intrusive_ptr<c10::TensorImpl> traced;
    int64_t number = 0;
  };
  static std::mutex mutex;
  static auto& all = *new std::vector<Uses>;  // one entry for each placeholder being traced
  std::lock_guard lock(mutex);
  std::erase_if(all, [](auto& uses) { return uses.traced.expired(); });
  auto found = std::ranges::find(all, placeholder.unsafeGetTensorImpl(),
                                 [](auto& uses) { return uses.traced._unsafe_get_target(); });
  if (found == all.end())
    found = all.insert(all.end(), {c10::weak_intrusive_ptr(placeholder.getIntrusivePtr()), 0});
  return ++found->number;
}

class Unshard : public torch::autograd::Function<Unshard> {
 public:
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& placeholder,
                        std::string contract, const std::optional<Tensor>& gathered,
                        bool saves_ordinal) {
    // Not by save_for_backward: the user's hooks on saved tensors would read it.
    context->saved_data["whose"] = placeholder;
    context->saved_data["contract"] = contract;
    context->saved_data["use"] = is_traced(placeholder) ? next_traced_use(placeholder) : 0;
    context->set_materialize_grads(false);
    if (gathered) return view_of(*gathered);
    const BelowAutograd guard;
    if (!saves_ordinal) return call_unshard(placeholder, contract);
    auto [full, ordinal] = call_unshard_with_ordinal(placeholder, contract);
    context->saved_data["whose"] = ordinal;
    return full;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    const auto& whose = context->saved_data["whose"].toTensor();
    if (c10::GradMode::is_enabled()) {
      auto parameter = Registry::get().find_or_null(whose);
      ZERO3_CHECK(false, "the gradient of '", parameter ? parameter->fqn() : "a sharded parameter",
                  "' cannot be differentiated again: backward(create_graph=True) is not supported");
    }
    if (grads[0].defined())
      call_reduce_grad(plain_gradient(grads[0], whose), whose, context->saved_data["use"].toInt(),
                       context->saved_data["contract"].toStringRef());
    return {Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

// An empty contract means the parameter's present contract.
Tensor apply_unshard(const Tensor& placeholder, std::string contract,
                     const std::optional<Tensor>& gathered, bool saves_placeholder = true) {
  const RuntimeState user_is_outside;  // autograd's functions change it
  const bool traced = is_traced(placeholder);
  auto parameter = traced ? nullptr : Registry::get().find_or_null(placeholder);
  if (parameter && contract.empty())
    contract = contract_name(parameter->settings.gradient_dtypes.leaf);
  // Inductor lays out what a graph saves of a convolution's sources, if it has four dimensions, in
  // the order of channels last: it would copy the placeholder, and so read it.
  const bool saves_ordinal = traced && !saves_placeholder && placeholder.dim() == 4 &&
                             placeholder.requires_grad() && c10::GradMode::is_enabled();
  auto full = Unshard::apply(placeholder, contract, gathered, saves_ordinal);
  if (!full.requires_grad()) return full;
  declare_grad_dtype(full, contract_dtype(contract));
  if (parameter) exchange_presences({parameter});  // a recomputed forward may be the first action
  return full;
}

Tensor unshard_autograd(const Tensor& placeholder, std::string contract, bool saves_placeholder) {
  return apply_unshard(placeholder, std::move(contract), std::nullopt, saves_placeholder);
}

// Returns fresh memory, as unshard does.
Tensor unshard_as(const Tensor& full, const Tensor& placeholder, std::string contract) {
  return full.clone();
}

Tensor unshard_as_autograd(const Tensor& full, const Tensor& placeholder, std::string contract) {
  return apply_unshard(placeholder, std::move(contract), full);
}

void register_kernels(torch::Library& m) {
  m.impl("all_gather_start", all_gather_start);
  m.impl("all_gather_wait", all_gather_wait);
  m.impl("all_gather_views", all_gather_views);
  m.impl("reduce_grad", reduce_grad);
  m.impl("reduce_mm", reduce_mm);
  m.impl("reduce_rows", reduce_rows);
  m.impl("unshard", unshard);
  m.impl("unshard_with_ordinal", unshard_with_ordinal);
  m.impl("unshard_as", unshard_as);
}

}  // namespace

TORCH_LIBRARY(zero3, m) {
  // A replayed CUDA graph would not gather or reduce.
  const std::vector<at::Tag> tags{at::Tag::cudagraph_unsafe};
  m.def("all_gather_start(Tensor[] placeholders, Tensor? after=None, str formats='') -> Tensor",
        tags);
  m.def("all_gather_wait(Tensor handle, Tensor[] placeholders, Tensor? after=None) -> Tensor[]",
        tags);
  // The results alias an input, so that no compiler writes to them.
  m.def(
      "all_gather_views(Tensor(a) handle, Tensor[] placeholders, Tensor? after=None) -> "
      "Tensor(a)[]",
      tags);
  m.def(
      "reduce_grad(Tensor grad, Tensor placeholder, Tensor? after=None, int use=0, "
      "str contract='') -> Tensor",
      tags);
  // A compiler keeps the strides of tensors in a list, and a factor is often a transposed view.
  m.def(
      "reduce_mm(Tensor[] factors, Tensor placeholder, Tensor? after=None, int use=0, "
      "str contract='') -> Tensor",
      tags);
  m.def(
      "reduce_rows(Tensor[] rows, Tensor placeholder, Tensor? after=None, int use=0, "
      "str contract='') -> Tensor",
      tags);
  m.def("unshard(Tensor placeholder, str contract, bool saves_placeholder=False) -> Tensor", tags);
  m.def("unshard_with_ordinal(Tensor placeholder, str contract) -> (Tensor, Tensor)", tags);
  m.def("unshard_as(Tensor full, Tensor placeholder, str contract) -> Tensor", tags);
}

TORCH_LIBRARY_IMPL(zero3, CPU, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(zero3, CUDA, m) { register_kernels(m); }

// Registered so that the error for a sparse gradient can name its parameter.
TORCH_LIBRARY_IMPL(zero3, SparseCPU, m) { m.impl("reduce_grad", reduce_grad); }
TORCH_LIBRARY_IMPL(zero3, SparseCUDA, m) { m.impl("reduce_grad", reduce_grad); }

TORCH_LIBRARY_IMPL(zero3, Autograd, m) {
  m.impl("unshard", unshard_autograd);
  m.impl("unshard_as", unshard_as_autograd);
}

Tensor read_gathered(const ParameterPtr& parameter) {
  ZERO3_CHECK(parameter->gathered.is_unsharded(), "'", parameter->fqn(), "' is not gathered");
  parameter->gathered.make_writable();
  return apply_unshard(parameter->placeholder(), "", parameter->gathered.full());
}

Tensor read_as(const ParameterPtr& parameter, const Tensor& full) {
  return apply_unshard(parameter->placeholder(), "", full);
}

Tensor gather_and_read(const ParameterPtr& parameter) {
  return apply_unshard(parameter->placeholder(), "", gather({parameter->source, parameter}));
}

void set_prepare_unshard(std::function<void(const Tensor&)> function) {
  prepare_unshard = std::move(function);
}

}  // namespace zero3
