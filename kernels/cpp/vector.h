// A vector of fp32 with a fused multiply-add: 16 numbers with AVX-512, 8 with AVX2.
#pragma once

#include <immintrin.h>

#ifdef __AVX512F__

struct Vector {
  static constexpr int WIDTH = 16;
  __m512 x;
  static Vector zero() { return {_mm512_setzero_ps()}; }
  static Vector all(float x) { return {_mm512_set1_ps(x)}; }
  static Vector load(const float* at) { return {_mm512_loadu_ps(at)}; }
  void store(float* at) const { _mm512_storeu_ps(at, x); }
  Vector plus(Vector y) const { return {_mm512_add_ps(x, y.x)}; }
  Vector plus_product(Vector y, Vector z) const { return {_mm512_fmadd_ps(y.x, z.x, x)}; }
  Vector max(Vector y) const { return {_mm512_max_ps(x, y.x)}; }
};

#else

struct Vector {
  static constexpr int WIDTH = 8;
  __m256 x;
  static Vector zero() { return {_mm256_setzero_ps()}; }
  static Vector all(float x) { return {_mm256_set1_ps(x)}; }
  static Vector load(const float* at) { return {_mm256_loadu_ps(at)}; }
  void store(float* at) const { _mm256_storeu_ps(at, x); }
  Vector plus(Vector y) const { return {_mm256_add_ps(x, y.x)}; }
  Vector plus_product(Vector y, Vector z) const { return {_mm256_fmadd_ps(y.x, z.x, x)}; }
  Vector max(Vector y) const { return {_mm256_max_ps(x, y.x)}; }
};

#endif
