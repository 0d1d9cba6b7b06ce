#include "collectives.h"

#include "device/races.h"
#include "tensors/aliases.h"

#include <torch/csrc/distributed/c10d/Work.hpp>

namespace simulated {

namespace {

// A collective under way. Waiting for it orders the current stream behind it, as with NCCL; since gloo works on the host,
// the host waits too.
class DeviceWork final : public c10d::Work {
 public:
  DeviceWork(c10::intrusive_ptr<c10d::Work> gloo, StreamState& stream, std::vector<at::Tensor> outputs)
      : gloo_(std::move(gloo)), device_(stream.device), clock_(stream.clock), outputs_(std::move(outputs)) {}

  bool isCompleted() override { return gloo_->isCompleted(); }
  bool isSuccess() const override { return gloo_->isSuccess(); }
  std::exception_ptr exception() const override { return gloo_->exception(); }
  int sourceRank() const override { return gloo_->sourceRank(); }
  std::vector<at::Tensor> result() override { return outputs_; }
  void abort() override { gloo_->abort(); }
  void synchronize() override { wait(kNoTimeout); }
  void blockCurrentStream() override { wait(kNoTimeout); }
  bool wait(std::chrono::milliseconds timeout) override {
    const bool is_done = gloo_->wait(timeout);
    Lock lock(mutex);
    current_stream(device_).clock.merge(clock_);
    return is_done;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                           std::vector<c10::Device>{{kDeviceType, index()}});
    wait(kNoTimeout);
    future->markCompleted(c10::IValue(outputs_));
    return future;
  }

 private:
  c10::DeviceIndex index() const { return static_cast<c10::DeviceIndex>(device_); }

  c10::intrusive_ptr<c10d::Work> gloo_;
  int device_;
  Clock clock_;
  std::vector<at::Tensor> outputs_;
};

class CoalescedWork final : public c10d::Work {
 public:
  explicit CoalescedWork(std::vector<c10::intrusive_ptr<c10d::Work>> parts) : parts_(std::move(parts)) {}

  bool isCompleted() override {
    return std::all_of(parts_.begin(), parts_.end(), [](const auto& part) { return part->isCompleted(); });
  }
  void synchronize() override { wait(kNoTimeout); }
  bool wait(std::chrono::milliseconds timeout) override {
    return std::all_of(parts_.begin(), parts_.end(), [&](const auto& part) { return part->wait(timeout); });
  }

 private:
  std::vector<c10::intrusive_ptr<c10d::Work>> parts_;
};

}  // namespace

// The tensors of one collective, and its place in the order of streams: behind the current stream's work.
class Collectives::Launch {
 public:
  Launch(Collectives& group, const char* name) : group_(group), name_(name) {}

  at::Tensor input(const at::Tensor& tensor) { return use(tensor, Access::kRead); }
  at::Tensor output(const at::Tensor& tensor) {
    outputs_.push_back(tensor);
    return use(tensor, Access::kWrite);
  }
  Tensors inputs(const Tensors& tensors) {
    Tensors used;
    for (const auto& tensor : tensors) {
      used.push_back(input(tensor));
    }
    return used;
  }
  Tensors outputs(const Tensors& tensors) {
    Tensors used;
    for (const auto& tensor : tensors) {
      used.push_back(output(tensor));
    }
    return used;
  }
  std::vector<Tensors> inputs(const std::vector<Tensors>& lists) {
    std::vector<Tensors> used;
    for (const auto& tensors : lists) {
      used.push_back(inputs(tensors));
    }
    return used;
  }
  std::vector<Tensors> outputs(const std::vector<Tensors>& lists) {
    std::vector<Tensors> used;
    for (const auto& tensors : lists) {
      used.push_back(outputs(tensors));
    }
    return used;
  }

  WorkPtr started(WorkPtr gloo) {
    TORCH_CHECK(stream_ != nullptr, name_, " without tensors");
    Lock lock(mutex);
    mark_done(*stream_);
    WorkPtr work = c10::make_intrusive<DeviceWork>(std::move(gloo), *stream_, std::move(outputs_));
    if (group_.is_coalescing_) {
      group_.coalesced_.push_back(work);
    }
    return work;
  }

 private:
  at::Tensor use(const at::Tensor& tensor, Access access) {
    TORCH_CHECK(is_on_device(tensor), name_, ": expected a tensor of the device, got one on ", tensor.device());
    if (stream_ == nullptr) {
      begin_on(tensor.device().index());
    }
    note_access(*stream_, stream_->issued, tensor.storage().data(), access, name_);
    return aliases_.on_cpu(tensor);
  }

  void begin_on(int device) {
    auto& current = current_stream(device);
    run_queued(current);
    Lock lock(mutex);
    stream_ = &group_.stream_on(device);
    stream_->clock.merge(current.clock);
    issue(*stream_);
  }

  Collectives& group_;
  const char* name_;
  StreamState* stream_ = nullptr;
  Aliases aliases_;
  Tensors outputs_;
};

Collectives::Collectives(c10::intrusive_ptr<c10d::Backend> gloo, std::string name)
    : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)), name_(std::move(name)) {}

StreamState& Collectives::stream_on(int device) {
  if (stream_ == nullptr) {
    stream_ = &add_stream(device);
  }
  TORCH_CHECK(stream_->device == device, "a group's tensors lie on device ", stream_->device, " and on ", device);
  return *stream_;
}

void Collectives::startCoalescing() {
  is_coalescing_ = true;
  coalesced_.clear();
}

Collectives::WorkPtr Collectives::endCoalescing() {
  is_coalescing_ = false;
  return c10::make_intrusive<CoalescedWork>(std::exchange(coalesced_, {}));
}

Collectives::WorkPtr Collectives::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  Launch launch(*this, "broadcast");
  auto used = launch.outputs(tensors);
  return launch.started(gloo_->broadcast(used, options));
}

Collectives::WorkPtr Collectives::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  Launch launch(*this, "all_reduce");
  auto used = launch.outputs(tensors);
  return launch.started(gloo_->allreduce(used, options));
}

Collectives::WorkPtr Collectives::allreduce_coalesced(Tensors& tensors,
                                                      const c10d::AllreduceCoalescedOptions& options) {
  Launch launch(*this, "all_reduce");
  auto used = launch.outputs(tensors);
  return launch.started(gloo_->allreduce_coalesced(used, options));
}

Collectives::WorkPtr Collectives::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  Launch launch(*this, "reduce");
  auto used = launch.outputs(tensors);
  return launch.started(gloo_->reduce(used, options));
}

Collectives::WorkPtr Collectives::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                            const c10d::AllgatherOptions& options) {
  Launch launch(*this, "all_gather");
  auto to = launch.outputs(outputs);
  auto from = launch.inputs(inputs);
  return launch.started(gloo_->allgather(to, from, options));
}

Collectives::WorkPtr Collectives::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                  const c10d::AllgatherOptions& options) {
  Launch launch(*this, "all_gather");
  auto to = launch.output(output), from = launch.input(input);
  return launch.started(gloo_->_allgather_base(to, from, options));
}

Collectives::WorkPtr Collectives::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                  const c10d::AllgatherOptions& options) {
  Launch launch(*this, "all_gather");
  auto to = launch.outputs(outputs), from = launch.inputs(inputs);
  return launch.started(gloo_->allgather_into_tensor_coalesced(to, from, options));
}

Collectives::WorkPtr Collectives::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                         const c10d::GatherOptions& options) {
  Launch launch(*this, "gather");
  auto from = launch.inputs(inputs);
  auto to = launch.outputs(outputs);
  return launch.started(gloo_->gather(to, from, options));
}

Collectives::WorkPtr Collectives::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                          const c10d::ScatterOptions& options) {
  Launch launch(*this, "scatter");
  auto from = launch.inputs(inputs);
  auto to = launch.outputs(outputs);
  return launch.started(gloo_->scatter(to, from, options));
}

Collectives::WorkPtr Collectives::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                 const c10d::ReduceScatterOptions& options) {
  Launch launch(*this, "reduce_scatter");
  auto from = launch.inputs(inputs);
  auto to = launch.outputs(outputs);
  return launch.started(gloo_->reduce_scatter(to, from, options));
}

Collectives::WorkPtr Collectives::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                       const c10d::ReduceScatterOptions& options) {
  Launch launch(*this, "reduce_scatter");
  auto to = launch.output(output), from = launch.input(input);
  return launch.started(gloo_->_reduce_scatter_base(to, from, options));
}

Collectives::WorkPtr Collectives::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                  const c10d::ReduceScatterOptions& options) {
  Launch launch(*this, "reduce_scatter");
  auto to = launch.outputs(outputs), from = launch.inputs(inputs);
  return launch.started(gloo_->reduce_scatter_tensor_coalesced(to, from, options));
}

Collectives::WorkPtr Collectives::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
                                                const c10d::AllToAllOptions& options) {
  Launch launch(*this, "all_to_all");
  auto to = launch.output(output), from = launch.input(input);
  return launch.started(gloo_->alltoall_base(to, from, output_sizes, input_sizes, options));
}

Collectives::WorkPtr Collectives::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  Launch launch(*this, "all_to_all");
  auto to = launch.outputs(outputs), from = launch.inputs(inputs);
  return launch.started(gloo_->alltoall(to, from, options));
}

Collectives::WorkPtr Collectives::send(Tensors& tensors, int destination, int tag) {
  Launch launch(*this, "send");
  auto from = launch.inputs(tensors);
  return launch.started(gloo_->send(from, destination, tag));
}

Collectives::WorkPtr Collectives::recv(Tensors& tensors, int source, int tag) {
  Launch launch(*this, "recv");
  auto to = launch.outputs(tensors);
  return launch.started(gloo_->recv(to, source, tag));
}

Collectives::WorkPtr Collectives::recvAnysource(Tensors& tensors, int tag) {
  Launch launch(*this, "recv");
  auto to = launch.outputs(tensors);
  return launch.started(gloo_->recvAnysource(to, tag));
}

}  // namespace simulated
