// Scales and quantization for FP8 products.
#include "../kernels/fp8.cuh"

#include "torch_side.h"

namespace megatrain {
namespace {

constexpr int BLOCKS_A_MULTIPROCESSOR = 8;
constexpr int64_t MAX_ROWS = int64_t(65535) * TILE;  // a grid has at most 65535 tiles along y

using Format = std::integral_constant<__nv_fp8_interpretation_t, __NV_E4M3>;
using WideRangeFormat = std::integral_constant<__nv_fp8_interpretation_t, __NV_E5M2>;

template <typename Body>
void dispatch_format(ScalarType dtype, Body&& body) {
  if (dtype == ScalarType::Float8_e4m3fn) return body(Format{});
  if (dtype == ScalarType::Float8_e5m2) return body(WideRangeFormat{});
  require(false, "dtype must be float8_e4m3fn or float8_e5m2, got ", torch::headeronly::toString(dtype));
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
  require(x.size(0) <= MAX_ROWS, "x must have at most ", MAX_ROWS, " rows, got ", shape_text(x));
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
    const T* place = const_pointer<T>(x);
    const bool is_wide = is_aligned(place) && x.numel() % full_width<T> == 0;
    const int width = is_wide ? full_width<T> : 1;
    const int64_t wanted = divide_up(x.numel(), int64_t(FP8_THREADS) * width * 4);
    const int64_t most = device.num_multiprocessors() * BLOCKS_A_MULTIPROCESSOR;
    const int64_t blocks = wanted < 1 ? 1 : wanted < most ? wanted : most;
    const Tensor parts = new_floats(x, {blocks});
    const auto kernel = is_wide ? largest_parts<T, full_width<T>> : largest_parts<T, 1>;
    device.launch("largest_parts", kernel, dim3(blocks), dim3(FP8_THREADS), place, pointer<float>(parts), x.numel());
    dispatch_format(dtype, [&](auto format) {
      device.launch("scale_of_parts", scale_of_parts<format.value>, dim3(1), dim3(FP8_THREADS), const_pointer<float>(parts),
                    blocks, pointer<float>(scale));
    });
  });
  return scale;
}

template <typename T, __nv_fp8_interpretation_t FORMAT>
void launch_quantize(const Device& device, const Quantize<T>& p) {
  const dim3 grid(divide_up(p.columns, TILE), divide_up(p.rows, TILE));
  const bool is_wide = p.rows % 16 == 0 && p.columns % 16 == 0 && is_aligned(p.x) && is_aligned(p.q) && is_aligned(p.q_t);
  const auto kernel = is_wide ? quantize<T, FORMAT, true> : quantize<T, FORMAT, false>;
  device.launch("quantize", kernel, grid, dim3(FP8_THREADS), p);
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
  const Tensor largest = new_floats(x, {divide_up(rows, TILE) * divide_up(columns, TILE)});
  if (x.numel() == 0) return {q, q_t, largest};
  const Device device(x);
  dispatch_quantized(x.scalar_type(), [&](auto type) {
    using T = decltype(type);
    const Quantize<T> p{const_pointer<T>(x), const_pointer<float>(scale), has_plain ? pointer<unsigned char>(q) : nullptr,
                        has_transposed ? pointer<unsigned char>(q_t) : nullptr, pointer<float>(largest), rows, columns, false};
    dispatch_format(dtype, [&](auto format) { launch_quantize<T, format.value>(device, p); });
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
    const bool is_wide = columns % 16 == 0 && is_aligned(const_pointer<T>(x)) && is_aligned(pointer<unsigned char>(q));
    dispatch_format(dtype, [&](auto format) {
      const auto kernel = is_wide ? quantize_rows<T, format.value, full_width<T>> : quantize_rows<T, format.value, 1>;
      device.launch("quantize_rows", kernel, dim3(rows), dim3(FP8_THREADS), const_pointer<T>(x), pointer<unsigned char>(q),
                    pointer<float>(inverse), columns);
    });
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
  const dim3 blocks_of_columns(divide_up(columns, FP8_THREADS));
  dispatch_quantized(x.scalar_type(), [&](auto type) {
    using T = decltype(type);
    if (rows > 0) {
      device.launch("largest_of_columns", largest_of_columns<T>, dim3(blocks_of_columns.x, unsigned(parts_of_rows)),
                    dim3(FP8_THREADS), const_pointer<T>(x), pointer<float>(parts), rows, columns);
    }
    dispatch_format(dtype, [&](auto format) {
      device.launch("scale_of_columns", scale_of_columns<format.value>, blocks_of_columns, dim3(FP8_THREADS),
                    const_pointer<float>(parts), parts_of_rows, columns, pointer<float>(scale), pointer<float>(inverse));
      const Quantize<T> p{const_pointer<T>(x), const_pointer<float>(scale), nullptr, pointer<unsigned char>(q_t), nullptr, rows,
                          columns, true};
      if (rows > 0) launch_quantize<T, format.value>(device, p);
    });
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
