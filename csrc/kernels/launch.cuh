// What every launch function needs: the choice of a kernel's template arguments, the launch, and the types to compile for.
#pragma once

#include <type_traits>
#include <utility>

#include "elements.h"

// Explicit instantiations for all types of floating-point tensors: INSTANTIATE(T) is a macro of the including file.
#define MEGATRAIN_FOR_FLOATING(INSTANTIATE) \
  INSTANTIATE(__nv_bfloat16)                \
  INSTANTIATE(__half)                       \
  INSTANTIATE(float)                        \
  INSTANTIATE(double)

namespace megatrain {

template <int VALUE>
using constant = std::integral_constant<int, VALUE>;

// Calls body(constant<WIDTH>) with the width of packs that pack_width<T> returned.
template <typename T, typename Body>
cudaError_t dispatch_width(int width, Body&& body) {
  if (width == 1) return body(constant<1>{});
  return body(constant<full_width<T>>{});
}

template <typename... Parameters, typename... Arguments>
cudaError_t launch_grid(cudaStream_t stream, void (*kernel)(Parameters...), dim3 grid, dim3 block, Arguments&&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
}

// The same for a grid of one dim. Fails if there are more blocks than a grid can have.
template <typename... Parameters, typename... Arguments>
cudaError_t launch(cudaStream_t stream, void (*kernel)(Parameters...), int64_t blocks, dim3 block, Arguments&&... arguments) {
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  return launch_grid(stream, kernel, dim3(unsigned(blocks)), block, std::forward<Arguments>(arguments)...);
}

}  // namespace megatrain
