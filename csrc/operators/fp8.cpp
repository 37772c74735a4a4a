// Scales and quantization for FP8 products.
#include "../kernels/fp8.h"

#include "torch_side.h"

namespace megatrain {
namespace {

Fp8Format format_of(ScalarType dtype) {
  require(dtype == ScalarType::Float8_e4m3fn || dtype == ScalarType::Float8_e5m2,
          "dtype must be float8_e4m3fn or float8_e5m2, got ", torch::headeronly::toString(dtype));
  return dtype == ScalarType::Float8_e4m3fn ? Fp8Format::E4M3 : Fp8Format::E5M2;
}

// Only bf16, fp16 and fp32: training in fp64 does not quantize.
template <typename Body>
void dispatch_quantized(ScalarType dtype, Body&& body) {
  switch (dtype) {
    case ScalarType::BFloat16: return body(__nv_bfloat16{});
    case ScalarType::Half: return body(__half{});
    case ScalarType::Float: return body(float{});
    default: break;
  }
  require(false, "x must be bf16, fp16 or fp32, got ", dtype_text(dtype));
}

void check_matrix(const Tensor& x) {
  require(x.dim() == 2, "x must be [rows, columns], got ", shape_text(x));
  require(x.size(0) <= FP8_MAX_ROWS, "x must have at most ", FP8_MAX_ROWS, " rows, got ", shape_text(x));
  check_contiguous("x", x);
}

Tensor new_floats(const Tensor& like, std::vector<int64_t> shape) {
  return torch::stable::new_empty(like, shape, ScalarType::Float);
}

Tensor fp8_scale(const Tensor& x, ScalarType dtype) {
  check_contiguous("x", x);
  const Tensor scale = new_floats(x, {2});
  const Device device(x);
  dispatch_quantized(x.scalar_type(), [&](auto type) {
    using T = decltype(type);
    const int width = pack_width<T>(x.numel(), {x.const_data_ptr()});
    const int64_t num_parts = num_largest_parts(device.num_multiprocessors(), x.numel(), width);
    const Tensor parts = new_floats(x, {num_parts});
    check_cuda("largest_parts", launch_largest_parts(device.stream(), const_pointer<T>(x), pointer<float>(parts), x.numel(),
                                                     num_parts, width));
    check_cuda("scale_of_parts", launch_scale_of_parts(device.stream(), format_of(dtype), const_pointer<float>(parts), num_parts,
                                                       pointer<float>(scale)));
  });
  return scale;
}

std::tuple<Tensor, Tensor, Tensor> fp8_quantize(const Tensor& x, const Tensor& scale, ScalarType dtype, bool has_plain,
                                                bool has_transposed) {
  check_matrix(x);
  check_same_device("scale", scale, "x", x);
  check_dtype("scale", scale, ScalarType::Float);
  require(scale.numel() >= 1, "scale must have a number");
  const int64_t rows = x.size(0), columns = x.size(1);
  const Tensor q = torch::stable::new_empty(x, {has_plain ? rows : 0, has_plain ? columns : 0}, dtype);
  const Tensor q_t = torch::stable::new_empty(x, {has_transposed ? columns : 0, has_transposed ? rows : 0}, dtype);
  const Tensor largest = new_floats(x, {divide_up(rows, FP8_TILE) * divide_up(columns, FP8_TILE)});
  if (x.numel() == 0) return {q, q_t, largest};
  const Device device(x);
  dispatch_quantized(x.scalar_type(), [&](auto type) {
    using T = decltype(type);
    const Quantize<T> p{const_pointer<T>(x), const_pointer<float>(scale), has_plain ? pointer<unsigned char>(q) : nullptr,
                        has_transposed ? pointer<unsigned char>(q_t) : nullptr, pointer<float>(largest), rows, columns, false};
    check_cuda("quantize", launch_quantize(device.stream(), format_of(dtype), p));
  });
  return {q, q_t, largest};
}

std::tuple<Tensor, Tensor> fp8_quantize_rows(const Tensor& x, ScalarType dtype) {
  check_matrix(x);
  const int64_t rows = x.size(0), columns = x.size(1);
  const Tensor q = torch::stable::new_empty(x, {rows, columns}, dtype);
  const Tensor inverse = new_floats(x, {rows, 1});
  if (rows == 0) return {q, inverse};
  const Device device(x);
  dispatch_quantized(x.scalar_type(), [&](auto type) {
    using T = decltype(type);
    check_cuda("quantize_rows", launch_quantize_rows(device.stream(), format_of(dtype), const_pointer<T>(x),
                                                     pointer<unsigned char>(q), pointer<float>(inverse), rows, columns));
  });
  return {q, inverse};
}

std::tuple<Tensor, Tensor> fp8_quantize_columns(const Tensor& x, ScalarType dtype) {
  check_matrix(x);
  const int64_t rows = x.size(0), columns = x.size(1);
  const Tensor q_t = torch::stable::new_empty(x, {columns, rows}, dtype);
  const Tensor inverse = new_floats(x, {columns, 1});
  if (columns == 0) return {q_t, inverse};
  const int64_t parts_of_rows = divide_up(rows, COLUMN_ROWS);
  const Tensor parts = new_floats(x, {parts_of_rows, columns});
  const Tensor scale = new_floats(x, {columns});
  const Device device(x);
  dispatch_quantized(x.scalar_type(), [&](auto type) {
    using T = decltype(type);
    if (rows > 0) {
      check_cuda("largest_of_columns", launch_largest_of_columns(device.stream(), const_pointer<T>(x), pointer<float>(parts), rows,
                                                                 columns));
    }
    const Fp8Format format = format_of(dtype);
    check_cuda("scale_of_columns", launch_scale_of_columns(device.stream(), format, const_pointer<float>(parts), parts_of_rows,
                                                           columns, pointer<float>(scale), pointer<float>(inverse)));
    const Quantize<T> p{const_pointer<T>(x), const_pointer<float>(scale), nullptr, pointer<unsigned char>(q_t), nullptr, rows,
                        columns, true};
    if (rows > 0) check_cuda("quantize", launch_quantize(device.stream(), format, p));
  });
  return {q_t, inverse};
}

}  // namespace

MEGATRAIN_KERNELS(library) {
  library.impl("fp8_scale", TORCH_BOX(&fp8_scale));
  library.impl("fp8_quantize", TORCH_BOX(&fp8_quantize));
  library.impl("fp8_quantize_rows", TORCH_BOX(&fp8_quantize_rows));
  library.impl("fp8_quantize_columns", TORCH_BOX(&fp8_quantize_columns));
}

}  // namespace megatrain
