// order.join_pairs: neighbours are added pairwise, in the memory of the left ones.
#pragma once

#include <cstdint>

// parts [n, size], n a power of two -> their sum in the first part.
static inline void join_pairs(float* parts, int64_t n, int64_t size) {
  for (int64_t apart = 1; apart < n; apart *= 2)
    for (int64_t left = 0; left < n; left += 2 * apart)
      for (int64_t i = 0; i < size; ++i) parts[left * size + i] += parts[(left + apart) * size + i];
}
