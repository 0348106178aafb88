// philox.uniform, and draw.drawn_logprobs before and after the exponential, which is torch's, as is the log.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "row_sum.h"
#include "tree.h"

namespace {

// The first two words of ten rounds of Philox 4x32.
void philox(uint32_t c[4], uint32_t k0, uint32_t k1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t(0xD2511F53) * c[0], p1 = uint64_t(0xCD9E8D57) * c[2];
    const uint32_t next[4] = {uint32_t(p1 >> 32) ^ c[1] ^ k0, uint32_t(p1), uint32_t(p0 >> 32) ^ c[3] ^ k1,
                              uint32_t(p0)};
    std::copy_n(next, 4, c);
    k0 += 0x9E3779B9, k1 += 0xBB67AE85;
  }
}

}  // namespace

// counter [4, n] -> u [n]
extern "C" void uniforms(const int64_t* counter, double* u, int64_t n, int64_t seed, int64_t stream) {
  for (int64_t i = 0; i < n; ++i) {
    uint32_t c[4];
    for (int word = 0; word < 4; ++word) c[word] = uint32_t(counter[word * n + i]);
    philox(c, uint32_t(seed), uint32_t(stream));
    u[i] = double((uint64_t(c[0] >> 5) << 26) + (c[1] >> 6)) * 0x1p-53;
  }
}

// shifted = z - max z, [T, V]
extern "C" void draw_shift(const float* z, float* shifted, int64_t T, int64_t V) {
  for (int64_t t = 0; t < T; ++t, z += V, shifted += V) {
    float highest = z[0];
    for (int64_t i = 1; i < V; ++i) highest = z[i] > highest || z[i] != z[i] ? z[i] : highest;
    for (int64_t i = 0; i < V; ++i) shifted[i] = z[i] - highest;
  }
}

// ids [T], and of each the total of e = exp(shifted) and its own shifted logit. u [T]: uniform numbers.
// lanes: of row_sum.h. leaves: of each total (leaves.py).
extern "C" void draw_ids(const float* shifted, const float* e, const double* u, int64_t* ids, float* chosen,
                         float* totals, int64_t T, int64_t V, int64_t lanes, int64_t leaves) {
  const int64_t part = V / leaves;
  std::vector<double> cdf(V);
  std::vector<float> sums(leaves);
  for (int64_t t = 0; t < T; ++t, e += V, shifted += V) {
    double sum = 0;
    for (int64_t i = 0; i < V; ++i) cdf[i] = sum += double(e[i]);
    const double drawn = u[t] * sum, limit = std::nextafter(sum, 0.0), target = drawn < limit ? drawn : limit;
    const int64_t id = std::upper_bound(cdf.begin(), cdf.end(), target) - cdf.begin();
    ids[t] = std::min(id, V - 1);
    chosen[t] = shifted[ids[t]];
    for (int64_t leaf = 0; leaf < leaves; ++leaf) sums[leaf] = row_sum(e + leaf * part, part, lanes);
    join_pairs(sums.data(), leaves, 1);
    totals[t] = sums[0];
  }
}
