// Where the queries and keys of an attention call lie (attention_plan.py).
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "scalar.h"

constexpr int64_t KEY_TILE = 32;

// S sequences. Arrays are of int64.
struct Plan {
  const int64_t* starts;      // [S], the first row of each sequence in q
  const int64_t* queries;     // [S]
  const int64_t* contexts;    // [S], the positions before the queries
  const int64_t* key_starts;  // [S], the first row in packed keys; null where the keys lie in blocks
  const int64_t* table;       // [S, pages], the blocks of each sequence
  int64_t pages, heads, kv_heads, D;

  int64_t group() const { return heads / kv_heads; }
  int64_t keys(int64_t s) const { return contexts[s] + queries[s]; }
  // The first key that position i sees. window: 0 is none.
  static int64_t first_seen(int64_t i, int64_t window) {
    return window ? std::max<int64_t>(0, i + 1 - window) : 0;
  }
};

// Packed keys k and values v [K, kv_heads, D], rows `stride` apart.
// Or blocks k [blocks * kv_heads, 2, KEY_TILE, D].
template <class T>
struct Keys {
  const T *k, *v;
  int64_t stride;

  // Keys (or values) [a, b) of head h of sequence s, in fp32 -> out [b - a, D]. Of blocks: within a key tile.
  void read(const Plan& p, int64_t s, int64_t h, bool values, int64_t a, int64_t b, float* out) const {
    const T* from;
    int64_t step;
    if (p.key_starts) {
      from = (values ? v : k) + (p.key_starts[s] + a) * stride + h * p.D;
      step = stride;
    } else {
      const int64_t tile = p.table[s * p.pages + a / KEY_TILE] * p.kv_heads + h;
      from = k + ((tile * 2 + values) * KEY_TILE + a % KEY_TILE) * p.D;
      step = p.D;
    }
    for (int64_t j = 0; j < b - a; ++j, from += step, out += p.D)
      for (int64_t d = 0; d < p.D; ++d) out[d] = widen(from[d]);
  }
};

// The query rows of head h of sequence s, times `scale`, in fp32 -> out [rows, D].
// x [T, heads, D], tokens `stride` apart.
template <class T>
void read_queries(const Plan& p, const T* x, int64_t stride, int64_t s, int64_t h, float scale, float* out) {
  const int64_t width = p.group() * p.D;
  const T* from = x + p.starts[s] * stride + h * width;
  for (int64_t t = 0; t < p.queries[s]; ++t, from += stride, out += width)
    for (int64_t i = 0; i < width; ++i) out[i] = widen(from[i]) * scale;
}
