// Kernels that run as late as their stream's queued copies do.
#pragma once

#include "fallback.h"

namespace simulated {

// Queues a call's kernel and puts its results, whose shapes the meta kernel gives, on the stack. Returns false, with the
// stack as it was, where it must run at once.
bool run_late(Call& call, StreamState& stream, uint64_t time);

// How many calls were queued since the start, and which operators' calls ran at once, by count.
struct LateCounts {
  int64_t num_late = 0;
  std::map<std::string, int64_t> at_once;
};
LateCounts late_counts();

}  // namespace simulated
