// The products of matmul.py in fp32, each sum in one chain: y = x w. N and K are multiples of 16.
#include <vector>

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
  std::vector<float> sums(leaves > 1 ? leaves * std::min(step, T) * PANEL : 0);
  for (int64_t t = 0; t < T; t += step) {
    const int64_t rows = std::min(step, T - t);
    for (int64_t n = 0; n < N; n += PANEL) {
      const int64_t width = std::min(PANEL, N - n);
      float* out = y + t * N + n;
      if (leaves == 1) {
        chains<Store::AS_IT_IS>(x + t * K, K, 1, panels + n * K, width, out, N, rows, width, K);
        continue;
      }
      for (int64_t leaf = 0; leaf < leaves; ++leaf)
        chains<Store::AS_IT_IS>(x + t * K + leaf * part, K, 1, panels + n * K + leaf * part * width, width,
                                sums.data() + leaf * rows * width, width, rows, width, part);
      join_pairs(sums.data(), leaves, rows * width);
      for (int64_t r = 0; r < rows; ++r) std::copy_n(sums.data() + r * width, width, out + r * N);
    }
  }
}
