// rms_norm and layer_norm, with and without a residual, forward and backward.
#include "../kernels/norm.h"

#include "columns.h"
#include "torch_side.h"

namespace megatrain {
namespace {

struct Rows {
  int64_t count;
  int hidden;
};

Rows rows_of(const char* name, const Tensor& x) {
  require(x.dim() >= 1, name, " must have at least one dim, got ", shape_text(x));
  const int64_t hidden = x.size(x.dim() - 1);
  require(hidden <= 0x3fffffff, name, " must have rows of less than 2^30 elements, got ", shape_text(x));
  check_contiguous(name, x);
  return {hidden == 0 ? 0 : x.numel() / hidden, int(hidden)};
}

void check_row_parameter(const char* name, const Tensor& tensor, const Tensor& x, int hidden) {
  check_same_device(name, tensor, "x", x);
  check_dtype(name, tensor, x.scalar_type());
  check_shape(name, tensor, {hidden});
  check_contiguous(name, tensor);
}

void check_statistic(const char* name, const Tensor& tensor, const Tensor& x) {
  check_same_device(name, tensor, "x", x);
  check_dtype(name, tensor, wide_dtype(x.scalar_type()));
  require(tensor.dim() == x.dim() && tensor.size(x.dim() - 1) == 1, name, " must have one number for each row of x, ",
                  shape_text(x), ", got ", shape_text(tensor));
  for (int64_t dim = 0; dim + 1 < x.dim(); ++dim) {
    require(tensor.size(dim) == x.size(dim), name, " must have one number for each row of x, ", shape_text(x), ", got ",
                    shape_text(tensor));
  }
  check_contiguous(name, tensor);
}

Tensor new_statistic(const Tensor& x) {
  std::vector<int64_t> shape;
  for (int64_t dim = 0; dim + 1 < x.dim(); ++dim) shape.push_back(x.size(dim));
  shape.push_back(1);
  return torch::stable::new_empty(x, shape, wide_dtype(x.scalar_type()));
}

struct Normed {
  Tensor out, sum, mean, rstd;
};

template <bool IS_CENTERED>
Normed forward(const Tensor& x, const std::optional<Tensor>& residual, const Tensor& weight, const std::optional<Tensor>& bias,
               double eps) {
  const Rows rows = rows_of("x", x);
  if (residual.has_value()) check_like("residual", *residual, "x", x);
  check_row_parameter("weight", weight, x, rows.hidden);
  if (bias.has_value()) check_row_parameter("bias", *bias, x, rows.hidden);
  Normed result;
  result.out = torch::stable::empty_like(x);
  result.rstd = new_statistic(x);
  if (residual.has_value()) result.sum = torch::stable::empty_like(x);
  if (IS_CENTERED) result.mean = new_statistic(x);
  if (x.numel() == 0) return result;
  const Device device(x);
  dispatch_floating("x", x.scalar_type(), [&](auto type) {
    using T = decltype(type);
    NormForward<T> p{};
    p.x = const_pointer<T>(x);
    p.residual = pointer_or_null<T>(residual);
    p.weight = const_pointer<T>(weight);
    p.bias = pointer_or_null<T>(bias);
    p.out = pointer<T>(result.out);
    p.sum = residual.has_value() ? pointer<T>(result.sum) : nullptr;
    p.mean = IS_CENTERED ? pointer<wide_t<T>>(result.mean) : nullptr;
    p.rstd = pointer<wide_t<T>>(result.rstd);
    p.rows = rows.count;
    p.hidden = rows.hidden;
    p.eps = wide_t<T>(eps);
    check_cuda("norm_forward", launch_norm_forward<IS_CENTERED>(device.stream(), p));
  });
  return result;
}

struct Gradients {
  Tensor x, weight, bias;
};

template <bool IS_CENTERED>
Gradients backward(const Tensor& grad_out, const std::optional<Tensor>& grad_sum, const Tensor& x, const Tensor& weight,
                   const std::optional<Tensor>& mean, const Tensor& rstd) {
  const Rows rows = rows_of("x", x);
  check_like("grad_out", grad_out, "x", x);
  if (grad_sum.has_value()) check_like("grad_sum", *grad_sum, "x", x);
  check_row_parameter("weight", weight, x, rows.hidden);
  if (mean.has_value()) check_statistic("mean", *mean, x);
  check_statistic("rstd", rstd, x);
  Gradients result;
  result.x = torch::stable::empty_like(x);
  result.weight = torch::stable::empty_like(weight);
  if (IS_CENTERED) result.bias = torch::stable::empty_like(weight);
  const Device device(x);
  dispatch_floating("x", x.scalar_type(), [&](auto type) {
    using T = decltype(type);
    NormBackward<T> p{};
    p.grad_out = const_pointer<T>(grad_out);
    p.grad_sum = pointer_or_null<T>(grad_sum);
    p.x = const_pointer<T>(x);
    p.weight = const_pointer<T>(weight);
    p.mean = pointer_or_null<wide_t<T>>(mean);
    p.rstd = const_pointer<wide_t<T>>(rstd);
    p.grad_x = pointer<T>(result.x);
    p.rows = rows.count;
    p.hidden = rows.hidden;
    const int width = pack_width<T>(p.hidden, {p.grad_out, p.grad_sum, p.x, p.weight, p.grad_x});
    const NormBackwardShape shape = norm_backward_shape(device.num_multiprocessors(), p.rows, p.hidden, width);
    const auto new_parts = [&] {
      return torch::stable::new_empty(x, {shape.parts(), int64_t(rows.hidden)}, wide_dtype(x.scalar_type()));
    };
    const Tensor weight_parts = new_parts();
    p.weight_parts = pointer<wide_t<T>>(weight_parts);
    const Tensor bias_parts = IS_CENTERED ? new_parts() : Tensor();
    if (IS_CENTERED) p.bias_parts = pointer<wide_t<T>>(bias_parts);
    if (x.numel() != 0) check_cuda("norm_backward", launch_norm_backward<IS_CENTERED>(device.stream(), p, shape));
    sum_columns<T>(device, weight_parts, result.weight);
    if (IS_CENTERED) sum_columns<T>(device, bias_parts, result.bias);
  });
  return result;
}

std::tuple<Tensor, Tensor> rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  Normed normed = forward<false>(x, std::nullopt, weight, std::nullopt, eps);
  return {normed.out, normed.rstd};
}

std::tuple<Tensor, Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps) {
  Normed normed = forward<false>(x, residual, weight, std::nullopt, eps);
  return {normed.out, normed.sum, normed.rstd};
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad_out, std::optional<Tensor> grad_sum, const Tensor& x,
                                             const Tensor& weight, const Tensor& rstd) {
  Gradients grads = backward<false>(grad_out, grad_sum, x, weight, std::nullopt, rstd);
  return {grads.x, grads.weight};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps) {
  Normed normed = forward<true>(x, std::nullopt, weight, bias, eps);
  return {normed.out, normed.mean, normed.rstd};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> add_layer_norm(const Tensor& x, const Tensor& residual, const Tensor& weight,
                                                          const Tensor& bias, double eps) {
  Normed normed = forward<true>(x, residual, weight, bias, eps);
  return {normed.out, normed.sum, normed.mean, normed.rstd};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(const Tensor& grad_out, std::optional<Tensor> grad_sum, const Tensor& x,
                                                       const Tensor& weight, const Tensor& mean, const Tensor& rstd) {
  Gradients grads = backward<true>(grad_out, grad_sum, x, weight, mean, rstd);
  return {grads.x, grads.weight, grads.bias};
}

}  // namespace

MEGATRAIN_KERNELS(library) {
  library.impl("rms_norm", TORCH_BOX(&rms_norm));
  library.impl("add_rms_norm", TORCH_BOX(&add_rms_norm));
  library.impl("rms_norm_backward", TORCH_BOX(&rms_norm_backward));
  library.impl("layer_norm", TORCH_BOX(&layer_norm));
  library.impl("add_layer_norm", TORCH_BOX(&add_layer_norm));
  library.impl("layer_norm_backward", TORCH_BOX(&layer_norm_backward));
}

}  // namespace megatrain
