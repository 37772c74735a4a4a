// adamw_, lamb_direction_ and lamb_apply_: the optimizers' updates of a flat shard.
#include "../kernels/optimizer_step.h"

#include <cmath>
#include <type_traits>

#include "torch_side.h"

namespace megatrain {
namespace {

void check_flat(const char* name, const Tensor& tensor, const Tensor& master) {
  check_same_device(name, tensor, "master", master);
  check_same_shape(name, tensor, "master", master);
  check_contiguous(name, tensor);
}

void check_master(const Tensor& master) {
  const ScalarType dtype = master.scalar_type();
  require(dtype == ScalarType::Float || dtype == ScalarType::Double, "master must be float32 or float64, got ",
          dtype_text(dtype));
  require(master.dim() == 1, "master must have one dim, got ", shape_text(master));
  check_contiguous("master", master);
}

void check_state(const char* name, const Tensor& tensor, const Tensor& master) {
  check_dtype(name, tensor, master.scalar_type());
  check_flat(name, tensor, master);
}

void check_published(const std::optional<Tensor>& published, const Tensor& master) {
  if (!published.has_value()) return;
  require(master.scalar_type() == ScalarType::Float, "master must be float32 where weights are published, got ",
          dtype_text(master.scalar_type()));
  check_dtype("published", *published, ScalarType::BFloat16);
  check_flat("published", *published, master);
}

void check_borders(const Tensor& run_borders, const Tensor& master) {
  check_same_device("run_borders", run_borders, "master", master);
  check_dtype("run_borders", run_borders, ScalarType::Long);
  require(run_borders.dim() == 1 && run_borders.size(0) >= 1, "run_borders must have shape [runs + 1], got ",
          shape_text(run_borders));
  require(run_borders.size(0) <= 0x3fffffff, "run_borders must have less than 2^30 entries, got ", shape_text(run_borders));
  check_contiguous("run_borders", run_borders);
}

void check_runs(const Tensor& run_borders, const Tensor& is_decayed, const Tensor& master) {
  check_borders(run_borders, master);
  check_same_device("is_decayed", is_decayed, "master", master);
  check_dtype("is_decayed", is_decayed, ScalarType::Bool);
  check_shape("is_decayed", is_decayed, {run_borders.size(0) - 1});
  check_contiguous("is_decayed", is_decayed);
}

ParameterRuns runs_of(const Tensor& run_borders, const bool* is_decayed) {
  return {const_pointer<int64_t>(run_borders), is_decayed, int(run_borders.size(0) - 1)};
}

__nv_bfloat16* published_pointer(const std::optional<Tensor>& published) {
  return published.has_value() ? pointer<__nv_bfloat16>(*published) : nullptr;
}

template <typename A>
MomentScalars<A> moment_scalars(double beta1, double beta2, double eps, double bias_correction2, double gradient_scale) {
  return {A(gradient_scale), A(1.0 - beta1), A(beta2), A(1.0 - beta2), A(std::sqrt(bias_correction2)), A(eps)};
}

// Calls body(T{}) with the C++ type of the master weights.
template <typename Body>
void dispatch_master(const Tensor& master, Body&& body) {
  if (master.scalar_type() == ScalarType::Double) return body(double{});
  body(float{});
}

void adamw_(const Tensor& grad, const Tensor& master, const Tensor& exp_avg, const Tensor& exp_avg_sq,
            std::optional<Tensor> published, const Tensor& run_borders, const Tensor& is_decayed, double lr, double beta1,
            double beta2, double eps, double weight_decay, double bias_correction1, double bias_correction2,
            double gradient_scale) {
  check_master(master);
  const bool is_narrow = grad.scalar_type() == ScalarType::BFloat16 && master.scalar_type() == ScalarType::Float;
  if (!is_narrow) check_dtype("grad", grad, master.scalar_type());
  check_flat("grad", grad, master);
  check_state("exp_avg", exp_avg, master);
  check_state("exp_avg_sq", exp_avg_sq, master);
  check_published(published, master);
  check_runs(run_borders, is_decayed, master);
  if (master.numel() == 0) return;
  const Device device(master);
  dispatch_master(master, [&](auto type) {
    using T = decltype(type);
    const auto step = [&](auto grad_type) {
      using G = decltype(grad_type);
      AdamwStep<G, T> p{};
      p.grad = const_pointer<G>(grad);
      p.master = pointer<T>(master);
      p.exp_avg = pointer<T>(exp_avg);
      p.exp_avg_sq = pointer<T>(exp_avg_sq);
      p.published = published_pointer(published);
      p.count = master.numel();
      p.runs = runs_of(run_borders, const_pointer<bool>(is_decayed));
      p.moments = moment_scalars<T>(beta1, beta2, eps, bias_correction2, gradient_scale);
      p.kept = T(1.0 - lr * weight_decay);
      p.step_size = T(-lr / bias_correction1);
      check_cuda("adamw", launch_adamw(device.stream(), p));
    };
    if constexpr (std::is_same_v<T, float>) {
      if (is_narrow) return step(__nv_bfloat16{});
    }
    step(T{});
  });
}

Tensor lamb_direction_(const Tensor& grad, const Tensor& master, const Tensor& exp_avg, const Tensor& exp_avg_sq,
                       const Tensor& run_borders, const Tensor& is_decayed, double beta1, double beta2, double eps,
                       double weight_decay, double bias_correction1, double bias_correction2, double gradient_scale) {
  check_master(master);
  check_state("grad", grad, master);
  check_state("exp_avg", exp_avg, master);
  check_state("exp_avg_sq", exp_avg_sq, master);
  check_runs(run_borders, is_decayed, master);
  const int64_t count = master.numel(), num_runs = run_borders.size(0) - 1;
  const int64_t tiles = divide_up(count, LAMB_TILE);
  const Tensor sums = torch::stable::new_empty(master, {num_runs, 2}, ScalarType::Double);
  const Tensor parts = torch::stable::new_empty(master, {tiles + num_runs, 2}, ScalarType::Double);
  const Device device(master);
  const ParameterRuns runs = runs_of(run_borders, const_pointer<bool>(is_decayed));
  dispatch_master(master, [&](auto type) {
    using T = decltype(type);
    LambDirection<T> p{};
    p.grad = pointer<T>(grad);
    p.master = const_pointer<T>(master);
    p.exp_avg = pointer<T>(exp_avg);
    p.exp_avg_sq = pointer<T>(exp_avg_sq);
    p.parts = pointer<double>(parts);
    p.count = count;
    p.runs = runs;
    p.moments = moment_scalars<T>(beta1, beta2, eps, bias_correction2, gradient_scale);
    p.correction1 = T(bias_correction1);
    p.weight_decay = T(weight_decay);
    if (count == 0) return;
    check_cuda("lamb_direction", launch_lamb_direction(device.stream(), p));
  });
  if (num_runs > 0) {
    check_cuda("lamb_square_sums",
               launch_lamb_square_sums(device.stream(), const_pointer<double>(parts), pointer<double>(sums), runs));
  }
  return sums;
}

void lamb_apply_(const Tensor& direction, const Tensor& master, std::optional<Tensor> published, const Tensor& run_borders,
                 const Tensor& ratios, double lr) {
  check_master(master);
  check_state("direction", direction, master);
  check_published(published, master);
  check_borders(run_borders, master);
  check_same_device("ratios", ratios, "master", master);
  check_dtype("ratios", ratios, ScalarType::Double);
  check_shape("ratios", ratios, {run_borders.size(0) - 1});
  check_contiguous("ratios", ratios);
  if (master.numel() == 0) return;
  const Device device(master);
  dispatch_master(master, [&](auto type) {
    using T = decltype(type);
    LambApply<T> p{};
    p.direction = const_pointer<T>(direction);
    p.master = pointer<T>(master);
    p.published = published_pointer(published);
    p.count = master.numel();
    p.runs = runs_of(run_borders, nullptr);
    p.ratios = const_pointer<double>(ratios);
    p.lr = T(lr);
    check_cuda("lamb_apply", launch_lamb_apply(device.stream(), p));
  });
}

}  // namespace

MEGATRAIN_KERNELS(library) {
  library.impl("adamw_", TORCH_BOX(&adamw_));
  library.impl("lamb_direction_", TORCH_BOX(&lamb_direction_));
  library.impl("lamb_apply_", TORCH_BOX(&lamb_apply_));
}

}  // namespace megatrain
