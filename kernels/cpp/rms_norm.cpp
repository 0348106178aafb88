// rms_norm.py and qk_norm.py for x [T, H, D] (H = 1 in rms_norm), tokens `stride` apart. The square root of
// the forward is torch's.
//
// The first `heads` heads have the weight wq [D], the others wk [D]. lanes: of row_sum.h.
#include <vector>

#include "row_sum.h"
#include "scalar.h"

namespace {

// mean(s^2) + eps of each head [T, H]. With a residual s is x + residual, rounded; without one it is x.
template <class T>
void means(const T* x, int64_t stride, const T* residual, T* s, float* out, int64_t rows, int64_t H,
           int64_t D, float eps, int64_t lanes) {
  std::vector<float> squares(D);
  for (int64_t t = 0; t < rows; ++t, x += stride)
    for (int64_t h = 0; h < H; ++h) {
      const T* of = x + h * D;
      if (residual) {
        for (int64_t i = 0; i < D; ++i) s[i] = narrow<T>(widen(of[i]) + widen(residual[i]));
        of = s, residual += D, s += D;
      }
      for (int64_t i = 0; i < D; ++i) squares[i] = widen(of[i]) * widen(of[i]);
      *out++ = row_sum(squares.data(), D, lanes) / float(D) + eps;
    }
}

// y = x r w; `roots` becomes r = 1 / root.
template <class T>
void scale(const T* x, int64_t stride, float* roots, const T* wq, const T* wk, T* y, int64_t rows, int64_t H,
           int64_t heads, int64_t D) {
  for (int64_t t = 0; t < rows; ++t, x += stride)
    for (int64_t h = 0; h < H; ++h, y += D) {
      const T *of = x + h * D, *w = h < heads ? wq : wk;
      const float r = 1.0f / *roots;
      *roots++ = r;
      for (int64_t i = 0; i < D; ++i) y[i] = narrow<T>((widen(of[i]) * r) * widen(w[i]));
    }
}

// dx = (dy w - xh mean(dy w xh)) r with xh = x r, and + ds where there is one. dw [T, H, D] = dy xh.
template <class T>
void backward(const T* dy, const T* x, int64_t stride, const float* r, const T* wq, const T* wk, const T* ds,
              T* dx, float* dw, int64_t rows, int64_t H, int64_t heads, int64_t D, int64_t lanes) {
  std::vector<float> scratch(3 * D);
  float *normal = scratch.data(), *dyw = normal + D, *products = dyw + D;
  for (int64_t t = 0; t < rows; ++t, x += stride)
    for (int64_t h = 0; h < H; ++h, dy += D, dx += D, dw += D) {
      const T *of = x + h * D, *w = h < heads ? wq : wk;
      const float factor = *r++;
      for (int64_t i = 0; i < D; ++i) {
        normal[i] = widen(of[i]) * factor;
        dw[i] = widen(dy[i]) * normal[i];
        dyw[i] = widen(dy[i]) * widen(w[i]);
        products[i] = dyw[i] * normal[i];
      }
      const float mean = row_sum(products, D, lanes) / float(D);
      for (int64_t i = 0; i < D; ++i) products[i] = (dyw[i] - normal[i] * mean) * factor;
      if (ds) {
        for (int64_t i = 0; i < D; ++i) products[i] += widen(ds[i]);
        ds += D;
      }
      for (int64_t i = 0; i < D; ++i) dx[i] = narrow<T>(products[i]);
    }
}

}  // namespace

#define DEFINE(T, NAME)                                                                                 \
  extern "C" void norm_means_##NAME(const T* x, int64_t stride, const T* residual, T* s, float* out,    \
                                    int64_t rows, int64_t H, int64_t D, float eps, int64_t lanes) {     \
    means(x, stride, residual, s, out, rows, H, D, eps, lanes);                                         \
  }                                                                                                     \
  extern "C" void norm_scale_##NAME(const T* x, int64_t stride, float* roots, const T* wq, const T* wk, \
                                    T* y, int64_t rows, int64_t H, int64_t heads, int64_t D) {          \
    scale(x, stride, roots, wq, wk, y, rows, H, heads, D);                                              \
  }                                                                                                     \
  extern "C" void norm_bwd_##NAME(const T* dy, const T* x, int64_t stride, const float* r, const T* wq, \
                                  const T* wk, const T* ds, T* dx, float* dw, int64_t rows, int64_t H,  \
                                  int64_t heads, int64_t D, int64_t lanes) {                            \
    backward(dy, x, stride, r, wq, wk, ds, dx, dw, rows, H, heads, D, lanes);                           \
  }
FOR_DTYPES(DEFINE)

extern "C" void row_sums(const float* x, float* out, int64_t rows, int64_t width, int64_t lanes) {
  for (int64_t t = 0; t < rows; ++t) out[t] = row_sum(x + t * width, width, lanes);
}
