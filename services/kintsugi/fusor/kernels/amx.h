// Products of a tile by AMX, over a bfloat16 cache that vLLM's CPU backend packs for it.
//
// One KV head of one block, where every unit of 1 KiB is an AMX operand in place:
//   K [block_size / 16][head_dim / 2][16 tokens][2 elements], then
//   V [head_dim / 16][block_size / 2][16 elements][2 tokens]

#pragma once

#include "vectors.h"

constexpr int ROWS = 32; // two AMX tiles

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

inline void start_products() {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) {
    config.row_bytes[tile] = 64;
    config.rows[tile] = 16;
  }
  _tile_loadconfig(&config);
}

inline void end_products() { _tile_release(); }

// Where 32 elements of a row lie in the query operand, [head_dim / 32][ROWS][32].
inline int query_place(int row, int step, int) { return (step * ROWS + row) * 32; }

// Adds products to the sums of ROWS rows × 32 columns, which tiles 4 to 7 hold. `left` has 32 elements a row, rows
// `stride` elements apart; `right` and `other` are operands of 16 columns each.
inline void add_products(const uint16_t *left, int64_t stride, const uint16_t *right, const uint16_t *other) {
  _tile_loadd(0, left, stride * 2);
  _tile_loadd(2, right, 64);
  _tile_dpbf16ps(4, 0, 2);
  _tile_loadd(3, other, 64);
  _tile_dpbf16ps(5, 0, 3);
  _tile_loadd(1, left + 16 * stride, stride * 2);
  _tile_dpbf16ps(6, 1, 2);
  _tile_dpbf16ps(7, 1, 3);
}

// Stores these sums, with rows `stride` apart.
inline void store_sums(float *sums, int64_t stride) {
  _tile_stored(4, sums, stride * 4);
  _tile_stored(5, sums + 16, stride * 4);
  _tile_stored(6, sums + 16 * stride, stride * 4);
  _tile_stored(7, sums + 16 * stride + 16, stride * 4);
}

// Stores the logits of ROWS queries and STEP keys, with rows `stride` apart.
inline void multiply_keys(const uint16_t *query, const uint16_t *keys, float *logits, int64_t stride,
                          int head_dim, int) {
  _tile_zero(4);
  _tile_zero(5);
  _tile_zero(6);
  _tile_zero(7);
  for (int step = 0; step < head_dim / 32; ++step)
    add_products(query + step * ROWS * 32, 32, keys + step * 512, keys + head_dim * 16 + step * 512);
  store_sums(logits, stride);
}

struct Values {
  const uint16_t *first;
  int64_t column_stride; // elements between two groups of 16 columns
};

// The keys and values of one chunk, of one KV head.
struct alignas(64) Context {
  uint16_t last_values[STEP * HEAD_DIM_MAX];
  Values values[CHUNK / STEP];

  // The operand of a step's keys. `slot` is the first one's in `block`; `known` of them are computed.
  const uint16_t *take_step(const uint16_t *block, int64_t slot, int64_t block_size, int step, int known,
                            int head_dim) {
    values[step] = {block + block_size * head_dim + slot * 16, block_size * 16};
    if (known < STEP)
      values[step] = copy_known(values[step], known, head_dim);
    return block + slot * head_dim;
  }

  // Copies the values of one step and zeroes those of tokens from `known` on: 0 × NaN is NaN.
  Values copy_known(Values source, int known, int head_dim) {
    for (int column = 0; column < head_dim / 16; ++column) {
      uint16_t *copy = last_values + column * STEP * 16;
      std::memcpy(copy, source.first + column * source.column_stride, STEP * 16 * sizeof(uint16_t));
      for (int token = known; token < STEP; ++token)
        for (int lane = 0; lane < 16; ++lane)
          copy[token / 2 * 32 + lane * 2 + token % 2] = 0;
    }
    return {last_values, STEP * 16};
  }

  // Adds weights [ROWS][CHUNK] × values to the output [ROWS][head_dim], 32 columns at a time.
  void add_values(const uint16_t *weights, int steps, int head_dim, int, float *sums) const {
    for (int column = 0; column < head_dim; column += 32) {
      float *output = sums + column;
      _tile_loadd(4, output, head_dim * 4);
      _tile_loadd(5, output + 16, head_dim * 4);
      _tile_loadd(6, output + 16 * head_dim, head_dim * 4);
      _tile_loadd(7, output + 16 * head_dim + 16, head_dim * 4);
      for (int step = 0; step < steps; ++step) {
        const uint16_t *mine = values[step].first + column / 16 * values[step].column_stride;
        add_products(weights + step * STEP, CHUNK, mine, mine + values[step].column_stride);
      }
      store_sums(output, head_dim);
    }
  }
};
