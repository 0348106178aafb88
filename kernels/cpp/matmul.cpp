// The products of matmul.py in fp32, each sum in one chain: y = x w. N and K are multiples of 16.
#include "chains.h"
#include "transpose.h"
#include "tree.h"

namespace {

constexpr int64_t PANEL = 2 * Vector::WIDTH;
// Numbers of x of one pass over w, so that they stay in the cache.
constexpr int64_t NUMBERS = 1 << 15;

// x [T, W] of rows `row` apart -> out [T, W]
template <int W>
void copy_columns(const float* x, int64_t row, float* out, int64_t T) {
  for (int64_t t = 0; t < T; ++t, x += row, out += W)
    for (int i = 0; i < W; ++i) out[i] = x[i];
}

// Rows whose leaves are summed together, so that these sums stay in the nearest cache.
constexpr int64_t LEAF_ROWS = 12, MOST_LEAVES = 8;

// A few rows of y, from one panel: the sums of the leaves, and their tree.
void leaf_rows(const float* x, const float* panel, float* y, int64_t rows, int64_t N, int64_t width,
               int64_t K, int64_t leaves) {
  alignas(64) float sums[MOST_LEAVES * LEAF_ROWS * PANEL];
  const int64_t part = K / leaves, size = rows * width;
  for (int64_t leaf = 0; leaf < leaves; ++leaf)
    chains<Store::AS_IT_IS>(x + leaf * part, K, 1, panel + leaf * part * width, width, sums + leaf * size,
                            width, rows, width, part);
  join_pairs(sums, leaves, size);
  for (int64_t r = 0; r < rows; ++r) std::copy_n(sums + r * width, width, y + r * N);
}

}  // namespace

// w [K, N], whose row or column lies in one piece -> panels [N / PANEL, K, PANEL]; the last one is narrower
// where N asks for it.
extern "C" void pack_panels(const float* w, int64_t row, int64_t column, float* out, int64_t K, int64_t N) {
  for (int64_t n = 0; n < N; n += PANEL) {
    const int64_t width = std::min(PANEL, N - n);
    if (column == 1) {
      width == PANEL ? copy_columns<PANEL>(w + n, row, out + n * K, K)
                     : copy_columns<Vector::WIDTH>(w + n, row, out + n * K, K);
    } else {
      transpose(w + n * column, column, out + n * K, width, width, K);
    }
  }
}

// y [T, N] = x [T, K] w, with w in panels. K is cut in leaves, which a tree adds (leaves.py).
extern "C" void matmul_panels(const float* x, const float* panels, float* y, int64_t T, int64_t N, int64_t K,
                              int64_t leaves) {
  const int64_t step = std::max<int64_t>(6, NUMBERS / K / 6 * 6), part = K / leaves;
  for (int64_t t = 0; t < T; t += step) {
    const int64_t rows = std::min(step, T - t);
    for (int64_t n = 0; n < N; n += PANEL) {
      const int64_t width = std::min(PANEL, N - n);
      const float *from = x + t * K, *panel = panels + n * K;
      float* out = y + t * N + n;
      if (leaves == 1)
        chains<Store::AS_IT_IS>(from, K, 1, panel, width, out, N, rows, width, K);
      else
        for (int64_t r = 0; r < rows; r += LEAF_ROWS)
          leaf_rows(from + r * K, panel, out + r * N, std::min(LEAF_ROWS, rows - r), N, width, K, leaves);
    }
  }
}
