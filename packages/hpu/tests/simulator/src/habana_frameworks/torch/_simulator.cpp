// A simulated Gaudi on torch's dispatch key HPU: memory on the CPU, rules of the hardware.
//
// Each operation runs torch's kernel for the CPU on aliases of its tensors.  What the hardware refuses is refused, and
// graphs, their compilations and copies are counted.  The rules are listed in the README beside the sources they follow.

#include <ATen/detail/HPUHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <unistd.h>

#include <unordered_map>

namespace {

constexpr c10::DeviceType kType = c10::DeviceType::HPU;
constexpr c10::DispatchKey kKey = c10::DispatchKey::HPU;

}  // namespace

#include "simulated_device.h"

#include "simulated_collectives.h"

namespace {

const c10::Device kDevice(kType, 0);

// The device of this process

struct Settings {
  std::string machine;  // the folder with a lock for each device
  int devices = 0;
  bool lazy = true;
} settings;

std::mutex device_mutex;
int acquired_module = -1;
int lock_file = -1;

// A device belongs to the process that has locked its file, until that process ends.
bool lock_module(int module) {
  const std::string path = settings.machine + "/module-" + std::to_string(module);
  const int file = open(path.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600);
  if (file < 0) return false;
  if (flock(file, LOCK_EX | LOCK_NB) != 0) {
    close(file);
    return false;
  }
  lock_file = file;
  acquired_module = module;
  return true;
}

c10::DeviceIndex index_or_current(c10::DeviceIndex) { return 0; }

void use_device() {
  const std::lock_guard<std::mutex> guard(device_mutex);
  if (acquired_module >= 0) return;
  const char* wanted = std::getenv("HLS_MODULE_ID");
  if (wanted != nullptr) {
    const int module = std::atoi(wanted);
    if (module >= 0 && module < settings.devices && lock_module(module)) return;
  } else {
    // The last one first: jobs of several processes begin with the first.
    for (int module = settings.devices - 1; module >= 0; --module)
      if (lock_module(module)) return;
  }
  TORCH_CHECK(false, "synStatus=8 [Device not found] Device acquire failed.");
}

// Counters

struct Counters {
  int64_t graphs = 0, compiled = 0, to_host = 0, to_device = 0, operations = 0;
  int64_t in_use = 0, max_in_use = 0, allocations = 0, frees = 0;
};
std::mutex counters_mutex;
Counters counters;
size_t pending_hash = 0;
int64_t pending_operations = 0;
std::unordered_set<size_t> compiled_graphs;

void record(size_t operation) {
  const std::lock_guard<std::mutex> guard(counters_mutex);
  pending_hash = c10::hash_combine(pending_hash, operation);
  ++pending_operations;
  ++counters.operations;
}

// Let the device run what has been recorded.  Without recording (eager mode) each operation has run by itself.
void end_graph() {
  const std::lock_guard<std::mutex> guard(counters_mutex);
  if (settings.lazy && pending_operations > 0) {
    ++counters.graphs;
    if (compiled_graphs.insert(pending_hash).second) ++counters.compiled;
  }
  pending_hash = 0;
  pending_operations = 0;
}

// HPU graphs: operations that are captured once, and replayed in the same memory without being recorded anew

using Operations = std::vector<std::function<void()>>;
struct HPUGraph {
  Operations operations;
};
Operations* capturing = nullptr;  // of a backward pass too, which has a thread of its own while the other one waits

void refuse_in_capture(const char* what) {
  TORCH_CHECK(capturing == nullptr, what, " is not supported during hpu graph capturing");
}

void capture_begin(HPUGraph& graph) {
  use_device();
  TORCH_CHECK(settings.lazy, "HPU graphs are supported in lazy mode only");
  TORCH_CHECK(capturing == nullptr, "another HPU graph is being captured");
  end_graph();
  graph.operations.clear();
  capturing = &graph.operations;
}

void capture_end() {
  TORCH_CHECK(capturing != nullptr, "no HPU graph is being captured");
  capturing = nullptr;
  end_graph();
}

// What is pending runs first, such as the copies of new inputs.
void replay(const HPUGraph& graph) {
  refuse_in_capture("replay");
  end_graph();
  for (const auto& operation : graph.operations) operation();
  const std::lock_guard<std::mutex> guard(counters_mutex);
  ++counters.graphs;
}

void count_copy(int64_t Counters::*which) {
  const std::lock_guard<std::mutex> guard(counters_mutex);
  ++(counters.*which);
}

// Memory

void count_bytes(int64_t bytes) {
  const std::lock_guard<std::mutex> guard(counters_mutex);
  counters.in_use += bytes;
  counters.max_in_use = std::max(counters.max_in_use, counters.in_use);
  ++(bytes > 0 ? counters.allocations : counters.frees);
}

struct Block {
  c10::DataPtr memory;
  int64_t bytes;
  Block(c10::DataPtr&& held, int64_t size) : memory(std::move(held)), bytes(size) { count_bytes(bytes); }
  ~Block() { if (bytes > 0) count_bytes(-bytes); }
};

c10::DataPtr on_device(c10::DataPtr&& memory, c10::DeviceIndex, int64_t bytes, const std::string&) {
  void* data = memory.get();
  auto* block = new Block(std::move(memory), bytes);
  return {data, block, [](void* context) { delete static_cast<Block*>(context); }, kDevice};
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    use_device();
    return on_device(c10::GetCPUAllocator()->allocate(bytes), 0, static_cast<int64_t>(bytes), "");
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
} allocator;
REGISTER_ALLOCATOR(c10::DeviceType::HPU, &allocator)

c10::Allocator* device_allocator() { return &allocator; }

// Random numbers: a state of the device, apart from that of the CPU

const at::Generator& default_generator(c10::DeviceIndex) {
  static const at::Generator generator = at::make_generator<DeviceGenerator>(0);
  return generator;
}

struct HPUHooks final : at::HPUHooksInterface {
  explicit HPUHooks(at::HPUHooksArgs) {}
  void init() const override { use_device(); }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return settings.devices > 0; }
  bool hasHPU() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return acquired_module >= 0; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(settings.devices); }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::Device getDeviceFromPtr(void*) const override { return kDevice; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(0); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<DeviceGenerator>(0); }
};
using at::HPUHooksRegistry;
using at::RegistererHPUHooksRegistry;
REGISTER_HPU_HOOKS(HPUHooks)

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::DeviceType::HPU;
  c10::DeviceType type() const override { return static_type; }
  c10::Device exchangeDevice(c10::Device device) const override {
    check(device);
    return kDevice;
  }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device device) const override { check(device); }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const override { return stream(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  static void check(c10::Device device) {
    TORCH_CHECK(!device.has_index() || device.index() == 0, "habana active device: ", int(device.index()), " != 0");
  }
};
C10_REGISTER_GUARD_IMPL(HPU, Guard)

// Operations

// Gaudi keeps float64 as float32.
void round_doubles(const at::Tensor& cpu) {
  if (cpu.defined() && cpu.scalar_type() == at::kDouble && cpu.numel() > 0) cpu.copy_(cpu.to(at::kFloat));
}

// Results of a replay go where those of the capture are; views of the same memory have changed with it.
void write_results(const c10::IValue& captured, const c10::IValue& result) {
  if (captured.isTensorList()) {
    const std::vector<at::Tensor> to = captured.toTensorVector(), from = result.toTensorVector();
    for (size_t index = 0; index < to.size(); ++index) write_results(to[index], from[index]);
  } else if (captured.isTensor() && captured.toTensor().defined() && captured.toTensor().numel() > 0) {
    const at::Tensor to = captured.toTensor(), from = result.toTensor();
    if (!to.is_same(from) && !to.is_alias_of(from)) {
      to.copy_(from);
      round_doubles(to);
    }
  }
}

void run_captured(
    const c10::OperatorHandle& operation, const torch::jit::Stack& arguments, const torch::jit::Stack& results) {
  const BelowAutograd guard;
  torch::jit::Stack stack = arguments;
  operation.callBoxed(&stack);
  for (size_t index = 0; index < results.size(); ++index) write_results(results[index], stack[index]);
}

void record(const Operation& operation) {
  size_t hash = std::hash<std::string>()(operation.name);
  for (const auto* tensors : {&operation.read, &operation.written})
    for (const at::Tensor& tensor : *tensors) {
      hash = c10::hash_combine(hash, static_cast<size_t>(tensor.scalar_type()));
      for (const int64_t size : tensor.sizes()) hash = c10::hash_combine(hash, static_cast<size_t>(size));
    }
  record(hash);
}

void before(const Operation& operation) {
  TORCH_CHECK(!operation.mixes_with_host, "Got a non-HPU tensor, expecting an HPU tensor");
  if (operation.name == "aten::convolution") refuse_in_capture("a convolution, which the simulator cannot replay,");
  if (operation.reads_values) {
    refuse_in_capture("a shape or value that the host needs");
    end_graph();
    count_copy(&Counters::to_host);
  }
  if (operation.computes) record(operation);
}

void call_kernel(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  const auto& schema = handle.schema();
  torch::jit::Stack arguments(stack->end() - static_cast<int64_t>(schema.arguments().size()), stack->end());
  handle.callBoxed(stack);
  torch::jit::Stack results(stack->end() - static_cast<int64_t>(schema.returns().size()), stack->end());
  if (schema.is_mutable())
    for (const c10::IValue& value : arguments) for_each_tensor(value, round_doubles);
  for (const c10::IValue& value : results) for_each_tensor(value, round_doubles);
  if (capturing == nullptr) return;
  capturing->push_back([handle, arguments = std::move(arguments), results = std::move(results)] {
    run_captured(handle, arguments, results);
  });
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool /*non_blocking*/) {
  use_device();
  const BelowAutograd guard;
  if (is_on_device(from) && !is_on_device(to)) {
    refuse_in_capture("a copy to the host");
    end_graph();
    count_copy(&Counters::to_host);
  } else if (!is_on_device(from)) {
    count_copy(&Counters::to_device);
  }
  Call call("aten::copy_");
  const at::Tensor target = call.to_cpu(to), source = call.to_cpu(from);
  target.copy_(source);
  if (is_on_device(to)) round_doubles(target);
  if (capturing != nullptr && is_on_device(from))
    capturing->push_back([target, source] {
      const BelowAutograd guard;
      target.copy_(source);
    });
  if (!is_on_device(from) || !is_on_device(to)) return to;
  Operation operation = call.operation();
  operation.read = {from};
  operation.written = {to};
  record(operation);
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  refuse_in_capture("a value that the host reads");
  end_graph();
  count_copy(&Counters::to_host);
  const BelowAutograd guard;
  Call call;
  return at::_local_scalar_dense(call.to_cpu(tensor));
}

void record_stream(at::Tensor&, c10::Stream) {}

TORCH_LIBRARY_IMPL(aten, HPU, m) {
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar_dense));
  m.impl("record_stream", TORCH_FN(record_stream));
}

// Collectives: those of HCCL

class Done final : public c10d::Work {
 public:
  Done(c10d::OpType type, Tensors results)
      : Work(-1, type),
        future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))) {
    future_->markCompleted(c10::IValue(std::move(results)));
    finish();
  }
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
  void synchronize() override {}
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// Each collective ends the graph, as those of HCCL do without lazy collectives, and is done when it returns.
class ProcessGroupHCCL final : public OverGloo {
 public:
  using OverGloo::OverGloo;
  const std::string getBackendName() const override { return "hccl"; }

 private:
  Started run(
      c10d::OpType type, const Tensors& inputs, const Tensors& outputs, const Transfer& transfer, bool) override {
    const BelowAutograd guard;
    Call call;
    const Started started = transfer(to_cpu(call, inputs), to_cpu(call, outputs));
    end_graph();
    if (started) started->wait();
    return c10::make_intrusive<Done>(type, outputs);
  }
  void check(const at::Tensor& tensor) const override {
    refuse_in_capture("collective nonSFG");
    TORCH_CHECK(is_on_device(tensor), "Got a non-HPU tensor, expecting an HPU tensor");
    TORCH_CHECK(tensor.is_contiguous(), "Tensors must be contiguous");
  }
  c10d::ReduceOp of_gloo(const c10d::ReduceOp& operation) const override {
    const auto kind = static_cast<c10d::ReduceOp::RedOpType>(operation);
    TORCH_CHECK(
        kind == c10d::ReduceOp::SUM || kind == c10d::ReduceOp::MIN || kind == c10d::ReduceOp::MAX ||
            kind == c10d::ReduceOp::PRODUCT,
        "Unsupported ReduceOp for HCCL process group");
    return operation;
  }
  // HCCL sums float32 and bfloat16, and everything else as float32.
  void reduce_one(const at::Tensor& cpu, const c10d::AllreduceOptions& options) override {
    const bool is_native = cpu.scalar_type() == at::kFloat || cpu.scalar_type() == at::kBFloat16;
    const at::Tensor sent = is_native ? cpu : cpu.to(at::kFloat);
    OverGloo::reduce_one(sent, options);
    if (!is_native) at::Tensor(cpu).copy_(sent);
  }
};

// torch has no collectives for the dispatch key HPU: the vendor registers them too

c10::intrusive_ptr<c10d::Backend> hccl_of(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  return group->getBackend(c10::DeviceType::HPU);
}

using Group = const c10::intrusive_ptr<c10d::ProcessGroup>&;
using Reduction = const c10::intrusive_ptr<c10d::ReduceOp>&;

TORCH_LIBRARY_IMPL(c10d, HPU, m) {
  m.impl("send", [](at::TensorList tensors, Group group, int64_t to, int64_t tag) {
    Tensors all = tensors.vec();
    return hccl_of(group)->send(all, static_cast<int>(to), static_cast<int>(tag));
  });
  m.impl("recv_", [](at::TensorList tensors, Group group, int64_t from, int64_t tag) {
    Tensors all = tensors.vec();
    return hccl_of(group)->recv(all, static_cast<int>(from), static_cast<int>(tag));
  });
  m.impl("broadcast_", [](at::TensorList tensors, Group group, int64_t root, int64_t tensor, bool, int64_t) {
    Tensors all = tensors.vec();
    c10d::BroadcastOptions options;
    options.rootRank = root;
    options.rootTensor = tensor;
    auto work = hccl_of(group)->broadcast(all, options);
    return std::tuple<Tensors, Started>(std::move(all), work);
  });
  m.impl(
      "allreduce_",
      [](at::TensorList tensors, Group group, Reduction reduction, const std::optional<at::Tensor>&, bool, int64_t) {
        Tensors all = tensors.vec();
        c10d::AllreduceOptions options;
        options.reduceOp = *reduction;
        auto work = hccl_of(group)->allreduce(all, options);
        return std::tuple<Tensors, Started>(std::move(all), work);
      });
  m.impl("allreduce_coalesced_", [](at::TensorList tensors, Group group, Reduction reduction, bool, int64_t) {
    Tensors all = tensors.vec();
    c10d::AllreduceCoalescedOptions options;
    options.reduceOp = *reduction;
    return hccl_of(group)->allreduce_coalesced(all, options);
  });
  m.impl(
      "reduce_",
      [](at::TensorList tensors, Group group, Reduction reduction, int64_t root, int64_t tensor, bool, int64_t) {
        Tensors all = tensors.vec();
        c10d::ReduceOptions options;
        options.reduceOp = *reduction;
        options.rootRank = root;
        options.rootTensor = tensor;
        return hccl_of(group)->reduce(all, options);
      });
  m.impl(
      "allgather_",
      [](const std::vector<Tensors>& outputs, at::TensorList inputs, Group group, bool, int64_t) {
        std::vector<Tensors> out = outputs;
        Tensors in = inputs.vec();
        auto work = hccl_of(group)->allgather(out, in, c10d::AllgatherOptions());
        return std::tuple<std::vector<Tensors>, Started>(outputs, work);
      });
  m.impl("_allgather_base_", [](at::Tensor& output, at::Tensor& input, Group group, bool, int64_t) {
    auto work = hccl_of(group)->_allgather_base(output, input, c10d::AllgatherOptions());
    return std::tuple<at::Tensor, Started>(output, work);
  });
  m.impl(
      "allgather_into_tensor_coalesced_", [](at::TensorList outputs, at::TensorList inputs, Group group, bool) {
        Tensors out = outputs.vec(), in = inputs.vec();
        return hccl_of(group)->allgather_into_tensor_coalesced(out, in, c10d::AllgatherOptions());
      });
  m.impl(
      "reduce_scatter_",
      [](const at::TensorList& outputs, const std::vector<Tensors>& inputs, Group group, Reduction reduction, bool,
         int64_t) {
        Tensors out = outputs.vec();
        std::vector<Tensors> in = inputs;
        c10d::ReduceScatterOptions options;
        options.reduceOp = *reduction;
        auto work = hccl_of(group)->reduce_scatter(out, in, options);
        return std::tuple<Tensors, Started>(std::move(out), work);
      });
  m.impl(
      "_reduce_scatter_base_",
      [](at::Tensor& output, at::Tensor& input, Group group, Reduction reduction, bool, int64_t) {
        c10d::ReduceScatterOptions options;
        options.reduceOp = *reduction;
        auto work = hccl_of(group)->_reduce_scatter_base(output, input, options);
        return std::tuple<at::Tensor, Started>(output, work);
      });
  m.impl(
      "reduce_scatter_tensor_coalesced_",
      [](at::TensorList outputs, at::TensorList inputs, Group group, Reduction reduction, bool, int64_t) {
        Tensors out = outputs.vec(), in = inputs.vec();
        c10d::ReduceScatterOptions options;
        options.reduceOp = *reduction;
        return hccl_of(group)->reduce_scatter_tensor_coalesced(out, in, options);
      });
  m.impl(
      "alltoall_base_",
      [](at::Tensor& output, at::Tensor& input, Group group, std::vector<int64_t> output_sizes,
         std::vector<int64_t> input_sizes, bool, int64_t) {
        return hccl_of(group)->alltoall_base(
            output, input, output_sizes, input_sizes, c10d::AllToAllOptions());
      });
  m.impl("barrier", [](at::Tensor, Group group, const std::vector<int64_t>&, bool, int64_t) {
    return hccl_of(group)->barrier(c10d::BarrierOptions());
  });
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  register_device();
  m.def("configure", [](const std::string& machine, int devices, bool lazy) {
    settings.machine = machine;
    settings.devices = devices;
    settings.lazy = lazy;
  });
  m.def("acquire", &use_device);
  m.def("module_id", [] { return acquired_module; });
  m.def("mark_step", &end_graph);
  m.def("default_generator", [] { return default_generator(0); });
  py::class_<HPUGraph>(m, "HPUGraph")
      .def(py::init<>())
      .def("capture_begin", [](HPUGraph& graph) { capture_begin(graph); })
      .def("capture_end", [](HPUGraph&) { capture_end(); })
      .def("replay", [](const HPUGraph& graph) { replay(graph); });
  m.def("counters", [] {
    const std::lock_guard<std::mutex> guard(counters_mutex);
    return std::unordered_map<std::string, int64_t>{
        {"graphs", counters.graphs},       {"compiled", counters.compiled},     {"to_host", counters.to_host},
        {"to_device", counters.to_device}, {"operations", counters.operations}, {"in_use", counters.in_use},
        {"max_in_use", counters.max_in_use}, {"allocations", counters.allocations}, {"frees", counters.frees},
        {"pending", pending_operations}};
  });
  m.def("reset_peak", [] {
    const std::lock_guard<std::mutex> guard(counters_mutex);
    counters.max_in_use = counters.in_use;
  });
  py::class_<ProcessGroupHCCL, c10::intrusive_ptr<ProcessGroupHCCL>, c10d::Backend>(m, "ProcessGroupHCCL")
      .def(py::init<c10::intrusive_ptr<c10d::Backend>, int, int>(), py::call_guard<py::gil_scoped_release>());
}
