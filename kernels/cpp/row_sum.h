// The sum of a row in the order of torch.sum on a CPU (aten/src/ATen/native/cpu/SumKernel.cpp): four sums of
// vectors side by side, cascaded, then the vector's lanes. Which number of lanes torch has is probed
// (cpp/row_sums.py).
#pragma once

#include <algorithm>
#include <cstdint>

template <int LANES>
static float row_sum_of(const float* x, int64_t n) {
  constexpr int LEVELS = 4, SIDES = 4, WIDTH = SIDES * LANES;
  const int64_t vectors = n / LANES, size = vectors / SIDES;
  int power = 4;
  for (int64_t log = 0; (int64_t(1) << log) < size; ++log) power = std::max<int>(power, (log + 1) / LEVELS);
  const int64_t step = int64_t(1) << power;
  float levels[LEVELS][WIDTH] = {};
  int64_t i = 0;
  while (i + step <= size) {
    for (const int64_t end = i + step; i < end; ++i)
      for (int k = 0; k < WIDTH; ++k) levels[0][k] += x[i * WIDTH + k];
    for (int j = 1; j < LEVELS; ++j) {
      for (int k = 0; k < WIDTH; ++k) levels[j][k] += levels[j - 1][k], levels[j - 1][k] = 0;
      if (i & ((step - 1) << (j * power))) break;
    }
  }
  for (; i < size; ++i)
    for (int k = 0; k < WIDTH; ++k) levels[0][k] += x[i * WIDTH + k];
  for (int j = 1; j < LEVELS; ++j)
    for (int k = 0; k < WIDTH; ++k) levels[0][k] += levels[j][k];
  float* sums = levels[0];
  for (int64_t v = size * SIDES; v < vectors; ++v)
    for (int k = 0; k < LANES; ++k) sums[k] += x[v * LANES + k];
  for (int side = 1; side < SIDES; ++side)
    for (int k = 0; k < LANES; ++k) sums[k] += sums[side * LANES + k];
  float total = 0;
  for (int64_t k = vectors * LANES; k < n; ++k) total += x[k];
  for (int k = 0; k < LANES; ++k) total += sums[k];
  return total;
}

static inline float row_sum(const float* x, int64_t n, int64_t lanes) {
  return lanes == 16 ? row_sum_of<16>(x, n) : lanes == 8 ? row_sum_of<8>(x, n) : row_sum_of<4>(x, n);
}
