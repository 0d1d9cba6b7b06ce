// Streams, events, and what happens before what.
//
// Work that a stream takes late is queued and runs when something needs it: the latest moment that a device could
// legally choose. Each stream, each event and the host have a vector clock; work on a stream happens after all that its
// clock covers.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace simulated {

constexpr auto kDeviceType = c10::DeviceType::PrivateUse1;
constexpr int kNumDevices = 8;

// Of every stream, by its lane: the time up to which its work has happened.
class Clock {
 public:
  void merge(const Clock& other);
  bool covers(size_t lane, uint64_t time) const;
  void set(size_t lane, uint64_t time);

 private:
  std::vector<uint64_t> times_;
};

struct QueuedWork {
  uint64_t time;
  std::function<void()> run;
};

struct StreamState {
  int device;
  int64_t id;
  // Its place in clocks, which count the streams of all devices.
  size_t lane;
  // Of the last work that it was given, and of the last that has run.
  uint64_t issued = 0;
  uint64_t done = 0;
  // What happens before its next work.
  Clock clock;
  std::deque<QueuedWork> queue;

  std::string name() const;
};

struct Modes {
  bool check_races = true;
  bool late_copies = true;
  bool late_kernels = false;
};
extern Modes modes;

// Guards streams, events, clocks, memory and the table of accesses. Recursive, since queued work may wait for other
// queued work. Nothing that runs under it may need Python's lock.
extern std::recursive_mutex mutex;
using Lock = std::lock_guard<std::recursive_mutex>;

int current_device();
void set_current_device(int device);
// An index, or the current device for a negative one.
int device_or_current(int device);

StreamState& stream_of(const c10::Stream& stream);
StreamState& stream_in_lane(size_t lane);
StreamState& default_stream(int device);
StreamState& current_stream(int device);
StreamState& add_stream(int device);
void set_current_stream(const c10::Stream& stream);
c10::Stream handle_of(const StreamState& stream);

// The time of new work on a stream, which is ordered behind what the host has waited for.
uint64_t issue(StreamState& stream);
// Work that was run as soon as it was issued: nothing before it may be queued.
void mark_done(StreamState& stream);
// Queues work at the stream's latest time.
void enqueue(StreamState& stream, std::function<void()> work);
void run_queued(StreamState& stream, uint64_t until = std::numeric_limits<uint64_t>::max());
// The same where nothing may be thrown; the next synchronization throws instead.
void run_queued_quietly(StreamState& stream) noexcept;
void run_everything_quietly() noexcept;

void host_waits_for(const Clock& clock);
void synchronize_stream(StreamState& stream);
void synchronize_device(int device);
size_t num_queued(int device);

struct EventState {
  StreamState* stream = nullptr;
  uint64_t time = 0;
  Clock clock;
  int num_queries = 0;
  // Milliseconds at which the stream came past it; shared with the work that measures them.
  std::shared_ptr<double> passed_at = std::make_shared<double>(0);
};

void record_event(EventState& event, StreamState& stream);
void wait_for_event(StreamState& stream, EventState& event);
bool has_happened(EventState& event);
void synchronize_event(EventState& event);

}  // namespace simulated
