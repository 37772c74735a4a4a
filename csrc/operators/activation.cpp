// bias_gelu and bias_swiglu, forward and backward.
#include "../kernels/activation.h"

#include "columns.h"
#include "torch_side.h"

namespace megatrain {
namespace {

// x as the kernels see it: [rows, PARTS, columns].
struct Rows {
  int64_t count, columns;
};

template <int PARTS>
Rows rows_of(const Tensor& x) {
  if (PARTS == 1) {
    require(x.dim() >= 1, "x must have at least one dim, got ", shape_text(x));
  } else {
    require(x.dim() >= 2 && x.size(x.dim() - 2) == PARTS, "x must have shape [..., 2, F], got ", shape_text(x));
  }
  check_contiguous("x", x);
  const int64_t columns = x.size(x.dim() - 1);
  return {columns == 0 ? 0 : x.numel() / (PARTS * columns), columns};
}

template <int PARTS>
void check_bias(const Tensor& bias, const Tensor& x, int64_t columns) {
  check_same_device("bias", bias, "x", x);
  check_dtype("bias", bias, x.scalar_type());
  if (PARTS == 1) {
    check_shape("bias", bias, {columns});
  } else {
    check_shape("bias", bias, {PARTS, columns});
  }
  check_contiguous("bias", bias);
}

template <int PARTS>
std::vector<int64_t> shape_of_result(const Tensor& x) {
  std::vector<int64_t> shape;
  for (int64_t dim = 0; dim < x.dim(); ++dim) {
    if (PARTS == 1 || dim != x.dim() - 2) shape.push_back(x.size(dim));
  }
  return shape;
}

template <int PARTS>
Tensor forward(const Tensor& x, const std::optional<Tensor>& bias) {
  const Rows rows = rows_of<PARTS>(x);
  if (bias.has_value()) check_bias<PARTS>(*bias, x, rows.columns);
  const Tensor out = torch::stable::new_empty(x, shape_of_result<PARTS>(x));
  const Device device(x);
  dispatch_floating("x", x.scalar_type(), [&](auto type) {
    using T = decltype(type);
    if (x.numel() == 0) return;
    Activation<T> p{};
    p.x = const_pointer<T>(x);
    p.bias = pointer_or_null<T>(bias);
    p.out = pointer<T>(out);
    const int width = pack_width<T>(rows.columns, {p.x, p.bias, p.out});
    const int at_once = bias.has_value() ? activation_rows<PARTS, false, true> : activation_rows<PARTS, false, false>;
    const WalkShape shape = walk_shape(device, rows.count, rows.columns, width, at_once, false);
    p.walk = shape.walk;
    check_cuda("activation_forward", launch_activation_forward<PARTS>(device.stream(), p, shape));
  });
  return out;
}

struct Gradients {
  Tensor x, bias;
};

template <int PARTS>
Gradients backward(const Tensor& grad_out, const Tensor& x, const std::optional<Tensor>& bias) {
  const Rows rows = rows_of<PARTS>(x);
  if (bias.has_value()) check_bias<PARTS>(*bias, x, rows.columns);
  check_same_device("grad_out", grad_out, "x", x);
  check_dtype("grad_out", grad_out, x.scalar_type());
  check_shape("grad_out", grad_out, shape_of_result<PARTS>(x));
  check_contiguous("grad_out", grad_out);
  Gradients result;
  result.x = torch::stable::empty_like(x);
  if (bias.has_value()) result.bias = torch::stable::empty_like(*bias);
  const Device device(x);
  dispatch_floating("x", x.scalar_type(), [&](auto type) {
    using T = decltype(type);
    Activation<T> p{};
    p.x = const_pointer<T>(x);
    p.bias = pointer_or_null<T>(bias);
    p.grad_out = const_pointer<T>(grad_out);
    p.out = pointer<T>(result.x);
    if (rows.columns == 0) return;
    const bool has_bias = bias.has_value();
    const int width = pack_width<T>(rows.columns, {p.x, p.bias, p.grad_out, p.out});
    const int at_once = has_bias ? activation_rows<PARTS, true, true> : activation_rows<PARTS, true, false>;
    const WalkShape shape = walk_shape(device, rows.count, rows.columns, width, at_once, has_bias);
    p.walk = shape.walk;
    Tensor parts;
    if (has_bias) {
      const int64_t groups = rows.count == 0 ? 0 : shape.groups();
      parts = torch::stable::new_empty(x, {groups, PARTS * rows.columns}, wide_dtype(x.scalar_type()));
      p.parts = pointer<wide_t<T>>(parts);
    }
    if (rows.count != 0) check_cuda("activation_backward", launch_activation_backward<PARTS>(device.stream(), p, shape));
    if (has_bias) sum_columns<T>(device, parts, result.bias);
  });
  return result;
}

Tensor bias_gelu(const Tensor& x, std::optional<Tensor> bias) { return forward<1>(x, bias); }

Tensor gelu_backward(const Tensor& grad_out, const Tensor& x) { return backward<1>(grad_out, x, std::nullopt).x; }

std::tuple<Tensor, Tensor> bias_gelu_backward(const Tensor& grad_out, const Tensor& x, const Tensor& bias) {
  const Gradients grads = backward<1>(grad_out, x, bias);
  return {grads.x, grads.bias};
}

Tensor bias_swiglu(const Tensor& x, std::optional<Tensor> bias) { return forward<2>(x, bias); }

Tensor swiglu_backward(const Tensor& grad_out, const Tensor& x) { return backward<2>(grad_out, x, std::nullopt).x; }

std::tuple<Tensor, Tensor> bias_swiglu_backward(const Tensor& grad_out, const Tensor& x, const Tensor& bias) {
  const Gradients grads = backward<2>(grad_out, x, bias);
  return {grads.x, grads.bias};
}

}  // namespace

MEGATRAIN_KERNELS(library) {
  library.impl("bias_gelu", TORCH_BOX(&bias_gelu));
  library.impl("gelu_backward", TORCH_BOX(&gelu_backward));
  library.impl("bias_gelu_backward", TORCH_BOX(&bias_gelu_backward));
  library.impl("bias_swiglu", TORCH_BOX(&bias_swiglu));
  library.impl("swiglu_backward", TORCH_BOX(&swiglu_backward));
  library.impl("bias_swiglu_backward", TORCH_BOX(&bias_swiglu_backward));
}

}  // namespace megatrain
