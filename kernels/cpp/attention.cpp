// The forward of attention.py, before and after the exponential, which is torch's.
//
// A query row of position i has i / KEY_TILE + 1 key tiles. The scores of its heads lie one after another:
// scores [tiles, KEY_TILE], of which those of token t begin at tile first[t] * heads.
#include "attention.h"

#include <cmath>

#include "chains.h"
#include "row_sum.h"
#include "transpose.h"

namespace {

// scores = scale q k - m, and m [T, heads], the maximum of a row. Hidden keys have -inf.
template <class T>
void scores(const Plan& p, const T* q, int64_t q_stride, const Keys<T>& keys, float scale,
            const int64_t* first, int64_t from, int64_t to, float* out, float* m) {
  const int64_t G = p.group(), D = p.D, base = first[p.starts[from]];
  std::vector<float> rows, tile(D * KEY_TILE), transposed(D * KEY_TILE);
  for (int64_t s = from; s < to; ++s) {
    const int64_t n = p.queries[s], context = p.contexts[s], start = p.starts[s];
    rows.resize(n * G * D);
    for (int64_t h = 0; h < p.kv_heads; ++h) {
      read_queries(p, q, q_stride, s, h, scale, rows.data());
      for (int64_t a = 0; a < context + n; a += KEY_TILE) {
        keys.read(p, s, h, false, a, std::min(a + KEY_TILE, context + n), tile.data());
        transpose(tile.data(), D, transposed.data(), KEY_TILE, KEY_TILE, D);
        for (int64_t t = std::max<int64_t>(0, a - context); t < n; ++t) {
          const int64_t width = (first[start + t + 1] - first[start + t]) * KEY_TILE;
          float* at = out + (first[start + t] - base) * p.heads * KEY_TILE + h * G * width + a;
          chains<Store::PLUS_ZERO>(rows.data() + t * G * D, D, 1, transposed.data(), KEY_TILE, at, width, G,
                                   KEY_TILE, D);
          for (int64_t g = 0; g < G; ++g)
            for (int64_t j = context + t + 1; j < a + KEY_TILE; ++j) at[g * width + j - a] = -INFINITY;
        }
      }
    }
    for (int64_t t = 0; t < n; ++t) {
      const int64_t width = (first[start + t + 1] - first[start + t]) * KEY_TILE;
      float* row = out + (first[start + t] - base) * p.heads * KEY_TILE;
      for (int64_t h = 0; h < p.heads; ++h, row += width) {
        Vector high = Vector::load(row);
        for (int64_t j = Vector::WIDTH; j < width; j += Vector::WIDTH) high = Vector::load(row + j).max(high);
        float lanes[Vector::WIDTH];
        high.store(lanes);
        const float highest = *std::max_element(lanes, lanes + Vector::WIDTH);
        for (int64_t j = 0; j < width; ++j) row[j] -= highest;
        m[(start + t) * p.heads + h] = highest;
      }
    }
  }
}

// o [T, heads, D] and l [T, heads] from e = exp(scores). lanes: of row_sum.h. Where the last key tile
// hides keys, their zeros change no bit.
template <class T>
void outputs(const Plan& p, const Keys<T>& keys, const int64_t* first, int64_t from, int64_t to,
             const float* e, int64_t lanes, T* o, float* l) {
  const int64_t G = p.group(), D = p.D, base = first[p.starts[from]];
  std::vector<float> sums, tile(D * KEY_TILE);
  for (int64_t s = from; s < to; ++s) {
    const int64_t n = p.queries[s], context = p.contexts[s], start = p.starts[s];
    for (int64_t h = 0; h < p.kv_heads; ++h) {
      sums.assign(n * G * D, 0.0f);
      for (int64_t a = 0; a < context + n; a += KEY_TILE) {
        keys.read(p, s, h, true, a, std::min(a + KEY_TILE, context + n), tile.data());
        for (int64_t t = std::max<int64_t>(0, a - context); t < n; ++t) {
          const int64_t width = (first[start + t + 1] - first[start + t]) * KEY_TILE;
          const float* at = e + (first[start + t] - base) * p.heads * KEY_TILE + h * G * width + a;
          const int64_t visible = std::min(KEY_TILE, context + t + 1 - a);
          chains<Store::ADD>(at, width, 1, tile.data(), D, sums.data() + t * G * D, D, G, D, visible);
        }
      }
      for (int64_t t = 0; t < n; ++t)
        for (int64_t g = 0; g < G; ++g) {
          const int64_t tiles = first[start + t + 1] - first[start + t], head = h * G + g;
          const float* of_row = e + ((first[start + t] - base) * p.heads + head * tiles) * KEY_TILE;
          double sum = 0;
          for (int64_t j = 0; j < tiles; ++j) sum += row_sum(of_row + j * KEY_TILE, KEY_TILE, lanes);
          const float total = float(sum), *acc = sums.data() + (t * G + g) * D;
          l[(start + t) * p.heads + head] = total;
          T* to_row = o + ((start + t) * p.heads + head) * D;
          for (int64_t i = 0; i < D; ++i) to_row[i] = narrow<T>(acc[i] / total);
        }
    }
  }
}

}  // namespace

#define DEFINE(T, NAME)                                                                                    \
  extern "C" void attention_scores_##NAME(const Plan* p, const T* q, int64_t q_stride, const T* k,         \
                                          int64_t stride, float scale, const int64_t* first, int64_t from, \
                                          int64_t to, float* out, float* m) {                              \
    scores(*p, q, q_stride, Keys<T>{k, nullptr, stride}, scale, first, from, to, out, m);                  \
  }                                                                                                        \
  extern "C" void attention_outputs_##NAME(const Plan* p, const T* k, const T* v, int64_t stride,          \
                                           const int64_t* first, int64_t from, int64_t to, const float* e, \
                                           int64_t lanes, T* o, float* l) {                                \
    outputs(*p, Keys<T>{k, v, stride}, first, from, to, e, lanes, o, l);                                   \
  }
FOR_DTYPES(DEFINE)
