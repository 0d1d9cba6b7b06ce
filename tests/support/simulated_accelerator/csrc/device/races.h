// The check that accesses to the same memory are ordered: by streams, events and waits of the host.
//
// It finds a missing wait even when the bytes happen to be right. Memory is watched per allocation, so two streams that
// use disjoint parts of one allocation without an order count as a race.
#pragma once

#include "streams.h"

#include <string>
#include <vector>

namespace simulated {

enum class Access { kRead, kWrite };

// Throws where work that touched the same allocation may still run. `allocation` is its first byte; null is ignored.
void note_access(StreamState& stream, uint64_t time, const void* allocation, Access access, const std::string& op);

// The first write to memory that is used anew must be ordered behind whatever its earlier owners did there. `rest_bytes`
// behind the `num_bytes` stay free.
void inherit_accesses(const char* begin, size_t num_bytes, size_t rest_bytes);
void forget_accesses(const void* allocation);

// What was found so far.
std::vector<std::string> races_found();

}  // namespace simulated
