// rope.py, and the three operations of decode_heads.py in one pass over the heads of new tokens.
#include <vector>

#include "scalar.h"

namespace {

// One head x [D], rotated: y1 = x1 cos - x2 sin, y2 = x2 cos + x1 sin.
template <class T>
void rotate(const T* x, const float* cos, const float* sin, float sign, T* y, int64_t D) {
  const int64_t half = D / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float x1 = widen(x[i]), x2 = widen(x[half + i]), s = sign * sin[i];
    y[i] = narrow<T>(x1 * cos[i] - x2 * s);
    y[half + i] = narrow<T>(x2 * cos[i] + x1 * s);
  }
}

// x [n, H, D], tokens `stride` apart -> y [n, H, D]; cos, sin [n, D / 2]; sign -1: the backward.
template <class T>
void rope(const T* x, int64_t stride, const float* cos, const float* sin, float sign, T* y, int64_t n,
          int64_t H, int64_t D) {
  for (int64_t t = 0; t < n; ++t, x += stride, cos += D / 2, sin += D / 2)
    for (int64_t h = 0; h < H; ++h, y += D) rotate(x + h * D, cos, sin, sign, y, D);
}

// qkv [n, heads + 2 kv, D] -> q [n, heads, D], and k and v into pages [blocks * kv, 2, tile, D] at (block,
// offset). roots [n, heads + kv]: of qk_norm, whose weights are wq and wk [D]; null where the model has none.
// blocks: of the cache. Returns whether each place is one of it; nothing is written otherwise.
template <class T>
int64_t heads_to_cache(const T* qkv, const float* roots, const T* wq, const T* wk, const float* cos,
                       const float* sin, T* q, T* pages, const int64_t* block, const int64_t* offset,
                       int64_t n, int64_t heads, int64_t kv, int64_t D, int64_t tile, int64_t blocks) {
  for (int64_t t = 0; t < n; ++t)
    if (block[t] < 0 || block[t] >= blocks || offset[t] < 0 || offset[t] >= tile) return 0;
  std::vector<T> normal(D);
  for (int64_t t = 0; t < n; ++t, cos += D / 2, sin += D / 2) {
    T* page = pages + block[t] * kv * 2 * tile * D + offset[t] * D;
    for (int64_t h = 0; h < heads + kv; ++h, qkv += D) {
      const T* x = qkv;
      if (roots) {
        const T* w = h < heads ? wq : wk;
        const float r = 1.0f / *roots++;
        for (int64_t i = 0; i < D; ++i) normal[i] = narrow<T>((widen(x[i]) * r) * widen(w[i]));
        x = normal.data();
      }
      T* y = h < heads ? q : page + (h - heads) * 2 * tile * D;
      rotate(x, cos, sin, 1.0f, y, D);
      if (h < heads) q += D;
    }
    for (int64_t h = 0; h < kv; ++h, qkv += D) std::memcpy(page + (h * 2 + 1) * tile * D, qkv, D * sizeof(T));
  }
  return 1;
}

}  // namespace

#define DEFINE(T, NAME)                                                                                     \
  extern "C" void rope_##NAME(const T* x, int64_t stride, const float* cos, const float* sin, float sign,   \
                              T* y, int64_t n, int64_t H, int64_t D) {                                      \
    rope(x, stride, cos, sin, sign, y, n, H, D);                                                            \
  }                                                                                                         \
  extern "C" int64_t heads_to_cache_##NAME(                                                                 \
      const T* qkv, const float* roots, const T* wq, const T* wk, const float* cos, const float* sin, T* q, \
      T* pages, const int64_t* block, const int64_t* offset, int64_t n, int64_t heads, int64_t kv,          \
      int64_t D, int64_t tile, int64_t blocks) {                                                            \
    return heads_to_cache(qkv, roots, wq, wk, cos, sin, q, pages, block, offset, n, heads, kv, D, tile,     \
                          blocks);                                                                          \
  }
FOR_DTYPES(DEFINE)
