// The operators. Graphs hold all_gather and reduce_grad; models call unshard.
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include "gather.h"
#include "grad_dtype.h"
#include "reduce.h"

namespace zero3 {
namespace {

using at::Tensor;

// An op that starts a collective takes the token of the one before it and gives its own, so that
// no scheduler can swap two of them on one rank.
Tensor token(const Tensor& like) { return at::empty({0}, like.options()); }

std::vector<Tensor> all_gather(at::TensorList placeholders, std::vector<std::string> fqns,
                               const std::optional<Tensor>& after) {
  TORCH_CHECK(!placeholders.empty() && placeholders.size() == fqns.size(),
              "zero3::all_gather needs one name for each placeholder, got ", placeholders.size(),
              " placeholders and ", fqns.size(), " names");
  std::vector<ParameterPtr> parameters;
  for (auto& fqn : fqns) parameters.push_back(Registry::get().find(fqn));
  auto result = gather(parameters);
  result.push_back(token(placeholders[0]));
  return result;
}

Tensor reduce_grad(const Tensor& grad, std::string fqn, const std::optional<Tensor>& after,
                   int64_t use) {
  auto parameter = Registry::get().find(fqn);
  if (torch::autograd::get_current_graph_task_id() == -1) {
    TORCH_CHECK(parameter->deferred, "zero3::reduce_grad('", fqn,
                "') was called outside of a backward: call it inside of defer_reduction(model)");
    accumulate(*parameter, grad);
  } else {
    Reduction::current()->add(parameter, grad);
  }
  return token(grad);
}

Tensor unshard(const Tensor& placeholder, std::string fqn) {
  auto parameter = Registry::get().find(fqn);
  if (!parameter->gathered.defined()) {
    refresh(*parameter);
    return gather({parameter})[0];
  }
  // A view that shares the version counter, so that writing to it is noticed.
  auto& gathered = parameter->gathered;
  return Tensor(gathered.unsafeGetTensorImpl()->shallow_copy_and_detach(
      torch::autograd::impl::version_counter(gathered), /*allow_tensor_metadata_change=*/true));
}

Tensor call_unshard(const Tensor& placeholder, const std::string& fqn) {
  static auto op = c10::Dispatcher::singleton()
                       .findSchemaOrThrow("zero3::unshard", "")
                       .typed<Tensor(const Tensor&, std::string)>();
  return op.call(placeholder, fqn);
}

void call_reduce_grad(const Tensor& grad, const std::string& fqn, int64_t use) {
  static auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("zero3::reduce_grad", "")
          .typed<Tensor(const Tensor&, std::string, const std::optional<Tensor>&, int64_t)>();
  op.call(grad, fqn, std::nullopt, use);
}

bool is_traced(const Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->is_python_dispatch() ||
         tensor.key_set().has(c10::DispatchKey::Functionalize);
}

// A compiler merges two nodes that are alike; the same gradient for two uses must count twice.
int64_t next_traced_use(const std::string& fqn) {
  auto parameter = Registry::get().find_or_null(fqn);
  return parameter ? parameter->traced_uses++ : 0;
}

class Unshard : public torch::autograd::Function<Unshard> {
 public:
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& placeholder,
                        std::string fqn) {
    context->saved_data["fqn"] = fqn;
    context->saved_data["use"] = is_traced(placeholder) ? next_traced_use(fqn) : 0;
    context->set_materialize_grads(false);
    at::AutoDispatchBelowADInplaceOrView guard;
    return call_unshard(placeholder, fqn);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    TORCH_CHECK(!c10::GradMode::is_enabled(), "zero3: the gradient of '",
                context->saved_data["fqn"].toStringRef(),
                "' cannot be differentiated again: backward(create_graph=True) is not supported");
    if (grads[0].defined())
      call_reduce_grad(grads[0], context->saved_data["fqn"].toStringRef(),
                       context->saved_data["use"].toInt());
    return {Tensor(), Tensor()};
  }
};

Tensor unshard_autograd(const Tensor& placeholder, std::string fqn) {
  auto full = Unshard::apply(placeholder, fqn);
  if (!full.requires_grad()) return full;
  auto parameter = Registry::get().find_or_null(fqn);
  if (!parameter) return full;
  declare_grad_dtype(full, parameter->grad_dtype);
  if (!is_traced(placeholder)) parameter->add_use(/*first=*/false);
  return full;
}

}  // namespace

TORCH_LIBRARY(zero3, m) {
  m.def("all_gather(Tensor[] placeholders, str[] fqns, Tensor? after=None) -> Tensor[]");
  m.def("reduce_grad(Tensor grad, str fqn, Tensor? after=None, int use=0) -> Tensor");
  m.def("unshard(Tensor placeholder, str fqn) -> Tensor");
}

TORCH_LIBRARY_IMPL(zero3, CPU, m) {
  m.impl("all_gather", all_gather);
  m.impl("reduce_grad", reduce_grad);
  m.impl("unshard", unshard);
}

TORCH_LIBRARY_IMPL(zero3, CUDA, m) {
  m.impl("all_gather", all_gather);
  m.impl("reduce_grad", reduce_grad);
  m.impl("unshard", unshard);
}

// So that it can be refused by name.
TORCH_LIBRARY_IMPL(zero3, SparseCPU, m) { m.impl("reduce_grad", reduce_grad); }
TORCH_LIBRARY_IMPL(zero3, SparseCUDA, m) { m.impl("reduce_grad", reduce_grad); }

TORCH_LIBRARY_IMPL(zero3, Autograd, m) { m.impl("unshard", unshard_autograd); }

}  // namespace zero3
