#include "races.h"

#include <c10/util/Exception.h>

#include <map>
#include <optional>

namespace simulated {

namespace {

struct Use {
  uint64_t time = 0;
  std::string op;
};

struct Accesses {
  size_t writer_lane = 0;
  Use write;
  std::map<size_t, Use> reads;  // the last one of each lane
};

constexpr char kFreed[] = " (of memory that was freed)";

std::map<const char*, Accesses>& accesses() {
  static auto& by_allocation = *new std::map<const char*, Accesses>;
  return by_allocation;
}

std::vector<std::string> races;

bool is_ordered(const StreamState& stream, size_t lane, const Use& earlier) {
  return lane == stream.lane || stream.clock.covers(lane, earlier.time);
}

std::string described(const StreamState& stream, Access access, const std::string& op, size_t lane, const Use& earlier,
                      const char* did) {
  return "race: " + op + (access == Access::kWrite ? " writes" : " reads") + " on stream " + stream.name() + " what " +
         earlier.op + did + " on stream " + stream_in_lane(lane).name() + ", without waiting for it";
}

std::optional<std::string> conflict(const Accesses& known, const StreamState& stream, Access access,
                                    const std::string& op) {
  if (!is_ordered(stream, known.writer_lane, known.write)) {
    return described(stream, access, op, known.writer_lane, known.write, " writes");
  }
  if (access == Access::kWrite) {
    for (const auto& [lane, read] : known.reads) {
      if (!is_ordered(stream, lane, read)) {
        return described(stream, access, op, lane, read, " uses");
      }
    }
  }
  return std::nullopt;
}

}  // namespace

void note_access(StreamState& stream, uint64_t time, const void* allocation, Access access, const std::string& op) {
  if (!modes.check_races || allocation == nullptr) {
    return;
  }
  Lock lock(mutex);
  auto& known = accesses()[static_cast<const char*>(allocation)];
  const auto race = conflict(known, stream, access, op);
  if (access == Access::kWrite) {
    known.reads.clear();
    known.writer_lane = stream.lane;
    known.write = {time, op};
  } else {
    known.reads[stream.lane] = {time, op};
  }
  if (race) {
    races.push_back(*race);
    TORCH_CHECK(false, *race);
  }
}

void inherit_accesses(const char* begin, size_t num_bytes, size_t rest_bytes) {
  if (!modes.check_races) {
    return;
  }
  Lock lock(mutex);
  auto& all = accesses();
  const auto first = all.lower_bound(begin), last = all.lower_bound(begin + num_bytes);
  // Both reads and writes of earlier owners hold up a write only: what is read must have been written first.
  Accesses inherited;
  const auto add = [&](size_t lane, const Use& use) {
    auto& latest = inherited.reads[lane];
    if (use.time > latest.time) {
      latest = {use.time, use.op.find(kFreed) == std::string::npos ? use.op + kFreed : use.op};
    }
  };
  for (auto it = first; it != last; ++it) {
    if (it->second.write.time > 0) {
      add(it->second.writer_lane, it->second.write);
    }
    for (const auto& [lane, read] : it->second.reads) {
      add(lane, read);
    }
  }
  all.erase(first, last);
  if (rest_bytes > 0 && !inherited.reads.empty()) {
    all.emplace(begin + num_bytes, inherited);
  }
  all[begin] = std::move(inherited);
}

void forget_accesses(const void* allocation) {
  Lock lock(mutex);
  accesses().erase(static_cast<const char*>(allocation));
}

std::vector<std::string> races_found() {
  Lock lock(mutex);
  return races;
}

}  // namespace simulated
