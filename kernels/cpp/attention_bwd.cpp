// The backward of attention.py, before and after the exponential, which is torch's.
//
// As there, QUERY_CHUNK positions are taken at a time, counted from the first key of a sequence, and the sums
// of a chunk have a chain each. Lengths are rounded up to ALIGN; the last key stands for the keys past the
// end. Rows without a query are left out: they add zeros to sums that are no -0. p lies chunk after chunk: of
// each the rows [positions with a query * group, keys as far as the chunk's end].
#include <cmath>

#include "attention.h"
#include "chains.h"
#include "transpose.h"

namespace {

constexpr int64_t QUERY_CHUNK = 32, ALIGN = 16;

int64_t aligned(int64_t n) { return (n + ALIGN - 1) / ALIGN * ALIGN; }

// Calls f(first position with a query, end of the positions, end of the keys) for each chunk with queries.
template <class F>
void for_chunks(const Plan& p, int64_t s, F f) {
  const int64_t end = p.keys(s), L = aligned(end);
  for (int64_t a = p.contexts[s] / QUERY_CHUNK * QUERY_CHUNK; a < end; a += QUERY_CHUNK)
    f(std::max(a, p.contexts[s]), std::min(a + QUERY_CHUNK, end), std::min(a + QUERY_CHUNK, L));
}

// Keys or values of a sequence and head, as far as aligned(keys), in fp32.
template <class T>
void read_all(const Plan& p, const Keys<T>& keys, int64_t s, int64_t h, bool values, std::vector<float>& rows,
              std::vector<float>& transposed) {
  const int64_t n = p.keys(s), L = aligned(n), D = p.D;
  rows.resize(L * D), transposed.resize(D * L);
  keys.read(p, s, h, values, 0, n, rows.data());
  for (int64_t j = n; j < L; ++j) std::copy_n(rows.data() + (n - 1) * D, D, rows.data() + j * D);
  transpose(rows.data(), D, transposed.data(), L, L, D);
}

// scale q k - lse, and -inf for hidden keys
template <class T>
void exponents(const Plan& p, const T* q, int64_t q_stride, const Keys<T>& keys, const float* lse,
               float scale, int64_t from, int64_t to, int64_t window, float* out) {
  const int64_t G = p.group(), D = p.D;
  std::vector<float> rows, k, kt;
  for (int64_t s = from; s < to; ++s) {
    const int64_t context = p.contexts[s], L = aligned(p.keys(s));
    rows.resize(p.queries[s] * G * D);
    for (int64_t h = 0; h < p.kv_heads; ++h) {
      read_queries(p, q, q_stride, s, h, scale, rows.data());
      read_all(p, keys, s, h, false, k, kt);
      for_chunks(p, s, [&](int64_t a, int64_t end, int64_t b) {
        chains<Store::PLUS_ZERO>(rows.data() + (a - context) * G * D, D, 1, kt.data(), L, out, b,
                                 (end - a) * G, b, D);
        for (int64_t i = a; i < end; ++i)
          for (int64_t g = 0; g < G; ++g, out += b) {
            const float of_row = lse[(p.starts[s] + i - context) * p.heads + h * G + g];
            const int64_t seen = Plan::first_seen(i, window);
            for (int64_t j = 0; j < seen; ++j) out[j] = -INFINITY;
            for (int64_t j = seen; j <= i; ++j) out[j] -= of_row;
            for (int64_t j = i + 1; j < b; ++j) out[j] = -INFINITY;
          }
      });
    }
  }
}

template <class T>
void write_keys(const Plan& p, int64_t s, int64_t h, const std::vector<float>& sums, T* out) {
  out += p.key_starts[s] * p.kv_heads * p.D + h * p.D;
  const float* from = sums.data();
  for (int64_t j = 0; j < p.keys(s); ++j, out += p.kv_heads * p.D)
    for (int64_t d = 0; d < p.D; ++d) out[d] = narrow<T>(*from++);
}

template <class T>
void gradients(const Plan& p, const T* d_o, const T* q, int64_t q_stride, const Keys<T>& keys,
               const float* delta, float scale, int64_t from, int64_t to, const float* e, T* dq, T* dk,
               T* dv) {
  const int64_t G = p.group(), D = p.D;
  std::vector<float> rows, d_rows, k, v, scratch, vt, ds, dq_rows, dk_sums, dv_sums;
  for (int64_t s = from; s < to; ++s) {
    const int64_t n = p.queries[s], context = p.contexts[s], L = aligned(p.keys(s));
    rows.resize(n * G * D), d_rows.resize(n * G * D), dq_rows.resize(n * G * D);
    for (int64_t h = 0; h < p.kv_heads; ++h) {
      read_queries(p, q, q_stride, s, h, scale, rows.data());
      read_queries(p, d_o, p.heads * D, s, h, 1.0f, d_rows.data());
      read_all(p, keys, s, h, false, k, scratch);
      read_all(p, keys, s, h, true, v, vt);
      dk_sums.assign(L * D, 0.0f), dv_sums.assign(L * D, 0.0f);
      for_chunks(p, s, [&](int64_t a, int64_t end, int64_t b) {
        const int64_t count = (end - a) * G, row = (a - context) * G;
        const float *qs = rows.data() + row * D, *dos = d_rows.data() + row * D;
        ds.resize(count * b);
        chains<Store::PLUS_ZERO>(dos, D, 1, vt.data(), L, ds.data(), b, count, b, D);
        for (int64_t r = 0; r < count; ++r) {
          const int64_t token = p.starts[s] + a - context + r / G;
          const float of_row = delta[token * p.heads + h * G + r % G];
          for (int64_t j = 0; j < b; ++j) ds[r * b + j] = (ds[r * b + j] - of_row) * e[r * b + j];
        }
        chains<Store::ADD>(e, 1, b, dos, D, dv_sums.data(), D, b, D, count);
        chains<Store::ADD>(ds.data(), 1, b, qs, D, dk_sums.data(), D, b, D, count);
        chains<Store::PLUS_ZERO>(ds.data(), b, 1, k.data(), D, dq_rows.data() + row * D, D, count, D, b);
        e += count * b;
      });
      write_keys(p, s, h, dk_sums, dk);
      write_keys(p, s, h, dv_sums, dv);
      for (int64_t t = 0; t < n; ++t) {
        T* to_row = dq + ((p.starts[s] + t) * p.heads + h * G) * D;
        for (int64_t i = 0; i < G * D; ++i) to_row[i] = narrow<T>(dq_rows[t * G * D + i] * scale);
      }
    }
  }
}

}  // namespace

// Elements of p of each of S sequences.
extern "C" void attention_bwd_sizes(const Plan* p, int64_t S, int64_t* sizes) {
  for (int64_t s = 0; s < S; ++s) {
    sizes[s] = 0;
    for_chunks(*p, s, [&](int64_t a, int64_t end, int64_t b) { sizes[s] += (end - a) * b * p->heads; });
  }
}

#define DEFINE(T, NAME)                                                                                   \
  extern "C" void attention_exponents_##NAME(const Plan* p, const T* q, int64_t q_stride, const T* k,     \
                                             int64_t stride, const float* lse, float scale, int64_t from, \
                                             int64_t to, int64_t window, float* out) {                    \
    exponents(*p, q, q_stride, Keys<T>{k, nullptr, stride}, lse, scale, from, to, window, out);           \
  }                                                                                                       \
  extern "C" void attention_gradients_##NAME(                                                             \
      const Plan* p, const T* d_o, const T* q, int64_t q_stride, const T* k, const T* v, int64_t stride,  \
      const float* delta, float scale, int64_t from, int64_t to, const float* e, T* dq, T* dk, T* dv) {   \
    gradients(*p, d_o, q, q_stride, Keys<T>{k, v, stride}, delta, scale, from, to, e, dq, dk, dv);        \
  }
FOR_DTYPES(DEFINE)
