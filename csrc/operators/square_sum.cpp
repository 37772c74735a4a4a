// square_sum: the sum of all squares of a flat tensor.
#include "../kernels/square_sum.h"

#include "torch_side.h"

namespace megatrain {
namespace {

Tensor square_sum(const Tensor& flat) {
  require(flat.dim() == 1, "flat must have one dim, got ", shape_text(flat));
  check_contiguous("flat", flat);
  const int64_t count = flat.numel();
  const int64_t tiles = divide_up(count, SQUARE_SUM_TILE);
  const Tensor parts = torch::stable::new_empty(flat, {tiles}, ScalarType::Double);
  const Tensor total = torch::stable::new_empty(flat, {}, ScalarType::Double);
  const Device device(flat);
  dispatch_floating("flat", flat.scalar_type(), [&](auto type) {
    using T = decltype(type);
    if (count == 0) return;
    check_cuda("square_sum_parts", launch_square_sum_parts(device.stream(), const_pointer<T>(flat), pointer<double>(parts), count));
  });
  check_cuda("add_parts", launch_add_parts(device.stream(), const_pointer<double>(parts), pointer<double>(total), tiles));
  return total;
}

}  // namespace

MEGATRAIN_KERNELS(library) { library.impl("square_sum", TORCH_BOX(&square_sum)); }

}  // namespace megatrain
