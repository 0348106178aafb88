// A transposed copy of a matrix, in squares of eight.
#pragma once

#include <immintrin.h>

#include <cstdint>

static inline void transpose_square(const float* x, int64_t x_row, float* y, int64_t y_row) {
  __m256 rows[8], pairs[8], fours[8];
  for (int i = 0; i < 8; ++i) rows[i] = _mm256_loadu_ps(x + i * x_row);
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; ++j) {
      fours[i + 2 * j] = _mm256_shuffle_ps(pairs[i + j], pairs[i + j + 2], 0x44);
      fours[i + 2 * j + 1] = _mm256_shuffle_ps(pairs[i + j], pairs[i + j + 2], 0xee);
    }
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(y + i * y_row, _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x20));
    _mm256_storeu_ps(y + (i + 4) * y_row, _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x31));
  }
}

// y [columns, rows] = x [rows, columns]^T
static inline void transpose(const float* x, int64_t x_row, float* y, int64_t y_row, int64_t rows,
                             int64_t columns) {
  const int64_t whole_rows = rows / 8 * 8, whole_columns = columns / 8 * 8;
  for (int64_t i = 0; i < whole_rows; i += 8)
    for (int64_t j = 0; j < whole_columns; j += 8)
      transpose_square(x + i * x_row + j, x_row, y + j * y_row + i, y_row);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = i < whole_rows ? whole_columns : 0; j < columns; ++j)
      y[j * y_row + i] = x[i * x_row + j];
}
