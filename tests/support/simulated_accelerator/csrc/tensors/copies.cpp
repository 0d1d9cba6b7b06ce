// Copies between host and device and inside it, and numbers that the host reads.
#include "aliases.h"
#include "fallback.h"

#include "../device/memory.h"
#include "../device/races.h"

#include <ATen/ops/_local_scalar_dense.h>
#include <torch/library.h>

namespace simulated {

namespace {

// What the race check watches: memory of the device, and host memory that the device can reach.
const void* watched(const at::Tensor& tensor) {
  const bool is_reachable = is_on_device(tensor) || is_pinned(tensor.data_ptr());
  return is_reachable ? tensor.storage().data() : nullptr;
}

void copy_bytes(at::Tensor to, const at::Tensor& from) {
  BareDispatch bare;
  to.copy_(from);
}

// The host goes on before the copy has run: inside a device always, otherwise if that was asked for and the host's
// memory is pinned. From pageable memory the bytes are staged first; into it the host waits.
bool host_goes_on(const at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  if (is_on_device(to) && is_on_device(from)) {
    return to.device() == from.device();
  }
  return non_blocking && (is_on_device(to) || is_pinned(to.data_ptr()));
}

at::Tensor& copy_(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  if (to.numel() == 0) {
    return to;
  }
  const int device = (is_on_device(to) ? to : from).device().index();
  if (is_on_device(to) && is_on_device(from) && to.device() != from.device()) {
    synchronize_device(from.device().index());
  }
  auto& stream = current_stream(device);
  const uint64_t time = issue(stream);
  note_access(stream, time, watched(from), Access::kRead, "aten::copy_");
  note_access(stream, time, watched(to), Access::kWrite, "aten::copy_");
  Aliases aliases;
  const auto target = aliases.on_cpu(to), source = aliases.on_cpu(from.expand_as(to));
  if (!host_goes_on(to, from, non_blocking)) {
    run_queued(stream);
    copy_bytes(target, source);
    mark_done(stream);
    synchronize_stream(stream);
  } else if (modes.late_copies) {
    const bool is_staged = !is_on_device(from) && !is_pinned(from.data_ptr());
    enqueue(stream, [target = unowned(target), source = is_staged ? source.clone() : unowned(source)] {
      copy_bytes(target, source);
    });
  } else {
    run_queued(stream);
    copy_bytes(target, source);
    mark_done(stream);
  }
  return to;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  at::Tensor target = to;
  return copy_(target, from, non_blocking);
}

c10::Scalar read_number(const at::Tensor& tensor) {
  auto& stream = current_stream(tensor.device().index());
  note_access(stream, issue(stream), tensor.storage().data(), Access::kRead, "aten::_local_scalar_dense");
  run_queued(stream);
  mark_done(stream);
  synchronize_stream(stream);
  Aliases aliases;
  return at::_local_scalar_dense(aliases.on_cpu(tensor));
}

void record_stream(at::Tensor& tensor, c10::Stream stream) {
  record_use(tensor.storage().data_ptr(), stream);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("copy_", copy_);
  library.impl("_copy_from", copy_from);
  library.impl("_local_scalar_dense", read_number);
  library.impl("record_stream", record_stream);
}

}  // namespace simulated
