// The forward of attention.py, before and after the exponential, which is torch's.
//
// A query row of position i has i / KEY_TILE + 1 key tiles. The scores of its heads lie one after another:
// scores [tiles, KEY_TILE], of which those of token t begin at tile first[t] * heads.
//
// chunk_tiles: key tiles of a chunk; 0: all keys are one. `joins` has two factors for each chunk of a row:
// of the row's state before, and of the chunk's. In between torch takes the exponential of scores and joins.
#include "attention.h"

#include <cmath>

#include "chains.h"
#include "row_sum.h"
#include "transpose.h"

namespace {

// Where the factors of the chunks of token t lie, for all heads, of the tokens from `start` on. No token has
// more than tiles / chunk_tiles + 1 chunks.
int64_t chunk_place(const int64_t* first, int64_t start, int64_t t, int64_t chunk_tiles) {
  return (first[t] - first[start]) / chunk_tiles + t - start;
}

float highest_of(const float* row, int64_t width) {
  Vector high = Vector::load(row);
  for (int64_t j = Vector::WIDTH; j < width; j += Vector::WIDTH) high = Vector::load(row + j).max(high);
  float lanes[Vector::WIDTH];
  high.store(lanes);
  return *std::max_element(lanes, lanes + Vector::WIDTH);
}

// scores = scale q k - the maximum of their chunk, and m [T, heads], the maximum of a row. Hidden keys have
// -inf. The logarithms of joins.
template <class T>
void scores(const Plan& p, const T* q, int64_t q_stride, const Keys<T>& keys, float scale,
            const int64_t* first, int64_t from, int64_t to, int64_t chunk_tiles, int64_t window, float* out,
            float* joins, float* m) {
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
          const int64_t seen = Plan::first_seen(context + t, window) - a;  // in the tile
          if (seen < KEY_TILE)
            chains<Store::PLUS_ZERO>(rows.data() + t * G * D, D, 1, transposed.data(), KEY_TILE, at, width, G,
                                     KEY_TILE, D);
          for (int64_t g = 0; g < G; ++g) {
            for (int64_t j = 0; j < std::min(seen, KEY_TILE); ++j) at[g * width + j] = -INFINITY;
            for (int64_t j = context + t + 1; j < a + KEY_TILE; ++j) at[g * width + j - a] = -INFINITY;
          }
        }
      }
    }
    for (int64_t t = 0; t < n; ++t) {
      const int64_t width = (first[start + t + 1] - first[start + t]) * KEY_TILE;
      float* row = out + (first[start + t] - base) * p.heads * KEY_TILE;
      const int64_t step = chunk_tiles ? chunk_tiles * KEY_TILE : width;
      float* join = joins;
      if (joins) join += 2 * p.heads * chunk_place(first, p.starts[from], start + t, chunk_tiles);
      for (int64_t h = 0; h < p.heads; ++h, row += width) {
        float before = -INFINITY;
        for (int64_t c = 0; c < width; c += step) {
          const int64_t end = std::min(c + step, width);
          const float highest = highest_of(row + c, end - c), after = std::max(before, highest);
          const float shift = highest == -INFINITY ? 0 : highest, joined = after == -INFINITY ? 0 : after;
          for (int64_t j = c; j < end; ++j) row[j] -= shift;
          if (joins) *join++ = before - joined, *join++ = highest - joined;
          before = after;
        }
        m[(start + t) * p.heads + h] = before;
      }
    }
  }
}

// The state of a row [D] after one more chunk: row a + chunk b. The chunk becomes 0.
void join_chunk(float* row, float* chunk, int64_t D, const float* factors) {
  const float a = factors[0], b = factors[1];
  for (int64_t i = 0; i < D; ++i) row[i] = row[i] * a + chunk[i] * b, chunk[i] = 0;
}

// The sum of exponentials e [tiles, KEY_TILE] of a row. lanes: of row_sum.h.
float total_of(const float* e, int64_t tiles, int64_t lanes, int64_t chunk_tiles, const float* factors) {
  float total = 0;
  for (int64_t c = 0; c < tiles; c += chunk_tiles, factors += 2) {
    double sum = 0;
    for (int64_t j = c; j < std::min(c + chunk_tiles, tiles); ++j)
      sum += row_sum(e + j * KEY_TILE, KEY_TILE, lanes);
    if (chunk_tiles >= tiles) return float(sum);
    total = total * factors[0] + float(sum) * factors[1];
  }
  return total;
}

// o [T, heads, D] and l [T, heads] from e = exp(scores). Where a key tile hides keys, their zeros change no
// bit. sinks [T, heads, 2]: the factor of a row's state, and what its sink adds to the sum; null for none.
template <class T>
void outputs(const Plan& p, const Keys<T>& keys, const int64_t* first, int64_t from, int64_t to,
             int64_t chunk_tiles, int64_t window, const float* e, const float* joins, const float* sinks,
             int64_t lanes, T* o, float* l) {
  const int64_t G = p.group(), D = p.D, base = first[p.starts[from]], step = chunk_tiles * KEY_TILE;
  const auto factors_of = [&](int64_t token, int64_t head) {
    const int64_t tiles = first[token + 1] - first[token], chunks = (tiles + chunk_tiles - 1) / chunk_tiles;
    return joins + 2 * (p.heads * chunk_place(first, p.starts[from], token, chunk_tiles) + head * chunks);
  };
  std::vector<float> sums, joined, tile(D * KEY_TILE);
  for (int64_t s = from; s < to; ++s) {
    const int64_t n = p.queries[s], context = p.contexts[s], start = p.starts[s], seen = context + n;
    const bool has_chunks = chunk_tiles && seen > step;
    for (int64_t h = 0; h < p.kv_heads; ++h) {
      sums.assign(n * G * D, 0.0f);
      if (has_chunks) joined.assign(n * G * D, 0.0f);
      for (int64_t a = 0; a < seen; a += KEY_TILE) {
        keys.read(p, s, h, true, a, std::min(a + KEY_TILE, seen), tile.data());
        for (int64_t t = std::max<int64_t>(0, a - context); t < n; ++t) {
          if (Plan::first_seen(context + t, window) >= a + KEY_TILE) continue;
          const int64_t width = (first[start + t + 1] - first[start + t]) * KEY_TILE;
          const float* at = e + (first[start + t] - base) * p.heads * KEY_TILE + h * G * width + a;
          const int64_t visible = std::min(KEY_TILE, context + t + 1 - a);
          chains<Store::ADD>(at, width, 1, tile.data(), D, sums.data() + t * G * D, D, G, D, visible);
        }
        if (!has_chunks || ((a + KEY_TILE) % step && a + KEY_TILE < seen)) continue;
        const int64_t c = a / step;
        for (int64_t t = std::max<int64_t>(0, c * step - context); t < n; ++t)
          for (int64_t g = 0; g < G; ++g) {
            const int64_t at = (t * G + g) * D;
            join_chunk(joined.data() + at, sums.data() + at, D, factors_of(start + t, h * G + g) + 2 * c);
          }
      }
      std::vector<float>& all = has_chunks ? joined : sums;
      for (int64_t t = 0; t < n; ++t)
        for (int64_t g = 0; g < G; ++g) {
          const int64_t tiles = first[start + t + 1] - first[start + t], head = h * G + g;
          const float* of_row = e + ((first[start + t] - base) * p.heads + head * tiles) * KEY_TILE;
          const float* factors = chunk_tiles ? factors_of(start + t, head) : nullptr;
          const int64_t row = (start + t) * p.heads + head;
          float total = total_of(of_row, tiles, lanes, chunk_tiles ? chunk_tiles : tiles, factors);
          float* acc = all.data() + (t * G + g) * D;
          if (sinks) {
            total = total * sinks[2 * row] + sinks[2 * row + 1];
            for (int64_t i = 0; i < D; ++i) acc[i] *= sinks[2 * row];
          }
          l[row] = total;
          T* to_row = o + row * D;
          for (int64_t i = 0; i < D; ++i)
            to_row[i] = narrow<T>(chunk_tiles ? acc[i] / total + 0.0f : acc[i] / total);
        }
    }
  }
}

}  // namespace

#define DEFINE(T, NAME)                                                                                      \
  extern "C" void attention_scores_##NAME(const Plan* p, const T* q, int64_t q_stride, const T* k,           \
                                          int64_t stride, float scale, const int64_t* first, int64_t from,   \
                                          int64_t to, int64_t chunk_tiles, int64_t window, float* out,       \
                                          float* joins, float* m) {                                          \
    const Keys<T> keys{k, nullptr, stride};                                                                  \
    scores(*p, q, q_stride, keys, scale, first, from, to, chunk_tiles, window, out, joins, m);               \
  }                                                                                                          \
  extern "C" void attention_outputs_##NAME(                                                                  \
      const Plan* p, const T* k, const T* v, int64_t stride, const int64_t* first, int64_t from, int64_t to, \
      int64_t chunk_tiles, int64_t window, const float* e, const float* joins, const float* sinks,           \
      int64_t lanes, T* o, float* l) {                                                                       \
    outputs(*p, Keys<T>{k, v, stride}, first, from, to, chunk_tiles, window, e, joins, sinks, lanes, o, l);  \
  }
FOR_DTYPES(DEFINE)
