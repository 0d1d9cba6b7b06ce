#include "fallback.h"

#include "late_kernels.h"

#include "../device/memory.h"
#include "../device/races.h"
#include "../device/runtime.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <torch/library.h>

#include <array>
#include <cstring>

namespace simulated {

namespace {

bool is_host_tensor(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().is_cpu() && tensor.dim() > 0;
}

// Views look at no bytes.
bool makes_views(const c10::FunctionSchema& schema) {
  for (const auto& result : schema.returns()) {
    if (result.alias_info() != nullptr && !result.alias_info()->isWrite()) {
      return true;
    }
  }
  return false;
}

at::Tensor take_tensor(Call& call, const at::Tensor& tensor, bool is_written) {
  if (!is_on_device(tensor)) {
    return tensor;
  }
  if (call.device < 0) {
    call.device = tensor.device().index();
  }
  TORCH_CHECK(call.device == tensor.device().index(), call.schema().name(),
              ": expected all tensors on one device, found ", call.device, " and ", tensor.device());
  auto alias = call.aliases.on_cpu(tensor);
  call.touched.push_back({tensor, alias, is_written});
  return alias;
}

c10::IValue take_argument(Call& call, size_t index) {
  const auto& value = call.given[index];
  if (value.isDevice() && value.toDevice().type() == kDeviceType) {
    if (call.device < 0) {
      call.device = device_or_current(value.toDevice().index());
    }
    return c10::Device(c10::DeviceType::CPU);
  }
  const bool is_written = call.writes_argument(index);
  return map_tensors(value, [&](const at::Tensor& tensor) { return take_tensor(call, tensor, is_written); });
}

// As on other accelerators: a number may come from the host, and so may the indices of these operators.
void refuse_host_tensors(const Call& call) {
  static const std::array<std::string, 3> indexing = {"aten::index", "aten::index_put_", "aten::_index_put_impl_"};
  if (call.touched.empty() ||
      std::find(indexing.begin(), indexing.end(), call.schema().name()) != indexing.end()) {
    return;
  }
  for (size_t i = 0; i < call.given.size(); ++i) {
    map_tensors(call.given[i], [&](const at::Tensor& tensor) {
      TORCH_CHECK(!is_host_tensor(tensor), call.schema().name(),
                  ": expected all tensors on one device, but the argument ", call.schema().arguments()[i].name(),
                  " is on the CPU and others are on ", c10::Device(kDeviceType, call.device));
      return tensor;
    });
  }
}

c10::IValue take_generator(const Call& call, size_t index) {
  const auto& value = call.given[index];
  if (value.isGenerator()) {
    return cpu_generator_of(value.toGenerator());
  }
  const bool wants_one = value.isNone() && call.schema().arguments()[index].name() == "generator";
  return wants_one ? c10::IValue(cpu_generator_of(default_generator(call.device))) : call.on_cpu[index];
}

void take_arguments(Call& call) {
  const size_t count = call.schema().arguments().size();
  const auto arguments = torch::jit::last(call.stack, count);
  call.given.assign(arguments.begin(), arguments.end());
  for (size_t i = 0; i < count; ++i) {
    call.on_cpu.push_back(take_argument(call, i));
  }
  call.device = device_or_current(call.device);
  refuse_host_tensors(call);
  for (size_t i = 0; i < count; ++i) {
    call.on_cpu[i] = take_generator(call, i);
  }
}

void run_kernel(Call& call) {
  torch::jit::drop(call.stack, call.given.size());
  call.stack.insert(call.stack.end(), call.on_cpu.begin(), call.on_cpu.end());
  call.op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &call.stack);
}

// An operator that works in place or has an `out` may have given it another size, or other memory.
void take_over_outputs(Call& call) {
  for (const auto& [tensor, alias, is_written] : call.touched) {
    if (!is_written) {
      continue;
    }
    const auto& memory = alias.storage();
    if (memory.data() != bytes_of(tensor.storage().data())) {
      const auto& hooks = at::detail::getPrivateUse1Hooks();
      hooks.resizePrivateUse1Bytes(tensor.storage(), 0);
      hooks.resizePrivateUse1Bytes(tensor.storage(), memory.nbytes());
      run_queued(current_stream(call.device));
      std::memcpy(bytes_of(tensor.storage().data()), memory.data(), memory.nbytes());
    }
    if (alias.sizes() != tensor.sizes() || alias.strides() != tensor.strides() ||
        alias.storage_offset() != tensor.storage_offset()) {
      tensor.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
    }
  }
}

// The device tensor for what a kernel returned: a view of an argument, or new memory with the result's bytes.
at::Tensor to_device(Call& call, const at::Tensor& result, StreamState& stream, uint64_t time) {
  if (!result.defined() || !result.device().is_cpu()) {
    return result;
  }
  if (const auto base = call.aliases.device_tensor_under(result); base.defined()) {
    auto view = view_of(base, result);
    view._set_conj(result.is_conj());
    view._set_neg(result.is_neg());
    return view;
  }
  auto tensor = empty_on_device(result.sizes(), result.strides(), result.dtype(), call.device);
  if (const size_t num_bytes = tensor.storage().nbytes()) {
    run_queued(stream);
    const auto* bytes = static_cast<const char*>(result.storage().data());
    std::memcpy(bytes_of(tensor.storage().data()), bytes + result.storage_offset() * result.itemsize(), num_bytes);
  }
  tensor._set_conj(result.is_conj());
  tensor._set_neg(result.is_neg());
  note_access(stream, time, tensor.storage().data(), Access::kWrite, call.schema().name());
  return tensor;
}

void return_results(Call& call, StreamState& stream, uint64_t time) {
  const size_t count = call.schema().returns().size();
  for (size_t i = 0; i < count; ++i) {
    auto& value = call.stack[call.stack.size() - count + i];
    if (const auto argument = call.argument_returned_as(i); argument.defined()) {
      value = argument;
    } else {
      value = map_tensors(value, [&](const at::Tensor& tensor) { return to_device(call, tensor, stream, time); });
    }
  }
}

void run_call(Call& call) {
  auto& stream = current_stream(call.device);
  if (makes_views(call.schema())) {
    run_kernel(call);
    return return_results(call, stream, 0);
  }
  const uint64_t time = issue(stream);
  for (const auto& [tensor, alias, is_written] : call.touched) {
    note_access(stream, time, tensor.storage().data(), is_written ? Access::kWrite : Access::kRead,
                call.schema().name());
  }
  if (modes.late_kernels && run_late(call, stream, time)) {
    return;
  }
  run_queued(stream);
  run_kernel(call);
  mark_done(stream);
  take_over_outputs(call);
  return_results(call, stream, time);
}

// Composites of convolution call these with the name of the device; the CPU's kernels lie behind the others.
void run_convolution(const c10::OperatorHandle& /*op*/, torch::jit::Stack* stack) {
  run_on_cpu_kernel(c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", ""), stack);
}

void run_convolution_backward(const c10::OperatorHandle& /*op*/, torch::jit::Stack* stack) {
  // It has an argument more, the bias's sizes, six before the mask at the end.
  const c10::IValue mask = torch::jit::pop(*stack);
  stack->insert(stack->end() - 6, c10::IValue());
  stack->push_back(mask);
  run_on_cpu_kernel(c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", ""), stack);
}

bool is_composite(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
         op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional) ||
         op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
}

}  // namespace

bool Call::writes_argument(size_t index) const {
  const auto* alias = schema().arguments()[index].alias_info();
  return alias != nullptr && alias->isWrite();
}

at::Tensor Call::argument_returned_as(size_t result) const {
  const auto* returned = schema().returns()[result].alias_info();
  if (returned == nullptr || !returned->isWrite()) {
    return {};
  }
  for (size_t i = 0; i < given.size(); ++i) {
    if (writes_argument(i) && given[i].isTensor() &&
        schema().arguments()[i].alias_info()->beforeSets() == returned->beforeSets()) {
      return given[i].toTensor();
    }
  }
  return {};
}

void run_on_cpu_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call call{op, *stack};
  take_arguments(call);
  run_call(call);
}

std::vector<std::string> prefer_cpu_kernels() {
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  std::vector<std::string> preferred;
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (name.name.rfind("aten::", 0) != 0 || !op || !op->hasSchema() || !is_composite(*op) ||
        !op->hasKernelForDispatchKey(c10::DispatchKey::CPU) ||
        op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) {
      continue;
    }
    const std::string overload = name.overload_name.empty() ? "" : "." + name.overload_name;
    preferred.push_back(name.name.substr(6) + overload);
    library.impl(preferred.back().c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_cpu_kernel>());
  }
  return preferred;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu_kernel>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&run_convolution>());
  library.impl("convolution_backward_overrideable",
               torch::CppFunction::makeFromBoxedFunction<&run_convolution_backward>());
}

}  // namespace simulated
