// columns.py: column sums of blocks of rows, each by a binary tree; and the tree over heads of qk_norm.py.
#include <algorithm>
#include <cstdint>
#include <vector>

namespace {

constexpr int64_t COLUMNS = 64;  // columns of one pass, so that the tree stays in the cache

// x [n, width]: the sum over n by halving, as order.tree_sum has it, into x[0].
void tree_in_place(float* x, int64_t n, int64_t width) {
  for (; n > 1; n = (n + 1) / 2) {
    const int64_t half = (n + 1) / 2;
    for (int64_t i = 0; i < n - half; ++i)
      for (int64_t c = 0; c < width; ++c) x[i * width + c] += x[(half + i) * width + c];
  }
}

}  // namespace

// acc[shard] += the column sums of each block. dy [T, N]; blocks [n, 3]: the shard's row of acc, first row,
// end. Rows past the end of a block are zeros, as far as `padded`, a power of two.
extern "C" void add_columns(float* acc, const float* dy, const int64_t* blocks, int64_t n, int64_t N,
                            int64_t padded) {
  std::vector<float> tree(padded * COLUMNS);
  for (int64_t c = 0; c < N; c += COLUMNS) {
    const int64_t width = std::min(COLUMNS, N - c);
    for (int64_t b = 0; b < n; ++b) {
      const int64_t shard = blocks[3 * b], start = blocks[3 * b + 1], rows = blocks[3 * b + 2] - start;
      for (int64_t i = 0; i < rows; ++i)
        std::copy_n(dy + (start + i) * N + c, width, tree.data() + i * width);
      std::fill(tree.data() + rows * width, tree.data() + padded * width, 0.0f);
      tree_in_place(tree.data(), padded, width);
      for (int64_t i = 0; i < width; ++i) acc[shard * N + c + i] += tree[i];
    }
  }
}

// The sum over heads [from, to) of dw [T, H, D] -> out [T, D].
extern "C" void sum_heads(const float* dw, float* out, int64_t T, int64_t H, int64_t from, int64_t to,
                          int64_t D) {
  std::vector<float> tree((to - from) * D);
  for (int64_t t = 0; t < T; ++t, out += D) {
    std::copy_n(dw + (t * H + from) * D, (to - from) * D, tree.data());
    tree_in_place(tree.data(), to - from, D);
    std::copy_n(tree.data(), D, out);
  }
}
