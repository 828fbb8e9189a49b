// The extension module: what Python may touch of the runtime beside the operators.
#include <ATen/ops/empty.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include "autograd.h"
#include "copy.h"
#include "error.h"
#include "exchange.h"
#include "gather.h"
#include "grad_dtype.h"
#include "heap.h"
#include "memory.h"
#include "ops.h"
#include "publish.h"
#include "reduce.h"

namespace py = pybind11;
using namespace zero3;

namespace {

// A view of memory that nobody allocated: full shape and strides, zero bytes of storage. Whoever
// reads it gets an exception, as with a FakeTensor.
at::Tensor make_placeholder(std::vector<int64_t> sizes, std::vector<int64_t> strides,
                            at::ScalarType dtype, at::Device device) {
  auto tensor = at::empty({0}, at::TensorOptions(dtype).device(device));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  storage->release_data_and_set_meta_custom_data_ptr_error_msg_(
      "zero3: the placeholder of a sharded parameter has no data; only a compiled graph may take "
      "it");
  return tensor;
}

// Both functions are held for the life of the process: at exit, Python may be gone before statics
// are destroyed.
void set_python_refresh(py::function function) {
  PyObject* callable = function.release().ptr();
  set_refresh([callable](const at::Tensor& placeholder) {
    py::gil_scoped_acquire gil;
    py::reinterpret_borrow<py::function>(callable)(placeholder);
  });
}

void set_python_deliver(py::function function) {
  PyObject* callable = function.release().ptr();
  set_deliver([callable](const std::vector<ReducedGradient>& gradients) {
    py::gil_scoped_acquire gil;
    py::list arguments;
    for (auto& [parameter, shard] : gradients) arguments.append(py::make_tuple(parameter, shard));
    py::reinterpret_borrow<py::function>(callable)(arguments);
  });
}

// What HANDLE_TH_ERRORS makes an exception of this type of.
class PythonError : public torch::PyTorchError {
 public:
  PythonError(const std::string& message, PyObject* type)
      : torch::PyTorchError(message), type_(type) {}
  PyObject* python_type() override { return type_; }

 private:
  PyObject* type_;
};

void set_python_error(py::object type) {
  PyObject* error = type.release().ptr();
  set_throw([error](const std::string& message) { throw PythonError(message, error); });
}

void check_python_signals() {
  py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() == 0) return;
  python_error raised;
  raised.persist();
  throw raised;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  py::class_<Parameter, ParameterPtr>(m, "Parameter")
      .def(py::init<>())
      .def_readwrite("fqn", &Parameter::fqn)
      .def_readwrite("root", &Parameter::root)
      .def_readwrite("group_name", &Parameter::group_name)
      .def_readwrite("reduce_group_name", &Parameter::reduce_group_name)
      .def_readwrite("rank", &Parameter::rank)
      .def_readwrite("world_size", &Parameter::world_size)
      .def_readwrite("replicate_group_name", &Parameter::replicate_group_name)
      .def_readwrite("replica", &Parameter::replica)
      .def_readwrite("replicas", &Parameter::replicas)
      .def_readwrite("sizes", &Parameter::sizes)
      .def_readwrite("strides", &Parameter::strides)
      .def_readwrite("compute_dtype", &Parameter::compute_dtype)
      .def_readwrite("device", &Parameter::device)
      .def_readwrite("simulated_backend", &Parameter::simulated_backend)
      .def_readwrite("grad_dtype", &Parameter::grad_dtype)
      .def_readwrite("reduce_dtype", &Parameter::reduce_dtype)
      .def_readwrite("shard_grad_dtype", &Parameter::shard_grad_dtype)
      .def_readwrite("bucket_bytes", &Parameter::bucket_bytes)
      .def_readwrite("divide_factor", &Parameter::divide_factor)
      .def_readwrite("requires_gradient_sync", &Parameter::requires_gradient_sync)
      .def_readwrite("requires_all_reduce", &Parameter::requires_all_reduce)
      .def_readwrite("requires_gradient_on_all_ranks", &Parameter::requires_gradient_on_all_ranks)
      .def_readwrite("placeholder", &Parameter::placeholder)
      .def_readwrite("shard", &Parameter::shard)
      .def("follow_version",
           [](Parameter& self, const at::Tensor& leaf) { self.version = version_counter_of(leaf); })
      .def_readonly("gathered", &Parameter::gathered)
      .def_readwrite("reshard_after_forward", &Parameter::reshard_after_forward)
      .def_readwrite("reshard_after_backward", &Parameter::reshard_after_backward)
      .def_readwrite("after_forward", &Parameter::after_forward)
      .def("stays_after_forward", &Parameter::stays_after_forward)
      .def("hold", [](Parameter& self, const at::Tensor& full) { self.hold(full); })
      .def("let_go", &Parameter::let_go)
      .def("let_go_of_held", &Parameter::let_go_of_held)
      .def("was_written", &Parameter::was_written)
      .def("is_stale", &Parameter::is_stale)
      .def("share",
           [](Parameter& self, const std::shared_ptr<OneHost>& one_host, const at::Tensor& progress,
              const std::shared_ptr<Copies>& copies) {
             self.shared = std::make_shared<SharedCopy>(one_host, self, progress, copies);
           })
      .def_property_readonly("is_shared", [](const Parameter& self) { return bool(self.shared); })
      .def_property_readonly(
          "copy_number",
          [](const Parameter& self) -> uint64_t { return self.shared ? self.shared->number : 0; })
      .def_readwrite("model", &Parameter::model)
      .def("has_accumulated", &Parameter::has_accumulated, py::call_guard<py::gil_scoped_release>())
      .def_readonly("arrived_dtype", &Parameter::arrived_dtype)
      .def_readwrite("detects_nonfinite", &Parameter::detects_nonfinite)
      .def("take_nonfinite",
           [](Parameter& self) -> std::optional<std::tuple<int64_t, int64_t, int64_t>> {
             py::gil_scoped_release no_gil;
             const auto found = self.take_nonfinite();
             if (!found) return std::nullopt;
             return std::make_tuple(found->nans, found->infinities, found->numel);
           })
      .def_readwrite("deferred", &Parameter::deferred)
      .def_readwrite("dropped", &Parameter::dropped)
      .def("accumulate",
           [](Parameter& self, const at::Tensor& grad) {
             py::gil_scoped_release no_gil;
             self.detect_nonfinite(grad);
             accumulate(self, grad);
           })
      .def("drop_accumulated", &Parameter::drop_accumulated,
           py::call_guard<py::gil_scoped_release>())
      .def_readonly("pending_uses", &Parameter::pending_uses)
      .def("register", [](const ParameterPtr& self) { Registry::get().add(self); });

  py::class_<Gather>(m, "Gather")
      .def(py::init<std::vector<ParameterPtr>>(), py::call_guard<py::gil_scoped_release>())
      .def("snapshot", &Gather::snapshot, py::call_guard<py::gil_scoped_release>())
      .def("finish", &Gather::finish, py::arg("fresh"), py::call_guard<py::gil_scoped_release>());

  py::class_<Publications>(m, "Publications")
      .def(py::init<const std::vector<ParameterPtr>&>())
      .def("invalidate_if_republished", &Publications::invalidate_if_republished);
  m.def("invalidate", [](const std::vector<ParameterPtr>& parameters) {
    for (auto& parameter : parameters)
      if (parameter->shared) parameter->shared->invalidate();
  });

  py::class_<OneHost, std::shared_ptr<OneHost>>(m, "OneHost")
      .def(py::init<const std::string&, int64_t, const std::vector<int64_t>&, const at::Tensor&>())
      .def_static("control_bytes", &OneHost::control_bytes)
      .def_property_readonly(
          "mailbox_bytes",
          [](const OneHost& self) { return self.mailbox ? self.mailbox->capacity() : 0; })
      .def("set_mailboxes", [](OneHost& self, const at::Tensor& memory) {
        self.mailbox = Mailbox::make(self.host, memory);
      });
  py::class_<Copies, std::shared_ptr<Copies>>(m, "Copies")
      .def(py::init<const at::Tensor&, const at::Tensor&>())
      .def("grow", &Copies::grow)
      .def_property_readonly("nbytes", [](const Copies& self) { return self.writable.nbytes(); });
  // Of a parameter of so many rows: a Progress for each rank and block of its gradient.
  m.def("progress_bytes", [](int64_t rows, int64_t row_bytes, int64_t world_size) {
    return blocks_of(rows, row_bytes, world_size).size() * world_size * sizeof(Progress);
  });
  m.attr("CACHE_LINE") = kCacheLine;
  m.attr("MOST_IN_FLIGHT") = kMostInFlight;
#if defined(ZERO3_WITH_CUDA)
  m.attr("WITH_CUDA") = true;
#else
  m.attr("WITH_CUDA") = false;
#endif
  m.def("make_read_only", &make_read_only);

  py::class_<Collective>(m, "Collective")
      .def_readonly("op", &Collective::op)
      .def_readonly("dtype", &Collective::dtype)
      .def_readonly("nbytes", &Collective::nbytes)
      .def_readonly("world_size", &Collective::world_size)
      .def_readonly("params", &Collective::params);
  py::class_<CollectiveLog, std::shared_ptr<CollectiveLog>>(m, "CollectiveLog")
      .def_static("start", &CollectiveLog::start, py::arg("simulated") = false)
      .def("take", &CollectiveLog::take)
      .def("stop", &CollectiveLog::stop)
      .def("records", &CollectiveLog::records);

  m.def("add_uses", [](const std::vector<ParameterPtr>& parameters, bool first) {
    for (auto& parameter : parameters) parameter->add_use(first);
  });
  m.def("backend_name", [](const std::string& group_name, at::Device device) {
    return backend_name({group_name, device});
  });
  m.def("timeout_of", [](const std::string& group_name) { return timeout_of(group_name).count(); });
  m.def("count_held", &count_held);
  m.def("reduce_accumulated", &reduce_accumulated, py::call_guard<py::gil_scoped_release>());
  m.def(
      "reduce",
      [](const ParameterPtr& parameter, const at::Tensor& grad, bool owned) {
        Reduction::current()->add(parameter, grad, owned);
      },
      py::arg("parameter"), py::arg("grad"), py::arg("owned") = false,
      py::call_guard<py::gil_scoped_release>());
  m.def("new_shared_file", &new_shared_file, py::arg("nbytes"));
  m.def("running_backward", &running_backward);
  m.def("forget_uses", [](int64_t root) {
    for (auto& parameter : Registry::get().of_root(root)) parameter->pending_uses = 0;
  });
  m.def("live_roots", [] { return Registry::get().live_roots(); });
  m.def("read_gathered", &read_gathered);
  m.def("gather_and_read", &gather_and_read, py::call_guard<py::gil_scoped_release>());
  m.def("contract_name", &contract_name);
  m.def(
      "release_buffers",
      [] {
        const auto nbytes = release_pool();
        let_go_of_heap();
        return nbytes;
      },
      py::call_guard<py::gil_scoped_release>());
  m.def(
      "buffer_stats",
      [](bool reset_peak) {
        const auto stats = pool_stats(reset_peak);
        return std::make_tuple(stats.in_use, stats.peak, stats.kept);
      },
      py::arg("reset_peak"), py::call_guard<py::gil_scoped_release>());
  m.def(
      "simulated_buffers",
      [](bool reset_peak) {
        const auto bytes = simulated_bytes(reset_peak);
        return std::make_pair(bytes.in_use, bytes.peak);
      },
      py::arg("reset_peak") = false);
  m.def(
      "empty_buffer",
      [](const std::vector<int64_t>& sizes, at::ScalarType dtype, at::Device device) {
        return pooled_empty(sizes, at::TensorOptions(dtype).device(device));
      },
      py::arg("sizes"), py::arg("dtype"), py::arg("device") = at::Device(at::kCPU));
  m.def("limit_buffers", &limit_pool, py::call_guard<py::gil_scoped_release>());
  m.def("make_placeholder", &make_placeholder);
  m.def("declare_grad_dtype", &declare_grad_dtype);
  m.def("copy_all",
        [](const std::vector<at::Tensor>& to, const std::vector<std::optional<at::Tensor>>& from,
           at::ScalarType through, double divisor) {
          std::vector<Copy> copies;
          for (size_t i = 0; i < to.size(); ++i)
            copies.push_back({to[i], from.at(i).value_or(at::Tensor())});
          copy_all(copies, through, divisor);
        });
  py::register_local_exception_translator([](std::exception_ptr raised) {
    try {
      if (raised) std::rethrow_exception(raised);
    } catch (PythonError& error) {
      PyErr_SetString(error.python_type(), error.what());
    } catch (python_error& error) {
      error.restore();
    }
  });
  set_check_signals(&check_python_signals);
  m.def("set_error", &set_python_error);
  m.def("set_refresh", &set_python_refresh);
  m.def("set_deliver", &set_python_deliver);
}
