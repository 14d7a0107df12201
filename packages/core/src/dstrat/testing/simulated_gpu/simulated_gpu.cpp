// A simulated GPU on torch's dispatch key PrivateUse1: the CPU's memory, and the rules of an asynchronous device.
//
// Each operation runs torch's kernel for the CPU on aliases of its tensors, as soon as its stream's earlier copies have
// run.  Copies between pinned memory and the device run as late as the program allows: one from the host when its
// stream needs it, one to the host when the host synchronizes.  Vector clocks tell which accesses are ordered: an
// operation that uses memory of another stream without waiting for it raises.

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pthread.h>

#include <atomic>
#include <deque>
#include <map>
#include <set>
#include <thread>

namespace {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
constexpr c10::DispatchKey kKey = c10::DispatchKey::PrivateUse1;
constexpr int kMaxDevices = 16;

}  // namespace

#include "simulated_device.h"

#include "simulated_collectives.h"

namespace {

int num_devices = 1;
std::atomic<bool> is_initialized{false}, is_in_bad_fork{false}, allows_forks{false};
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

void use_device() {
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

struct Block {
  std::shared_ptr<c10::DataPtr> memory;  // shared with copies that have not run: they see what is freed meanwhile
  c10::DeviceIndex device;
  int64_t bytes;
  int stream;
  Access write;
  std::map<int, Access> reads;
  std::set<int> recorded;
  Block(c10::DataPtr&& held, c10::DeviceIndex on, int64_t size, const std::string& made_by);
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

Block::Block(c10::DataPtr&& held, c10::DeviceIndex on, int64_t size, const std::string& made_by)
    : memory(std::make_shared<c10::DataPtr>(std::move(held))), device(on), bytes(size), stream(current_stream(on)) {
  const Lock lock;
  DeviceMemory& total = memory_of[device];
  TORCH_CHECK_WITH(
      OutOfMemoryError, total.limit == 0 || total.in_use + bytes <= total.limit,
      "simgpu out of memory. Tried to allocate ", bytes, " bytes. Device ", int(device), " has a total capacity of ",
      total.limit, " bytes, of which ", total.limit - total.in_use, " bytes are free");
  StreamState& state = state_of(stream);
  merge(state.clock, host_clock);
  write = {stream, state.operations, made_by};
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

c10::DataPtr on_device(c10::DataPtr&& memory, c10::DeviceIndex device, int64_t bytes, const std::string& made_by) {
  void* data = memory.get();
  auto* block = new Block(std::move(memory), device, bytes, made_by);
  return {data, block, [](void* context) { delete static_cast<Block*>(context); }, c10::Device(kType, device)};
}

Block* block_of(const c10::DataPtr& pointer) {
  return pointer.device().type() == kType ? static_cast<Block*>(pointer.get_context()) : nullptr;
}

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    use_device();
    const auto size = static_cast<int64_t>(bytes);
    return on_device(c10::GetCPUAllocator()->allocate(bytes), current_device, size, "an allocation");
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

c10::Allocator* device_allocator() { return &allocator; }

// Devices, their generators and streams, as torch asks for them

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

void check_index(c10::DeviceIndex index) {
  TORCH_CHECK(index < num_devices, "invalid device ordinal: simgpu:", int(index), ", and there are ", num_devices);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override { use_device(); }
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

// It runs in the current stream of its device, after what the stream has queued.
void before(const Operation& operation) {
  TORCH_CHECK(
      !operation.mixes_with_host && !operation.mixes_devices,
      "Expected all tensors to be on the same device, but found at least two devices, simgpu:", int(operation.device),
      operation.mixes_devices ? " and another one" : " and cpu", ", in ", operation.name);
  if (!operation.computes && !operation.reads_values) return;  // a view
  const int stream = current_stream(operation.device);
  Launch launch(operation.name, stream);
  for (const at::Tensor& tensor : operation.read) launch.reads(tensor);
  for (const at::Tensor& tensor : operation.written) launch.writes(tensor);
  launch.start();
  if (!operation.reads_values) return;
  report_synchronization(operation.name);
  synchronize_stream(stream);
}

void call_kernel(const c10::OperatorHandle& handle, torch::jit::Stack* stack) { handle.callBoxed(stack); }

// A tensor of the CPU in the memory of one, which may be freed before: a copy keeps no memory of the device.
at::Tensor in_memory_of(const at::Tensor& tensor) {
  Block* block = is_on_device(tensor) ? block_of(tensor.storage().data_ptr()) : nullptr;
  if (block == nullptr) return tensor;
  using Memory = std::shared_ptr<c10::DataPtr>;
  c10::DataPtr shared(
      block->memory->get(), new Memory(block->memory), [](void* memory) { delete static_cast<Memory*>(memory); },
      c10::Device(c10::DeviceType::CPU));
  const size_t bytes = tensor.storage().nbytes();
  return tensor_in(storage_of(std::move(shared), bytes, c10::GetCPUAllocator()), c10::DispatchKey::CPU, tensor);
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
  use_device();
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
    const at::Tensor late_source = in_memory_of(from), late_target = in_memory_of(to);
    state_of(stream).queue.push_back({operation, [stream, operation, to_host, late_source, late_target] {
      const BelowAutograd below;
      if (to_host) {
        state_of(stream).host_writes.push_back({operation, [late_target, values = late_source.clone()] {
          const BelowAutograd still_below;
          late_target.copy_(values);
        }});
      } else {
        for (const auto& [other, reached] : state_of(stream).clock) write_host(other, reached);
        write_host(stream, operation);  // what the stream has copied to the same memory of the host
        late_target.copy_(late_source);
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

void record_stream(at::Tensor& tensor, c10::Stream stream) {
  allocator.recordStream(tensor.storage().data_ptr(), stream);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar_dense));
  m.impl("record_stream", TORCH_FN(record_stream));
}

void Hooks::resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const {
  auto* impl = storage.unsafeGetStorageImpl();
  const c10::DeviceGuard guard(storage.device());
  c10::DataPtr memory = allocator.allocate(bytes);
  if (bytes > 0 && impl->nbytes() > 0) std::memcpy(memory.get(), impl->data(), std::min(bytes, impl->nbytes()));
  impl->set_data_ptr_noswap(std::move(memory));
  impl->set_nbytes(bytes);
}

// Collectives: over gloo, in a stream of their own, which waits for the current one

void wait_quietly(const Started& transfer) {
  try {
    transfer->wait();
  } catch (const std::exception&) {  // the other rank has ended
  }
}

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
  // What nobody has waited for still arrives.
  ~StreamWork() override {
    if (transfer_ != nullptr) std::thread([transfer = std::move(transfer_)] { wait_quietly(transfer); }).detach();
  }
  bool isCompleted() override { return transfer_ == nullptr || transfer_->isCompleted(); }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void synchronize() override {
    if (transfer_ != nullptr) transfer_->wait();
    transfer_ = nullptr;
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

class ProcessGroup final : public OverGloo {
 public:
  using OverGloo::OverGloo;
  const std::string getBackendName() const override { return "simulated_ccl"; }

 private:
  Started run(
      c10d::OpType type, const Tensors& inputs, const Tensors& outputs, const Transfer& transfer, bool later) override {
    use_device();
    const c10::DeviceIndex device =
        !outputs.empty() ? outputs[0].device().index() : !inputs.empty() ? inputs[0].device().index() : current_device;
    const BelowAutograd guard;
    Call call;
    Tensors in = to_cpu(call, inputs), out = to_cpu(call, outputs);
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

  void check(const at::Tensor& tensor) const override {
    TORCH_CHECK(
        is_on_device(tensor), "No backend type associated with device type ", tensor.device().type(),
        ": simulated_ccl takes tensors of the simulated GPU only");
    TORCH_CHECK(tensor.is_non_overlapping_and_dense(), "Tensors must be contiguous");
  }

  std::map<c10::DeviceIndex, int> streams_;
};

}  // namespace

// Collectives have no formula for gradients: torch passes over that step for its own types of devices, and since a later
// version than 2.9 for this one too.
void pass_over_autograd() {
  if (c10::Dispatcher::singleton().hasBackendFallbackForDispatchKey(c10::DispatchKey::AutogradPrivateUse1)) return;
  static torch::Library library(torch::Library::IMPL, "_", c10::DispatchKey::AutogradPrivateUse1, __FILE__, __LINE__);
  library.fallback(torch::CppFunction::makeFallthrough());
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  c10::SetAllocator(kType, &allocator);
  at::RegisterPrivateUse1HooksInterface(&hooks);
  register_device();
  pass_over_autograd();
  pthread_atfork(nullptr, nullptr, [] { if (is_initialized && !allows_forks) is_in_bad_fork = true; });
  m.def("set_num_devices", [](int count) {
    TORCH_CHECK(count <= kMaxDevices, "at most ", kMaxDevices, " simulated GPUs");
    num_devices = count;
  });
  m.def("num_devices", [] { return num_devices; });
  m.def("init", &use_device);
  m.def("allow_forks", [] { allows_forks = true; });
  m.def("is_initialized", [] { return is_initialized && !allows_forks; });
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
