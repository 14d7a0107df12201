// A simulated Gaudi on torch's dispatch key HPU: memory on the CPU, rules of the hardware.
//
// Each operation runs torch's kernel for the CPU on aliases of its tensors.  What the hardware refuses is refused, and
// graphs, their compilations and copies are counted.  The rules are listed in the README beside the sources they follow.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/HPUHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

namespace {

const c10::Device kDevice(c10::DeviceType::HPU, 0);

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

void acquire_device() {
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
  acquire_device();
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

c10::DataPtr on_device(c10::DataPtr&& memory, int64_t bytes) {
  void* data = memory.get();
  auto* block = new Block(std::move(memory), bytes);
  return {data, block, [](void* context) { delete static_cast<Block*>(context); }, kDevice};
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    acquire_device();
    return on_device(c10::GetCPUAllocator()->allocate(bytes), static_cast<int64_t>(bytes));
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
} allocator;
REGISTER_ALLOCATOR(c10::DeviceType::HPU, &allocator)

// Memory of the host that the device can read: it is only marked

std::mutex pinned_mutex;
std::unordered_set<const void*> pinned;

struct PinnedAllocator final : c10::Allocator {
  struct Pinned {
    c10::DataPtr memory;
  };
  c10::DataPtr allocate(size_t bytes) override {
    auto* block = new Pinned{c10::GetCPUAllocator()->allocate(bytes)};
    void* data = block->memory.get();
    const std::lock_guard<std::mutex> guard(pinned_mutex);
    pinned.insert(data);
    return {data, block, &release, c10::Device(c10::DeviceType::CPU)};
  }
  static void release(void* context) {
    auto* block = static_cast<Pinned*>(context);
    {
      const std::lock_guard<std::mutex> guard(pinned_mutex);
      pinned.erase(block->memory.get());
    }
    delete block;
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
} pinned_allocator;

// Random numbers: a state of the device, apart from that of the CPU

struct DeviceGenerator final : c10::GeneratorImpl {
  at::Generator cpu;
  explicit DeviceGenerator(uint64_t seed = c10::default_rng_seed_val)
      : GeneratorImpl(kDevice, c10::DispatchKeySet(c10::DispatchKey::HPU)), cpu(at::detail::createCPUGenerator(seed)) {}
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "HPU generators have no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "HPU generators have no offset"); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_state(const c10::TensorImpl& state) override { cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }
  DeviceGenerator* clone_impl() const override {
    auto* copy = new DeviceGenerator();
    copy->cpu = cpu.clone();
    return copy;
  }
};

const at::Generator& default_generator() {
  static const at::Generator generator = at::make_generator<DeviceGenerator>();
  return generator;
}

at::Generator cpu_generator(const at::Generator& generator) {
  TORCH_CHECK(
      generator.device().type() == c10::DeviceType::HPU,
      "Expected a 'hpu' device type for generator but found '", generator.device(), "'");
  return static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->cpu;
}

struct HPUHooks final : at::HPUHooksInterface {
  explicit HPUHooks(at::HPUHooksArgs) {}
  void init() const override { acquire_device(); }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return settings.devices > 0; }
  bool hasHPU() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return acquired_module >= 0; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(settings.devices); }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::Device getDeviceFromPtr(void*) const override { return kDevice; }
  bool isPinnedPtr(const void* data) const override {
    const std::lock_guard<std::mutex> guard(pinned_mutex);
    return pinned.count(data) != 0;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<DeviceGenerator>(); }
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

bool is_on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == c10::DeviceType::HPU; }

struct BelowAutograd {
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

// Gaudi keeps float64 as float32.
void round_doubles(const at::Tensor& cpu) {
  if (cpu.defined() && cpu.scalar_type() == at::kDouble && cpu.numel() > 0) cpu.copy_(cpu.to(at::kFloat));
}

// The memory of a storage of the CPU, which lives as long as the pointer does.
c10::DataPtr held(const c10::Storage& storage, c10::Device device) {
  auto* owner = new c10::Storage(storage);
  return {storage.mutable_data(), owner, [](void* context) { delete static_cast<c10::Storage*>(context); }, device};
}

c10::Storage storage_of(c10::DataPtr&& memory, size_t bytes, c10::Allocator* from) {
  return c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes, std::move(memory), from, /*resizable=*/true);
}

at::Tensor with_sizes(c10::intrusive_ptr<c10::TensorImpl> impl, const at::Tensor& like) {
  impl->set_storage_offset(like.storage_offset());
  impl->set_sizes_and_strides(like.sizes(), like.strides());
  return at::Tensor(std::move(impl));
}

at::Tensor tensor_in(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like) {
  return with_sizes(
      c10::make_intrusive<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype()), like);
}

// A view has the keys of its base: in inference mode that of a parameter is no tensor of inference.
at::Tensor view_in(c10::Storage storage, c10::DispatchKeySet keys, const at::Tensor& like) {
  return with_sizes(
      c10::make_intrusive<c10::TensorImpl>(c10::TensorImpl::VIEW, std::move(storage), keys, like.dtype()), like);
}

// The tensors of one call as tensors of the CPU in the same memory, and the way back.
class Call {
 public:
  at::Tensor to_cpu(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!is_on_device(tensor)) {
      has_host_ = has_host_ || (tensor.device().is_cpu() && tensor.dim() > 0);
      return tensor;
    }
    has_device_ = true;
    for (const auto& [device, alias] : tensors_)
      if (device.is_same(tensor)) return alias;
    at::Tensor alias = tensor_in(alias_of(tensor.storage()), c10::DispatchKey::CPU, tensor);
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) alias.unsafeGetTensorImpl()->set_wrapped_number(true);
    hash_ = c10::hash_combine(hash_, static_cast<size_t>(tensor.scalar_type()));
    for (const int64_t size : tensor.sizes()) hash_ = c10::hash_combine(hash_, static_cast<size_t>(size));
    tensors_.emplace_back(tensor, alias);
    return alias;
  }

  at::Tensor to_device(const at::Tensor& result) {
    if (!result.defined() || !result.device().is_cpu()) return result;
    for (const auto& [device, alias] : tensors_)
      if (alias.is_same(result)) return device;
    for (const auto& [device, alias] : tensors_)
      if (alias.storage().is_alias_of(result.storage())) return view_in(device.storage(), device.key_set(), result);
    for (const auto& [device, alias] : storages_)
      if (alias.is_alias_of(result.storage())) return tensor_in(device, c10::DispatchKey::HPU, result);
    computes_ = true;
    round_doubles(result);
    const size_t bytes = result.storage().nbytes();
    auto memory = on_device(held(result.storage(), c10::Device(c10::DeviceType::CPU)), static_cast<int64_t>(bytes));
    auto storage = storage_of(std::move(memory), bytes, &allocator);
    storages_.emplace_back(storage, result.storage());
    return tensor_in(storage, c10::DispatchKey::HPU, result);
  }

  void check() const {
    TORCH_CHECK(!(has_device_ && has_host_), "Got a non-HPU tensor, expecting an HPU tensor");
  }

  // Take over what the operation has changed of its arguments: values, and sizes with new memory.
  void finish(bool changes) {
    computes_ = computes_ || changes;
    if (!changes) return;
    for (auto& [device, alias] : tensors_) {
      round_doubles(alias);
      if (device.sizes() != alias.sizes() || device.strides() != alias.strides())
        device.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides());
    }
    for (auto& [device, alias] : storages_) {
      if (alias.data() == device.data()) continue;
      auto* impl = device.unsafeGetStorageImpl();
      const size_t bytes = alias.nbytes();
      impl->set_data_ptr_noswap(on_device(held(alias, c10::Device(c10::DeviceType::CPU)), static_cast<int64_t>(bytes)));
      impl->set_nbytes(bytes);
    }
  }

  bool computes() const { return computes_; }
  size_t hash() const { return hash_; }

 private:
  c10::Storage alias_of(const c10::Storage& storage) {
    for (const auto& [device, alias] : storages_)
      if (device.is_alias_of(storage)) return alias;
    storages_.emplace_back(
        storage,
        storage_of(held(storage, c10::Device(c10::DeviceType::CPU)), storage.nbytes(), c10::GetCPUAllocator()));
    return storages_.back().second;
  }

  std::vector<std::pair<at::Tensor, at::Tensor>> tensors_;
  std::vector<std::pair<c10::Storage, c10::Storage>> storages_;  // of the device, of the CPU
  size_t hash_ = 0;
  bool has_device_ = false, has_host_ = false, computes_ = false;
};

c10::IValue to_cpu(Call& call, const c10::IValue& value) {
  if (value.isTensor()) return call.to_cpu(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> tensors;
    for (const at::Tensor& tensor : value.toTensorVector()) tensors.push_back(call.to_cpu(tensor));
    return tensors;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> tensors;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      tensors.push_back(tensor.has_value() ? std::optional<at::Tensor>(call.to_cpu(*tensor)) : std::nullopt);
    return tensors;
  }
  if (value.isDevice()) return c10::Device(c10::DeviceType::CPU);
  if (value.isGenerator()) return cpu_generator(value.toGenerator());
  return value;
}

c10::IValue to_device(Call& call, const c10::IValue& value) {
  if (value.isTensor()) return call.to_device(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> tensors;
    for (const at::Tensor& tensor : value.toTensorVector()) tensors.push_back(call.to_device(tensor));
    return tensors;
  }
  return value;
}

bool is_generator(const c10::Argument& argument) {
  const auto type = argument.type();
  const auto optional = type->cast<c10::OptionalType>();
  return (optional ? optional->getElementType() : type)->kind() == c10::TypeKind::GeneratorType;
}

// Operations whose results have a shape, or are values of the host, that depend on what the device has computed
const std::unordered_set<std::string> kReads = {
    "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
    "aten::repeat_interleave", "aten::equal", "aten::bincount"};

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

void run_on_cpu(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  acquire_device();
  const BelowAutograd guard;
  const auto& schema = operation.schema();
  const size_t count = schema.arguments().size();
  const size_t begin = stack->size() - count;
  Call call;
  for (size_t index = 0; index < count; ++index) {
    c10::IValue& value = (*stack)[begin + index];
    if (value.isNone() && is_generator(schema.arguments()[index]))
      value = cpu_generator(default_generator());
    else
      value = to_cpu(call, value);
  }
  if (schema.name() != "aten::_pack_padded_sequence") call.check();  // which takes lengths on the CPU
  if (kReads.count(schema.name()) != 0) {
    refuse_in_capture("a shape or value that the host needs");
    end_graph();
    count_copy(&Counters::to_host);
  }
  torch::jit::Stack arguments;
  if (capturing != nullptr) arguments.assign(stack->end() - static_cast<int64_t>(count), stack->end());
  operation.callBoxed(stack);
  call.finish(schema.is_mutable());
  const size_t returned = stack->size() - schema.returns().size();
  if (capturing != nullptr) {
    torch::jit::Stack results(stack->begin() + static_cast<int64_t>(returned), stack->end());
    capturing->push_back([operation, arguments = std::move(arguments), results = std::move(results)] {
      run_captured(operation, arguments, results);
    });
  }
  for (size_t index = returned; index < stack->size(); ++index) (*stack)[index] = to_device(call, (*stack)[index]);
  if (call.computes()) record(c10::hash_combine(std::hash<std::string>()(schema.name()), call.hash()));
}

at::Tensor empty_memory_format(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  Guard::check(device.value_or(kDevice));
  return at::detail::empty_generic(
      size, &allocator, c10::DispatchKeySet(c10::DispatchKey::HPU), at::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  Guard::check(device.value_or(kDevice));
  return at::detail::empty_strided_generic(
      size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::HPU), at::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool /*non_blocking*/) {
  acquire_device();
  const BelowAutograd guard;
  if (is_on_device(from) && !is_on_device(to)) {
    refuse_in_capture("a copy to the host");
    end_graph();
    count_copy(&Counters::to_host);
  } else if (!is_on_device(from)) {
    count_copy(&Counters::to_device);
  }
  Call call;
  const at::Tensor target = call.to_cpu(to), source = call.to_cpu(from);
  target.copy_(source);
  if (is_on_device(to)) round_doubles(target);
  if (capturing != nullptr && is_on_device(from))
    capturing->push_back([target, source] {
      const BelowAutograd guard;
      target.copy_(source);
    });
  if (is_on_device(from) && is_on_device(to)) record(c10::hash_combine(std::hash<std::string>()("copy"), call.hash()));
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

at::Tensor& set_storage_offset(
    at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  TORCH_CHECK(source.device_type() == c10::DeviceType::HPU, "Got a non-HPU storage, expecting an HPU storage");
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.empty() && !size.empty())
    impl->set_sizes_contiguous(size);
  else
    impl->set_sizes_and_strides(size, stride);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  const auto size = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_storage_offset(self, std::move(source), 0, {size}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage_offset(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  return set_storage_offset(self, storage_of(allocator.allocate(0), 0, &allocator), 0, {0}, {1});
}

void record_stream(at::Tensor&, c10::Stream) {}

at::Tensor convolution(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding,
    int64_t groups) {
  const BelowAutograd guard;
  Call call;
  const at::Tensor in = call.to_cpu(input), w = call.to_cpu(weight);
  const std::optional<at::Tensor> b =
      bias.has_value() ? std::optional<at::Tensor>(call.to_cpu(*bias)) : std::nullopt;
  call.check();
  refuse_in_capture("a convolution, which the simulator cannot replay,");
  record(c10::hash_combine(std::hash<std::string>()("convolution"), call.hash()));
  return call.to_device(at::convolution(in, w, b, stride, padding, dilation, transposed, output_padding, groups));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding,
    int64_t groups, std::array<bool, 3> mask) {
  const BelowAutograd guard;
  Call call;
  const at::Tensor g = call.to_cpu(gradient), in = call.to_cpu(input), w = call.to_cpu(weight);
  call.check();
  record(c10::hash_combine(std::hash<std::string>()("convolution_backward"), call.hash()));
  const int64_t channels = transposed ? weight.size(1) * groups : weight.size(0);
  auto [to_input, to_weight, to_bias] = at::convolution_backward(
      g, in, w, at::IntArrayRef({channels}), stride, padding, dilation, transposed, output_padding, groups, mask);
  return {call.to_device(to_input), call.to_device(to_weight), call.to_device(to_bias)};
}

TORCH_LIBRARY_IMPL(_, HPU, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, HPU, m) {
  m.impl("empty.memory_format", TORCH_FN(empty_memory_format));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar_dense));
  m.impl("set_", TORCH_FN(set_nothing));
  m.impl("set_.source_Storage", TORCH_FN(set_storage));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage_offset));
  m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("convolution_overrideable", TORCH_FN(convolution));
  m.impl("convolution_backward_overrideable", TORCH_FN(convolution_backward));
}

// What has a kernel for the CPU runs it as a whole.  Otherwise torch would call another form of the operation, with
// memory that it allocates for the result.
void run_all_on_cpu() {
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::HPU, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    const auto operation = dispatcher.findOp(name);
    if (!operation.has_value() || !operation->hasSchema()) continue;
    if (!operation->hasKernelForDispatchKey(c10::DispatchKey::CPU)) continue;
    if (operation->hasKernelForDispatchKey(c10::DispatchKey::HPU)) continue;
    const std::string full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  }
}

}  // namespace

// Autocast, with torch's own lists of operations

namespace at::autocast {

TORCH_LIBRARY_IMPL(_, AutocastHPU, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastHPU, m) {
#define KERNEL_OF_16_BITS(...) KERNEL(c10::DeviceType::HPU, __VA_ARGS__, lower_precision_fp)
#define KERNEL_OF_32_BITS(...) KERNEL(c10::DeviceType::HPU, __VA_ARGS__, fp32)
  AT_FORALL_LOWER_PRECISION_FP(KERNEL_OF_16_BITS)
  AT_FORALL_FP32(KERNEL_OF_32_BITS)
}

}  // namespace at::autocast

// Collectives: those of HCCL over a backend of the CPU

namespace {

class Done final : public c10d::Work {
 public:
  Done(c10d::OpType type, std::vector<at::Tensor> results)
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

using Tensors = std::vector<at::Tensor>;
using Started = c10::intrusive_ptr<c10d::Work>;

// Each collective ends the graph, as those of HCCL do without lazy collectives, and is done when it returns.
class ProcessGroupHCCL final : public c10d::Backend {
 public:
  ProcessGroupHCCL(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size)
      : Backend(rank, size), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override { return "hccl"; }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }

  Started broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    Call call;
    Tensors cpu = all(call, tensors);
    return done(gloo_->broadcast(cpu, options), c10d::OpType::BROADCAST, tensors);
  }
  Started allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    check(options.reduceOp);
    for (const at::Tensor& tensor : tensors) reduce_one(tensor, options);
    return done({}, c10d::OpType::ALLREDUCE, tensors);
  }
  Started allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    check(options.reduceOp);
    c10d::AllreduceOptions each;
    each.reduceOp = options.reduceOp;
    for (const at::Tensor& tensor : tensors) reduce_one(tensor, each);
    return done({}, c10d::OpType::ALLREDUCE_COALESCED, tensors);
  }
  Started reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    check(options.reduceOp);
    Call call;
    Tensors cpu = all(call, tensors);
    return done(gloo_->reduce(cpu, options), c10d::OpType::REDUCE, tensors);
  }
  Started allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    Call call;
    Tensors in = all(call, inputs);
    std::vector<Tensors> out;
    for (Tensors& output : outputs) out.push_back(all(call, output));
    return done(gloo_->allgather(out, in, options), c10d::OpType::ALLGATHER, outputs.at(0));
  }
  Started _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    Call call;
    at::Tensor in = one(call, input), out = one(call, output);
    return done(gloo_->_allgather_base(out, in, options), c10d::OpType::_ALLGATHER_BASE, {output});
  }
  Started allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    for (size_t index = 0; index < outputs.size(); ++index) _allgather_base(outputs[index], inputs[index], options);
    return done({}, c10d::OpType::COALESCED, outputs);
  }
  Started reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    check(options.reduceOp);
    Call call;
    Tensors out = all(call, outputs);
    std::vector<Tensors> in;
    for (Tensors& input : inputs) in.push_back(all(call, input));
    return done(gloo_->reduce_scatter(out, in, options), c10d::OpType::REDUCE_SCATTER, outputs);
  }
  Started _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    check(options.reduceOp);
    Call call;
    at::Tensor in = one(call, input), out = one(call, output);
    return done(gloo_->_reduce_scatter_base(out, in, options), c10d::OpType::_REDUCE_SCATTER_BASE, {output});
  }
  Started reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    for (size_t index = 0; index < outputs.size(); ++index)
      _reduce_scatter_base(outputs[index], inputs[index], options);
    return done({}, c10d::OpType::COALESCED, outputs);
  }
  Started alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override {
    Call call;
    at::Tensor in = one(call, input), out = one(call, output);
    return done(
        gloo_->alltoall_base(out, in, output_sizes, input_sizes, options), c10d::OpType::ALLTOALL_BASE, {output});
  }
  Started send(Tensors& tensors, int to, int tag) override {
    Call call;
    Tensors cpu = all(call, tensors);
    return done(gloo_->send(cpu, to, tag), c10d::OpType::SEND, tensors);
  }
  Started recv(Tensors& tensors, int from, int tag) override {
    Call call;
    Tensors cpu = all(call, tensors);
    return done(gloo_->recv(cpu, from, tag), c10d::OpType::RECV, tensors);
  }
  Started barrier(const c10d::BarrierOptions&) override {
    return done(gloo_->barrier(c10d::BarrierOptions()), c10d::OpType::BARRIER, {});
  }

 private:
  static void check(const c10d::ReduceOp& operation) {
    const auto kind = static_cast<c10d::ReduceOp::RedOpType>(operation);
    TORCH_CHECK(
        kind == c10d::ReduceOp::SUM || kind == c10d::ReduceOp::MIN || kind == c10d::ReduceOp::MAX ||
            kind == c10d::ReduceOp::PRODUCT,
        "Unsupported ReduceOp for HCCL process group");
  }
  static at::Tensor one(Call& call, const at::Tensor& tensor) {
    refuse_in_capture("collective nonSFG");
    TORCH_CHECK(is_on_device(tensor), "Got a non-HPU tensor, expecting an HPU tensor");
    TORCH_CHECK(tensor.is_contiguous(), "Tensors must be contiguous");
    return call.to_cpu(tensor);
  }
  static Tensors all(Call& call, const Tensors& tensors) {
    Tensors cpu;
    for (const at::Tensor& tensor : tensors) cpu.push_back(one(call, tensor));
    return cpu;
  }
  // HCCL sums float32 and bfloat16, and everything else as float32.
  void reduce_one(const at::Tensor& tensor, const c10d::AllreduceOptions& options) {
    Call call;
    const BelowAutograd guard;
    at::Tensor cpu = one(call, tensor);
    const bool is_native = cpu.scalar_type() == at::kFloat || cpu.scalar_type() == at::kBFloat16;
    Tensors sent = {is_native ? cpu : cpu.to(at::kFloat)};
    gloo_->allreduce(sent, options)->wait();
    if (!is_native) cpu.copy_(sent[0]);
  }
  static Started done(const Started& work, c10d::OpType type, Tensors results) {
    end_graph();
    if (work) work->wait();
    return c10::make_intrusive<Done>(type, std::move(results));
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
};

// torch has no collectives for the dispatch key HPU: the vendor registers them too

c10::intrusive_ptr<c10d::Backend> hccl_of(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  return group->getBackend(c10::DeviceType::HPU);
}

using Group = const c10::intrusive_ptr<c10d::ProcessGroup>&;
using Operation = const c10::intrusive_ptr<c10d::ReduceOp>&;

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
      [](at::TensorList tensors, Group group, Operation operation, const std::optional<at::Tensor>&, bool, int64_t) {
        Tensors all = tensors.vec();
        c10d::AllreduceOptions options;
        options.reduceOp = *operation;
        auto work = hccl_of(group)->allreduce(all, options);
        return std::tuple<Tensors, Started>(std::move(all), work);
      });
  m.impl("allreduce_coalesced_", [](at::TensorList tensors, Group group, Operation operation, bool, int64_t) {
    Tensors all = tensors.vec();
    c10d::AllreduceCoalescedOptions options;
    options.reduceOp = *operation;
    return hccl_of(group)->allreduce_coalesced(all, options);
  });
  m.impl(
      "reduce_",
      [](at::TensorList tensors, Group group, Operation operation, int64_t root, int64_t tensor, bool, int64_t) {
        Tensors all = tensors.vec();
        c10d::ReduceOptions options;
        options.reduceOp = *operation;
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
      [](const at::TensorList& outputs, const std::vector<Tensors>& inputs, Group group, Operation operation, bool,
         int64_t) {
        Tensors out = outputs.vec();
        std::vector<Tensors> in = inputs;
        c10d::ReduceScatterOptions options;
        options.reduceOp = *operation;
        auto work = hccl_of(group)->reduce_scatter(out, in, options);
        return std::tuple<Tensors, Started>(std::move(out), work);
      });
  m.impl(
      "_reduce_scatter_base_",
      [](at::Tensor& output, at::Tensor& input, Group group, Operation operation, bool, int64_t) {
        c10d::ReduceScatterOptions options;
        options.reduceOp = *operation;
        auto work = hccl_of(group)->_reduce_scatter_base(output, input, options);
        return std::tuple<at::Tensor, Started>(output, work);
      });
  m.impl(
      "reduce_scatter_tensor_coalesced_",
      [](at::TensorList outputs, at::TensorList inputs, Group group, Operation operation, bool, int64_t) {
        Tensors out = outputs.vec(), in = inputs.vec();
        c10d::ReduceScatterOptions options;
        options.reduceOp = *operation;
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
  run_all_on_cpu();
  m.def("configure", [](const std::string& machine, int devices, bool lazy) {
    settings.machine = machine;
    settings.devices = devices;
    settings.lazy = lazy;
  });
  m.def("acquire", &acquire_device);
  m.def("module_id", [] { return acquired_module; });
  m.def("mark_step", &end_graph);
  m.def("default_generator", &default_generator);
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
