// residual_dropout with its backward, and the gradient of a bias.
#include "../kernels/dropout.h"

#include <cmath>

#include "columns.h"
#include "torch_side.h"

namespace megatrain {
namespace {

struct Draw {
  double probability;
  int64_t first_key, second_key;
};

// The outputs of one launch: `out` and the sums of its columns, each only if it has a value.
struct Target {
  std::optional<Tensor> out, sums;
};

int64_t check_rows(const char* name, const Tensor& x) {
  require(x.dim() >= 1, name, " must have at least one dim, got ", shape_text(x));
  check_contiguous(name, x);
  return x.size(x.dim() - 1);
}

void check_draw(const char* name, const Tensor& x, const std::optional<Tensor>& token, double probability) {
  require(probability >= 0 && probability < 1, "probability must be at least 0 and less than 1, got ", probability);
  if (!token.has_value()) {
    require(probability == 0, "token must be given where probability is not 0");
    return;
  }
  check_same_device("token", *token, name, x);
  check_dtype("token", *token, ScalarType::Long);
  bool is_right = token->dim() == x.dim() - 1;
  for (int64_t dim = 0; is_right && dim < token->dim(); ++dim) is_right = token->size(dim) == x.size(dim);
  require(is_right, "token must have one number for each row of ", name, ", ", shape_text(x), ", got ", shape_text(*token));
  check_contiguous("token", *token);
}

void run(const char* name, const Tensor& y, const std::optional<Tensor>& residual, const std::optional<Tensor>& bias,
         const std::optional<Tensor>& token, const Draw& draw, const Target& target) {
  const int64_t columns = y.size(y.dim() - 1);
  const Device device(y);
  dispatch_floating(name, y.scalar_type(), [&](auto type) {
    using T = decltype(type);
    if (columns == 0) return;
    const int64_t rows = y.numel() / columns;
    Dropout<T> p{};
    p.y = const_pointer<T>(y);
    p.residual = pointer_or_null<T>(residual);
    p.bias = pointer_or_null<T>(bias);
    p.token = pointer_or_null<int64_t>(token);
    p.out = pointer_or_null<T>(target.out);
    p.key = {uint64_t(draw.first_key), uint64_t(draw.second_key)};
    p.threshold = uint64_t(std::nearbyint(draw.probability * 4294967296.0));  // ties to even, as Python rounds
    p.scale = wide_t<T>(1.0 / (1.0 - draw.probability));
    const int width = pack_width<T>(columns, {p.y, p.residual, p.bias, p.out});
    const WalkShape shape = walk_shape(device, rows, columns, width, WALK_ROWS, target.sums.has_value());
    p.walk = shape.walk;
    Tensor parts;
    if (target.sums.has_value()) {
      parts = torch::stable::new_empty(y, {rows == 0 ? 0 : shape.groups(), columns}, wide_dtype(y.scalar_type()));
      p.parts = pointer<wide_t<T>>(parts);
    }
    if (rows != 0) check_cuda("dropout", launch_dropout(device.stream(), p, shape));
    if (target.sums.has_value()) sum_columns<T>(device, parts, *target.sums);
  });
}

Tensor residual_dropout(std::optional<Tensor> residual, const Tensor& y, std::optional<Tensor> bias,
                        std::optional<Tensor> token, double probability, int64_t first_key, int64_t second_key) {
  const int64_t columns = check_rows("y", y);
  if (residual.has_value()) check_like("residual", *residual, "y", y);
  if (bias.has_value()) {
    check_same_device("bias", *bias, "y", y);
    check_dtype("bias", *bias, y.scalar_type());
    check_shape("bias", *bias, {columns});
    check_contiguous("bias", *bias);
  }
  check_draw("y", y, token, probability);
  const Tensor out = torch::stable::empty_like(y);
  run("y", y, residual, bias, token, {probability, first_key, second_key}, {out, std::nullopt});
  return out;
}

std::tuple<Tensor, Tensor> bias_dropout_backward(const Tensor& grad_out, const Tensor& token, double probability,
                                                 int64_t first_key, int64_t second_key) {
  const int64_t columns = check_rows("grad_out", grad_out);
  check_draw("grad_out", grad_out, token, probability);
  const Tensor grad_y = torch::stable::empty_like(grad_out);
  const Tensor grad_bias = torch::stable::new_empty(grad_out, {columns});
  run("grad_out", grad_out, std::nullopt, std::nullopt, token, {probability, first_key, second_key}, {grad_y, grad_bias});
  return {grad_y, grad_bias};
}

Tensor bias_backward(const Tensor& grad_out) {
  const int64_t columns = check_rows("grad_out", grad_out);
  const Tensor grad_bias = torch::stable::new_empty(grad_out, {columns});
  run("grad_out", grad_out, std::nullopt, std::nullopt, std::nullopt, {0.0, 0, 0}, {std::nullopt, grad_bias});
  return grad_bias;
}

}  // namespace

MEGATRAIN_KERNELS(library) {
  library.impl("residual_dropout", TORCH_BOX(&residual_dropout));
  library.impl("bias_dropout_backward", TORCH_BOX(&bias_dropout_backward));
  library.impl("bias_backward", TORCH_BOX(&bias_backward));
}

}  // namespace megatrain
