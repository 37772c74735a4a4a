// embedding, and embedding_gradient_, which adds to the caller's table.
#include "../kernels/embedding.h"

#include <array>

#include "torch_side.h"

namespace megatrain {
namespace {

void check_table(const char* name, const Tensor& table) {
  require(table.dim() == 2, name, " must have two dims, got ", shape_text(table));
  require(table.size(0) <= 0x7fffffff && table.size(1) <= 0x3fffffff, name,
          " must have less than 2^31 rows of less than 2^30 elements, got ", shape_text(table));
  check_contiguous(name, table);
}

void check_tokens(const Tensor& tokens, const char* other_name, const Tensor& other) {
  check_same_device("tokens", tokens, other_name, other);
  check_dtype("tokens", tokens, ScalarType::Long);
  check_contiguous("tokens", tokens);
}

Tensor embedding(const Tensor& tokens, const Tensor& weight) {
  check_table("weight", weight);
  check_tokens(tokens, "weight", weight);
  std::vector<int64_t> shape;
  for (int64_t dim = 0; dim < tokens.dim(); ++dim) shape.push_back(tokens.size(dim));
  shape.push_back(weight.size(1));
  const Tensor out = torch::stable::new_empty(weight, shape);
  dispatch_floating("weight", weight.scalar_type(), [&](auto type) {
    if (out.numel() == 0) return;
    LookUp p{};
    p.tokens = const_pointer<int64_t>(tokens);
    p.table = weight.const_data_ptr();
    p.out = out.mutable_data_ptr();
    p.num_tokens = tokens.numel();
    p.num_rows = weight.size(0);
    p.columns = int(weight.size(1));
    p.element_bytes = int(sizeof(type));
    const Device device(weight);
    check_cuda("look_up_rows", launch_look_up(device.stream(), p));
  });
  return out;
}

struct Sorted {
  Tensor values, places;
};

// Sorts stably, in ascending order. A radix sort of 32 bits has half as many passes as one of 64 bits.
Sorted sorted(const Tensor& tokens) {
  const Tensor keys = torch::stable::to(tokens, ScalarType::Int);
  std::array<StableIValue, 4> stack{torch::stable::detail::from(keys), torch::stable::detail::from(std::optional<bool>(true)),
                                    torch::stable::detail::from(int64_t(0)), torch::stable::detail::from(false)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::sort", "stable", stack.data(), TORCH_ABI_VERSION));
  return {torch::stable::detail::to<Tensor>(stack[0]), torch::stable::detail::to<Tensor>(stack[1])};
}

template <typename T, typename W>
void launch_sums(const Tensor& grad_weight, const Tensor& tokens, const Tensor& grad) {
  const int64_t num_parts = divide_up(tokens.numel(), PART_ROWS);
  const Sorted by_token = sorted(tokens);
  const Tensor parts = torch::stable::new_empty(grad, {num_parts, 2, grad.size(1)}, wide_dtype(grad.scalar_type()));
  RowSums<T, W> p{};
  p.sorted = const_pointer<int32_t>(by_token.values);
  p.order = const_pointer<int64_t>(by_token.places);
  p.grad = const_pointer<T>(grad);
  p.table = pointer<W>(grad_weight);
  p.parts = pointer<wide_t<T>>(parts);
  p.num_tokens = tokens.numel();
  p.num_rows = grad_weight.size(0);
  p.columns = int(grad.size(1));
  const Device device(grad);
  check_cuda("sum_rows", launch_sum_rows(device.stream(), p));
  if (num_parts > 1) check_cuda("sum_parts", launch_sum_parts(device.stream(), p));
}

void embedding_gradient_(const Tensor& grad_weight, const Tensor& tokens, const Tensor& grad) {
  check_table("grad_weight", grad_weight);
  check_tokens(tokens, "grad_weight", grad_weight);
  require(tokens.dim() == 1, "tokens must have one dim, got ", shape_text(tokens));
  check_same_device("grad", grad, "grad_weight", grad_weight);
  check_shape("grad", grad, {tokens.size(0), grad_weight.size(1)});
  check_contiguous("grad", grad);
  const ScalarType dtype = grad.scalar_type(), of_table = grad_weight.scalar_type();
  dispatch_floating("grad", dtype, [&](auto type) {
    using T = decltype(type);
    if (of_table != dtype) check_dtype("grad_weight", grad_weight, wide_dtype(dtype));
    if (grad.numel() == 0) return;
    if (of_table == dtype) return launch_sums<T, T>(grad_weight, tokens, grad);
    launch_sums<T, wide_t<T>>(grad_weight, tokens, grad);
  });
}

}  // namespace

MEGATRAIN_KERNELS(library) {
  library.impl("embedding", TORCH_BOX(&embedding));
  library.impl("embedding_gradient_", TORCH_BOX(&embedding_gradient_));
}

}  // namespace megatrain
