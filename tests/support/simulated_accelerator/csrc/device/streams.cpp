#include "streams.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <exception>

namespace simulated {

Modes modes;
std::recursive_mutex mutex;

void Clock::merge(const Clock& other) {
  times_.resize(std::max(times_.size(), other.times_.size()));
  for (size_t lane = 0; lane < other.times_.size(); ++lane) {
    times_[lane] = std::max(times_[lane], other.times_[lane]);
  }
}

bool Clock::covers(size_t lane, uint64_t time) const {
  return time == 0 || (lane < times_.size() && times_[lane] >= time);
}

void Clock::set(size_t lane, uint64_t time) {
  times_.resize(std::max(times_.size(), lane + 1));
  times_[lane] = time;
}

std::string StreamState::name() const {
  return std::to_string(device) + ":" + std::to_string(id);
}

namespace {

struct Streams {
  std::array<std::vector<StreamState*>, kNumDevices> of_device;
  // Never removed: handles of streams are numbers, which may outlive their objects.
  std::vector<std::unique_ptr<StreamState>> by_lane;

  Streams() {
    for (int device = 0; device < kNumDevices; ++device) {
      add(device);
    }
  }

  StreamState& add(int device) {
    auto stream = std::make_unique<StreamState>();
    stream->device = device;
    stream->id = of_device.at(device).size();
    stream->lane = by_lane.size();
    of_device[device].push_back(stream.get());
    by_lane.push_back(std::move(stream));
    return *by_lane.back();
  }
};

Streams& streams() {
  static auto& all = *new Streams;
  return all;
}

// One clock for all threads of the host.
Clock& host_clock = *new Clock;
std::exception_ptr unreported;
thread_local int chosen_device = 0;
thread_local std::array<int64_t, kNumDevices> chosen_streams{};

double milliseconds_now() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void throw_unreported() {
  std::exception_ptr error;
  {
    Lock lock(mutex);
    std::swap(error, unreported);
  }
  if (error) {
    std::rethrow_exception(error);
  }
}

}  // namespace

int current_device() {
  return chosen_device;
}

void set_current_device(int device) {
  TORCH_CHECK(device >= 0 && device < kNumDevices, "there is no device ", device, ": ", kNumDevices, " are simulated");
  chosen_device = device;
}

int device_or_current(int device) {
  return device < 0 ? chosen_device : device;
}

StreamState& stream_of(const c10::Stream& stream) {
  Lock lock(mutex);
  return *streams().of_device.at(device_or_current(stream.device_index())).at(stream.id());
}

StreamState& stream_in_lane(size_t lane) {
  Lock lock(mutex);
  return *streams().by_lane.at(lane);
}

StreamState& default_stream(int device) {
  Lock lock(mutex);
  return *streams().of_device.at(device).front();
}

StreamState& current_stream(int device) {
  Lock lock(mutex);
  return *streams().of_device.at(device).at(chosen_streams.at(device));
}

StreamState& add_stream(int device) {
  Lock lock(mutex);
  return streams().add(device);
}

void set_current_stream(const c10::Stream& stream) {
  chosen_streams.at(stream.device_index()) = stream.id();
}

c10::Stream handle_of(const StreamState& stream) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDeviceType, stream.device), stream.id);
}

uint64_t issue(StreamState& stream) {
  Lock lock(mutex);
  stream.clock.merge(host_clock);
  stream.clock.set(stream.lane, ++stream.issued);
  return stream.issued;
}

void mark_done(StreamState& stream) {
  Lock lock(mutex);
  if (stream.queue.empty()) {
    stream.done = stream.issued;
  }
}

void enqueue(StreamState& stream, std::function<void()> work) {
  Lock lock(mutex);
  stream.queue.push_back({stream.issued, std::move(work)});
}

void run_queued(StreamState& stream, uint64_t until) {
  Lock lock(mutex);
  while (!stream.queue.empty() && stream.queue.front().time <= until) {
    auto work = std::move(stream.queue.front());
    stream.queue.pop_front();
    work.run();
    stream.done = work.time;
  }
}

void run_queued_quietly(StreamState& stream) noexcept {
  try {
    run_queued(stream);
  } catch (...) {
    Lock lock(mutex);
    unreported = std::current_exception();
  }
}

void run_everything_quietly() noexcept {
  Lock lock(mutex);
  for (auto& stream : streams().by_lane) {
    run_queued_quietly(*stream);
  }
}

void host_waits_for(const Clock& clock) {
  Lock lock(mutex);
  host_clock.merge(clock);
}

void synchronize_stream(StreamState& stream) {
  run_queued(stream);
  host_waits_for(stream.clock);
  throw_unreported();
}

void synchronize_device(int device) {
  Lock lock(mutex);
  for (auto* stream : streams().of_device.at(device)) {
    synchronize_stream(*stream);
  }
}

size_t num_queued(int device) {
  Lock lock(mutex);
  size_t count = 0;
  for (auto* stream : streams().of_device.at(device)) {
    count += stream->queue.size();
  }
  return count;
}

void record_event(EventState& event, StreamState& stream) {
  Lock lock(mutex);
  event.stream = &stream;
  event.time = issue(stream);
  event.clock = stream.clock;
  event.num_queries = 0;
  event.passed_at = std::make_shared<double>(0);
  if (stream.queue.empty()) {
    *event.passed_at = milliseconds_now();
    mark_done(stream);
  } else {
    enqueue(stream, [passed_at = event.passed_at] { *passed_at = milliseconds_now(); });
  }
}

void wait_for_event(StreamState& stream, EventState& event) {
  Lock lock(mutex);
  if (event.stream == nullptr) {
    return;
  }
  stream.clock.merge(event.clock);
  if (event.stream != &stream && event.stream->done < event.time) {
    issue(stream);
    enqueue(stream, [other = event.stream, time = event.time] { run_queued(*other, time); });
  }
}

bool has_happened(EventState& event) {
  Lock lock(mutex);
  if (event.stream == nullptr) {
    return true;
  }
  // Late at the first query, but a loop of queries must end.
  if (event.stream->done < event.time && ++event.num_queries > 1) {
    run_queued(*event.stream, event.time);
  }
  if (event.stream->done < event.time) {
    return false;
  }
  host_waits_for(event.clock);
  return true;
}

void synchronize_event(EventState& event) {
  if (event.stream != nullptr) {
    run_queued(*event.stream, event.time);
    host_waits_for(event.clock);
    throw_unreported();
  }
}

}  // namespace simulated
