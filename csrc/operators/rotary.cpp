// Rotary positions for the product of queries, keys and values: in place, or with the split into three; and the backward.
#include "../kernels/rotary.h"

#include "torch_side.h"

namespace megatrain {
namespace {

// Heads of one kind, [S, B, G, heads of a group, D]: a view of `tensor` that begins at head `first` of each group.
struct Heads {
  const Tensor* tensor;
  int64_t first;
};

struct Sizes {
  int64_t sequence, batch, groups, queries, dim;
};

void check_tables(const Tensor& cos, const Tensor& sin, const char* name, const Tensor& x, const Sizes& sizes) {
  const auto check_table = [&](const char* table_name, const Tensor& table) {
    check_same_device(table_name, table, name, x);
    check_dtype(table_name, table, wide_dtype(x.scalar_type()));
    check_shape(table_name, table, {sizes.sequence, 1, 1, sizes.dim / 2});
    check_contiguous(table_name, table);
  };
  check_table("cos", cos);
  check_table("sin", sin);
}

Sizes product_sizes(const Tensor& product) {
  require(product.dim() == 5 && product.size(3) >= 3 && product.size(4) > 0 && product.size(4) % 2 == 0,
          "product must have shape [S, B, G, R + 2, D], D even, got ", shape_text(product));
  check_contiguous("product", product);
  return {product.size(0), product.size(1), product.size(2), product.size(3) - 2, product.size(4)};
}

template <typename Side, typename P>
Side side_of(P* place, const Heads& heads) {
  const Tensor& x = *heads.tensor;
  const auto stride = [&](int64_t dim) { return x.size(dim) == 1 ? 0 : x.stride(dim); };
  return {place + heads.first * stride(3), stride(0), stride(1), stride(2), stride(3)};
}

// Rotates queries and keys from one place to another, and moves values if `from` has them as its third kind.
void run(const char* name, const Sizes& sizes, const std::vector<Heads>& from, const std::vector<Heads>& to, const Tensor& cos,
         const Tensor& sin, bool is_inverse) {
  const Tensor& x = *from[0].tensor;
  const int kinds = int(from.size());
  const int64_t tokens = sizes.sequence * sizes.batch, a_group = sizes.queries + kinds - 1;
  require(tokens <= 0x7fffffff && sizes.groups * a_group <= 0x7fffff && sizes.dim <= 0x7fffff, name,
          " must have less than 2^31 tokens, less than 2^23 heads and a head dim less than 2^23, got ", shape_text(x));
  const Device device(x);
  dispatch_floating(name, x.scalar_type(), [&](auto type) {
    using T = decltype(type);
    if (tokens == 0 || sizes.groups == 0) return;
    Rotary<T> p{};
    for (int kind = 0; kind < kinds; ++kind) {
      p.from[kind] = side_of<HeadsFrom<T>>(const_pointer<T>(*from[kind].tensor), from[kind]);
      p.to[kind] = side_of<HeadsTo<T>>(pointer<T>(*to[kind].tensor), to[kind]);
    }
    p.cos = const_pointer<wide_t<T>>(cos);
    p.sin = const_pointer<wide_t<T>>(sin);
    p.tokens = int(tokens);
    p.batch = int(sizes.batch);
    p.heads = int(sizes.groups * a_group);
    p.a_group = int(a_group);
    p.queries = int(sizes.queries);
    p.half = int(sizes.dim / 2);
    p.is_inverse = is_inverse;
    check_cuda("rotary", launch_rotary(device.stream(), p));
  });
}

void rotate_queries_and_keys_(const Tensor& product, const Tensor& cos, const Tensor& sin) {
  const Sizes sizes = product_sizes(product);
  check_tables(cos, sin, "product", product, sizes);
  const std::vector<Heads> heads{{&product, 0}, {&product, sizes.queries}};
  run("product", sizes, heads, heads, cos, sin, false);
}

std::tuple<Tensor, Tensor, Tensor> split_rotated(const Tensor& product, const Tensor& cos, const Tensor& sin) {
  const Sizes sizes = product_sizes(product);
  check_tables(cos, sin, "product", product, sizes);
  const auto new_heads = [&](int64_t count) {
    return torch::stable::new_empty(product, {sizes.sequence, sizes.batch, sizes.groups, count, sizes.dim});
  };
  const Tensor q = new_heads(sizes.queries), k = new_heads(1), v = new_heads(1);
  run("product", sizes, {{&product, 0}, {&product, sizes.queries}, {&product, sizes.queries + 1}}, {{&q, 0}, {&k, 0}, {&v, 0}},
      cos, sin, false);
  return {q, k, v};
}

void check_gradient(const char* name, const Tensor& grad, const Tensor& grad_q, const Sizes& sizes) {
  check_same_device(name, grad, "grad_q", grad_q);
  check_dtype(name, grad, grad_q.scalar_type());
  check_shape(name, grad, {sizes.sequence, sizes.batch, sizes.groups, 1, sizes.dim});
  require(grad.stride(4) == 1, name, " must have units next to each other");
}

Tensor rotated_backward(const Tensor& grad_q, const Tensor& grad_k, const Tensor& grad_v, const Tensor& cos, const Tensor& sin) {
  require(grad_q.dim() == 5 && grad_q.size(3) >= 1 && grad_q.size(4) > 0 && grad_q.size(4) % 2 == 0,
          "grad_q must have shape [S, B, G, R, D], D even, got ", shape_text(grad_q));
  require(grad_q.stride(4) == 1, "grad_q must have units next to each other");
  const Sizes sizes{grad_q.size(0), grad_q.size(1), grad_q.size(2), grad_q.size(3), grad_q.size(4)};
  check_gradient("grad_k", grad_k, grad_q, sizes);
  check_gradient("grad_v", grad_v, grad_q, sizes);
  check_tables(cos, sin, "grad_q", grad_q, sizes);
  const Tensor grad = torch::stable::new_empty(grad_q, {sizes.sequence, sizes.batch, sizes.groups, sizes.queries + 2, sizes.dim});
  run("grad_q", sizes, {{&grad_q, 0}, {&grad_k, 0}, {&grad_v, 0}}, {{&grad, 0}, {&grad, sizes.queries}, {&grad, sizes.queries + 1}},
      cos, sin, true);
  return grad;
}

}  // namespace

MEGATRAIN_KERNELS(library) {
  library.impl("rotate_queries_and_keys_", TORCH_BOX(&rotate_queries_and_keys_));
  library.impl("split_rotated", TORCH_BOX(&split_rotated));
  library.impl("rotated_backward", TORCH_BOX(&rotated_backward));
}

}  // namespace megatrain
