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
  const int64_t* pieces;  // the numbers of each part that one leaf has
  int64_t count, leaves;
};

// The sums of two neighbouring pieces of K numbers, together: AVX-512 has registers for both.
template <int R, int V>
static inline void add_two_products(Vector (&left)[R][V], Vector (&right)[R][V], const float* x,
                                    int64_t x_row, const float* panel, int64_t K) {
  constexpr int W = Vector::WIDTH;
  for (int64_t k = 0; k < K; ++k) {
    Vector a[V], b[V];
    for (int v = 0; v < V; ++v) a[v] = Vector::load(panel + (k * V + v) * W);
    for (int v = 0; v < V; ++v) b[v] = Vector::load(panel + ((k + K) * V + v) * W);
    for (int r = 0; r < R; ++r) {
      const Vector x_left = Vector::all(x[r * x_row + k]), x_right = Vector::all(x[r * x_row + k + K]);
      for (int v = 0; v < V; ++v) left[r][v] = left[r][v].plus_product(x_left, a[v]);
      for (int v = 0; v < V; ++v) right[r][v] = right[r][v].plus_product(x_right, b[v]);
    }
  }
}

// R rows of V vectors of y: each leaf's chain, and the tree of the leaves as a binary counter.
template <int R, int V>
void leaf_tile(const float* x, int64_t x_row, const float* panel, float* y, int64_t y_row, Parts parts) {
  constexpr int W = Vector::WIDTH, LEVELS = 2;  // of at most four pairs of leaves
  Vector left[R][V], right[R][V], waiting[LEVELS][R][V];
  for (int64_t leaf = 0; leaf < parts.leaves; leaf += 2) {
    set_zero(left);
    set_zero(right);
    for (int64_t part = 0, first = 0; part < parts.count; first += parts.pieces[part++] * parts.leaves) {
      const int64_t K = parts.pieces[part], k = first + leaf * K;
      const float* from = panel + k * V * W;
      if (W == 16) {
        add_two_products(left, right, x + k, x_row, from, K);
      } else {
        add_products(left, x + k, x_row, 1, from, V * W, K);
        add_products(right, x + k + K, x_row, 1, from + K * V * W, V * W, K);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) left[r][v] = left[r][v].plus(right[r][v]);
    int level = 0;
    for (int64_t bits = leaf / 2; bits & 1; bits >>= 1, ++level)
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) left[r][v] = waiting[level][r][v].plus(left[r][v]);
    if (leaf + 2 == parts.leaves) break;
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) waiting[level][r][v] = left[r][v];
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) left[r][v].store(y + r * y_row + v * W);
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

// y [T, N] = x [T, K] w, with w in panels. K lies in parts and is cut in leaves, which a tree adds
// (leaves.py).
extern "C" void matmul_panels(const float* x, const float* panels, float* y, int64_t T, int64_t N, int64_t K,
                              const int64_t* pieces, int64_t parts, int64_t leaves) {
  const int64_t step = std::max<int64_t>(6, NUMBERS / K / 6 * 6);
  const Parts all = {pieces, parts, leaves};
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
