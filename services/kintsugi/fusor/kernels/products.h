// The products of a tile with the instruction set of this build, and their query operands.
//
// A tile is up to ROWS rows: a few queries × the query heads that share a KV head. A key operand, for every
// 16 tokens, is [head_dim / 2][16 tokens][2 elements]; a query operand is as `query_place` says.

#pragma once

#ifdef __AMX_BF16__
#include "amx.h"
#else
#include "avx512.h"
#endif

// Fills the query operand of a tile: `rows` rows of consecutive queries × the `group` query heads of a KV head,
// then zeros. `query` is the first head of the first query; strides are in elements.
inline void load_query_rows(uint16_t *operand, const uint16_t *query, int64_t token_stride, int64_t head_stride,
                            int64_t group, int rows, int head_dim) {
  for (int row = 0; row < ROWS; ++row) {
    const uint16_t *source = query + row / group * token_stride + row % group * head_stride;
    for (int step = 0; step < head_dim / 32; ++step) {
      uint16_t *target = operand + query_place(row, step, head_dim);
      if (row < rows)
        std::memcpy(target, source + step * 32, 64);
      else
        std::memset(target, 0, 64);
    }
  }
}
