// What Python sees of the simulated device.
#include "collectives.h"
#include "device/memory.h"
#include "device/races.h"
#include "device/runtime.h"
#include "device/streams.h"
#include "tensors/fallback.h"
#include "tensors/late_kernels.h"

#include <torch/csrc/Generator.h>
#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace simulated;
  module.attr("num_devices") = kNumDevices;
  module.def("register_hooks", &register_hooks);
  module.def("prefer_cpu_kernels", &prefer_cpu_kernels);
  module.def("current_device", &current_device);
  module.def("set_device", &set_current_device);
  module.def("synchronize", &synchronize_device, py::call_guard<py::gil_scoped_release>());
  module.def("num_queued", &num_queued);
  module.def("default_generator", [](int device) { return default_generator(device); });
  module.def("set_memory_limit", &set_memory_limit);
  module.def("races", &races_found);
  module.def("check_races", [](bool on) { modes.check_races = on; });
  module.def("late_copies", [](bool on) { modes.late_copies = on; });
  module.def("late_kernels", [](bool on) { modes.late_kernels = on; });
  module.def("late_counts", [] {
    const auto counts = late_counts();
    return py::make_tuple(counts.num_late, counts.at_once);
  });

  py::module_::import("torch.distributed");
  py::class_<Collectives, c10d::Backend, c10::intrusive_ptr<Collectives>>(module, "Collectives")
      .def(py::init([](const c10::intrusive_ptr<c10d::Backend>& gloo, std::string name) {
        return c10::make_intrusive<Collectives>(gloo, std::move(name));
      }));
}
