// The CPU kernel of `kintsugi.fusor.kernels.native`: how much attention each key gets, summed over queries and heads.
//
// Keys are first packed as `products.h` multiplies them. A tile then holds up to 32 rows: a few queries × the
// query heads that share a KV head. It multiplies them by all keys; the softmax is in fp32 and to base 2. Tiles
// are added to a bounded number of sums, each of which always takes the same tiles in the same order. The sums are
// added up in a fixed order, too, so that the result does not depend on the number of threads.

#include "products.h"

#include <omp.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>

namespace {

constexpr int LANES = 16;
constexpr int64_t SUMS_MAX = 64; // maximum number of threads that add up at a time, and of floats in memory per key

struct Problem {
  const uint16_t *query; // [queries][kv heads × group][head_dim]
  const uint16_t *key;   // [keys][kv heads][head_dim]
  const int32_t *query_positions, *key_positions;
  int64_t num_queries, num_keys, num_kv_heads, group;
  int head_dim;
  float scale;
  int32_t window; // positions that a query sees, including its own

  int64_t padded() const { return (num_keys + STEP - 1) / STEP * STEP; }
  int64_t queries_per_tile() const { return ROWS / group; }
  int64_t tiles() const { return (num_queries + queries_per_tile() - 1) / queries_per_tile(); }
};

struct Free {
  void operator()(void *memory) const { std::free(memory); }
};

template <typename Element> using Memory = std::unique_ptr<Element[], Free>;

// Allocates whole cache lines, so that no load of 64 bytes touches two; a null pointer if there is no memory.
template <typename Element> Memory<Element> allocate(int64_t count) {
  const size_t bytes = (count * sizeof(Element) / 64 + 1) * 64;
  return Memory<Element>(static_cast<Element *>(std::aligned_alloc(64, bytes)));
}

struct alignas(64) Query {
  uint16_t operand[ROWS * HEAD_DIM_MAX];
};

// 16 keys of one head. Places after the last key repeat it, and are masked.
void pack_keys(const Problem &problem, int64_t head, int64_t first, uint16_t *packed) {
  for (int lane = 0; lane < LANES; ++lane) {
    const int64_t key = std::min(first + lane, problem.num_keys - 1);
    const uint16_t *source = problem.key + (key * problem.num_kv_heads + head) * problem.head_dim;
    for (int pair = 0; pair < problem.head_dim / 2; ++pair)
      std::memcpy(packed + (pair * LANES + lane) * 2, source + pair * 2, 2 * sizeof(uint16_t));
  }
}

void load_queries(const Problem &problem, Query &query, int64_t head, int64_t first, int rows) {
  const int64_t head_stride = problem.head_dim, token_stride = problem.num_kv_heads * problem.group * head_stride;
  const uint16_t *source = problem.query + first * token_stride + head * problem.group * head_stride;
  load_query_rows(query.operand, source, token_stride, head_stride, problem.group, rows, problem.head_dim);
}

// The keys that a query at `position` sees. Padding has a position after that of every query.
inline __mmask16 visible(const Problem &problem, const int32_t *positions, int32_t position) {
  const __m512i found = _mm512_loadu_si512(positions);
  const __mmask16 past = _mm512_cmple_epi32_mask(found, _mm512_set1_epi32(position));
  return past & _mm512_cmpgt_epi32_mask(found, _mm512_set1_epi32(position - problem.window));
}

// Turns one row's logits into weights and adds them to `total`.
void add_weights(const Problem &problem, const int32_t *positions, int32_t position, float *logits,
                 float *total) {
  const int64_t padded = problem.padded();
  const float scale = problem.scale * LOG2_E;
  __m512 highest = _mm512_set1_ps(LOWEST);
  for (int64_t key = 0; key < padded; key += LANES)
    highest = _mm512_mask_max_ps(highest, visible(problem, positions + key, position), highest,
                                 _mm512_loadu_ps(logits + key));
  const __m512 factor = _mm512_set1_ps(scale);
  const __m512 offset = _mm512_set1_ps(_mm512_reduce_max_ps(highest) * scale);
  __m512 sum = _mm512_setzero_ps();
  for (int64_t key = 0; key < padded; key += LANES) {
    const __m512 power = exp2_of(_mm512_fmsub_ps(_mm512_loadu_ps(logits + key), factor, offset));
    const __m512 weight = _mm512_maskz_mov_ps(visible(problem, positions + key, position), power);
    sum = _mm512_add_ps(sum, weight);
    _mm512_storeu_ps(logits + key, weight);
  }
  const __m512 share = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(sum));
  for (int64_t key = 0; key < padded; key += LANES)
    _mm512_storeu_ps(total + key, _mm512_fmadd_ps(_mm512_loadu_ps(logits + key), share,
                                                  _mm512_loadu_ps(total + key)));
}

} // namespace

// `total`: fp32 [keys]. `key_positions` has room for keys up to a multiple of STEP, which lie after every query.
// Returns false if memory was short. Nothing may be thrown here: the caller is not C++, and OpenMP's
// threads have no caller.
extern "C" bool attention_mass(const uint16_t *query, const uint16_t *key, const int32_t *query_positions,
                               const int32_t *key_positions, float *total, int64_t num_queries,
                               int64_t num_keys, int64_t num_kv_heads, int64_t group, int64_t head_dim,
                               int64_t window, float scale) {
  const Problem problem{query,        key,   query_positions,             key_positions, num_queries, num_keys,
                        num_kv_heads, group, static_cast<int>(head_dim), scale,
                        static_cast<int32_t>(window)};
  const int64_t padded = problem.padded(), tiles = problem.tiles(), per_tile = problem.queries_per_tile();
  const int64_t blocks = padded / LANES, items = num_kv_heads * tiles, sums = std::min(items, SUMS_MAX);
  const int threads = omp_get_max_threads();
  const auto packed = allocate<uint16_t>(num_kv_heads * padded * head_dim);
  const auto totals = allocate<float>(sums * padded);
  const auto rows_of_logits = allocate<float>(threads * ROWS * padded);
  if (!packed || !totals || !rows_of_logits)
    return false;
#pragma omp parallel num_threads(threads)
  {
    Query operand;
    float *logits = rows_of_logits.get() + omp_get_thread_num() * ROWS * padded;
    start_products();
#pragma omp for schedule(static)
    for (int64_t item = 0; item < num_kv_heads * blocks; ++item)
      pack_keys(problem, item / blocks, item % blocks * LANES, packed.get() + item * LANES * head_dim);
#pragma omp for schedule(dynamic)
    for (int64_t sum = 0; sum < sums; ++sum) {
      float *mine = totals.get() + sum * padded;
      std::memset(mine, 0, sizeof(float) * padded);
      for (int64_t item = sum; item < items; item += sums) {
        const int64_t head = item / tiles, first = item % tiles * per_tile;
        const int rows = static_cast<int>(std::min(per_tile, num_queries - first) * group);
        load_queries(problem, operand, head, first, rows);
        for (int64_t step = 0; step < padded; step += STEP)
          multiply_keys(operand.operand, packed.get() + (head * padded + step) * head_dim, logits + step, padded,
                        problem.head_dim, rows);
        for (int row = 0; row < rows; ++row)
          add_weights(problem, key_positions, query_positions[first + row / group], logits + row * padded, mine);
      }
    }
#pragma omp for schedule(static)
    for (int64_t place = 0; place < num_keys; ++place) {
      float sum = 0.0f;
      for (int64_t other = 0; other < sums; ++other)
        sum += totals[other * padded + place];
      total[place] = sum;
    }
    end_products();
  }
  return true;
}
