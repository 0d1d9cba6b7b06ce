#include "aliases.h"

#include "../device/memory.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/from_blob.h>

namespace simulated {

at::Tensor Aliases::on_cpu(const at::Tensor& tensor) {
  if (!is_on_device(tensor)) {
    return tensor;
  }
  const auto& storage = tensor.storage();
  auto* key = storage.unsafeGetStorageImpl();
  auto found = cpu_storages_.find(key);
  if (found == cpu_storages_.end()) {
    c10::DataPtr bytes(bytes_of(storage.data()), new c10::Storage(storage),
                       [](void* owner) { delete static_cast<c10::Storage*>(owner); }, c10::DeviceType::CPU);
    // Resizable by the CPU's allocator: some kernels resize their output.
    c10::Storage alias(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(bytes),
                       c10::GetAllocator(c10::DeviceType::CPU), /*resizable=*/true);
    device_tensors_.emplace(alias.unsafeGetStorageImpl(), tensor);
    found = cpu_storages_.emplace(key, std::move(alias)).first;
  }
  auto alias = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(found->second), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* impl = alias.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    impl->set_wrapped_number(true);
  }
  alias._set_conj(tensor.is_conj());
  alias._set_neg(tensor.is_neg());
  return alias;
}

at::Tensor Aliases::device_tensor_under(const at::Tensor& on_cpu) const {
  const auto found = device_tensors_.find(on_cpu.storage().unsafeGetStorageImpl());
  return found == device_tensors_.end() ? at::Tensor() : found->second;
}

at::Tensor view_of(const at::Tensor& base, const at::Tensor& like) {
  // With the keys of the base: in inference mode, a view of a plain tensor needs its version counter.
  auto view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()),
                                                       base.key_set(), like.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return view;
}

at::Tensor unowned(const at::Tensor& on_cpu) {
  if (!on_cpu.defined() || on_cpu.numel() == 0) {
    return on_cpu;
  }
  return at::from_blob(on_cpu.data_ptr(), on_cpu.sizes(), on_cpu.strides(), on_cpu.options());
}

at::Tensor empty_on_device(c10::IntArrayRef sizes, c10::IntArrayRef strides, caffe2::TypeMeta dtype, int device) {
  const size_t num_bytes = at::detail::computeStorageNbytes(sizes, strides, dtype.itemsize());
  c10::Storage storage(c10::Storage::use_byte_size_t(), num_bytes, allocate(num_bytes, device), &allocator(),
                       /*resizable=*/true);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return tensor;
}

}  // namespace simulated
