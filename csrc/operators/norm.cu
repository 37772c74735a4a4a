// rms_norm and layer_norm, with and without a residual, forward and backward.
#include "../kernels/norm.cuh"

#include "columns.h"
#include "torch_side.h"

namespace megatrain {
namespace {

constexpr int FORWARD_PACKS = 4;  // 64 bytes for each thread and tensor in flight
constexpr int FORWARD_BLOCK = 128;
constexpr int BACKWARD_PACKS = 4;  // rows with more packs for each thread are read twice

int threads_for(int pieces) {
  const int threads = divide_up(pieces, WARP) * WARP;
  return threads < WARP ? WARP : threads > NORM_MAX_THREADS ? NORM_MAX_THREADS : threads;
}

// Calls body(constant<PACKS>) with the least of 1, 2, 4 and 8 packs that cover a row, or 0 where none of them does.
template <typename Body>
void dispatch_packs(int needed, Body&& body) {
  if (needed <= 1) return body(constant<1>{});
  if (needed <= 2) return body(constant<2>{});
  if (needed <= 4) return body(constant<4>{});
  if (needed <= 8) return body(constant<8>{});
  return body(constant<0>{});
}

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

template <typename T, bool IS_CENTERED>
void launch_forward(const Device& device, const NormForward<T>& p) {
  const auto run = [&](auto width) {
    const int pieces = divide_up(p.hidden, width.value);
    const int threads = threads_for(divide_up(pieces, FORWARD_PACKS));
    const int rows_a_block = threads < FORWARD_BLOCK ? FORWARD_BLOCK / threads : 1;
    dispatch_packs(divide_up(pieces, threads), [&](auto packs) {
      device.launch("norm_forward", norm_forward<T, width.value, packs.value, IS_CENTERED>,
                    dim3(divide_up(p.rows, rows_a_block)), dim3(threads, rows_a_block), p);
    });
  };
  const bool is_wide = p.hidden % full_width<T> == 0 && is_aligned(p.x) && is_aligned(p.residual) && is_aligned(p.weight) &&
                       is_aligned(p.bias) && is_aligned(p.out) && is_aligned(p.sum);
  if (is_wide) {
    run(constant<full_width<T>>{});
  } else {
    run(constant<1>{});
  }
}

// How the rows of a backward pass are divided among groups of threads. The number of parts is the number of groups.
struct BackwardShape {
  int threads, rows_a_block, blocks, packs;
  int64_t parts() const { return int64_t(blocks) * rows_a_block; }
};

BackwardShape backward_shape(const Device& device, int64_t rows, int hidden, int width) {
  const int pieces = divide_up(hidden, width);
  const int threads = threads_for(pieces);
  const int packs = divide_up(pieces, threads);
  const int rows_a_block = packs > BACKWARD_PACKS || threads == NORM_MAX_THREADS ? 1 : NORM_MAX_THREADS / threads;
  const int wanted = device.num_multiprocessors();
  const int blocks = divide_up(rows, rows_a_block) < wanted ? divide_up(rows, rows_a_block) : wanted;
  return {threads, rows_a_block, blocks, packs};
}

template <typename T, bool IS_CENTERED>
void launch_backward(const Device& device, const NormBackward<T>& p, const BackwardShape& shape, int width) {
  const dim3 grid(shape.blocks), block(shape.threads, shape.rows_a_block);
  const auto run = [&](auto width) {
    const auto with = [&](auto packs, auto rows) {
      device.launch("norm_backward", norm_backward<T, width.value, packs.value, rows.value, IS_CENTERED>, grid, block, p);
    };
    if (shape.packs <= 1) return with(constant<1>{}, constant<4>{});
    if (shape.packs <= 2) return with(constant<2>{}, constant<2>{});
    if (shape.packs <= 4) return with(constant<4>{}, constant<1>{});
    device.launch("norm_backward_long", norm_backward_long<T, IS_CENTERED>, grid, block, p);
  };
  if (width == 1) {
    run(constant<1>{});
  } else {
    run(constant<full_width<T>>{});
  }
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
    launch_forward<T, IS_CENTERED>(device, p);
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
    const bool is_wide = p.hidden % full_width<T> == 0 && is_aligned(p.grad_out) && is_aligned(p.grad_sum) && is_aligned(p.x) &&
                         is_aligned(p.weight) && is_aligned(p.grad_x);
    const int width = is_wide ? full_width<T> : 1;
    const BackwardShape shape = backward_shape(device, rows.count, rows.hidden, width);
    const auto new_parts = [&] {
      return torch::stable::new_empty(x, {shape.parts(), int64_t(rows.hidden)}, wide_dtype(x.scalar_type()));
    };
    const Tensor weight_parts = new_parts();
    p.weight_parts = pointer<wide_t<T>>(weight_parts);
    const Tensor bias_parts = IS_CENTERED ? new_parts() : Tensor();
    if (IS_CENTERED) p.bias_parts = pointer<wide_t<T>>(bias_parts);
    if (x.numel() != 0) launch_backward<T, IS_CENTERED>(device, p, shape, width);
    launch_column_sum<T>(device, weight_parts, result.weight);
    if (IS_CENTERED) launch_column_sum<T>(device, bias_parts, result.bias);
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
