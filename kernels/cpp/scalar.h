// The dtypes of tensors, and their conversion to the fp32 in which everything is computed.
#pragma once

#include <cstdint>
#include <cstring>

struct bfloat16 {
  uint16_t bits;
};

static inline float widen(float x) { return x; }

static inline float widen(bfloat16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, sizeof y);
  return y;
}

template <class T>
T narrow(float x);

template <>
inline float narrow(float x) {
  return x;
}

// To the nearest, and to the even one of two. NaN stays NaN.
template <>
inline bfloat16 narrow(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return {uint16_t(x != x ? 0x7fc0 : rounded)};
}

// Each function for both dtypes, under C names that end with the dtype's.
#define FOR_DTYPES(DEFINE) DEFINE(float, float32) DEFINE(bfloat16, bfloat16)
