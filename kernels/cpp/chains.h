// Matrix products whose every sum is one chain of fused multiply-adds, in ascending order from +0.
//
// The products of oneDNN and small ones of MKL are such chains. The callers in Python probe where. MKL adds
// the chain to +0, which makes a +0 of the -0 that a sum of products may underflow to.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "vector.h"

enum class Store { AS_IT_IS, PLUS_ZERO, ADD };

// sums[r][v] += the chain over k of a[r][k] b[k][n], for R rows and V vectors of columns.
template <int R, int V>
static inline void add_products(Vector (&sums)[R][V], const float* a, int64_t a_row, int64_t a_column,
                                const float* b, int64_t b_row, int64_t K) {
  for (int64_t k = 0; k < K; ++k, b += b_row) {
    Vector columns[V];
    for (int v = 0; v < V; ++v) columns[v] = Vector::load(b + v * Vector::WIDTH);
    for (int r = 0; r < R; ++r) {
      const Vector x = Vector::all(a[r * a_row + k * a_column]);
      for (int v = 0; v < V; ++v) sums[r][v] = sums[r][v].plus_product(x, columns[v]);
    }
  }
}

template <int R, int V>
static inline void set_zero(Vector (&sums)[R][V]) {
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) sums[r][v] = Vector::zero();
}

// The chain over k of a[m][k] b[k][n] for R rows and V vectors of columns: into c[m][n], or added to it.
template <int R, int V, Store HOW>
static inline void chain_tile(const float* a, int64_t a_row, int64_t a_column, const float* b, int64_t b_row,
                              float* c, int64_t c_row, int64_t K) {
  Vector sums[R][V];
  set_zero(sums);
  add_products(sums, a, a_row, a_column, b, b_row, K);
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) {
      float* at = c + r * c_row + v * Vector::WIDTH;
      if (HOW == Store::ADD) sums[r][v] = Vector::load(at).plus(sums[r][v]);
      if (HOW == Store::PLUS_ZERO) sums[r][v] = Vector::zero().plus(sums[r][v]);
      sums[r][v].store(at);
    }
}

// tile(R, m) for all M rows from m = 0 on, R of them at a time: six, and fewer at the end. R is a constant.
template <class Tile>
static inline void six_at_a_time(int64_t M, Tile tile) {
  int64_t m = 0;
  for (; m + 6 <= M; m += 6) tile(std::integral_constant<int, 6>(), m);
  for (; m + 4 <= M; m += 4) tile(std::integral_constant<int, 4>(), m);
  for (; m + 2 <= M; m += 2) tile(std::integral_constant<int, 2>(), m);
  if (m < M) tile(std::integral_constant<int, 1>(), m);
}

// All rows of V vectors of columns.
template <int V, Store HOW>
static inline void chain_columns(const float* a, int64_t a_row, int64_t a_column, const float* b,
                                 int64_t b_row, float* c, int64_t c_row, int64_t M, int64_t K) {
  six_at_a_time(M, [=](auto R, int64_t m) {
    chain_tile<R.value, V, HOW>(a + m * a_row, a_row, a_column, b, b_row, c + m * c_row, c_row, K);
  });
}

// All of c [M, N] from a [M, K] b [K, N], with any strides of a. N is a multiple of 16.
template <Store HOW>
static inline void chains(const float* a, int64_t a_row, int64_t a_column, const float* b, int64_t b_row,
                          float* c, int64_t c_row, int64_t M, int64_t N, int64_t K) {
  constexpr int64_t PAIR = 2 * Vector::WIDTH;
  int64_t n = 0;
  for (; n + PAIR <= N; n += PAIR)
    chain_columns<2, HOW>(a, a_row, a_column, b + n, b_row, c + n, c_row, M, K);
  if (n < N) chain_columns<1, HOW>(a, a_row, a_column, b + n, b_row, c + n, c_row, M, K);
}
