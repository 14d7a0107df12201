// What simulated devices share: the CPU's memory under a dispatch key of their own, random numbers, pinned memory and
// autocast.
//
// Each operation runs torch's kernel for the CPU on aliases of its tensors.  The source of a device defines kType and
// kKey before it includes this, then the functions of the first part, which are its rules, and calls register_device()
// when it is loaded.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <functional>
#include <mutex>
#include <unordered_set>

namespace {

// What a device defines

struct Operation {
  std::string name;
  c10::DeviceIndex device = 0;
  std::vector<at::Tensor> read, written;  // tensors of the device
  bool computes = true;        // or it returns views alone
  bool reads_values = false;   // the host needs what the device has computed
  bool mixes_with_host = false, mixes_devices = false;
};

void use_device();  // this process begins to use it, or may not
c10::DeviceIndex index_or_current(c10::DeviceIndex index);  // of -1, that of the current device
c10::Allocator* device_allocator();  // of the current device
c10::DataPtr on_device(c10::DataPtr&& memory, c10::DeviceIndex device, int64_t bytes, const std::string& made_by);
const at::Generator& default_generator(c10::DeviceIndex index);
void before(const Operation& operation);  // it runs, or raises
void call_kernel(const c10::OperatorHandle& handle, torch::jit::Stack* stack);  // with tensors of the CPU

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
    use_device();
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
      : GeneratorImpl(c10::Device(kType, device), c10::DispatchKeySet(kKey)),
        cpu(at::detail::createCPUGenerator(seed)) {}
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "generators of this device have no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "generators of this device have no offset"); }
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

at::Generator cpu_generator(const at::Generator& generator) {
  TORCH_CHECK(
      generator.device().type() == kType,
      "Expected a '", c10::DeviceTypeName(kType, /*lower_case=*/true), "' device type for generator but found '",
      generator.device(), "'");
  return static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->cpu;
}

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
  explicit Call(std::string name = "an operation") : name_(std::move(name)) {}

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
      if (alias.is_alias_of(result.storage())) return tensor_in(device, kKey, result);
    const size_t bytes = result.storage().nbytes();
    auto memory = on_device(held(result.storage()), device(), static_cast<int64_t>(bytes), name_);
    auto storage = storage_of(std::move(memory), bytes, device_allocator());
    storages_.emplace_back(storage, result.storage());
    return tensor_in(storage, kKey, result);
  }

  void set_device(c10::DeviceIndex device) { on_one_device(device); }
  c10::DeviceIndex device() const { return index_or_current(device_); }

  // The operation without its tensors.
  Operation operation() const {
    return {.name = name_,
            .device = device(),
            .mixes_with_host = device_ >= 0 && has_host_ && name_ != "aten::_pack_padded_sequence",  // lengths
            .mixes_devices = has_two_devices_};
  }

  // Take over what the operation has changed of its arguments: sizes with new memory.
  void finish() {
    for (auto& [device, alias] : tensors_)
      if (device.sizes() != alias.sizes() || device.strides() != alias.strides())
        device.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides());
    for (auto& [device, alias] : storages_) {
      if (alias.data() == device.data()) continue;
      auto* impl = device.unsafeGetStorageImpl();
      const size_t bytes = alias.nbytes();
      impl->set_data_ptr_noswap(on_device(held(alias), device.device().index(), static_cast<int64_t>(bytes), name_));
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

  std::string name_;
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors_;
  std::vector<std::pair<c10::Storage, c10::Storage>> storages_;  // of the device, of the CPU
  c10::DeviceIndex device_ = -1;
  bool has_host_ = false, has_two_devices_ = false;
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

bool computes(const c10::FunctionSchema& schema) {
  if (schema.is_mutable()) return true;
  bool makes = false, is_view = false;
  for (const c10::Argument& result : schema.returns()) {
    is_view = is_view || result.alias_info() != nullptr;
    makes = makes || result.type()->kind() == c10::TypeKind::TensorType ||
            result.type()->kind() == c10::TypeKind::ListType;
  }
  return makes && !is_view;
}

void run_on_cpu(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  use_device();
  const BelowAutograd guard;
  const auto& schema = handle.schema();
  const size_t count = schema.arguments().size();
  const size_t begin = stack->size() - count;
  Call call(schema.name());
  std::vector<at::Tensor> read, written;
  const bool reads = reads_values(schema.name(), *stack, begin);
  for (size_t index = 0; index < count; ++index) {
    c10::IValue& value = (*stack)[begin + index];
    const auto* alias = schema.arguments()[index].alias_info();
    for_each_tensor(value, [&, writes = alias != nullptr && alias->isWrite()](const at::Tensor& tensor) {
      if (is_on_device(tensor)) (writes ? written : read).push_back(tensor);
    });
    if (!value.isNone() || !is_generator(schema.arguments()[index])) value = to_cpu(call, value);
  }
  for (size_t index = 0; index < count; ++index)
    if ((*stack)[begin + index].isNone() && is_generator(schema.arguments()[index]))
      (*stack)[begin + index] = cpu_generator(default_generator(call.device()));
  Operation operation = call.operation();
  operation.read = std::move(read);
  operation.written = std::move(written);
  operation.computes = computes(schema);
  operation.reads_values = reads;
  before(operation);
  call_kernel(handle, stack);
  if (schema.is_mutable()) call.finish();
  for (size_t index = stack->size() - schema.returns().size(); index < stack->size(); ++index)
    (*stack)[index] = to_device(call, (*stack)[index]);
}

at::Tensor empty_memory_format(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(device.value_or(c10::Device(kType)));  // which refuses what is not there
  return at::detail::empty_generic(
      size, device_allocator(), c10::DispatchKeySet(kKey), at::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(device.value_or(c10::Device(kType)));  // which refuses what is not there
  return at::detail::empty_strided_generic(
      size, stride, device_allocator(), c10::DispatchKeySet(kKey), at::dtype_or_default(dtype));
}

at::Tensor& set_storage_offset(
    at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  TORCH_CHECK(source.device_type() == kType, "Attempted to set the storage of a tensor of this device to another one");
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
  return set_storage_offset(self, storage_of(device_allocator()->allocate(0), 0, device_allocator()), 0, {0}, {1});
}

at::Tensor convolution(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding,
    int64_t groups) {
  const BelowAutograd guard;
  Call call("aten::convolution");
  const at::Tensor in = call.to_cpu(input), w = call.to_cpu(weight);
  const std::optional<at::Tensor> b =
      bias.has_value() ? std::optional<at::Tensor>(call.to_cpu(*bias)) : std::nullopt;
  Operation operation = call.operation();
  operation.read = {input, weight};
  if (bias.has_value()) operation.read.push_back(*bias);
  before(operation);
  return call.to_device(at::convolution(in, w, b, stride, padding, dilation, transposed, output_padding, groups));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding,
    int64_t groups, std::array<bool, 3> mask) {
  const BelowAutograd guard;
  Call call("aten::convolution_backward");
  const at::Tensor g = call.to_cpu(gradient), in = call.to_cpu(input), w = call.to_cpu(weight);
  Operation operation = call.operation();
  operation.read = {gradient, input, weight};
  before(operation);
  const int64_t channels = transposed ? weight.size(1) * groups : weight.size(0);
  auto [to_input, to_weight, to_bias] = at::convolution_backward(
      g, in, w, at::IntArrayRef({channels}), stride, padding, dilation, transposed, output_padding, groups, mask);
  return {call.to_device(to_input), call.to_device(to_weight), call.to_device(to_bias)};
}

}  // namespace

namespace at::autocast {

void register_autocast() {  // with torch's own lists of operations
  const c10::DispatchKey key = get_autocast_dispatch_key_from_device_type(kType);
  static torch::Library fallback(torch::Library::IMPL, "_", key, __FILE__, __LINE__);
  fallback.fallback(torch::CppFunction::makeFallthrough());
  static torch::Library m(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
#define KERNEL_OF_16_BITS(...) KERNEL(kType, __VA_ARGS__, lower_precision_fp)
#define KERNEL_OF_32_BITS(...) KERNEL(kType, __VA_ARGS__, fp32)
  AT_FORALL_LOWER_PRECISION_FP(KERNEL_OF_16_BITS)
  AT_FORALL_FP32(KERNEL_OF_32_BITS)
}

}  // namespace at::autocast

namespace {

// Add the operations to torch, and autocast.
void register_device() {
  static torch::Library fallback(torch::Library::IMPL, "_", kKey, __FILE__, __LINE__);
  fallback.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  static torch::Library m(torch::Library::IMPL, "aten", kKey, __FILE__, __LINE__);
  m.impl("empty.memory_format", TORCH_FN(empty_memory_format));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("set_", TORCH_FN(set_nothing));
  m.impl("set_.source_Storage", TORCH_FN(set_storage));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage_offset));
  m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  m.impl("convolution_overrideable", TORCH_FN(convolution));
  m.impl("convolution_backward_overrideable", TORCH_FN(convolution_backward));
  // What has a kernel for the CPU runs it as a whole.  Otherwise torch would call another form of the operation, with
  // memory that it allocates for the result.
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    const auto operation = dispatcher.findOp(name);
    if (!operation.has_value() || !operation->hasSchema()) continue;
    if (!operation->hasKernelForDispatchKey(c10::DispatchKey::CPU)) continue;
    if (operation->hasKernelForDispatchKey(kKey)) continue;
    const std::string full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    m.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  }
  at::autocast::register_autocast();
}

}  // namespace
