// What PyTorch asks of a device: guards over streams and events, random numbers, hooks.
#pragma once

#include <ATen/core/Generator.h>

namespace simulated {

void register_hooks();
// A generator's bits are those of a CPU generator of the same seed.
at::Generator& default_generator(int device);
// The CPU generator inside a generator of the device; throws for a generator of another device.
at::Generator cpu_generator_of(const at::Generator& generator);

}  // namespace simulated
