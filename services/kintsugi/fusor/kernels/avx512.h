// Products of a tile by AVX-512, over a bfloat16 cache that vLLM's CPU backend keeps for its ISA "vec".
//
// One KV head of one block: K [head_dim][block_size], then V [block_size][head_dim]. The instruction takes pairs
// of summands, which lie in two rows of K or of V. So 32 columns of two rows each are interleaved, once for
// all rows of a tile: for a step of keys, or for 32 columns of a chunk of values. Registers hold 8 rows × 32
// columns of a product, so that a pair of the left operand is used twice for each load, one of the right 8 times.

#pragma once

#include "vectors.h"

constexpr int ROWS = 32;         // 64 take 5 % less time and twice the memory
constexpr int ROWS_OF_BLOCK = 8; // × 32 columns: 16 sums in registers; 4 rows are slower, 12 no faster

inline void start_products() {}
inline void end_products() {}

// Where 32 elements of a row lie in the query operand, [ROWS][head_dim].
inline int query_place(int row, int step, int head_dim) { return row * head_dim + step * 32; }

// Adds products of pairs. Without the instruction, both elements of a pair are converted to fp32, and the whole
// kernel takes 1.8 times as long.
inline __m512 add_pairs(__m512 sum, __m512i left, __m512i right) {
#ifdef __AVX512BF16__
  return _mm512_dpbf16_ps(sum, (__m512bh)left, (__m512bh)right);
#else
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  sum = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(left, 16)),
                        _mm512_castsi512_ps(_mm512_slli_epi32(right, 16)), sum);
  return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(left, upper)),
                         _mm512_castsi512_ps(_mm512_and_si512(right, upper)), sum);
#endif
}

// Interleaves rows of 32 elements by two: 16 columns to `low`, 16 to `high`. Rows from `known` on count as 0.
inline void interleave_rows(const uint16_t *rows, int64_t stride, int count, int known, uint16_t *low,
                            uint16_t *high) {
  alignas(64) static const struct Order {
    uint16_t low[32], high[32];
    constexpr Order() : low(), high() {
      for (int lane = 0; lane < 32; ++lane) {
        low[lane] = static_cast<uint16_t>(lane / 2 + lane % 2 * 32);
        high[lane] = static_cast<uint16_t>(low[lane] + 16);
      }
    }
  } order;
  const __m512i take_low = _mm512_load_si512(order.low), take_high = _mm512_load_si512(order.high);
  for (int row = 0; row < count; row += 2) {
    const __m512i even = row < known ? _mm512_loadu_si512(rows + row * stride) : _mm512_setzero_si512();
    const __m512i odd = row + 1 < known ? _mm512_loadu_si512(rows + (row + 1) * stride) : _mm512_setzero_si512();
    _mm512_storeu_si512(low + row * 16, _mm512_permutex2var_epi16(even, take_low, odd));
    _mm512_storeu_si512(high + row * 16, _mm512_permutex2var_epi16(even, take_high, odd));
  }
}

// Adds left [ROWS_OF_BLOCK][pairs][2] × right, which is two operands [pairs][16 columns][2], to the sums
// [ROWS_OF_BLOCK][32].
template <bool from_zero>
inline void multiply_block(const uint16_t *left, int64_t left_stride, const uint16_t *low, const uint16_t *high,
                           int pairs, float *sums, int64_t stride) {
  __m512 first[ROWS_OF_BLOCK], second[ROWS_OF_BLOCK];
#pragma GCC unroll 8
  for (int row = 0; row < ROWS_OF_BLOCK; ++row) {
    first[row] = from_zero ? _mm512_setzero_ps() : _mm512_loadu_ps(sums + row * stride);
    second[row] = from_zero ? _mm512_setzero_ps() : _mm512_loadu_ps(sums + row * stride + 16);
  }
  for (int pair = 0; pair < pairs; ++pair) {
    const __m512i mine = _mm512_loadu_si512(low + pair * 32), other = _mm512_loadu_si512(high + pair * 32);
#pragma GCC unroll 8
    for (int row = 0; row < ROWS_OF_BLOCK; ++row) {
      int32_t both;
      std::memcpy(&both, left + row * left_stride + pair * 2, sizeof both);
      const __m512i spread = _mm512_set1_epi32(both);
      first[row] = add_pairs(first[row], spread, mine);
      second[row] = add_pairs(second[row], spread, other);
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < ROWS_OF_BLOCK; ++row) {
    _mm512_storeu_ps(sums + row * stride, first[row]);
    _mm512_storeu_ps(sums + row * stride + 16, second[row]);
  }
}

// Stores the logits of `rows` queries, rounded up, and STEP keys, with rows `stride` apart.
inline void multiply_keys(const uint16_t *query, const uint16_t *keys, float *logits, int64_t stride,
                          int head_dim, int rows) {
  for (int row = 0; row < rows; row += ROWS_OF_BLOCK)
    multiply_block<true>(query + row * head_dim, head_dim, keys, keys + head_dim * 16, head_dim / 2,
                         logits + row * stride, stride);
}

// The keys and values of one chunk, of one KV head.
struct alignas(64) Context {
  uint16_t keys[STEP * HEAD_DIM_MAX], values[CHUNK * 32];
  const uint16_t *of_step[CHUNK / STEP]; // the values of its first key
  int known[CHUNK / STEP];

  // The operand of a step's keys. `slot` is the first one's in `block`; `known` of them are computed.
  const uint16_t *take_step(const uint16_t *block, int64_t slot, int64_t block_size, int step, int known_keys,
                            int head_dim) {
    of_step[step] = block + block_size * head_dim + slot * head_dim;
    known[step] = known_keys;
    interleave_rows(block + slot, block_size, head_dim, head_dim, keys, keys + head_dim * 16);
    return keys;
  }

  // Adds weights [ROWS][CHUNK] × values to the output [ROWS][head_dim].
  void add_values(const uint16_t *weights, int steps, int head_dim, int rows, float *output) {
    for (int column = 0; column < head_dim; column += 32) {
      for (int step = 0; step < steps; ++step)
        interleave_rows(of_step[step] + column, head_dim, STEP, known[step], values + step * STEP * 16,
                        values + (CHUNK + step * STEP) * 16);
      for (int row = 0; row < rows; row += ROWS_OF_BLOCK)
        multiply_block<false>(weights + row * CHUNK, CHUNK, values, values + CHUNK * 16, steps * STEP / 2,
                              output + row * head_dim + column, head_dim);
    }
  }
};
