// The extension module: the runtime's Python interface besides the operators.

#include "parameter/bindings.h"

#include <ATen/record_function.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include "features/digests/bindings.h"
#include "features/hybrid/bindings.h"
#include "features/quantized/bindings.h"
#include "features/tier/bindings.h"
#include "gather/gather.h"
#include "gather/gather_order.h"
#include "kernels/copy.h"
#include "ops.h"
#include "parameter/registry.h"
#include "reduce/reduce.h"
#include "support/autograd.h"
#include "support/error.h"
#include "support/grad_dtype.h"
#include "support/heap.h"
#include "support/host_copies.h"
#include "support/memory.h"
#include "support/saved_tensors.h"
#include "support/signals.h"
#include "support/tensor_ops.h"
#include "support/user_state.h"
#include "transport/bindings.h"
#include "transport/transport.h"

namespace py = pybind11;
using namespace zero3;

namespace {

// Returns a tensor of full shape and strides over zero bytes of storage. Reading its data raises,
// as for a FakeTensor.
at::Tensor make_placeholder(std::vector<int64_t> sizes, std::vector<int64_t> strides,
                            at::ScalarType dtype, at::Device device) {
  auto tensor = tensor_ops::empty({0}, at::TensorOptions(dtype).device(device));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  storage->release_data_and_set_meta_custom_data_ptr_error_msg_(
      "zero3: a kernel reads the placeholder of a sharded parameter, which has no data. If another "
      "backend has compiled convolutions in a checkpoint, Inductor's layout optimization copies "
      "their weights: compile with backend=\"zero3\", or with options={\"layout_optimization\": "
      "False}");
  return tensor;
}

// Once the interpreter ends, a thread that asks for the GIL is ended inside of C++ frames, which
// aborts the process.
bool is_python_finalizing() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing();
#else
  return _Py_IsFinalizing();
#endif
}

// These functions live as long as the process: Python may be gone before statics are destroyed.
void set_python_prepare_unshard(py::function function) {
  PyObject* callable = function.release().ptr();
  set_prepare_unshard([callable](const at::Tensor& placeholder) {
    py::gil_scoped_acquire gil;
    const UserState user;
    py::reinterpret_borrow<py::function>(callable)(placeholder);
  });
}

void set_python_deliver(py::function function) {
  PyObject* callable = function.release().ptr();
  set_deliver([callable](const std::vector<ReducedGradient>& gradients, Moment moment,
                         const std::vector<int64_t>& model_numbers) {
    wait_for_host_copies(CopyStream::kGradients);
    if (moment != Moment::kEarly) wait_for_host_copies(CopyStream::kShards);
    py::gil_scoped_acquire gil;
    const UserState user;
    py::list arguments;
    for (auto& [parameter, shard] : gradients) arguments.append(py::make_tuple(parameter, shard));
    py::reinterpret_borrow<py::function>(callable)(arguments, moment, model_numbers);
  });
}

void set_python_interrupted(py::function function) {
  PyObject* callable = function.release().ptr();
  set_interrupted([callable](const std::vector<int64_t>& model_numbers) {
    if (!Py_IsInitialized() || is_python_finalizing()) return;
    py::gil_scoped_acquire gil;
    const UserState user;
    py::error_scope scope;  // the error of the backward may be set
    try {
      py::reinterpret_borrow<py::function>(callable)(model_numbers);
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("a backward that has raised");
    }
  });
}

// HANDLE_TH_ERRORS turns this into a Python exception of `type`.
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
  if (gettid() != getpid()) {  // Python handles signals on the main thread alone
    while (is_python_finalizing()) sleep(1);
    return;
  }
  py::gil_scoped_acquire gil;
  const UserState user;
  if (PyErr_CheckSignals() == 0) return;
  python_error raised;
  raised.persist();
  throw raised;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  bind_digests(m);
  bind_tiers(m);
  bind_quantized(m);
  bind_transports(m);
  bind_parameters(m);
  bind_hybrid(m);

  py::class_<Gather>(m, "Gather")
      // No call guard: it would cover pybind11's own list of objects too.
      .def(py::init([](const py::sequence& sources, const std::string& formats) {
             auto wanted = gatherables(sources);
             py::gil_scoped_release released;
             auto codecs = codecs_of(formats, wanted.size());
             return request_gather(std::move(wanted), std::move(codecs));
           }),
           py::arg("sources"), py::arg("formats") = "")
      .def("snapshot", &Gather::snapshot, py::call_guard<py::gil_scoped_release>())
      .def("start_again_if_lost", &Gather::start_again_if_lost,
           py::call_guard<py::gil_scoped_release>())
      .def("finish", &Gather::finish, py::arg("fresh"), py::call_guard<py::gil_scoped_release>());

  py::class_<GatherOrders, std::shared_ptr<GatherOrders>>(m, "GatherOrders")
      .def(py::init<>())
      .def("add", [](const std::shared_ptr<GatherOrders>& self,
                     Parameter& parameter) { parameter.gather_orders = self; })
      .def("begin_forward", &GatherOrders::begin_forward)
      .def("end_forward", &GatherOrders::end_forward)
      .def("end_backward", &GatherOrders::end_backward)
      .def_readwrite("bytes_ahead", &GatherOrders::bytes_ahead);
  struct RecordedForwardContext {
    std::optional<RecordedForward> scope;
  };
  py::class_<RecordedForwardContext>(m, "RecordedForward")
      .def(py::init<>())
      .def("__enter__", [](RecordedForwardContext& context) { context.scope.emplace(); })
      .def("__exit__",
           [](RecordedForwardContext& context, const py::args&) { context.scope.reset(); });
  py::class_<ForwardEpochs>(m, "ForwardEpochs")
      .def(py::init([](const py::sequence& sources) {
        std::vector<SourcePtr> result;
        for (auto& each : gatherables(sources)) result.push_back(std::move(each.source));
        return std::make_unique<ForwardEpochs>(result);
      }))
      .def("begin_backward", &ForwardEpochs::begin_backward);
  m.def("invalidate", [](const std::vector<ParameterPtr>& parameters) {
    for (auto& parameter : parameters) parameter->transport()->invalidate();
  });

  m.attr("MAX_IN_FLIGHT") = kMaxInFlight;
  m.attr("MAX_REPLICA_SUMS") = ReplicaSums::kMaxReplicaSums;
#if defined(ZERO3_WITH_CUDA)
  m.attr("WITH_CUDA") = true;
#else
  m.attr("WITH_CUDA") = false;
#endif

  py::class_<Collective>(m, "Collective")
      .def_readonly("op", &Collective::op)
      .def_readonly("dtype", &Collective::dtype)
      .def_readonly("nbytes", &Collective::nbytes)
      .def_readonly("world_size", &Collective::world_size)
      .def_readonly("params", &Collective::params)
      .def("__repr__", [](const py::object& self) {
        return py::str(
                   "Collective(op={0.op!r}, dtype={0.dtype}, nbytes={0.nbytes}, "
                   "world_size={0.world_size}, params={0.params})")
            .format(self);
      });
  py::class_<CollectiveLog, std::shared_ptr<CollectiveLog>>(m, "CollectiveLog")
      .def_static("start", &CollectiveLog::start, py::arg("on_meta") = false)
      .def("take", &CollectiveLog::take)
      .def("stop", &CollectiveLog::stop)
      .def("records", &CollectiveLog::records);

  py::class_<SavedTensor>(m, "SavedTensor")
      .def(py::init<const at::Tensor&>())
      .def("unpack", &SavedTensor::unpack);
  py::class_<WatchedStorages, std::shared_ptr<WatchedStorages>>(m, "WatchedStorages")
      .def(py::init<>())
      .def("watch", &WatchedStorages::watch)
      .def("unwatch", &WatchedStorages::unwatch)
      .def("clear", &WatchedStorages::clear);
  // Hooks that take no Python frame for most tensors: there are thousands in a step.
  m.def("pack_hook", [](std::shared_ptr<WatchedStorages> watched, py::function pack_view) {
    return py::cpp_function([=](const at::Tensor& tensor) {
      auto saved = watched->save(tensor);
      return saved ? py::cast(*std::move(saved)) : pack_view(tensor);
    });
  });
  m.def("unpack_hook", [](const py::object& packed) {
    return py::isinstance<SavedTensor>(packed) ? py::cast(packed.cast<SavedTensor&>().unpack())
                                               : packed();
  });

  // Calls `begin`, which returns a Work that may end after a profile: see Transfers::start().
  m.def("begin_unseen", [](const py::function& begin) {
    const at::DisableRecordFunctionGuard guard;
    return begin();
  });

  m.def("announce_presences", &announce_presences, py::call_guard<py::gil_scoped_release>());
  m.def("exchange_presences", &exchange_presences, py::call_guard<py::gil_scoped_release>());
  m.def(
      "wait_for_shards", [] { wait_for_host_copies(CopyStream::kShards); },
      py::call_guard<py::gil_scoped_release>());
  m.def("note_skipped_gathers", &note_skipped_gathers);
  m.def("note_other_gather", [](const ParameterPtr& parameter) { count_unpublished({parameter}); });
  m.def("reshard_retained_after_forward", &reshard_retained_after_forward);
  m.def("reduce_deferred", &reduce_deferred, py::call_guard<py::gil_scoped_release>());
  m.def(
      "reduce",
      [](const ParameterPtr& parameter, const at::Tensor& grad, bool owned) {
        Reduction::current()->add(parameter, grad, owned);
      },
      py::arg("parameter"), py::arg("grad"), py::arg("owned") = false,
      py::call_guard<py::gil_scoped_release>());
  m.def("running_backward", &running_backward);
  m.def("in_backward", &in_backward);
  m.def("handles_signals", &handles_signals);
  m.def("live_model_numbers", [] { return Registry::get().live_model_numbers(); });
  m.def("read_gathered", &read_gathered, py::call_guard<py::gil_scoped_release>());
  m.def("read_as", &read_as, py::call_guard<py::gil_scoped_release>());
  m.def("gather_and_read", &gather_and_read, py::call_guard<py::gil_scoped_release>());
  m.def("contract_name", &contract_name);
  m.def(
      "release_buffers",
      [] {
        drop_exchanges_of_destroyed_groups();  // whose tensors go to the pool
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
      "meta_buffers",
      [](bool reset_peak) {
        const auto bytes = meta_bytes(reset_peak);
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
  m.def("copy_to_flat", &copy_to_flat);
  m.def("copy_from_flat", &copy_from_flat);
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
  m.def("set_prepare_unshard", &set_python_prepare_unshard);
  py::enum_<Moment>(m, "Moment")
      .value("EARLY", Moment::kEarly)
      .value("NESTED_END", Moment::kNestedEnd)
      .value("END", Moment::kEnd);
  m.def("set_deliver", &set_python_deliver);
  m.def("set_interrupted", &set_python_interrupted);
}
