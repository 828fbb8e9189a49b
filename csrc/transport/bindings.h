// Python bindings of transports. Included by bindings.cpp alone: pybind11 takes ten seconds to
// compile.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "transport/c10d/process_group.h"
#include "transport/messages.h"
#include "transport/shared/host_exchange.h"
#include "transport/shared/shared_memory.h"
#include "transport/simulated/simulated.h"

namespace zero3 {

inline void bind_transports(pybind11::module_& m) {
  pybind11::class_<Capabilities>(m, "Capabilities")
      .def_readonly("gathers_views", &Capabilities::gathers_views)
      .def_readonly("publishes", &Capabilities::publishes)
      .def_readonly("ranks_meet_in_backward", &Capabilities::ranks_meet_in_backward)
      .def_readonly("sends_any_dtype", &Capabilities::sends_any_dtype)
      .def_readonly("bounds_buckets", &Capabilities::bounds_buckets)
      .def_readonly("sends_messages", &Capabilities::sends_messages);
  pybind11::class_<Transport, std::shared_ptr<Transport>>(m, "Transport")
      .def_property_readonly("name", &Transport::name)
      .def_property_readonly("parameter_index", &Transport::parameter_index);

  pybind11::class_<Channel, std::shared_ptr<Channel>>(m, "Channel")
      .def_property_readonly("name", [](const Channel& self) { return self.name; })
      .def_property_readonly("rank", [](const Channel& self) { return self.rank; })
      .def_property_readonly("world_size", [](const Channel& self) { return self.world_size; });
  pybind11::class_<ProcessGroupChannel, Channel, std::shared_ptr<ProcessGroupChannel>>(
      m, "ProcessGroupChannel")
      .def(pybind11::init<const std::string&, int64_t, std::vector<std::string>, int64_t,
                          at::Device, bool>());
  pybind11::class_<SimulatedChannel, Channel, std::shared_ptr<SimulatedChannel>>(m,
                                                                                 "SimulatedChannel")
      .def(pybind11::init<const std::string&, int64_t, int64_t, const std::string&>());
  pybind11::class_<Messages, Transport, std::shared_ptr<Messages>>(m, "Messages")
      .def(pybind11::init<std::shared_ptr<Channel>, std::shared_ptr<Channel>>())
      .def_readonly("gathers", &Messages::gathers)
      .def_readonly("reductions", &Messages::reductions);
  m.def("backend_name", &backend_name);
  m.def("seconds_waited", &seconds_waited);
  m.def("timeout_of", [](const std::string& group_name) { return timeout_of(group_name).count(); });

  pybind11::class_<SharedMemory, Transport, std::shared_ptr<SharedMemory>>(m, "SharedMemory")
      .def(pybind11::init<std::shared_ptr<OneHost>, const Source&, at::Tensor,
                          std::shared_ptr<CopyMemory>, bool>());
  pybind11::class_<OneHost, std::shared_ptr<OneHost>>(m, "OneHost")
      .def(pybind11::init<const std::string&, int64_t, std::vector<std::string>,
                          const std::vector<int64_t>&, const at::Tensor&>())
      .def_static("control_bytes", &OneHost::control_bytes)
      .def_property_readonly(
          "mailbox_bytes",
          [](const OneHost& self) { return self.mailbox ? self.mailbox->capacity() : 0; })
      .def("set_mailboxes", [](OneHost& self, const at::Tensor& memory) {
        self.mailbox = Mailbox::make(self.waiter, memory);
      });
  pybind11::class_<CopyMemory, std::shared_ptr<CopyMemory>>(m, "CopyMemory")
      .def(pybind11::init<const at::Tensor&, const at::Tensor&>())
      .def("grow", &CopyMemory::grow)
      .def_property_readonly("nbytes",
                             [](const CopyMemory& self) { return self.writable.nbytes(); });
  pybind11::class_<HostExchange>(m, "HostExchange")
      .def(pybind11::init([](const std::string& group_name, int64_t rank,
                             std::vector<std::string> names, const std::vector<int64_t>& pids,
                             const at::Tensor& memory, const std::string& rule) {
        return std::make_unique<HostExchange>(group_name, rank, RankNames(std::move(names)), pids,
                                              memory, rule);
      }))
      .def_static("nbytes", &HostExchange::nbytes)
      .def("exchange", &HostExchange::exchange,
           pybind11::call_guard<pybind11::gil_scoped_release>())
      .def_property_readonly_static("LINE_BYTES",
                                    [](const pybind11::object&) { return kLineBytes; });
  // Bytes of a parameter's `progress`: a Progress for each rank and each block of the gradient.
  m.def("progress_bytes", [](const RowLayout& layout, int64_t row_bytes) {
    return blocks_of(layout, row_bytes).size() * layout.world_size() * sizeof(Progress);
  });
  m.def("new_shared_file", &new_shared_file, pybind11::arg("nbytes"),
        pybind11::call_guard<pybind11::gil_scoped_release>());
  m.def("make_read_only", &make_read_only);
  m.attr("CACHE_LINE") = kCacheLine;
}

}  // namespace zero3
