// The parts of torch that every operator needs, on its stable ABI: registration, checks, types, device and stream.
#pragma once

#include <cstdint>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include "../kernels/elements.h"

// The dispatch key under which kernels are registered. Tests compile the same files for the CPU, with key CPU.
#ifndef MEGATRAIN_DISPATCH_KEY
#define MEGATRAIN_DISPATCH_KEY CUDA
#endif
#define MEGATRAIN_KERNELS(library) STABLE_TORCH_LIBRARY_IMPL(megatrain, MEGATRAIN_DISPATCH_KEY, library)

// Only a torch that is built for CUDA has this function. It is weak, so that the extension loads with any torch. It is found in
// the libraries that the extension was linked to (csrc/build.py, link_flags).
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace megatrain {

using torch::stable::Tensor;
using torch::headeronly::ScalarType;

inline std::string shape_text(const Tensor& tensor) {
  std::string text = "[";
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) text += (dim ? ", " : "") + std::to_string(tensor.size(dim));
  return text + "]";
}

// Throws an error that Python sees as RuntimeError.
template <typename... Parts>
void require(bool holds, const Parts&... parts) {
  if (holds) return;
  std::ostringstream message;
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

inline std::string dtype_text(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Half: return "float16";
    case ScalarType::Float: return "float32";
    case ScalarType::Double: return "float64";
    case ScalarType::Long: return "int64";
    case ScalarType::Int: return "int32";
    case ScalarType::Bool: return "bool";
    default: return torch::headeronly::toString(dtype);
  }
}

inline void check_shape(const char* name, const Tensor& tensor, const std::vector<int64_t>& shape) {
  bool is_right = tensor.dim() == int64_t(shape.size());
  std::string expected;
  int64_t dim = 0;
  for (int64_t size : shape) {
    is_right = is_right && tensor.size(dim) == size;
    expected += (dim++ ? ", " : "") + std::to_string(size);
  }
  require(is_right, name, " must have shape [", expected, "], got ", shape_text(tensor));
}

inline void check_same_shape(const char* name, const Tensor& tensor, const char* other_name, const Tensor& other) {
  bool is_right = tensor.dim() == other.dim();
  for (int64_t dim = 0; is_right && dim < tensor.dim(); ++dim) is_right = tensor.size(dim) == other.size(dim);
  require(is_right, name, " must have the shape of ", other_name, ", ", shape_text(other), ", got ", shape_text(tensor));
}

inline void check_dtype(const char* name, const Tensor& tensor, ScalarType dtype) {
  require(tensor.scalar_type() == dtype, name, " must be ", dtype_text(dtype), ", got ", dtype_text(tensor.scalar_type()));
}

inline void check_contiguous(const char* name, const Tensor& tensor) {
  require(tensor.is_contiguous(), name, " must be contiguous");
}

inline void check_same_device(const char* name, const Tensor& tensor, const char* other_name, const Tensor& other) {
  require(tensor.device() == other.device(), name, " must be on the device of ", other_name);
}

// Same device, dtype and shape, and contiguous.
inline void check_like(const char* name, const Tensor& tensor, const char* other_name, const Tensor& other) {
  check_same_device(name, tensor, other_name, other);
  check_dtype(name, tensor, other.scalar_type());
  check_same_shape(name, tensor, other_name, other);
  check_contiguous(name, tensor);
}

// The dtype of statistics and partial sums: fp64 for fp64, and fp32 for all others.
inline ScalarType wide_dtype(ScalarType dtype) {
  return dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// Calls body(T{}) with the C++ type of `dtype`.
template <typename Body>
void dispatch_floating(const char* name, ScalarType dtype, Body&& body) {
  switch (dtype) {
    case ScalarType::BFloat16: return body(__nv_bfloat16{});
    case ScalarType::Half: return body(__half{});
    case ScalarType::Float: return body(float{});
    case ScalarType::Double: return body(double{});
    default: break;
  }
  require(false, name, " must be bf16, fp16, fp32 or fp64, got ", dtype_text(dtype));
}

template <typename T>
T* pointer(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}
template <typename T>
const T* const_pointer(const Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}
template <typename T>
T* pointer_or_null(const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? pointer<T>(*tensor) : nullptr;
}

// `what`: the kernel that was launched or the function that was called, for the error message.
inline void check_cuda(const char* what, cudaError_t status) {
  require(status == cudaSuccess, what, ": ", cudaGetErrorString(status));
}

// Returns torch's current stream of a GPU. Throws where torch has no such function: the default stream in its place would not be
// part of a CUDA graph, and would run beside the work that torch orders before and after it.
inline cudaStream_t current_stream(int32_t device_index) {
  require(aoti_torch_get_current_cuda_stream != nullptr, "megatrain._C does not find torch's current stream of cuda:", device_index,
          ": aoti_torch_get_current_cuda_stream is missing in the torch that is loaded; build megatrain._C again in an environment ",
          "whose torch is built for CUDA");
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_index, &stream));
  return static_cast<cudaStream_t>(stream);
}

// Makes the device of `tensor` the current one for as long as this object lives, so that kernels run on it.
class Device {
 public:
  explicit Device(const Tensor& tensor) : index_(tensor.get_device_index()) {
    if (index_ < 0) return;  // no GPU: the kernels run on the CPU
    stream_ = current_stream(index_);
    check_cuda("cudaGetDevice", cudaGetDevice(&previous_));
    if (previous_ != index_) check_cuda("cudaSetDevice", cudaSetDevice(index_));
  }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  ~Device() {
    if (index_ >= 0 && previous_ != index_) cudaSetDevice(previous_);
  }

  int num_multiprocessors() const {
    int count = 0;
    check_cuda("cudaDeviceGetAttribute", cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, index_));
    return count;
  }

  // Torch's current stream of the device, for launches.
  cudaStream_t stream() const { return stream_; }

 private:
  int index_;
  int previous_ = -1;
  cudaStream_t stream_ = nullptr;
};

}  // namespace megatrain
