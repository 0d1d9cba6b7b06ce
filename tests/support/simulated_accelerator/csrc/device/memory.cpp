#include "memory.h"

#include "races.h"

#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <map>

namespace simulated {

namespace {

constexpr size_t kAddressesPerDevice = 16ull << 30;
constexpr size_t kDefaultLimit = 1ull << 30;
constexpr size_t kAlignment = 512;
constexpr size_t kSegmentBytes = 2 << 20;
constexpr int kFresh = 0xFF;

struct Block {
  size_t num_bytes;
  int64_t stream;
  std::vector<int64_t> recorded_streams;
};

struct DeviceMemory {
  char* begin = nullptr;
  size_t limit = kDefaultLimit;
  // Bytes from the beginning that any pool has had.
  size_t num_taken = 0;
  // Free bytes by offset, for each stream: a caching allocator gives memory back to the stream that it came from.
  std::map<int64_t, std::map<size_t, size_t>> free;
  std::map<size_t, Block> used;
  c10::CachingDeviceAllocator::DeviceStats stats;
};

// Never destroyed, like all tables here: tensors may outlive what a process destroys at its end.
std::array<DeviceMemory, kNumDevices>& devices = *new std::array<DeviceMemory, kNumDevices>;
char* device_addresses = nullptr;
char* kernel_addresses = nullptr;

char* reserve_addresses(int protection) {
  constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* begin = mmap(nullptr, kAddressesPerDevice * kNumDevices, protection, flags, -1, 0);
  TORCH_CHECK(begin != MAP_FAILED, "no room for the simulated device's addresses: ", std::strerror(errno));
  return static_cast<char*>(begin);
}

size_t offset_of(const void* pointer, const DeviceMemory& memory) {
  return static_cast<const char*>(pointer) - memory.begin;
}

void count_bytes(DeviceMemory& memory, int64_t change) {
  // Nothing is kept beside what is allocated.
  for (auto* stat : {&memory.stats.allocated_bytes[0], &memory.stats.reserved_bytes[0]}) {
    stat->current += change;
    stat->peak = std::max(stat->peak, stat->current);
  }
}

// In the order of the allocating stream, whose queued kernels may still use the memory for its earlier owner.
void fill_fresh(StreamState& stream, char* bytes, size_t num_bytes) {
  const auto fill = [bytes, num_bytes] { std::memset(bytes, kFresh, num_bytes); };
  if (modes.late_kernels) {
    enqueue(stream, fill);
  } else {
    run_queued(stream);
    fill();
  }
}

// The smallest free range of a stream that is large enough, taken from the free ones, and what it leaves over.
std::pair<size_t, size_t> take_free(DeviceMemory& memory, int64_t stream, size_t num_bytes) {
  auto& free = memory.free[stream];
  auto best = free.end();
  for (auto it = free.begin(); it != free.end(); ++it) {
    if (it->second >= num_bytes && (best == free.end() || it->second < best->second)) {
      best = it;
    }
  }
  if (best == free.end()) {
    const size_t segment = std::max(num_bytes, kSegmentBytes);
    TORCH_CHECK_WITH(OutOfMemoryError, memory.num_taken + segment <= kAddressesPerDevice,
                     "the simulated device has no addresses left");
    best = free.emplace(memory.num_taken, segment).first;
    memory.num_taken += segment;
  }
  const auto [offset, available] = *best;
  free.erase(best);
  if (available > num_bytes) {
    free[offset + num_bytes] = available - num_bytes;
  }
  return {offset, available - num_bytes};
}

void give_back(std::map<size_t, size_t>& free, size_t offset, size_t num_bytes) {
  auto it = free.emplace(offset, num_bytes).first;
  const auto next = std::next(it);
  if (next != free.end() && it->first + it->second == next->first) {
    it->second += next->second;
    free.erase(next);
  }
  if (it != free.begin()) {
    const auto previous = std::prev(it);
    if (previous->first + previous->second == it->first) {
      previous->second += it->second;
      free.erase(it);
    }
  }
}

// Who used the memory stays on record until it is used anew; so do its bytes, since work that is queued may read them.
void release(void* pointer) {
  if (pointer == nullptr) {
    return;
  }
  Lock lock(mutex);
  const int device = device_of_pointer(pointer);
  auto& memory = devices[device];
  const auto entry = memory.used.find(offset_of(pointer, memory));
  const Block block = entry->second;
  auto& home = stream_of(c10::Stream(c10::Stream::UNSAFE, c10::Device(kDeviceType, device), block.stream));
  for (const int64_t id : block.recorded_streams) {
    auto& other = stream_of(c10::Stream(c10::Stream::UNSAFE, c10::Device(kDeviceType, device), id));
    run_queued_quietly(other);
    home.clock.merge(other.clock);
  }
  give_back(memory.free[block.stream], entry->first, block.num_bytes);
  memory.used.erase(entry);
  count_bytes(memory, -static_cast<int64_t>(block.num_bytes));
}

// To the system, as soon as all work has ended that may use them.
void drop_free_pages() {
  constexpr uintptr_t page = 4096;
  Lock lock(mutex);
  run_everything_quietly();
  for (auto& memory : devices) {
    for (const auto& [stream, ranges] : memory.free) {
      for (const auto& [offset, num_bytes] : ranges) {
        const auto begin = reinterpret_cast<uintptr_t>(bytes_of(memory.begin + offset));
        const auto first = (begin + page - 1) / page * page, last = (begin + num_bytes) / page * page;
        if (first < last) {
          madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
        }
      }
    }
  }
}

class DeviceAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t num_bytes) override { return simulated::allocate(num_bytes, current_device()); }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t num_bytes) const override {
    std::memcpy(bytes_of(to), bytes_of(from), num_bytes);
  }
  bool initialized() override { return device_addresses != nullptr; }
  void emptyCache(c10::MempoolId_t /*pool*/ = {0, 0}) override { drop_free_pages(); }
  void recordStream(const c10::DataPtr& memory, c10::Stream stream) override { record_use(memory, stream); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    Lock lock(mutex);
    return devices.at(device).stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex /*device*/) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    Lock lock(mutex);
    auto& stats = devices.at(device).stats;
    for (auto* stat : {&stats.allocated_bytes[0], &stats.reserved_bytes[0]}) {
      stat->peak = stat->current;
    }
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    Lock lock(mutex);
    const auto& memory = devices.at(device);
    const size_t used = memory.stats.allocated_bytes[0].current;
    return {memory.limit - std::min(used, memory.limit), memory.limit};
  }
};

DeviceAllocator the_allocator;
REGISTER_ALLOCATOR(kDeviceType, &the_allocator)

std::map<const char*, size_t>& pinned_blocks() {
  static auto& bytes_by_begin = *new std::map<const char*, size_t>;
  return bytes_by_begin;
}

void release_pinned(void* pointer) {
  // PyTorch's own allocator keeps a block until the copies from and to it have ended.
  run_everything_quietly();
  {
    Lock lock(mutex);
    pinned_blocks().erase(static_cast<const char*>(pointer));
    forget_accesses(pointer);
  }
  std::free(pointer);
}

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t num_bytes) override {
    constexpr size_t page = 4096;
    void* begin = std::aligned_alloc(page, (num_bytes + page) / page * page);
    TORCH_CHECK(begin != nullptr, "no host memory for ", num_bytes, " pinned bytes");
    Lock lock(mutex);
    pinned_blocks()[static_cast<const char*>(begin)] = std::max<size_t>(num_bytes, 1);
    return {begin, begin, &release_pinned, c10::DeviceType::CPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* to, const void* from, size_t num_bytes) const override { std::memcpy(to, from, num_bytes); }
};

}  // namespace

void open_memory() {
  static const bool opened = [] {
    kernel_addresses = reserve_addresses(PROT_READ | PROT_WRITE);
    device_addresses = reserve_addresses(PROT_NONE);
    for (int device = 0; device < kNumDevices; ++device) {
      devices[device].begin = device_addresses + device * kAddressesPerDevice;
    }
    return true;
  }();
  (void)opened;
}

bool is_device_pointer(const void* pointer) {
  const auto* byte = static_cast<const char*>(pointer);
  return device_addresses != nullptr && byte >= device_addresses &&
         byte < device_addresses + kAddressesPerDevice * kNumDevices;
}

int device_of_pointer(const void* pointer) {
  return static_cast<int>((static_cast<const char*>(pointer) - device_addresses) / kAddressesPerDevice);
}

char* bytes_of(const void* device_pointer) {
  return device_pointer == nullptr ? nullptr
                                   : kernel_addresses + (static_cast<const char*>(device_pointer) - device_addresses);
}

c10::DataPtr allocate(size_t num_bytes, int device) {
  open_memory();
  const c10::Device where(kDeviceType, device);
  if (num_bytes == 0) {
    return {nullptr, nullptr, &release, where};
  }
  Lock lock(mutex);
  auto& memory = devices.at(device);
  auto& stream = current_stream(device);
  const size_t rounded = (num_bytes + kAlignment - 1) / kAlignment * kAlignment;
  const size_t held = memory.stats.allocated_bytes[0].current;
  TORCH_CHECK_WITH(OutOfMemoryError, held + rounded <= memory.limit, "the simulated device ", device,
                   " is out of memory: ", rounded, " bytes are wanted and ", held, " of ", memory.limit, " are in use");
  const auto [offset, rest_bytes] = take_free(memory, stream.id, rounded);
  memory.used[offset] = {rounded, stream.id, {}};
  count_bytes(memory, static_cast<int64_t>(rounded));
  char* begin = memory.begin + offset;
  inherit_accesses(begin, rounded, rest_bytes);
  fill_fresh(stream, bytes_of(begin), rounded);
  return {begin, begin, &release, where};
}

c10::DeviceAllocator& allocator() {
  return the_allocator;
}

void set_memory_limit(size_t num_bytes, int device) {
  Lock lock(mutex);
  devices.at(device).limit = num_bytes;
}

void record_use(const c10::DataPtr& memory, const c10::Stream& stream) {
  if (memory.get() != nullptr) {
    Lock lock(mutex);
    auto& on_device = devices.at(device_of_pointer(memory.get()));
    on_device.used.at(offset_of(memory.get(), on_device)).recorded_streams.push_back(stream.id());
  }
}

bool is_pinned(const void* pointer) {
  Lock lock(mutex);
  const auto* byte = static_cast<const char*>(pointer);
  auto after = pinned_blocks().upper_bound(byte);
  return after != pinned_blocks().begin() && (--after, byte < after->first + after->second);
}

c10::Allocator& pinned_allocator() {
  static PinnedAllocator allocator;
  return allocator;
}

}  // namespace simulated
