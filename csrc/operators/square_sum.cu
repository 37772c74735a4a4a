// square_sum: the sum of all squares of a flat tensor.
#include "../kernels/square_sum.cuh"

#include "torch_side.h"

namespace megatrain {
namespace {

Tensor square_sum(const Tensor& flat) {
  require(flat.dim() == 1, "flat must have one dim, got ", shape_text(flat));
  check_contiguous("flat", flat);
  const int64_t count = flat.numel();
  const int64_t tiles = (count + SQUARE_SUM_TILE - 1) / SQUARE_SUM_TILE;
  const Tensor parts = torch::stable::new_empty(flat, {tiles}, ScalarType::Double);
  const Tensor total = torch::stable::new_empty(flat, {}, ScalarType::Double);
  const Device device(flat);
  dispatch_floating("flat", flat.scalar_type(), [&](auto type) {
    using T = decltype(type);
    if (count == 0) return;
    const auto run = [&](auto width) {
      device.launch("square_sum_parts", square_sum_parts<T, width.value>, dim3(unsigned(tiles)), dim3(SQUARE_SUM_THREADS),
                    const_pointer<T>(flat), pointer<double>(parts), count);
    };
    if (count % full_width<T> == 0 && is_aligned(flat.const_data_ptr())) return run(constant<full_width<T>>{});
    run(constant<1>{});
  });
  device.launch("add_parts", add_parts, dim3(1), dim3(ADD_PARTS_THREADS), const_pointer<double>(parts), pointer<double>(total),
                tiles);
  return total;
}

}  // namespace

MEGATRAIN_KERNELS(library) { library.impl("square_sum", TORCH_BOX(&square_sum)); }

}  // namespace megatrain
