#include "late_kernels.h"

#include "../device/memory.h"
#include "../device/races.h"

#include <ATen/EmptyTensor.h>
#include <c10/util/Exception.h>

#include <set>

namespace simulated {

namespace {

LateCounts counts;

const std::set<std::string> kAtOnce = {
    // The meta kernel gives mean and deviation in float32, as CUDA's kernel does; the CPU's gives bfloat16.
    "aten::native_layer_norm",
    // Their meta kernels describe scratch results of other sizes than the CPU's kernels have.
    "aten::_embedding_bag",
    "aten::_embedding_bag_forward_only",
};

// Their results can't be described before they are computed.
bool must_run_at_once(const Call& call) {
  const auto& schema = call.schema();
  if (kAtOnce.count(schema.name()) > 0) {
    return true;
  }
  for (size_t i = 0; i < call.given.size(); ++i) {
    // Random numbers are drawn in the order of the calls, whatever the stream.
    if (schema.arguments()[i].name() == "generator") {
      return true;
    }
    // A mask among the indices: the number of results depends on it.
    if (call.given[i].isOptionalTensorList()) {
      for (const std::optional<at::Tensor>& index : call.given[i].toOptionalTensorVector()) {
        if (index && index->defined() && index->scalar_type() == at::kBool) {
          return true;
        }
      }
    }
  }
  for (const auto& result : schema.returns()) {
    const auto kind = result.type()->kind();
    if (kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType) {
      return true;
    }
  }
  return false;
}

at::Tensor meta_of(const at::Tensor& tensor) {
  if (!is_on_device(tensor)) {
    return tensor;
  }
  return at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type());
}

// What the operator would return, without bytes; empty where the meta kernel doesn't take these arguments, or would
// change an argument's shape.
std::optional<std::vector<c10::IValue>> described_results(const Call& call) {
  torch::jit::Stack stack;
  std::vector<std::pair<at::Tensor, at::Tensor>> written;
  for (size_t i = 0; i < call.given.size(); ++i) {
    const auto& value = call.given[i];
    if (value.isDevice()) {
      stack.emplace_back(c10::Device(c10::DeviceType::Meta));
      continue;
    }
    stack.push_back(map_tensors(value, [&](const at::Tensor& tensor) {
      auto meta = meta_of(tensor);
      if (call.writes_argument(i) && meta.defined()) {
        written.emplace_back(tensor, meta);
      }
      return meta;
    }));
  }
  try {
    call.op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
  } catch (const std::exception&) {
    return std::nullopt;
  }
  for (const auto& [tensor, meta] : written) {
    if (tensor.sizes() != meta.sizes() || tensor.strides() != meta.strides()) {
      return std::nullopt;
    }
  }
  return stack;
}

// A device reads a number from the host when the kernel is launched.
at::Tensor as_launched(const at::Tensor& argument, const at::Tensor& given) {
  if (is_on_device(given)) {
    return unowned(argument);
  }
  if (!given.defined() || given.unsafeGetTensorImpl()->is_wrapped_number()) {
    return given;
  }
  BareDispatch bare;
  return given.clone();
}

std::vector<c10::IValue> launched_arguments(const Call& call) {
  std::vector<c10::IValue> launched;
  for (size_t i = 0; i < call.on_cpu.size(); ++i) {
    std::vector<at::Tensor> given;
    map_tensors(call.given[i], [&](const at::Tensor& tensor) {
      given.push_back(tensor);
      return tensor;
    });
    size_t next = 0;
    launched.push_back(
        map_tensors(call.on_cpu[i], [&](const at::Tensor& argument) { return as_launched(argument, given[next++]); }));
  }
  return launched;
}

void fill_results(const c10::FunctionSchema& schema, const torch::jit::Stack& returned,
                  const std::vector<std::vector<at::Tensor>>& results) {
  for (size_t i = 0; i < results.size(); ++i) {
    size_t next = 0;
    if (results[i].empty()) {
      continue;
    }
    map_tensors(returned[returned.size() - results.size() + i], [&](const at::Tensor& value) {
      const auto& result = results[i][next++];
      TORCH_CHECK(value.sizes() == result.sizes() && value.dtype() == result.dtype(), schema.name(),
                  " returned ", value.dtype(), value.sizes(), ", but its meta kernel describes ", result.dtype(),
                  result.sizes(), "; let it run at once");
      result.copy_(value);
      return value;
    });
  }
}

}  // namespace

bool run_late(Call& call, StreamState& stream, uint64_t time) {
  const auto described = must_run_at_once(call) ? std::nullopt : described_results(call);
  if (!described) {
    Lock lock(mutex);
    ++counts.at_once[call.schema().name()];
    return false;
  }
  auto arguments = launched_arguments(call);
  std::vector<c10::IValue> returned;
  std::vector<std::vector<at::Tensor>> results(call.schema().returns().size());
  for (size_t i = 0; i < results.size(); ++i) {
    if (const auto argument = call.argument_returned_as(i); argument.defined()) {
      returned.emplace_back(argument);
      continue;
    }
    const auto& description = (*described)[described->size() - results.size() + i];
    returned.push_back(map_tensors(description, [&](const at::Tensor& meta) {
      if (!meta.defined()) {
        results[i].emplace_back();
        return meta;
      }
      auto tensor = empty_on_device(meta.sizes(), meta.strides(), meta.dtype(), call.device);
      note_access(stream, time, tensor.storage().data(), Access::kWrite, call.schema().name());
      Aliases aliases;
      results[i].push_back(unowned(aliases.on_cpu(tensor)));
      return tensor;
    }));
  }
  enqueue(stream, [op = call.op, arguments = std::move(arguments), results = std::move(results)]() mutable {
    BareDispatch bare;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &arguments);
    fill_results(op.schema(), arguments, results);
  });
  torch::jit::drop(call.stack, call.given.size());
  call.stack.insert(call.stack.end(), returned.begin(), returned.end());
  Lock lock(mutex);
  ++counts.num_late;
  return true;
}

LateCounts late_counts() {
  Lock lock(mutex);
  return counts;
}

}  // namespace simulated
