// cross_entropy_statistics and cross_entropy_gradient_: the passes before and after the ranks combine their statistics.
#include "../kernels/cross_entropy.h"

#include "torch_side.h"

namespace megatrain {
namespace {

void check_logits(const Tensor& logits) {
  require(logits.dim() == 2, "logits must have two dims, got ", shape_text(logits));
  require(logits.size(0) <= 0x7fffffff, "logits must have less than 2^31 rows, got ", shape_text(logits));
  check_contiguous("logits", logits);
}

void check_of_row(const char* name, const Tensor& tensor, ScalarType dtype, const Tensor& logits) {
  check_same_device(name, tensor, "logits", logits);
  check_dtype(name, tensor, dtype);
  check_shape(name, tensor, {logits.size(0)});
  check_contiguous(name, tensor);
}

// The number of columns below `vocab_size`, where the first column has number `first_column`.
int64_t real_columns(const Tensor& logits, int64_t first_column, int64_t vocab_size) {
  const int64_t real = vocab_size - first_column;
  return real < 0 ? 0 : real < logits.size(1) ? real : logits.size(1);
}

Tensor cross_entropy_statistics(const Tensor& logits, const Tensor& labels, int64_t first_column, int64_t vocab_size,
                                bool has_sum) {
  check_logits(logits);
  check_of_row("labels", labels, ScalarType::Long, logits);
  const ScalarType dtype = logits.scalar_type();
  const Tensor out = torch::stable::new_empty(logits, {has_sum ? 3 : 2, logits.size(0)}, wide_dtype(dtype));
  dispatch_floating("logits", dtype, [&](auto type) {
    using T = decltype(type);
    if (logits.size(0) == 0) return;
    LossStatistics<T> p{};
    p.logits = const_pointer<T>(logits);
    p.labels = const_pointer<int64_t>(labels);
    p.out = pointer<wide_t<T>>(out);
    p.rows = logits.size(0);
    p.columns = logits.size(1);
    p.real = real_columns(logits, first_column, vocab_size);
    p.first_column = first_column;
    const Device device(logits);
    check_cuda("loss_statistics", launch_loss_statistics(device.stream(), p, has_sum));
  });
  return out;
}

void cross_entropy_gradient_(const Tensor& logits, const Tensor& labels, const Tensor& lse, const Tensor& grad,
                             int64_t first_column, int64_t vocab_size, double z_loss, double label_smoothing) {
  check_logits(logits);
  const ScalarType dtype = logits.scalar_type();
  check_of_row("labels", labels, ScalarType::Long, logits);
  check_of_row("lse", lse, wide_dtype(dtype), logits);
  check_of_row("grad", grad, wide_dtype(dtype), logits);
  dispatch_floating("logits", dtype, [&](auto type) {
    using T = decltype(type);
    if (logits.numel() == 0) return;
    LossGradient<T> p{};
    p.logits = pointer<T>(logits);
    p.labels = const_pointer<int64_t>(labels);
    p.lse = const_pointer<wide_t<T>>(lse);
    p.grad = const_pointer<wide_t<T>>(grad);
    p.rows = logits.size(0);
    p.columns = logits.size(1);
    p.real = real_columns(logits, first_column, vocab_size);
    p.first_column = first_column;
    p.twice_z_loss = wide_t<T>(2 * z_loss);
    p.of_target = wide_t<T>(1 - label_smoothing);
    p.of_each = wide_t<T>(label_smoothing / double(vocab_size));
    const Device device(logits);
    check_cuda("loss_gradient", launch_loss_gradient(device.stream(), p));
  });
}

}  // namespace

MEGATRAIN_KERNELS(library) {
  library.impl("cross_entropy_statistics", TORCH_BOX(&cross_entropy_statistics));
  library.impl("cross_entropy_gradient_", TORCH_BOX(&cross_entropy_gradient_));
}

}  // namespace megatrain
