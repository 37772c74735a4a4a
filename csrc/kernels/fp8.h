// Quantization to 8-bit floating point, with one scale for the tensor, for each row or for each column, and with the
// transposed copy that matrix products of the backward pass need (they read both operands along the dim of the sum).
//
// Values are multiplied by a scale; products are multiplied by its inverse afterwards. Values that are not finite become
// NaN, because saturation would hide them. T is bf16, fp16 or fp32: training in fp64 does not quantize.
#pragma once

#include "elements.h"

namespace megatrain {

enum class Fp8Format { E4M3, E5M2 };

// The blocks of launch_largest_parts, each of which writes one part.
int64_t num_largest_parts(int num_multiprocessors, int64_t numel, int width);
// parts[block] = the largest magnitude of the block's part of x. width: of a pack of x.
template <typename T>
cudaError_t launch_largest_parts(cudaStream_t stream, const T* x, float* parts, int64_t numel, int64_t num_parts, int width);
// scale[0] = the scale for the largest of parts, scale[1] = its inverse.
cudaError_t launch_scale_of_parts(cudaStream_t stream, Fp8Format format, const float* parts, int64_t num_parts, float* scale);

constexpr int FP8_TILE = 128;  // rows and columns of the tile of a block
constexpr int64_t FP8_MAX_ROWS = int64_t(65535) * FP8_TILE;  // a grid has at most 65535 tiles along y

template <typename T>
struct Quantize {
  const T* x;            // [rows, columns]
  const float* scale;    // one number, or one for each column
  unsigned char* q;      // [rows, columns], or null
  unsigned char* q_t;    // [columns, rows], or null
  float* largest;        // [tiles]: the largest magnitude of each tile, or null
  int64_t rows, columns;
  bool is_scale_of_column;
};

template <typename T>
cudaError_t launch_quantize(cudaStream_t stream, Fp8Format format, const Quantize<T>& p);

// Quantizes each row of x [rows, columns] with its own scale. inverse [rows]: the inverse of the scales.
template <typename T>
cudaError_t launch_quantize_rows(cudaStream_t stream, Fp8Format format, const T* x, unsigned char* q, float* inverse, int64_t rows,
                                 int64_t columns);

constexpr int COLUMN_ROWS = 256;  // rows over which a block finds the largest magnitude of each column

// parts [blocks of COLUMN_ROWS rows, columns]: the largest magnitude of each column in these rows.
template <typename T>
cudaError_t launch_largest_of_columns(cudaStream_t stream, const T* x, float* parts, int64_t rows, int64_t columns);
// scale and inverse [columns]: the scale for the largest of a column's parts, and its inverse.
cudaError_t launch_scale_of_columns(cudaStream_t stream, Fp8Format format, const float* parts, int64_t num_parts, int64_t columns,
                                    float* scale, float* inverse);

}  // namespace megatrain
