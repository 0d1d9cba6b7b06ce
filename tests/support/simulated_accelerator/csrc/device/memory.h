// Device memory that host code can't touch, and pinned host memory.
//
// A device pointer lies in pages without access: what reads or writes through it ends with a segmentation fault. Kernels
// use `bytes_of` it instead, the same bytes mapped elsewhere.
#pragma once

#include "streams.h"

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>

namespace simulated {

// Reserves addresses; idempotent.
void open_memory();
bool is_device_pointer(const void* pointer);
int device_of_pointer(const void* pointer);
// Where kernels find what a device pointer points to; null for null.
char* bytes_of(const void* device_pointer);

// Throws torch.OutOfMemoryError over the limit. New memory is filled with 0xFF: NaN, or -1.
c10::DataPtr allocate(size_t num_bytes, int device);
c10::DeviceAllocator& allocator();
void set_memory_limit(size_t num_bytes, int device);
// Memory that `stream` uses is given to no one else before the stream's present work has ended.
void record_use(const c10::DataPtr& memory, const c10::Stream& stream);

bool is_pinned(const void* pointer);
c10::Allocator& pinned_allocator();

}  // namespace simulated
