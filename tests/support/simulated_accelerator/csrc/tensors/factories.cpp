// Tensors without values, and tensors that change size or storage.
#include "aliases.h"

#include "../device/memory.h"

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/util/strides.h>
#include <torch/library.h>

namespace simulated {

namespace {

caffe2::TypeMeta requested_dtype(std::optional<at::ScalarType> dtype) {
  return dtype ? c10::scalarTypeToTypeMeta(*dtype) : at::get_default_dtype();
}

int index_of(std::optional<c10::Device> device) {
  return device_or_current(device ? device->index() : -1);
}

at::Tensor empty_strided(c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout> /*layout*/, std::optional<c10::Device> device,
                         std::optional<bool> /*pin_memory*/) {
  return empty_on_device(C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), requested_dtype(dtype),
                         index_of(device));
}

at::Tensor empty(c10::SymIntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout> /*layout*/,
                 std::optional<c10::Device> device, std::optional<bool> /*pin_memory*/,
                 std::optional<at::MemoryFormat> format) {
  const auto shape = C10_AS_INTARRAYREF_SLOW(sizes);
  at::detail::check_size_nonnegative(shape);
  auto tensor = empty_on_device(shape, c10::contiguous_strides(shape), requested_dtype(dtype), index_of(device));
  if (format && *format != at::MemoryFormat::Contiguous && *format != at::MemoryFormat::Preserve) {
    tensor.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  }
  return tensor;
}

void grow_to_fit(const at::Tensor& tensor) {
  const auto needed = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize(),
                                                       tensor.storage_offset());
  if (tensor.storage().nbytes() < needed) {
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(tensor.storage(), needed);
  }
}

const at::Tensor& resize_(const at::Tensor& tensor, c10::SymIntArrayRef sizes,
                          std::optional<at::MemoryFormat> /*format*/) {
  const auto shape = C10_AS_INTARRAYREF_SLOW(sizes);
  if (tensor.sizes() != shape) {
    tensor.unsafeGetTensorImpl()->set_sizes_contiguous(shape);
    grow_to_fit(tensor);
  }
  return tensor;
}

at::Tensor& set_shape_in(at::Tensor& tensor, at::Storage storage, int64_t offset, c10::IntArrayRef sizes,
                         c10::IntArrayRef strides) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_sizes_and_strides(sizes, strides, offset);
  grow_to_fit(tensor);
  return tensor;
}

at::Tensor& set_storage_and_shape(at::Tensor& tensor, at::Storage storage, c10::SymInt offset,
                                  c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  const auto shape = C10_AS_INTARRAYREF_SLOW(sizes);
  const auto contiguous = c10::contiguous_strides(shape);
  const auto given = C10_AS_INTARRAYREF_SLOW(strides);
  return set_shape_in(tensor, std::move(storage), offset.expect_int(), shape,
                      given.size() == shape.size() ? given : c10::IntArrayRef(contiguous));
}

at::Tensor& set_storage(at::Tensor& tensor, at::Storage storage) {
  const int64_t count = storage.nbytes() / tensor.itemsize();
  return set_shape_in(tensor, std::move(storage), 0, {count}, {1});
}

at::Tensor& set_tensor(at::Tensor& tensor, const at::Tensor& source) {
  return set_shape_in(tensor, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& tensor) {
  c10::Storage nothing(c10::Storage::use_byte_size_t(), 0, allocate(0, tensor.device().index()), &allocator(),
                       /*resizable=*/true);
  return set_shape_in(tensor, std::move(nothing), 0, {0}, {1});
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("resize_", resize_);
  library.impl("set_.source_Storage_storage_offset", set_storage_and_shape);
  library.impl("set_.source_Storage", set_storage);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("set_", set_nothing);
}

}  // namespace simulated
