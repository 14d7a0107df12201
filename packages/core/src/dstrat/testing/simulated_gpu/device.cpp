// A simulated GPU on torch's dispatch key PrivateUse1: the CPU's memory, and the rules of an asynchronous device.
//
// Each operation runs torch's kernel for the CPU on aliases of its tensors, as soon as its stream's earlier copies have
// run.  Copies between pinned memory and the device run as late as the program allows: one from the host when its
// stream needs it, one to the host when the host synchronizes.  Vector clocks tell which accesses are ordered: an
// operation that uses memory of another stream without waiting for it raises.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/StreamGuard.h>
#include <pthread.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <unordered_set>

namespace {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
constexpr int kMaxDevices = 16;

int num_devices = 1;
std::atomic<bool> is_initialized{false}, is_in_bad_fork{false};
thread_local c10::DeviceIndex current_device = 0;

// Host synchronizations: counted by kind, and reported to Python, which keeps the stack

std::atomic<int64_t> synchronizations{0};
py::object* on_synchronization = nullptr;

void report_synchronization(const std::string& kind) {
  ++synchronizations;
  if (on_synchronization == nullptr) return;
  py::gil_scoped_acquire gil;
  (*on_synchronization)(kind);
}

// Streams: a clock of what has happened before their next operation, and copies that have not run

using Clock = std::map<int, int64_t>;  // of each stream, by its number, the last operation that has happened before

void merge(Clock& into, const Clock& other) {
  for (const auto& [stream, operation] : other) {
    int64_t& reached = into[stream];
    reached = std::max(reached, operation);
  }
}

struct Pending {
  int64_t operation;
  std::function<void()> run;
};

struct StreamState {
  c10::DeviceIndex device;
  int64_t operations = 0;
  Clock clock;
  std::deque<Pending> queue;      // copies, and waits for other streams
  std::deque<Pending> host_writes;  // copies that have left the device, and that the host does not see yet
};

std::recursive_mutex mutex;
std::vector<std::unique_ptr<StreamState>> streams;
Clock host_clock;
std::vector<Pending> garbage;  // destroyed without the lock, as a tensor's destructor may need Python's
int lock_depth = 0;

class Lock {
 public:
  Lock() { mutex.lock(); ++lock_depth; }
  ~Lock() {
    std::vector<Pending> dead;
    if (--lock_depth == 0) dead.swap(garbage);
    mutex.unlock();
  }
};

// The numbers of streams: default streams first, one for each device.
StreamState& state_of(int stream) {
  if (streams.empty())
    for (int device = 0; device < kMaxDevices; ++device) {
      streams.push_back(std::make_unique<StreamState>());
      streams.back()->device = static_cast<c10::DeviceIndex>(device);
    }
  return *streams.at(static_cast<size_t>(stream));
}

int number_of(const c10::Stream& stream) {
  return stream.id() == 0 ? stream.device_index() : static_cast<int>(stream.id()) - 1;
}

int new_stream(c10::DeviceIndex device) {
  const Lock lock;
  state_of(0);
  streams.push_back(std::make_unique<StreamState>());
  streams.back()->device = device;
  return static_cast<int>(streams.size()) - 1;
}

c10::Stream stream_object(int number) {
  const c10::DeviceIndex device = number < kMaxDevices ? static_cast<c10::DeviceIndex>(number) : state_of(number).device;
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, device), number < kMaxDevices ? 0 : number + 1);
}

thread_local std::map<c10::DeviceIndex, int> current_streams;

int current_stream(c10::DeviceIndex device) {
  const auto found = current_streams.find(device);
  return found == current_streams.end() ? device : found->second;
}

void check_process() {
  TORCH_CHECK(
      !is_in_bad_fork, "Cannot re-initialize the simulated GPU in forked subprocess. To use it with multiprocessing, "
      "you must use the 'spawn' start method");
  is_initialized = true;
}

void drain(int stream, int64_t until) {
  StreamState& state = state_of(stream);
  while (!state.queue.empty() && state.queue.front().operation <= until) {
    Pending pending = std::move(state.queue.front());
    state.queue.pop_front();
    pending.run();
    garbage.push_back(std::move(pending));
  }
}

void write_host(int stream, int64_t until) {
  StreamState& state = state_of(stream);
  while (!state.host_writes.empty() && state.host_writes.front().operation <= until) {
    Pending pending = std::move(state.host_writes.front());
    state.host_writes.pop_front();
    pending.run();
    garbage.push_back(std::move(pending));
  }
}

// Everything in the clock has run, and what it copies to the host is there.
void complete(const Clock& clock) {
  for (const auto& [stream, operation] : clock) drain(stream, operation);
  for (const auto& [stream, operation] : clock) write_host(stream, operation);
}

Clock clock_after(int stream) {
  StreamState& state = state_of(stream);
  Clock clock = state.clock;
  clock[stream] = state.operations;
  return clock;
}

void host_waits_for(const Clock& clock) {
  const Lock lock;
  complete(clock);
  merge(host_clock, clock);
}

void synchronize_stream(int stream) {
  const Lock lock;
  host_waits_for(clock_after(stream));
}

void stream_waits_for(int stream, const Clock& clock) {
  const Lock lock;
  StreamState& state = state_of(stream);
  merge(state.clock, clock);
  // As late as possible: when the stream's next operation runs.
  state.queue.push_back({++state.operations, [clock] {
    for (const auto& [other, operation] : clock) drain(other, operation);
  }});
}

// Memory: who has used it last, and how much of it there is

struct Access {
  int stream = -1;
  int64_t operation = 0;
  std::string name;
};

// A block that was freed while other streams may still use it: its stream may reuse it at once.
struct Freed {
  std::vector<Access> accesses;
};

struct DeviceMemory {
  int64_t limit = 0, in_use = 0, peak = 0, allocations = 0, frees = 0;
  bool is_touched = false;
};
DeviceMemory memory_of[kMaxDevices];
std::map<int, std::vector<Freed>> freed_blocks;  // by the stream that allocated them

thread_local const std::string* current_operation = nullptr;

struct Block {
  c10::DataPtr memory;
  c10::DeviceIndex device;
  int64_t bytes;
  int stream;
  Access write;
  std::map<int, Access> reads;
  std::set<int> recorded;
  Block(c10::DataPtr&& held, c10::DeviceIndex on, int64_t size);
  ~Block();
};

bool is_ordered(const Clock& clock, int stream, const Access& access) {
  if (access.stream < 0 || access.stream == stream) return true;
  const auto found = clock.find(access.stream);
  return found != clock.end() && found->second >= access.operation;
}

[[noreturn]] void refuse(int stream, const char* verb, const std::string& name, const Access& other, const char* used) {
  TORCH_CHECK(
      false, "race on the simulated GPU: ", name, " on stream ", stream, " ", verb, " memory that ", other.name,
      " on stream ", other.stream, " ", used, ", and stream ", stream,
      " does not wait for it: call wait_stream or wait_event before");
}

Block::Block(c10::DataPtr&& held, c10::DeviceIndex on, int64_t size)
    : memory(std::move(held)), device(on), bytes(size), stream(current_stream(on)) {
  const Lock lock;
  DeviceMemory& total = memory_of[device];
  TORCH_CHECK_WITH(
      OutOfMemoryError, total.limit == 0 || total.in_use + bytes <= total.limit,
      "simgpu out of memory. Tried to allocate ", bytes, " bytes. Device ", int(device), " has a total capacity of ",
      total.limit, " bytes, of which ", total.limit - total.in_use, " bytes are free");
  StreamState& state = state_of(stream);
  merge(state.clock, host_clock);
  write = {stream, state.operations, current_operation == nullptr ? "an allocation" : *current_operation};
  auto& freed = freed_blocks[stream];
  const std::vector<Freed> candidates = std::move(freed);
  freed.clear();
  for (const Freed& block : candidates)
    for (const Access& access : block.accesses)
      if (!is_ordered(state.clock, stream, access)) refuse(stream, "reuses", "an allocation", access, "may still use");
  total.is_touched = true;
  total.in_use += bytes;
  total.peak = std::max(total.peak, total.in_use);
  ++total.allocations;
}

Block::~Block() {
  const Lock lock;
  memory_of[device].in_use -= bytes;
  ++memory_of[device].frees;
  Freed block;
  for (const auto& [other, access] : reads)
    if (other != stream && recorded.count(other) == 0) block.accesses.push_back(access);
  if (write.stream != stream && recorded.count(write.stream) == 0) block.accesses.push_back(write);
  if (!block.accesses.empty() && bytes > 0) freed_blocks[stream].push_back(std::move(block));
}

c10::DataPtr on_device(c10::DataPtr&& memory, c10::DeviceIndex device, int64_t bytes) {
  void* data = memory.get();
  auto* block = new Block(std::move(memory), device, bytes);
  return {data, block, [](void* context) { delete static_cast<Block*>(context); }, c10::Device(kType, device)};
}

Block* block_of(const c10::DataPtr& pointer) {
  return pointer.device().type() == kType ? static_cast<Block*>(pointer.get_context()) : nullptr;
}

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    check_process();
    return on_device(c10::GetCPUAllocator()->allocate(bytes), current_device, static_cast<int64_t>(bytes));
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  bool initialized() override { return is_initialized; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    const Lock lock;
    if (Block* block = block_of(pointer)) block->recorded.insert(number_of(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const Lock lock;
    c10::CachingDeviceAllocator::DeviceStats stats;
    const DeviceMemory& total = memory_of[device];
    for (auto* bytes : {&stats.allocated_bytes[0], &stats.reserved_bytes[0], &stats.active_bytes[0]}) {
      bytes->current = total.in_use;
      bytes->peak = total.peak;
    }
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    const Lock lock;
    memory_of[device].peak = memory_of[device].in_use;
  }
} allocator;

// Pinned memory of the host: it is only marked

std::mutex pinned_mutex;
std::unordered_set<const void*> pinned;

bool is_pinned(const void* data) {
  const std::lock_guard<std::mutex> guard(pinned_mutex);
  return pinned.count(data) != 0;
}

struct PinnedAllocator final : c10::Allocator {
  struct Pinned {
    c10::DataPtr memory;
  };
  c10::DataPtr allocate(size_t bytes) override {
    check_process();
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

// Random numbers: a state for each device

struct DeviceGenerator final : c10::GeneratorImpl {
  at::Generator cpu;
  explicit DeviceGenerator(c10::DeviceIndex device, uint64_t seed = c10::default_rng_seed_val)
      : GeneratorImpl(c10::Device(kType, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        cpu(at::detail::createCPUGenerator(seed)) {}
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "generators of the simulated GPU have no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "generators of the simulated GPU have no offset"); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_state(const c10::TensorImpl& state) override { cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }
  DeviceGenerator* clone_impl() const override {
    auto* copy = new DeviceGenerator(device_.index());
    copy->cpu = cpu.clone();
    return copy;
  }
};

c10::DeviceIndex index_or_current(c10::DeviceIndex index) { return index < 0 ? current_device : index; }

const at::Generator& default_generator(c10::DeviceIndex index) {
  static std::vector<at::Generator> generators = [] {
    std::vector<at::Generator> made;
    for (c10::DeviceIndex device = 0; device < kMaxDevices; ++device)
      made.push_back(at::make_generator<DeviceGenerator>(device));
    return made;
  }();
  return generators.at(static_cast<size_t>(index_or_current(index)));
}

at::Generator cpu_generator(const at::Generator& generator) {
  TORCH_CHECK(
      generator.device().type() == kType,
      "Expected a 'simgpu' device type for generator but found '", generator.device(), "'");
  return static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->cpu;
}

void check_index(c10::DeviceIndex index) {
  TORCH_CHECK(index < num_devices, "invalid device ordinal: simgpu:", int(index), ", and there are ", num_devices);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override { check_process(); }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return num_devices > 0; }
  bool hasPrimaryContext(c10::DeviceIndex device) const override { return memory_of[index_or_current(device)].is_touched; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(num_devices); }
  void setCurrentDevice(c10::DeviceIndex device) const override { check_index(device); current_device = device; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    check_index(device);
    return std::exchange(current_device, device);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  c10::Device getDeviceFromPtr(void*) const override { return c10::Device(kType, current_device); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<DeviceGenerator>(index_or_current(index));
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override;
} hooks;

struct Event {
  Clock clock;
  bool is_recorded = false;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return c10::Device(kType, hooks.exchangeDevice(device.index()));
  }
  c10::Device getDevice() const override { return c10::Device(kType, current_device); }
  void setDevice(c10::Device device) const override { hooks.setCurrentDevice(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = device.index(); }
  c10::Stream getStream(c10::Device device) const override {
    return stream_object(current_stream(index_or_current(device.index())));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_object(index_or_current(device.index()));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return stream_object(new_stream(index_or_current(device.index())));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const int before = current_stream(stream.device_index());
    current_streams[stream.device_index()] = number_of(stream);
    return stream_object(before);
  }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(num_devices); }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    const Lock lock;
    if (*event == nullptr) *event = new Event();
    auto* recorded = static_cast<Event*>(*event);
    merge(state_of(number_of(stream)).clock, host_clock);
    recorded->clock = clock_after(number_of(stream));
    recorded->is_recorded = true;
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) stream_waits_for(number_of(stream), static_cast<Event*>(event)->clock);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  // What is asked for has happened by then.
  bool queryEvent(void* event) const override {
    if (event != nullptr) host_waits_for(static_cast<Event*>(event)->clock);
    return true;
  }
  bool queryStream(const c10::Stream& stream) const override {
    synchronize_stream(number_of(stream));
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    report_synchronization("Stream.synchronize");
    synchronize_stream(number_of(stream));
  }
  void synchronizeEvent(void* event) const override {
    report_synchronization("Event.synchronize");
    if (event != nullptr) host_waits_for(static_cast<Event*>(event)->clock);
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    report_synchronization("synchronize");
    const Lock lock;
    state_of(0);
    for (size_t stream = 0; stream < streams.size(); ++stream)
      if (streams[stream]->device == device) synchronize_stream(static_cast<int>(stream));
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    allocator.recordStream(pointer, stream);
  }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 1.0; }  // it has no clock
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// Operations

bool is_on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kType; }

struct BelowAutograd {
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

// The memory of a storage of the CPU, which lives as long as the pointer does.
c10::DataPtr held(const c10::Storage& storage) {
  auto* owner = new c10::Storage(storage);
  return {
      storage.mutable_data(), owner, [](void* context) { delete static_cast<c10::Storage*>(context); },
      c10::Device(c10::DeviceType::CPU)};
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
    on_one_device(tensor.device().index());
    for (const auto& [device, alias] : tensors_)
      if (device.is_same(tensor)) return alias;
    at::Tensor alias = tensor_in(alias_of(tensor.storage()), c10::DispatchKey::CPU, tensor);
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) alias.unsafeGetTensorImpl()->set_wrapped_number(true);
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
      if (alias.is_alias_of(result.storage())) return tensor_in(device, c10::DispatchKey::PrivateUse1, result);
    const size_t bytes = result.storage().nbytes();
    auto storage = storage_of(
        on_device(held(result.storage()), device(), static_cast<int64_t>(bytes)), bytes, &allocator);
    storages_.emplace_back(storage, result.storage());
    return tensor_in(storage, c10::DispatchKey::PrivateUse1, result);
  }

  void check(const std::string& name) const {
    TORCH_CHECK(
        !(device_ >= 0 && has_host_) && !has_two_devices_,
        "Expected all tensors to be on the same device, but found at least two devices, simgpu:", int(device_),
        has_two_devices_ ? " and another one" : " and cpu", ", in ", name);
  }

  void set_device(c10::DeviceIndex device) { on_one_device(device); }
  c10::DeviceIndex device() const { return index_or_current(device_); }

  // Take over what the operation has changed of its arguments: sizes with new memory.
  void finish() {
    for (auto& [device, alias] : tensors_)
      if (device.sizes() != alias.sizes() || device.strides() != alias.strides())
        device.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides());
    for (auto& [device, alias] : storages_) {
      if (alias.data() == device.data()) continue;
      auto* impl = device.unsafeGetStorageImpl();
      const size_t bytes = alias.nbytes();
      impl->set_data_ptr_noswap(on_device(held(alias), device.device().index(), static_cast<int64_t>(bytes)));
      impl->set_nbytes(bytes);
    }
  }

 private:
  void on_one_device(c10::DeviceIndex device) {
    has_two_devices_ = has_two_devices_ || (device_ >= 0 && device_ != device);
    device_ = device;
  }
  c10::Storage alias_of(const c10::Storage& storage) {
    for (const auto& [device, alias] : storages_)
      if (device.is_alias_of(storage)) return alias;
    storages_.emplace_back(storage, storage_of(held(storage), storage.nbytes(), c10::GetCPUAllocator()));
    return storages_.back().second;
  }

  std::vector<std::pair<at::Tensor, at::Tensor>> tensors_;
  std::vector<std::pair<c10::Storage, c10::Storage>> storages_;  // of the device, of the CPU
  c10::DeviceIndex device_ = -1;
  bool has_host_ = false, has_two_devices_ = false;
};

// An operation in a stream: what it reads and writes is ordered after what other streams did with it, or it raises.
class Launch {
 public:
  Launch(std::string name, int stream) : name_(std::move(name)), stream_(stream) {}
  void reads(const at::Tensor& tensor) { add(tensor, read_); }
  void writes(const at::Tensor& tensor) { add(tensor, written_); }

  // Return the number of the operation.
  int64_t enqueue() {
    const Lock lock;
    StreamState& state = state_of(stream_);
    merge(state.clock, host_clock);
    const int64_t operation = ++state.operations;
    for (Block* block : read_)
      if (!is_ordered(state.clock, stream_, block->write)) refuse(stream_, "reads", name_, block->write, "has written");
    for (Block* block : written_) {
      if (!is_ordered(state.clock, stream_, block->write)) refuse(stream_, "writes", name_, block->write, "has written");
      for (const auto& [other, access] : block->reads)
        if (!is_ordered(state.clock, stream_, access)) refuse(stream_, "writes", name_, access, "reads");
    }
    for (Block* block : read_) block->reads[stream_] = {stream_, operation, name_};
    for (Block* block : written_) {
      block->write = {stream_, operation, name_};
      block->reads.clear();
    }
    return operation;
  }

  // An operation that computes: what its stream has queued has run before.
  int64_t start() {
    const Lock lock;
    const int64_t operation = enqueue();
    drain(stream_, operation);
    return operation;
  }

 private:
  void add(const at::Tensor& tensor, std::vector<Block*>& blocks) {
    if (!is_on_device(tensor) || tensor.numel() == 0) return;
    if (Block* block = block_of(tensor.storage().data_ptr()))
      if (std::find(blocks.begin(), blocks.end(), block) == blocks.end()) blocks.push_back(block);
  }
  std::string name_;
  int stream_;
  std::vector<Block*> read_, written_;
};

template <typename Function>
void for_each_tensor(const c10::IValue& value, Function function) {
  if (value.isTensor()) {
    function(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) function(tensor);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      if (tensor.has_value()) function(*tensor);
  }
}

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
  if (value.isDevice()) {
    const c10::Device device = value.toDevice();
    if (device.type() == kType) call.set_device(index_or_current(device.index()));
    return c10::Device(c10::DeviceType::CPU);
  }
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
    "aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::equal", "aten::bincount"};

bool is_mask(const at::Tensor& tensor) {
  return is_on_device(tensor) && (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte);
}

bool reads_values(const std::string& name, const torch::jit::Stack& stack, size_t begin) {
  if (kReads.count(name) != 0) return true;
  if (name == "aten::repeat_interleave") return stack.size() > begin + 1 && stack.back().isNone();
  if (name != "aten::index" && name != "aten::index_put_" && name != "aten::_index_put_impl_") return false;
  bool has_mask = false;  // its shape is that of nonzero
  for_each_tensor(stack[begin + 1], [&](const at::Tensor& tensor) { has_mask = has_mask || is_mask(tensor); });
  return has_mask;
}

bool is_view(const c10::FunctionSchema& schema) {
  if (schema.is_mutable()) return false;
  for (const c10::Argument& result : schema.returns())
    if (result.alias_info() != nullptr) return true;
  return false;
}

void run_on_cpu(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  check_process();
  const BelowAutograd guard;
  const auto& schema = operation.schema();
  const size_t count = schema.arguments().size();
  const size_t begin = stack->size() - count;
  const bool reads = reads_values(schema.name(), *stack, begin);
  const torch::jit::Stack arguments(stack->begin() + static_cast<int64_t>(begin), stack->end());
  Call call;
  for (size_t index = 0; index < count; ++index) {
    c10::IValue& value = (*stack)[begin + index];
    if (!value.isNone() || !is_generator(schema.arguments()[index])) value = to_cpu(call, value);
  }
  for (size_t index = 0; index < count; ++index)
    if ((*stack)[begin + index].isNone() && is_generator(schema.arguments()[index]))
      (*stack)[begin + index] = cpu_generator(default_generator(call.device()));
  if (schema.name() != "aten::_pack_padded_sequence") call.check(schema.name());  // which takes lengths on the CPU
  const int stream = current_stream(call.device());
  if (!is_view(schema)) {
    Launch launch(schema.name(), stream);
    for (size_t index = 0; index < count; ++index) {
      const auto* alias = schema.arguments()[index].alias_info();
      const bool writes = alias != nullptr && alias->isWrite();
      for_each_tensor(arguments[index], [&](const at::Tensor& tensor) {
        writes ? launch.writes(tensor) : launch.reads(tensor);
      });
    }
    launch.start();
  }
  if (reads) {
    report_synchronization(schema.name());
    synchronize_stream(stream);
  }
  operation.callBoxed(stack);
  if (schema.is_mutable()) call.finish();
  const size_t returned = stack->size() - schema.returns().size();
  current_operation = &schema.name();
  for (size_t index = returned; index < stack->size(); ++index) (*stack)[index] = to_device(call, (*stack)[index]);
  current_operation = nullptr;
}

at::Tensor empty_memory_format(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceIndex index = index_or_current(device.has_value() ? device->index() : -1);
  check_index(index);
  const c10::DeviceGuard guard(c10::Device(kType, index));
  return at::detail::empty_generic(
      size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), at::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceIndex index = index_or_current(device.has_value() ? device->index() : -1);
  check_index(index);
  const c10::DeviceGuard guard(c10::Device(kType, index));
  return at::detail::empty_strided_generic(
      size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), at::dtype_or_default(dtype));
}

constexpr size_t kStagedByDriver = 64 * 1024;  // bytes of pageable memory that a copy takes along without waiting

// Two devices: both streams wait for each other, as torch's copies do.
void copy_between_devices(const at::Tensor& from, const at::Tensor& to) {
  const int source = current_stream(from.device().index()), target = current_stream(to.device().index());
  const Lock lock;
  if (source != target) stream_waits_for(source, clock_after(target));
  Launch launch("aten::copy_", source);
  launch.reads(from);
  launch.writes(to);
  launch.start();
  if (source != target) stream_waits_for(target, clock_after(source));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  check_process();
  const BelowAutograd guard;
  Call of_source, of_target;
  const at::Tensor source = of_source.to_cpu(from), target = of_target.to_cpu(to);
  if (is_on_device(from) && is_on_device(to)) {
    copy_between_devices(from, to);
    target.copy_(source);
    return to;
  }
  const bool to_host = is_on_device(from);
  const at::Tensor& host = to_host ? to : from;
  const int stream = current_stream((to_host ? from : to).device().index());
  Launch launch("aten::copy_", stream);
  launch.reads(from);
  launch.writes(to);
  if (non_blocking && is_pinned(host.storage().data())) {
    const Lock lock;
    const int64_t operation = launch.enqueue();
    state_of(stream).queue.push_back({operation, [stream, operation, source, target, to_host] {
      const BelowAutograd below;
      if (to_host) {
        state_of(stream).host_writes.push_back({operation, [target, values = source.clone()] {
          const BelowAutograd still_below;
          target.copy_(values);
        }});
      } else {
        for (const auto& [other, reached] : state_of(stream).clock) write_host(other, reached);
        write_host(stream, operation);  // what the stream has copied to the same memory of the host
        target.copy_(source);
      }
    }});
    return to;
  }
  const bool waits = to_host || !non_blocking || host.nbytes() > kStagedByDriver;
  if (waits && host.numel() > 0)
    report_synchronization(to_host ? "a copy to the host" : "a copy from memory of the host that is not pinned");
  launch.start();
  if (waits) synchronize_stream(stream);
  target.copy_(source);
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  const BelowAutograd guard;
  report_synchronization("item");
  const int stream = current_stream(tensor.device().index());
  Launch launch("aten::_local_scalar_dense", stream);
  launch.reads(tensor);
  launch.start();
  synchronize_stream(stream);
  Call call;
  return at::_local_scalar_dense(call.to_cpu(tensor));
}

at::Tensor& set_storage_offset(
    at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  TORCH_CHECK(source.device_type() == kType, "Attempted to set the storage of a tensor on the simulated GPU to another");
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
  const c10::DeviceGuard guard(self.device());
  return set_storage_offset(self, storage_of(allocator.allocate(0), 0, &allocator), 0, {0}, {1});
}

void record_stream(at::Tensor& tensor, c10::Stream stream) {
  allocator.recordStream(tensor.storage().data_ptr(), stream);
}

at::Tensor convolution(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding,
    int64_t groups) {
  const BelowAutograd guard;
  Call call;
  const at::Tensor in = call.to_cpu(input), w = call.to_cpu(weight);
  const std::optional<at::Tensor> b =
      bias.has_value() ? std::optional<at::Tensor>(call.to_cpu(*bias)) : std::nullopt;
  call.check("aten::convolution");
  Launch launch("aten::convolution", current_stream(call.device()));
  launch.reads(input);
  launch.reads(weight);
  if (bias.has_value()) launch.reads(*bias);
  launch.start();
  return call.to_device(at::convolution(in, w, b, stride, padding, dilation, transposed, output_padding, groups));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding,
    int64_t groups, std::array<bool, 3> mask) {
  const BelowAutograd guard;
  Call call;
  const at::Tensor g = call.to_cpu(gradient), in = call.to_cpu(input), w = call.to_cpu(weight);
  call.check("aten::convolution_backward");
  Launch launch("aten::convolution_backward", current_stream(call.device()));
  for (const at::Tensor* tensor : {&gradient, &input, &weight}) launch.reads(*tensor);
  launch.start();
  const int64_t channels = transposed ? weight.size(1) * groups : weight.size(0);
  auto [to_input, to_weight, to_bias] = at::convolution_backward(
      g, in, w, at::IntArrayRef({channels}), stride, padding, dilation, transposed, output_padding, groups, mask);
  return {call.to_device(to_input), call.to_device(to_weight), call.to_device(to_bias)};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
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
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    const auto operation = dispatcher.findOp(name);
    if (!operation.has_value() || !operation->hasSchema()) continue;
    if (!operation->hasKernelForDispatchKey(c10::DispatchKey::CPU)) continue;
    if (operation->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) continue;
    const std::string full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  }
}

void Hooks::resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const {
  auto* impl = storage.unsafeGetStorageImpl();
  const c10::DeviceGuard guard(storage.device());
  c10::DataPtr memory = allocator.allocate(bytes);
  if (bytes > 0 && impl->nbytes() > 0) std::memcpy(memory.get(), impl->data(), std::min(bytes, impl->nbytes()));
  impl->set_data_ptr_noswap(std::move(memory));
  impl->set_nbytes(bytes);
}

}  // namespace

// Autocast, with torch's own lists of operations

namespace at::autocast {

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define KERNEL_OF_16_BITS(...) KERNEL(c10::DeviceType::PrivateUse1, __VA_ARGS__, lower_precision_fp)
#define KERNEL_OF_32_BITS(...) KERNEL(c10::DeviceType::PrivateUse1, __VA_ARGS__, fp32)
  AT_FORALL_LOWER_PRECISION_FP(KERNEL_OF_16_BITS)
  AT_FORALL_FP32(KERNEL_OF_32_BITS)
}

}  // namespace at::autocast

// Collectives: over gloo, in a stream of their own, which waits for the current one

namespace {

using Tensors = std::vector<at::Tensor>;
using Started = c10::intrusive_ptr<c10d::Work>;

// The current stream waits for the collective's, and the host does not.
class StreamWork final : public c10d::Work {
 public:
  StreamWork(c10d::OpType type, c10::DeviceIndex device, int stream, Tensors results, Started transfer)
      : Work(-1, type), device_(device), results_(std::move(results)), transfer_(std::move(transfer)) {
    const Lock lock;
    clock_ = clock_after(stream);
    // The future's events are those of the collective's stream.
    const c10::StreamGuard guard(stream_object(stream));
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{c10::Device(kType, device)});
    future_->markCompleted(c10::IValue(results_));
  }
  bool isCompleted() override { return transfer_ == nullptr || transfer_->isCompleted(); }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void synchronize() override {
    if (transfer_ != nullptr) transfer_->wait();
    stream_waits_for(current_stream(device_), clock_);
    if (opType_ != c10d::OpType::BARRIER) return;
    report_synchronization("barrier");
    host_waits_for(clock_);
  }
  std::vector<at::Tensor> result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  c10::DeviceIndex device_;
  Clock clock_;
  Tensors results_;
  Started transfer_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class ProcessGroup final : public c10d::Backend {
 public:
  ProcessGroup(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size) : Backend(rank, size), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override { return "simulated_ccl"; }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  void abort() override { gloo_->abort(); }
  void shutdown() override { gloo_->shutdown(); }

  Started broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return run(c10d::OpType::BROADCAST, tensors, tensors, [&](Tensors, Tensors out) {
      return gloo_->broadcast(out, options);
    });
  }
  Started allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return run(c10d::OpType::ALLREDUCE, tensors, tensors, [&](Tensors, Tensors out) {
      return reduce_each(out, options);
    });
  }
  Started allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return run(c10d::OpType::ALLREDUCE_COALESCED, tensors, tensors, [&](Tensors, Tensors out) {
      return reduce_each(out, options);
    });
  }
  Started reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return run(c10d::OpType::REDUCE, tensors, tensors, [&](Tensors, Tensors out) {
      c10d::ReduceOptions summed = options;
      summed.reduceOp = without_mean(options.reduceOp);
      gloo_->reduce(out, summed)->wait();
      if (getRank() == options.rootRank) divide(out, options.reduceOp);
      return Started();
    });
  }
  Started allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return run(c10d::OpType::ALLGATHER, inputs, flat(outputs), [&](Tensors in, Tensors out) {
      std::vector<Tensors> lists = unflat(out, outputs);
      return gloo_->allgather(lists, in, options);
    });
  }
  Started _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    return run(c10d::OpType::_ALLGATHER_BASE, {input}, {output}, [&](Tensors in, Tensors out) {
      return gloo_->_allgather_base(out[0], in[0], options);
    });
  }
  Started allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return run(c10d::OpType::COALESCED, inputs, outputs, [&](Tensors in, Tensors out) {
      for (size_t index = 0; index < in.size(); ++index) gloo_->_allgather_base(out[index], in[index], options)->wait();
      return Started();
    });
  }
  Started gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    return run(c10d::OpType::GATHER, inputs, flat(outputs), [&](Tensors in, Tensors out) {
      std::vector<Tensors> lists = unflat(out, outputs);
      return gloo_->gather(lists, in, options);
    });
  }
  Started scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    return run(c10d::OpType::SCATTER, flat(inputs), outputs, [&](Tensors in, Tensors out) {
      std::vector<Tensors> lists = unflat(in, inputs);
      return gloo_->scatter(out, lists, options);
    });
  }
  Started reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    return run(c10d::OpType::REDUCE_SCATTER, flat(inputs), outputs, [&](Tensors in, Tensors out) {
      std::vector<Tensors> lists = unflat(in, inputs);
      c10d::ReduceScatterOptions summed = options;
      summed.reduceOp = without_mean(options.reduceOp);
      gloo_->reduce_scatter(out, lists, summed)->wait();
      divide(out, options.reduceOp);
      return Started();
    });
  }
  Started _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    Tensors outputs{output}, inputs{input};
    return reduce_scatter_tensor_coalesced(outputs, inputs, options);
  }
  Started reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    return run(c10d::OpType::_REDUCE_SCATTER_BASE, inputs, outputs, [&](Tensors in, Tensors out) {
      c10d::ReduceScatterOptions summed = options;
      summed.reduceOp = without_mean(options.reduceOp);
      for (size_t index = 0; index < in.size(); ++index)
        gloo_->_reduce_scatter_base(out[index], in[index], summed)->wait();
      divide(out, options.reduceOp);
      return Started();
    });
  }
  Started alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override {
    return run(c10d::OpType::ALLTOALL_BASE, {input}, {output}, [&](Tensors in, Tensors out) {
      return gloo_->alltoall_base(out[0], in[0], output_sizes, input_sizes, options);
    });
  }
  Started send(Tensors& tensors, int to, int tag) override {
    return run(c10d::OpType::SEND, tensors, {}, [&](Tensors in, Tensors) { return gloo_->send(in, to, tag); }, true);
  }
  Started recv(Tensors& tensors, int from, int tag) override {
    return run(c10d::OpType::RECV, {}, tensors, [&](Tensors, Tensors out) { return gloo_->recv(out, from, tag); }, true);
  }
  Started barrier(const c10d::BarrierOptions&) override {
    return run(c10d::OpType::BARRIER, {}, {}, [&](Tensors, Tensors) { return gloo_->barrier(c10d::BarrierOptions()); });
  }

 private:
  template <typename Transfer>
  Started run(c10d::OpType type, const Tensors& inputs, const Tensors& outputs, Transfer transfer, bool later = false) {
    check_process();
    const c10::DeviceIndex device =
        !outputs.empty() ? outputs[0].device().index() : !inputs.empty() ? inputs[0].device().index() : current_device;
    const BelowAutograd guard;
    Call call;
    Tensors in = all(call, inputs), out = all(call, outputs);
    int stream;
    {
      const Lock lock;
      auto found = streams_.find(device);
      if (found == streams_.end()) found = streams_.emplace(device, new_stream(device)).first;
      stream = found->second;
      stream_waits_for(stream, clock_after(current_stream(index_or_current(device))));
      Launch launch("a collective", stream);
      for (const at::Tensor& tensor : inputs) launch.reads(tensor);
      for (const at::Tensor& tensor : outputs) launch.writes(tensor);
      launch.start();
      for (const Tensors* tensors : {&inputs, &outputs})
        for (const at::Tensor& tensor : *tensors)  // it keeps them until it has ended, as NCCL's does
          allocator.recordStream(tensor.storage().data_ptr(), stream_object(stream));
    }
    Started started = transfer(in, out);
    if (started && !later) started->wait();
    return c10::make_intrusive<StreamWork>(type, index_or_current(device), stream, outputs, later ? started : Started());
  }

  static Tensors all(Call& call, const Tensors& tensors) {
    Tensors cpu;
    for (const at::Tensor& tensor : tensors) {
      TORCH_CHECK(is_on_device(tensor), "No backend type associated with device type ", tensor.device().type(),
                  ": simulated_ccl takes tensors of the simulated GPU only");
      TORCH_CHECK(tensor.is_non_overlapping_and_dense(), "Tensors must be contiguous");
      cpu.push_back(call.to_cpu(tensor));
    }
    return cpu;
  }
  static Tensors flat(const std::vector<Tensors>& lists) {
    Tensors tensors;
    for (const Tensors& list : lists) tensors.insert(tensors.end(), list.begin(), list.end());
    return tensors;
  }
  static std::vector<Tensors> unflat(const Tensors& tensors, const std::vector<Tensors>& like) {
    std::vector<Tensors> lists;
    auto next = tensors.begin();
    for (const Tensors& list : like) {
      lists.emplace_back(next, next + static_cast<int64_t>(list.size()));
      next += static_cast<int64_t>(list.size());
    }
    return lists;
  }
  static c10d::ReduceOp without_mean(const c10d::ReduceOp& operation) {
    return operation == c10d::ReduceOp::AVG ? c10d::ReduceOp(c10d::ReduceOp::SUM) : operation;
  }
  void divide(const Tensors& tensors, const c10d::ReduceOp& operation) const {
    if (operation == c10d::ReduceOp::AVG)
      for (const at::Tensor& tensor : tensors) at::Tensor(tensor).div_(getSize());
  }
  template <typename Options>
  Started reduce_each(const Tensors& tensors, const Options& options) {
    c10d::AllreduceOptions summed;
    summed.reduceOp = without_mean(options.reduceOp);
    for (const at::Tensor& tensor : tensors) {
      Tensors one{tensor};
      gloo_->allreduce(one, summed)->wait();
    }
    divide(tensors, options.reduceOp);
    return {};
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  std::map<c10::DeviceIndex, int> streams_;
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  c10::SetAllocator(kType, &allocator);
  at::RegisterPrivateUse1HooksInterface(&hooks);
  run_all_on_cpu();
  pthread_atfork(nullptr, nullptr, [] { if (is_initialized) is_in_bad_fork = true; });
  m.def("set_num_devices", [](int count) {
    TORCH_CHECK(count <= kMaxDevices, "at most ", kMaxDevices, " simulated GPUs");
    num_devices = count;
  });
  m.def("num_devices", [] { return num_devices; });
  m.def("init", &check_process);
  m.def("is_initialized", [] { return is_initialized.load(); });
  m.def("is_in_bad_fork", [] { return is_in_bad_fork.load(); });
  m.def("default_generator", [](int device) { return default_generator(static_cast<c10::DeviceIndex>(device)); });
  m.def("synchronizations", [] { return synchronizations.load(); });
  m.def("set_on_synchronization", [](const py::object& function) {
    py::object* before = on_synchronization;
    on_synchronization = function.is_none() ? nullptr : new py::object(function);
    delete before;
  });
  m.def("limit_memory", [](int device, int64_t bytes) {
    const Lock lock;
    memory_of[device].limit = bytes;
  });
  m.def("memory", [](int device) {
    const Lock lock;
    const DeviceMemory& total = memory_of[device];
    return std::unordered_map<std::string, int64_t>{
        {"in_use", total.in_use}, {"peak", total.peak}, {"limit", total.limit}, {"allocations", total.allocations},
        {"frees", total.frees}, {"is_touched", total.is_touched}};
  });
  m.def("reset_peak", [](int device) { allocator.resetPeakStats(static_cast<c10::DeviceIndex>(device)); });
  py::class_<ProcessGroup, c10::intrusive_ptr<ProcessGroup>, c10d::Backend>(m, "ProcessGroup")
      .def(py::init<c10::intrusive_ptr<c10d::Backend>, int, int>(), py::call_guard<py::gil_scoped_release>());
}
