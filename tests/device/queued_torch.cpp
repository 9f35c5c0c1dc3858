// What torch asks of a device: a guard, an allocator, generators, hooks, a few operators, and for all others one fallback.
#include "queued.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <map>

namespace queued {
namespace {

using at::Tensor;
using c10::IValue;
using Stack = std::vector<IValue>;

// --- streams and events ------------------------------------------------------------------------

struct Event {
  std::mutex mutex;
  PointPtr point; // of the last record; none: never recorded
  std::atomic<bool> is_captured = false;
};

PointPtr point_of(void* event) {
  auto* each = static_cast<Event*>(event);
  if (each == nullptr) {
    return nullptr;
  }
  std::lock_guard lock(each->mutex);
  return each->point;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return TYPE;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    return at(set_current_device(device.index()));
  }
  c10::Device getDevice() const override {
    return at(current_device());
  }
  void setDevice(c10::Device device) const override {
    set_current_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    set_current_device(device.index());
  }
  c10::Stream getStream(c10::Device device) const override {
    return current_stream(index(device));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, at(index(device)));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return new_stream(index(device));
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return new_stream(index(device));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return set_current_stream(stream);
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return &queue_of(stream);
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return DEVICES;
  }
  bool queryStream(const c10::Stream& stream) const override {
    return queue_of(stream).is_idle();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    synchronize(stream);
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    may_fail("synchronize");
    for (auto* queue : queues_of(device)) {
      queue->mark()->wait();
    }
    raise_error_of(device);
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    may_fail("record");
    if (*event == nullptr) {
      *event = new Event;
    }
    auto* each = static_cast<Event*>(*event);
    each->is_captured = queue_of(stream).capture.load() != 0;
    auto point = queue_of(stream).mark();
    std::lock_guard lock(each->mutex);
    each->point = std::move(point);
  }
  void block(void* event, const c10::Stream& stream) const override {
    may_fail("wait");
    auto* each = static_cast<Event*>(event);
    const bool is_captured = queue_of(stream).capture.load() != 0;
    if (each != nullptr && each->is_captured.load() != is_captured) {
      break_captures("a wait between a stream that is captured and one that is not");
      TORCH_CHECK(false, "queued: a stream that is captured and one that is not cannot wait for one another");
    }
    if (is_captured) {
      return;
    }
    if (auto point = point_of(event)) {
      queue_of(stream).wait_for(std::move(point));
    }
  }
  bool queryEvent(void* event) const override {
    auto point = point_of(event);
    return point == nullptr || point->is_reached();
  }
  void synchronizeEvent(void* event) const override {
    may_fail("synchronize");
    break_captures("synchronize");
    if (auto point = point_of(event)) {
      point->wait();
    }
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override;

 private:
  static c10::Device at(int device) {
    return c10::Device(TYPE, static_cast<c10::DeviceIndex>(device));
  }
  static int index(c10::Device device) {
    return device.has_index() ? device.index() : current_device();
  }
};

// --- memory --------------------------------------------------------------------------------------

void free_block(void* context) {
  auto* block = static_cast<BlockPtr*>(context);
  release(*block);
  delete block;
}

BlockPtr block_of(const c10::DataPtr& data) {
  return data.get_deleter() == &free_block ? *static_cast<BlockPtr*>(data.get_context()) : nullptr;
}

BlockPtr block_of(const Tensor& tensor) {
  const bool is_ours = tensor.defined() && tensor.is_privateuseone() && tensor.has_storage();
  return is_ours ? block_of(tensor.storage().data_ptr()) : nullptr;
}

void Guard::recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const {
  if (auto block = block_of(data)) {
    use_on(block, stream);
  }
}

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    const c10::Device device(TYPE, static_cast<c10::DeviceIndex>(current_device()));
    if (nbytes == 0) {
      return {nullptr, device};
    }
    auto block = queued::allocate(nbytes);
    return {block->data, new BlockPtr(block), &free_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr; // a pointer alone does not say which block it is
  }
  void copy_data(void* into, const void* from, std::size_t nbytes) const override {
    for (auto* queue : queues_of(current_device())) {
      queue->mark()->wait();
    }
    std::memcpy(into, from, nbytes);
  }
};

std::mutex pinned_mutex;
std::map<const char*, size_t> pinned; // never used at exit, when it may be gone
std::map<const char*, int> registered; // of these, what was not allocated here: by which device

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    auto* data = static_cast<char*>(std::aligned_alloc(64, (nbytes + 64) / 64 * 64));
    TORCH_CHECK(data != nullptr, "the host has no memory");
    std::lock_guard lock(pinned_mutex);
    pinned[data] = nbytes;
    return {data, data, &unpin, c10::Device(c10::DeviceType::CPU)};
  }
  static void unpin(void* data) {
    std::lock_guard lock(pinned_mutex);
    pinned.erase(static_cast<const char*>(data));
    std::free(data);
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &unpin;
  }
  void copy_data(void* into, const void* from, std::size_t nbytes) const override {
    std::memcpy(into, from, nbytes);
  }
};

bool is_pinned(const void* data) {
  const auto* at = static_cast<const char*>(data);
  std::lock_guard lock(pinned_mutex);
  auto next = pinned.upper_bound(at);
  return next != pinned.begin() && at < std::prev(next)->first + std::prev(next)->second;
}

/// Runtimes refuse a copy that begins in one registration and ends outside it.
bool is_across(const void* data, size_t nbytes) {
  const auto* at = static_cast<const char*>(data);
  std::lock_guard lock(pinned_mutex);
  auto next = pinned.upper_bound(at);
  if (next != pinned.end() && at + nbytes > next->first) {
    return true;
  }
  if (next == pinned.begin()) {
    return false;
  }
  const auto* end = std::prev(next)->first + std::prev(next)->second;
  return at < end && at + nbytes > end;
}

int refused(int code) {
  set_last_error(code);
  return code;
}

bool is_ordered_to_fail(const char* call) {
  try {
    may_fail(call);
  } catch (const std::exception&) {
    return true;
  }
  return false;
}

DeviceMemory device_memory;
PinnedMemory pinned_memory;

void resize_storage(c10::StorageImpl* storage, size_t nbytes) {
  c10::DeviceGuard guard(storage->device());
  const auto stream = current_stream(storage->device().index());
  auto data = device_memory.allocate(nbytes);
  auto from = block_of(storage->data_ptr()), into = block_of(data);
  if (from && into) {
    launch(stream, {from, into}, [=] { std::memcpy(into->data, from->data, std::min(from->nbytes, into->nbytes)); });
  }
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(nbytes);
}

// --- random numbers ------------------------------------------------------------------------------

/// As on a GPU what a kernel draws is settled when it is queued: by a seed, and how many kernels have drawn before.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(int device)
      : GeneratorImpl(c10::Device(TYPE, static_cast<c10::DeviceIndex>(device)), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(uint64_t offset) override {
    offset_ = offset;
  }
  uint64_t get_offset() const override {
    return offset_;
  }
  uint64_t current_seed() const override {
    return seed_;
  }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16 && state.device().is_cpu(), "the state of a generator is 16 bytes, on the host");
    std::memcpy(&seed_, state.data(), 8);
    std::memcpy(&offset_, static_cast<const char*>(state.data()) + 8, 8);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({16}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
    std::memcpy(state.mutable_data_ptr(), &seed_, 8);
    std::memcpy(static_cast<char*>(state.mutable_data_ptr()) + 8, &offset_, 8);
    return state.getIntrusivePtr();
  }
  /// For one kernel.
  at::Generator draw() {
    std::lock_guard lock(mutex_);
    return at::make_generator<at::CPUGeneratorImpl>(seed_ * 0x9E3779B97F4A7C15u + ++offset_);
  }

 private:
  Generator* clone_impl() const override {
    auto* other = new Generator(device_.index());
    other->seed_ = seed_;
    other->offset_ = offset_;
    return other;
  }
  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

const at::Generator& default_generator(int device) {
  static auto* all = new std::array<at::Generator, DEVICES>{at::make_generator<Generator>(0), at::make_generator<Generator>(1)};
  return all->at(static_cast<size_t>(device < 0 ? current_device() : device));
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return DEVICES;
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    set_current_device(device);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_device());
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return static_cast<c10::DeviceIndex>(set_current_device(device));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }
  bool isPinnedPtr(const void* data) const override {
    return is_pinned(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_memory;
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? current_device() : device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), nbytes);
  }
};

// --- operators that torch needs from every device --------------------------------------------------

Tensor empty(
    at::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(
      size, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    at::IntArrayRef size,
    at::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      size, stride, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

const Tensor& resize_(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_sizes_contiguous(size);
  if (format.has_value() && *format != at::MemoryFormat::Preserve) {
    tensor->empty_tensor_restride(*format);
  }
  const auto items = static_cast<size_t>(self.storage_offset() + self.numel());
  if (self.numel() && self.storage().nbytes() < items * self.element_size()) {
    resize_storage(self.storage().unsafeGetStorageImpl(), items * self.element_size());
  }
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, std::move(storage), offset, size, stride);
}

Tensor as_strided(const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

Tensor view(const Tensor& self, at::IntArrayRef size) {
  return at::native::view(self, size);
}

Tensor reshape_alias(const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::as_strided_tensorimpl(self, size, stride, std::nullopt);
}

void record_stream(Tensor& self, c10::Stream stream) {
  if (auto block = block_of(self)) {
    use_on(block, stream);
  }
}

/// The same memory, as a tensor of the host.
Tensor on_host(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_privateuseone()) {
    return tensor;
  }
  return at::from_blob(
      tensor.mutable_data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU).requires_grad(false));
}

void put_into(Tensor into, const Tensor& from, int device, Direction direction) {
  auto bytes = from.to(into.scalar_type()).expand(into.sizes()).contiguous();
  auto target = into.is_contiguous() ? into : at::empty(into.sizes(), into.options());
  transfer(device, direction, static_cast<char*>(target.mutable_data_ptr()), static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes());
  if (!target.is_same(into)) {
    into.copy_(target);
  }
}

Blocks blocks_of(std::initializer_list<Tensor> tensors) {
  Blocks blocks;
  for (const auto& each : tensors) {
    if (auto block = block_of(each)) {
      blocks.push_back(block);
    }
  }
  return blocks;
}

Tensor copy_from(const Tensor& self, const Tensor& dst, bool non_blocking) {
  may_fail("copy");
  at::AutoDispatchBelowADInplaceOrView below;
  if (dst.numel() == 0) {
    return dst;
  }
  auto from = on_host(self), into = on_host(dst);
  if (self.is_privateuseone() && dst.is_privateuseone()) {
    // On the stream of the source; that of the destination waits for it, and it for that.
    const auto stream = current_stream(self.device().index()), other = current_stream(dst.device().index());
    if (stream != other) {
      queue_of(stream).wait_for(queue_of(other).mark());
    }
    launch(stream, blocks_of({self, dst}), [from, into] { into.copy_(from); });
    if (stream != other) {
      queue_of(other).wait_for(queue_of(stream).mark());
    }
    return dst;
  }
  // Memory of the host stays alive until the copy is done, as that of torch's own host allocators does.
  const bool is_to_host = self.is_privateuseone();
  const auto device = is_to_host ? self.device().index() : dst.device().index();
  if (!is_to_host && non_blocking && !is_pinned(self.const_data_ptr())) {
    from = self.clone(); // as drivers do: what is pageable may change when the call returns
  }
  TORCH_CHECK(!is_to_host || !is_across(dst.const_data_ptr(), dst.nbytes()), "queued: a copy across two registrations");
  const auto stream = current_stream(device);
  launch(stream, blocks_of({self, dst}), [=] { put_into(into, from, device, is_to_host ? TO_HOST : FROM_HOST); });
  if (!non_blocking) {
    synchronize(stream);
  }
  return dst;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& dst) {
  dst.resize_(self.sizes());
  return copy_from(self, dst, false);
}

/// The CPU's kernel draws from the global generator of the host.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  const bool drops = train.value_or(true) && p > 0;
  auto mask = at::empty_like(input, input.options().dtype(at::kBool));
  drops ? mask.bernoulli_(1 - p) : mask.fill_(true);
  auto output = input.mul(mask);
  return {drops && p < 1 ? output.mul_(1 / (1 - p)) : output, mask};
}

// --- all other operators -----------------------------------------------------------------------------

template <typename Map>
IValue map_tensors(const IValue& value, Map map) {
  if (value.isTensor()) {
    return map(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<Tensor> mapped;
    for (const Tensor& each : value.toTensorVector()) {
      mapped.push_back(map(each));
    }
    return mapped;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> mapped;
    for (const std::optional<Tensor>& each : value.toOptionalTensorVector()) {
      mapped.push_back(each.has_value() ? std::optional<Tensor>(map(*each)) : std::nullopt);
    }
    return mapped;
  }
  return value;
}

bool is_tensors(const c10::TypePtr& type) {
  return type->isSubtypeOf(*c10::TensorType::get()) || type->isSubtypeOf(*c10::ListType::ofTensors());
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

Tensor without_memory(const Tensor& tensor) {
  if (!tensor.defined()) {
    return tensor;
  }
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta).requires_grad(false));
}

/// One call of an operator, on tensors of this device.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack)
      : op_(op), schema_(op.schema()), stack_(stack), arguments_(torch::jit::last(*stack, schema_.arguments().size()).vec()) {
    for (const auto& argument : arguments_) {
      map_tensors(argument, [&](const Tensor& each) {
        if (each.defined() && each.is_privateuseone()) {
          TORCH_CHECK(device_ < 0 || device_ == each.device().index(), "queued: tensors on two devices: ", name());
          device_ = each.device().index();
        }
        if (auto block = block_of(each)) {
          blocks_.push_back(block);
        }
        return each;
      });
      if (device_ < 0 && argument.isDevice() && argument.toDevice().type() == TYPE) {
        device_ = argument.toDevice().has_index() ? argument.toDevice().index() : current_device();
      }
    }
    device_ = device_ < 0 ? current_device() : device_;
  }

  void run() {
    const c10::DeviceGuard guard(c10::Device(TYPE, static_cast<c10::DeviceIndex>(device_)));
    const auto stream = current_stream(device_);
    bool is_known = true; // what comes back: the arguments themselves, or new tensors whose form is known
    bool has_new = false;
    for (const auto& each : schema_.returns()) {
      TORCH_CHECK(each.alias_info() == nullptr || is_written(each), "queued: no such view: ", name());
      is_known &= is_tensors(each.type());
      has_new |= !is_written(each);
    }
    bool has_empty_out = false;
    for_outs([&](const Tensor& out) { has_empty_out |= out.numel() == 0; });
    std::vector<IValue> forms;
    if (is_known && (has_new || has_empty_out)) {
      is_known = find_forms(forms);
    }
    std::vector<IValue> results;
    if (is_known) {
      results = new_results(forms);
      auto work = on_host_memory();
      std::vector<IValue> into;
      for (const auto& each : results) {
        into.push_back(map_tensors(each, [&](const Tensor& tensor) {
          if (auto block = block_of(tensor)) {
            blocks_.push_back(block);
          }
          return on_host(tensor);
        }));
      }
      launch(stream, blocks_, [op = op_, work, into]() mutable {
        op.callBoxed(&work);
        fill(into, work, op.schema());
      });
    } else {
      note_waiting_op(name());
      synchronize(stream);
      auto work = on_host_memory();
      op_.callBoxed(&work);
      for (size_t i = 0; i < work.size(); ++i) {
        results.push_back(is_written(schema_.returns()[i]) ? argument_of(i) : on_device(work[i]));
      }
    }
    torch::jit::drop(*stack_, arguments_.size());
    stack_->insert(stack_->end(), results.begin(), results.end());
  }

 private:
  std::string name() const {
    return toString(schema_.operator_name());
  }

  template <typename Visit>
  void for_outs(Visit visit) {
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (is_written(schema_.arguments()[i]) && schema_.arguments()[i].is_out() && arguments_[i].isTensor()) {
        visit(arguments_[i].toTensor());
      }
    }
  }

  /// Sizes, strides and types of the results, by torch's kernels for tensors without memory; outputs are resized to them.
  bool find_forms(std::vector<IValue>& forms) {
    Stack stack;
    for (const auto& argument : arguments_) {
      if (argument.isDevice()) {
        stack.emplace_back(c10::Device(c10::DeviceType::Meta));
      } else if (argument.isGenerator()) {
        stack.emplace_back();
      } else {
        stack.push_back(map_tensors(argument, without_memory));
      }
    }
    const Stack before = stack;
    try {
      op_.callBoxed(&stack);
    } catch (const std::exception&) {
      return false; // none, or it depends on the values; an error of the caller's shows on the CPU
    }
    forms = stack;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const auto& argument = schema_.arguments()[i];
      if (is_written(argument) && argument.is_out() && arguments_[i].isTensor()) {
        const auto size = before[i].toTensor().sizes();
        if (size != arguments_[i].toTensor().sizes()) {
          arguments_[i].toTensor().resize_(size);
          if (auto block = block_of(arguments_[i].toTensor())) {
            blocks_.push_back(block);
          }
        }
      }
    }
    return true;
  }

  std::vector<IValue> new_results(const std::vector<IValue>& forms) {
    std::vector<IValue> results;
    for (size_t i = 0; i < schema_.returns().size(); ++i) {
      if (is_written(schema_.returns()[i])) {
        results.push_back(argument_of(i));
      } else {
        results.push_back(map_tensors(forms[i], [&](const Tensor& form) {
          return form.defined() ? at::empty_strided(form.sizes(), form.strides(), options(form)) : form;
        }));
      }
    }
    return results;
  }

  /// The arguments as the CPU's kernel takes them.  What the host may change when the call has returned is copied.
  Stack on_host_memory() {
    Stack stack;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const auto& argument = schema_.arguments()[i];
      const auto& value = arguments_[i];
      if (value.isDevice()) {
        stack.emplace_back(c10::Device(c10::DeviceType::CPU));
      } else if (argument.name() == "generator") {
        auto generator = value.isGenerator() ? value.toGenerator() : default_generator(device_);
        stack.emplace_back(generator.get<Generator>()->draw());
      } else {
        stack.push_back(map_tensors(value, [&](const Tensor& tensor) {
          if (!tensor.defined() || tensor.is_privateuseone()) {
            return on_host(tensor);
          }
          TORCH_CHECK(!is_written(argument), "queued: writes to the host: ", name());
          return tensor.clone();
        }));
      }
    }
    return stack;
  }

  static void fill(const std::vector<IValue>& into, const Stack& from, const c10::FunctionSchema& schema) {
    for (size_t i = 0; i < into.size(); ++i) {
      if (is_written(schema.returns()[i])) {
        continue;
      }
      auto targets = into[i].isTensor() ? std::vector<Tensor>{into[i].toTensor()} : into[i].toTensorVector();
      auto sources = from[i].isTensor() ? std::vector<Tensor>{from[i].toTensor()} : from[i].toTensorVector();
      TORCH_CHECK(targets.size() == sources.size(), "not as many results as was said");
      for (size_t k = 0; k < targets.size(); ++k) {
        if (targets[k].defined() && sources[k].defined()) {
          targets[k].copy_(sources[k]);
        }
      }
    }
  }

  /// The argument that comes back as this result.
  IValue argument_of(size_t result) {
    const auto& wanted = schema_.returns()[result].alias_info()->beforeSets();
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const auto* alias = schema_.arguments()[i].alias_info();
      if (alias != nullptr && alias->beforeSets() == wanted) {
        return arguments_[i];
      }
    }
    TORCH_CHECK(false, "queued: which argument comes back? ", name());
  }

  IValue on_device(const IValue& result) {
    return map_tensors(result, [&](const Tensor& tensor) {
      if (!tensor.defined()) {
        return tensor;
      }
      auto copy = at::empty_strided(tensor.sizes(), tensor.strides(), options(tensor));
      on_host(copy).copy_(tensor);
      return copy;
    });
  }

  at::TensorOptions options(const Tensor& tensor) const {
    return tensor.options().device(c10::Device(TYPE, static_cast<c10::DeviceIndex>(device_)));
  }

  const c10::OperatorHandle op_;
  const c10::FunctionSchema& schema_;
  Stack* stack_;
  std::vector<IValue> arguments_;
  int device_ = -1;
  Blocks blocks_;
};

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  Call(op, stack).run();
}

/// Rows of one type go end to end, as with every device; the fallback would make two more tensors for each of them.
void cat(const c10::OperatorHandle& op, Stack* stack) {
  const auto tensors = torch::jit::peek(*stack, 0, 2).toTensorVector();
  const auto are_alike = [&](const Tensor& each) {
    return each.dim() == 1 && each.is_contiguous() && each.is_privateuseone() && each.dtype() == tensors[0].dtype() &&
        each.device() == tensors[0].device();
  };
  if (tensors.empty() || !std::all_of(tensors.begin(), tensors.end(), are_alike)) {
    fallback(op, stack);
    return;
  }
  at::AutoDispatchBelowADInplaceOrView below;
  std::vector<std::pair<const char*, size_t>> rows;
  Blocks blocks;
  int64_t items = 0;
  for (const auto& each : tensors) {
    items += each.numel();
    if (auto block = block_of(each)) {
      rows.emplace_back(static_cast<const char*>(each.const_data_ptr()), each.nbytes());
      blocks.push_back(std::move(block));
    }
  }
  const c10::DeviceGuard guard(tensors[0].device());
  const auto made = at::empty({items}, tensors[0].options().requires_grad(false));
  if (auto block = block_of(made)) {
    blocks.push_back(std::move(block));
  }
  auto* into = static_cast<char*>(made.mutable_data_ptr());
  launch(current_stream(made.device().index()), std::move(blocks), [rows = std::move(rows), into] {
    auto* next = into;
    for (const auto& [data, nbytes] : rows) {
      std::memcpy(next, data, nbytes);
      next += nbytes;
    }
  });
  torch::jit::drop(*stack, 2);
  stack->emplace_back(made);
}

REGISTER_ALLOCATOR(TYPE, &device_memory)
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

} // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", at::native::set_);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("record_stream", record_stream);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("native_dropout", native_dropout);
  m.impl("cat", torch::CppFunction::makeFromBoxedFunction<&cat>());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

} // namespace queued

#define EXPORTED __attribute__((visibility("default")))

extern "C" {

EXPORTED void queued_register() {
  at::RegisterPrivateUse1HooksInterface(new queued::Hooks);
}

/// 0; 2 if it was ordered to fail; 712 if a part of it is registered already.
EXPORTED int queued_host_register(char* data, int64_t nbytes, unsigned flags) {
  using namespace queued;
  break_captures("register");
  if (is_ordered_to_fail("register")) {
    return refused(2);
  }
  std::lock_guard lock(pinned_mutex);
  auto next = pinned.lower_bound(data);
  const bool is_taken = (next != pinned.end() && data + nbytes > next->first) ||
      (next != pinned.begin() && std::prev(next)->first + std::prev(next)->second > data);
  if (is_taken) {
    return refused(712);
  }
  pinned[data] = static_cast<size_t>(nbytes);
  registered[data] = current_device();
  if (flags != 1) {
    report("a registration that is not portable");
  }
  return 0;
}

/// 0; 1 if it was ordered to fail; 713 if there is none at this address.
EXPORTED int queued_host_unregister(char* data) {
  using namespace queued;
  if (is_ordered_to_fail("unregister")) {
    return refused(1);
  }
  std::lock_guard lock(pinned_mutex);
  if (registered.erase(data) == 0) {
    return refused(713);
  }
  unsigned char is_there = 0;
  if (mincore(data, 1, &is_there) != 0) {
    report("memory was unmapped before it was unregistered");
  }
  pinned.erase(data);
  return 0;
}

/// In lines: the address, the bytes, the device.
EXPORTED int64_t queued_registered(char* into, int64_t room) {
  using namespace queued;
  std::string text;
  std::lock_guard lock(pinned_mutex);
  for (const auto& [data, device] : registered) {
    text += std::to_string(reinterpret_cast<uintptr_t>(data)) + " " + std::to_string(pinned.at(data)) + " " + std::to_string(device) + "\n";
  }
  return static_cast<int64_t>(text.copy(into, static_cast<size_t>(room)));
}

EXPORTED void queued_get_rng(int device, uint64_t* seed, uint64_t* offset) {
  const auto& generator = queued::default_generator(device);
  *seed = generator.current_seed();
  *offset = generator.get_offset();
}

EXPORTED void queued_set_rng(int device, uint64_t seed, uint64_t offset) {
  auto generator = queued::default_generator(device);
  generator.set_current_seed(seed);
  generator.set_offset(offset);
}
}
