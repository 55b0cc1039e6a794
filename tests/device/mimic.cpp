// A device of torch's PrivateUse1 hooks: memory of its own kind, kernels of the CPU behind it.
//
// Its tensors say device "mimic" and lie in ordinary memory under an allocator of their own. What it does itself is
// what no fallback can do: make tensors, look at their memory in another way, and copy them from and to the CPU.
// Every other operator goes to the CPU's kernel, so that results equal the CPU's bit for bit. It is a poor device on
// purpose: one index, no events, no streams besides the default one, no pinned memory, no graphs, no statistics of
// memory, no generator of its own, no autocast. MIMIC_WITHOUT_FP8 in the environment takes its FP8 dtypes away.

#include <cstdlib>
#include <cstring>
#include <unordered_map>

#include <ATen/core/Tensor.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/histc.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

namespace {

constexpr auto kMimic = c10::DeviceType::PrivateUse1;

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* at = bytes == 0 ? nullptr : std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    TORCH_CHECK(bytes == 0 || at != nullptr, "mimic: no memory for ", bytes, " bytes");
    return {at, at, &std::free, c10::Device(kMimic, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

Memory memory;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kMimic; }
  c10::Device exchangeDevice(c10::Device) const override { return {kMimic, 0}; }
  c10::Device getDevice() const override { return {kMimic, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, c10::Device(kMimic, 0)); }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(c10::DeviceIndex) const override {}
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  at::Device getDeviceFromPtr(void*) const override { return {kMimic, 0}; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto grown = memory.allocate(bytes);
    if (bytes != 0 && storage.data() != nullptr)
      std::memcpy(grown.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(grown));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

bool without_fp8() {
  static const bool asked = std::getenv("MIMIC_WITHOUT_FP8") != nullptr;
  return asked;
}

at::ScalarType stored(std::optional<at::ScalarType> dtype) {
  const auto found = dtype.value_or(c10::typeMetaToScalarType(c10::get_default_dtype()));
  TORCH_CHECK(!without_fp8() || !c10::isFloat8Type(found), "mimic: it has no ", found);
  return found;
}

at::Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), stored(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), stored(dtype));
}

// The same memory as a tensor of the CPU: used only while `tensor` lives.
at::Tensor on_cpu(const at::Tensor& tensor) {
  if (tensor.device().is_cpu()) return tensor;
  auto plain = at::from_blob(
      tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU).requires_grad(false));
  if (tensor.is_conj()) plain._set_conj(true);
  if (tensor.is_neg()) plain._set_neg(true);
  return plain;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  if (from.numel() != 0) on_cpu(to).copy_(on_cpu(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) { return on_cpu(tensor).item(); }

const at::Tensor& resize(const at::Tensor& tensor, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  if (tensor.sizes() == size) return tensor;
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  const auto bytes = (size.size() == 0 ? 1 : c10::multiply_integers(size)) * tensor.itemsize();
  const auto needed = static_cast<size_t>(bytes) + tensor.storage_offset() * tensor.itemsize();
  if (tensor.storage().nbytes() < needed) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(tensor.storage(), needed);
  return tensor;
}

at::Tensor& set_storage(
    at::Tensor& tensor, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  stride.data() == nullptr ? impl->set_sizes_contiguous(size) : impl->set_sizes_and_strides(size, stride);
  return tensor;
}

at::Tensor brought(const at::Tensor& tensor) {
  auto made = empty_strided(tensor.sizes(), tensor.strides(), tensor.scalar_type(), {}, {}, {});
  return copy_from(tensor, made, false);
}

bool is_mimic(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kMimic; }

// Runs the CPU's kernel on the tensors where they lie, strides and all: other strides may mean another order of sums.
void everything_else(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const auto first = stack->size() - arguments.size();
  std::unordered_map<c10::TensorImpl*, at::Tensor> of;  // the CPU's view of a tensor -> the tensor
  const auto seen_by_cpu = [&](const at::Tensor& tensor) {
    if (!is_mimic(tensor)) return tensor;
    auto plain = on_cpu(tensor);
    of.emplace(plain.unsafeGetTensorImpl(), tensor);
    return plain;
  };
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto& value = (*stack)[first + i];
    const auto* alias = arguments[i].alias_info();
    if (alias != nullptr && alias->isWrite() && value.isTensor() && is_mimic(value.toTensor()) && value.toTensor().numel() == 0)
      return at::native::cpu_fallback(op, stack);  // it may be resized, which this view cannot
  }
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto& value = (*stack)[first + i];
    if (value.isTensor()) {
      value = seen_by_cpu(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> plain;
      for (const at::Tensor& tensor : value.toTensorVector()) plain.push_back(seen_by_cpu(tensor));
      value = plain;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> plain;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
        plain.push_back(tensor.has_value() ? std::optional(seen_by_cpu(*tensor)) : std::nullopt);
      value = plain;
    } else if (value.isDevice()) {
      value = c10::Device(at::kCPU);
    }
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  const auto back = [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    const auto found = of.find(tensor.unsafeGetTensorImpl());
    return found == of.end() ? brought(tensor) : found->second;
  };
  for (auto i = stack->size() - op.schema().returns().size(); i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = back(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> made;
      for (const at::Tensor& tensor : value.toTensorVector()) made.push_back(back(tensor));
      value = made;
    }
  }
}

// Convolutions are the one operator that torch leaves to a device by another name.
at::Tensor convolution(
    const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& bias, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef more, c10::SymInt groups) {
  const auto shift = bias.has_value() && bias->defined() ? std::optional(on_cpu(*bias)) : std::nullopt;
  return brought(at::convolution_symint(
      on_cpu(x), on_cpu(w), shift, stride, padding, dilation, transposed, more, groups));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& dy, const at::Tensor& x, const at::Tensor& w, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef more, c10::SymInt groups,
    std::array<bool, 3> mask) {
  const c10::SymInt outputs[] = {w.sym_size(0)};
  auto [dx, dw, db] = at::convolution_backward_symint(
      on_cpu(dy), on_cpu(x), on_cpu(w), c10::SymIntArrayRef(outputs), stride, padding, dilation, transposed, more, groups, mask);
  const auto back = [](const at::Tensor& tensor) { return tensor.defined() ? brought(tensor) : tensor; };
  return {back(dx), back(dw), back(db)};
}

// Of whole numbers too, as devices have it beside the CPU, and as models of experts ask of them.
at::Tensor histc(const at::Tensor& x, int64_t bins, const at::Scalar& least, const at::Scalar& most) {
  const auto counted = at::histc(on_cpu(x).to(at::kFloat), bins, least, most);
  return brought(counted.to(x.scalar_type()));
}

const bool registered = [] {
  c10::SetAllocator(kMimic, &memory);
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return true;
}();

}  // namespace

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

TORCH_LIBRARY_IMPL(aten, PrivateUse1, kernels) {
  kernels.impl("empty.memory_format", &empty);
  kernels.impl("empty_strided", &empty_strided);
  kernels.impl("_copy_from", &copy_from);
  kernels.impl("_copy_from_and_resize", &copy_from_and_resize);
  kernels.impl("_local_scalar_dense", &local_scalar_dense);
  kernels.impl("resize_", &resize);
  kernels.impl("set_.source_Storage_storage_offset", &set_storage);
  kernels.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  kernels.impl("view", TORCH_FN(at::native::view));
  kernels.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  kernels.impl("convolution_overrideable", &convolution);
  kernels.impl("convolution_backward_overrideable", &convolution_backward);
  kernels.impl("histc", &histc);
  kernels.impl("unfold", TORCH_FN(at::native::unfold));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, kernels) {
  kernels.fallback(torch::CppFunction::makeFromBoxedFunction<&everything_else>());
}
