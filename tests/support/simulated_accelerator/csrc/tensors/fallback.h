// Every operator that has no kernel of its own here runs the CPU's kernel on CPU aliases of its tensors.
#pragma once

#include "aliases.h"

#include "../device/streams.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <string>
#include <vector>

namespace simulated {

void run_on_cpu_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// Gives operators that have both a CPU kernel and a composite the CPU kernel, whose bits may differ; returns their names.
std::vector<std::string> prefer_cpu_kernels();

// One call of an operator, taken from the stack.
struct Call {
  const c10::OperatorHandle& op;
  torch::jit::Stack& stack;
  Aliases aliases;
  int device = -1;
  // Arguments as they were passed, and as the CPU's kernel takes them.
  std::vector<c10::IValue> given;
  std::vector<c10::IValue> on_cpu;
  // Device tensors among them.
  struct Touched {
    at::Tensor tensor;
    at::Tensor alias;
    bool is_written;
  };
  std::vector<Touched> touched;

  const c10::FunctionSchema& schema() const { return op.schema(); }
  bool writes_argument(size_t index) const;
  // The argument that a result is, such as `self` of an operator that works in place; undefined for a new tensor.
  at::Tensor argument_returned_as(size_t result) const;
};

// Applies a function to each tensor in a value.
template <class Function>
c10::IValue map_tensors(const c10::IValue& value, Function function) {
  if (value.isTensor()) {
    return function(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> mapped;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      mapped.push_back(function(tensor));
    }
    return mapped;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> mapped;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      mapped.push_back(tensor ? std::optional<at::Tensor>(function(*tensor)) : tensor);
    }
    return mapped;
  }
  return value;
}

// Runs an operator's CPU kernel and nothing around it: queued work runs wherever something waits for it.
class BareDispatch {
  c10::impl::ExcludeDispatchKeyGuard guard_{
      c10::python_ks | c10::autograd_dispatch_keyset | c10::autocast_dispatch_keyset |
      c10::DispatchKeySet({c10::DispatchKey::ADInplaceOrView, c10::DispatchKey::Functionalize})};
};

}  // namespace simulated
