#include "runtime.h"

#include "memory.h"
#include "streams.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>
#include <vector>

namespace simulated {

namespace {

class GeneratorImpl final : public c10::GeneratorImpl {
 public:
  GeneratorImpl(int device, at::Generator on_cpu)
      : c10::GeneratorImpl(c10::Device(kDeviceType, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        on_cpu_(std::move(on_cpu)) {}
  explicit GeneratorImpl(int device) : GeneratorImpl(device, at::detail::createCPUGenerator()) {}

  const at::Generator& on_cpu() const { return on_cpu_; }

  void set_current_seed(uint64_t seed) override { on_cpu_.set_current_seed(seed); }
  uint64_t current_seed() const override { return on_cpu_.current_seed(); }
  uint64_t seed() override { return on_cpu_.seed(); }
  // A CPU generator's numbers aren't found by an offset.
  void set_offset(uint64_t /*offset*/) override {}
  uint64_t get_offset() const override { return 0; }
  void set_state(const c10::TensorImpl& state) override { on_cpu_.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return on_cpu_.unsafeGetGeneratorImpl()->get_state();
  }

 private:
  GeneratorImpl* clone_impl() const override { return new GeneratorImpl(device().index(), on_cpu_.clone()); }

  at::Generator on_cpu_;
};

class DeviceGuard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kDeviceType; }
  c10::DeviceIndex deviceCount() const noexcept override { return kNumDevices; }
  c10::Device getDevice() const override { return {kDeviceType, static_cast<c10::DeviceIndex>(current_device())}; }
  void setDevice(c10::Device device) const override {
    if (device.has_index()) {
      set_current_device(device.index());
    }
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { setDevice(device); }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  void synchronizeDevice(c10::DeviceIndex device) const override { synchronize_device(device_or_current(device)); }

  c10::Stream getStream(c10::Device device) const override {
    return handle_of(current_stream(device_or_current(device.index())));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return handle_of(default_stream(device_or_current(device.index())));
  }
  c10::Stream getNewStream(c10::Device device, int /*priority*/ = 0) const override {
    return handle_of(add_stream(device_or_current(device.index())));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*high_priority*/ = false) const override {
    return getNewStream(device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = getStream(stream.device());
    set_current_stream(stream);
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return &stream_of(stream); }
  bool queryStream(const c10::Stream& stream) const override { return stream_of(stream).queue.empty(); }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize_stream(stream_of(stream)); }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    record_use(memory, stream);
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex /*device*/,
              c10::EventFlag /*flag*/) const override {
    if (*event == nullptr) {
      *event = new EventState;
    }
    record_event(*static_cast<EventState*>(*event), stream_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      wait_for_event(stream_of(stream), *static_cast<EventState*>(event));
    }
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || has_happened(*static_cast<EventState*>(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      synchronize_event(*static_cast<EventState*>(event));
    }
  }
  void destroyEvent(void* event, c10::DeviceIndex /*device*/) const noexcept override {
    delete static_cast<EventState*>(event);
  }
  double elapsedTime(void* begun, void* ended, c10::DeviceIndex /*device*/) const override {
    return *static_cast<EventState*>(ended)->passed_at - *static_cast<EventState*>(begun)->passed_at;
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, DeviceGuard)

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  void init() const override { open_memory(); }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex /*device*/) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kNumDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device()); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = getCurrentDevice();
    set_current_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }

  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  c10::Device getDeviceFromPtr(void* pointer) const override {
    TORCH_CHECK(is_device_pointer(pointer), "the pointer isn't one of the simulated device");
    return {kDeviceType, static_cast<c10::DeviceIndex>(device_of_pointer(pointer))};
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    TORCH_CHECK(impl->resizable(), "the storage can't be resized");
    const int device = impl->device().index();
    auto memory = allocate(num_bytes, device);
    const size_t kept = std::min(num_bytes, impl->nbytes());
    if (kept > 0) {
      run_queued(current_stream(device));
      std::memcpy(bytes_of(memory.get()), bytes_of(impl->data()), kept);
    }
    impl->set_data_ptr_noswap(std::move(memory));
    impl->set_nbytes(num_bytes);
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device_or_current(device));
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<GeneratorImpl>(device_or_current(device));
  }
};

}  // namespace

void register_hooks() {
  static Hooks hooks;
  open_memory();
  at::RegisterPrivateUse1HooksInterface(&hooks);
}

at::Generator& default_generator(int device) {
  static std::vector<at::Generator> generators = [] {
    std::vector<at::Generator> made;
    for (int index = 0; index < kNumDevices; ++index) {
      made.push_back(at::make_generator<GeneratorImpl>(index));
    }
    return made;
  }();
  return generators.at(device);
}

at::Generator cpu_generator_of(const at::Generator& generator) {
  TORCH_CHECK(generator.device().type() == kDeviceType, "expected a generator of the device, got one of ",
              generator.device());
  return static_cast<GeneratorImpl*>(generator.unsafeGetGeneratorImpl())->on_cpu();
}

}  // namespace simulated
