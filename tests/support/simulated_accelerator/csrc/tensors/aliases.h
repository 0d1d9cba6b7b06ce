// Tensors over the same bytes: CPU tensors for kernels to compute on, and device tensors that share a storage.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>

namespace simulated {

inline bool is_on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == c10::DeviceType::PrivateUse1;
}

// Of the arguments of one call: tensors that share a device storage share the CPU storage too, so that kernels find
// views and overlaps as they are.
class Aliases {
 public:
  // A CPU tensor over the bytes of a device tensor; any other tensor itself.
  at::Tensor on_cpu(const at::Tensor& tensor);
  // The device tensor whose bytes a CPU tensor uses; undefined if it has bytes of its own.
  at::Tensor device_tensor_under(const at::Tensor& on_cpu) const;

 private:
  std::map<c10::StorageImpl*, c10::Storage> cpu_storages_;
  std::map<c10::StorageImpl*, at::Tensor> device_tensors_;
};

// A device tensor in the storage of `base` that lies there as the CPU tensor `like` does in its alias.
at::Tensor view_of(const at::Tensor& base, const at::Tensor& like);

// A CPU tensor that points to the same bytes and owns nothing, as queued work of a device would: what is freed too
// early goes wrong.
at::Tensor unowned(const at::Tensor& on_cpu);

at::Tensor empty_on_device(c10::IntArrayRef sizes, c10::IntArrayRef strides, caffe2::TypeMeta dtype, int device);

}  // namespace simulated
