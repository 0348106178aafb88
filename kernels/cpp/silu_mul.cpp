// The elementwise parts of silu_mul.py and gelu_mul.py. The exponential between them is torch's.
//
// gu [rows, 2 I]; e, y, dy [rows, I]; dgu like gu. I: the width.
#include "scalar.h"

namespace {

// A and B of gelu.py, in fp64 as torch takes them, rounded as torch rounds them.
constexpr double a = 1.5957691216057308, b = 0.044715 * a;

inline float square_of(float g) {
  const float square = g * g;
  return square > 1024.0f ? 1024.0f : square;
}

// z is g, or g (a + b g^2) of gelu.
template <bool GELU, class T>
void minus_gate(const T* gu, float* out, int64_t rows, int64_t width) {
  for (int64_t t = 0; t < rows; ++t, gu += 2 * width, out += width)
    for (int64_t i = 0; i < width; ++i) {
      const float g = widen(gu[i]);
      out[i] = -(GELU ? (square_of(g) * float(b) + float(a)) * g : g);
    }
}

// e: exp(-z)
template <class T>
void forward(const T* gu, const float* e, T* y, int64_t rows, int64_t width) {
  for (int64_t t = 0; t < rows; ++t, gu += 2 * width, e += width, y += width)
    for (int64_t i = 0; i < width; ++i) {
      const T silu = narrow<T>(widen(gu[i]) / (e[i] + 1.0f));
      y[i] = narrow<T>(widen(silu) * widen(gu[width + i]));
    }
}

template <bool GELU, class T>
void backward(const T* dy, const T* gu, const float* e, T* dgu, int64_t rows, int64_t width) {
  for (int64_t t = 0; t < rows; ++t, dy += width, gu += 2 * width, e += width, dgu += 2 * width)
    for (int64_t i = 0; i < width; ++i) {
      const float g = widen(gu[i]), u = widen(gu[width + i]), d = widen(dy[i]);
      const float s = 1.0f / (e[i] + 1.0f), silu = g * s;
      const float rest = GELU ? (e[i] > 1e30f ? 1e30f : e[i]) * s : 1.0f - s;
      const float inner = rest * silu;
      const float slope = (GELU ? inner * (square_of(g) * float(3.0 * b) + float(a)) : inner) + s;
      dgu[i] = narrow<T>((slope * u) * d);
      dgu[width + i] = narrow<T>(widen(narrow<T>(silu)) * d);
    }
}

}  // namespace

#define DEFINE(T, NAME)                                                                             \
  extern "C" void silu_minus_gate_##NAME(const T* gu, float* out, int64_t rows, int64_t width) {    \
    minus_gate<false>(gu, out, rows, width);                                                        \
  }                                                                                                 \
  extern "C" void gelu_minus_gate_##NAME(const T* gu, float* out, int64_t rows, int64_t width) {    \
    minus_gate<true>(gu, out, rows, width);                                                         \
  }                                                                                                 \
  extern "C" void silu_fwd_##NAME(const T* gu, const float* e, T* y, int64_t rows, int64_t width) { \
    forward(gu, e, y, rows, width);                                                                 \
  }                                                                                                 \
  extern "C" void silu_bwd_##NAME(const T* dy, const T* gu, const float* e, T* dgu, int64_t rows,   \
                                  int64_t width) {                                                  \
    backward<false>(dy, gu, e, dgu, rows, width);                                                   \
  }                                                                                                 \
  extern "C" void gelu_bwd_##NAME(const T* dy, const T* gu, const float* e, T* dgu, int64_t rows,   \
                                  int64_t width) {                                                  \
    backward<true>(dy, gu, e, dgu, rows, width);                                                    \
  }
FOR_DTYPES(DEFINE)
