// The products of matmul.py in fp32, each sum in one chain: y = x w. N and K are multiples of 16.
#include "chains.h"
#include "transpose.h"

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

// Parts that lie one after another along K; a leaf has an equal piece of each, in one chain.
struct Parts {
  const int64_t* widths;
  int64_t count, leaves;
};

// R rows of V vectors of y: each leaf's chain, and the tree of the leaves as a binary counter.
template <int R, int V>
void leaf_tile(const float* x, int64_t x_row, const float* panel, float* y, int64_t y_row, Parts parts) {
  constexpr int W = Vector::WIDTH, LEVELS = 3;  // of at most eight leaves
  Vector sums[R][V], waiting[LEVELS][R][V];
  for (int64_t leaf = 0; leaf < parts.leaves; ++leaf) {
    set_zero(sums);
    for (int64_t part = 0, first = 0; part < parts.count; first += parts.widths[part++]) {
      const int64_t K = parts.widths[part] / parts.leaves, k = first + leaf * K;
      add_products(sums, x + k, x_row, 1, panel + k * V * W, V * W, K);
    }
    int level = 0;
    for (int64_t bits = leaf; bits & 1; bits >>= 1, ++level)
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) sums[r][v] = waiting[level][r][v].plus(sums[r][v]);
    if (leaf + 1 == parts.leaves) break;
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) waiting[level][r][v] = sums[r][v];
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) sums[r][v].store(y + r * y_row + v * W);
}

// All rows of V vectors of columns.
template <int V>
void leaf_columns(const float* x, int64_t x_row, const float* panel, float* y, int64_t y_row, int64_t M,
                  Parts parts) {
  six_at_a_time(M, [=](auto R, int64_t m) {
    leaf_tile<R.value, V>(x + m * x_row, x_row, panel, y + m * y_row, y_row, parts);
  });
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

// y [T, N] = x [T, K] w, with w in panels. K lies in parts and is cut in leaves, which a tree adds (leaves.py).
extern "C" void matmul_panels(const float* x, const float* panels, float* y, int64_t T, int64_t N, int64_t K,
                              const int64_t* widths, int64_t parts, int64_t leaves) {
  const int64_t step = std::max<int64_t>(6, NUMBERS / K / 6 * 6);
  const Parts all = {widths, parts, leaves};
  for (int64_t t = 0; t < T; t += step) {
    const int64_t rows = std::min(step, T - t);
    for (int64_t n = 0; n < N; n += PANEL) {
      const int64_t width = std::min(PANEL, N - n);
      const float *from = x + t * K, *panel = panels + n * K;
      float* out = y + t * N + n;
      if (leaves == 1)
        chains<Store::AS_IT_IS>(from, K, 1, panel, width, out, N, rows, width, K);
      else if (width == PANEL)
        leaf_columns<2>(from, K, panel, out, N, rows, all);
      else
        leaf_columns<1>(from, K, panel, out, N, rows, all);
    }
  }
}
