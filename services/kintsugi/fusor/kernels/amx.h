// What the CPU kernels share: products of queries and keys by AMX, and powers of 2.
//
// A query operand is [head_dim / 32][ROWS][32]; a key operand, for every 16 tokens, is
// [head_dim / 2][16 tokens][2 elements].

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

constexpr int ROWS = 32; // two AMX tiles
constexpr int STEP = 32; // keys of one product
constexpr int HEAD_DIM_MAX = 256;
constexpr float LOWEST = -1e30f; // a real minus infinity would turn a masked row into NaN
constexpr float LOG2_E = 1.44269504f;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

inline void configure_tiles() {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) {
    config.row_bytes[tile] = 64;
    config.rows[tile] = 16;
  }
  _tile_loadconfig(&config);
}

// 2^x for x <= 0, with a relative error of 3e-6; 0 far below. scalef rounds its exponent down by itself.
inline __m512 exp2_of(__m512 x) {
  const __m512 rest = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 value = _mm512_set1_ps(1.353417e-2f);
  value = _mm512_fmadd_ps(value, rest, _mm512_set1_ps(5.201146e-2f));
  value = _mm512_fmadd_ps(value, rest, _mm512_set1_ps(2.4144276e-1f));
  value = _mm512_fmadd_ps(value, rest, _mm512_set1_ps(6.9300383e-1f));
  value = _mm512_fmadd_ps(value, rest, _mm512_set1_ps(1.00000259f));
  return _mm512_scalef_ps(value, x);
}

inline __mmask16 lanes_below(int count) {
  return count >= 16 ? 0xffff : count <= 0 ? 0 : static_cast<__mmask16>((1u << count) - 1);
}

// Stores the logits of ROWS queries and STEP keys, with rows `stride` apart.
inline void multiply_keys(const uint16_t *query, const uint16_t *keys, float *logits, int64_t stride,
                          int head_dim) {
  _tile_zero(4);
  _tile_zero(5);
  _tile_zero(6);
  _tile_zero(7);
  for (int step = 0; step < head_dim / 32; ++step) {
    _tile_loadd(0, query + step * ROWS * 32, 64);
    _tile_loadd(2, keys + step * 512, 64);
    _tile_dpbf16ps(4, 0, 2);
    _tile_loadd(3, keys + head_dim * 16 + step * 512, 64);
    _tile_dpbf16ps(5, 0, 3);
    _tile_loadd(1, query + step * ROWS * 32 + 512, 64);
    _tile_dpbf16ps(6, 1, 2);
    _tile_dpbf16ps(7, 1, 3);
  }
  _tile_stored(4, logits, stride * 4);
  _tile_stored(5, logits + 16, stride * 4);
  _tile_stored(6, logits + 16 * stride, stride * 4);
  _tile_stored(7, logits + 16 * stride + 16, stride * 4);
}

// Fills the query operand of a tile: `rows` rows of consecutive queries × the `group` query heads of a KV head,
// zeros behind them. `query` is the first head of the first query; strides are in elements.
inline void load_query_rows(uint16_t *operand, const uint16_t *query, int64_t token_stride, int64_t head_stride,
                            int64_t group, int rows, int head_dim) {
  for (int row = 0; row < ROWS; ++row) {
    const uint16_t *source = query + row / group * token_stride + row % group * head_stride;
    for (int step = 0; step < head_dim / 32; ++step) {
      uint16_t *target = operand + (step * ROWS + row) * 32;
      if (row < rows)
        std::memcpy(target, source + step * 32, 64);
      else
        std::memset(target, 0, 64);
    }
  }
}
