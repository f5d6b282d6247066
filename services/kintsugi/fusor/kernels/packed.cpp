// The CPU kernel of `kintsugi.fusor.kernels.native`: scattered queries over a bfloat16 cache of vLLM's CPU backend.
//
// A tile holds up to 32 rows: a few queries × the query heads that share a KV head. It reads each key once,
// 256 keys at a time: logits, a running softmax in fp32 and to base 2, then weights × values. Only chunks of keys
// that reach past the tile's first position are masked. `products.h` describes the products, and the layout of the
// cache.

#include "products.h"

#include <algorithm>
#include <cstring>

namespace {

struct Problem {
  const uint16_t *query;
  int64_t query_token_stride, query_head_stride;
  uint16_t *output;
  int64_t output_token_stride, output_head_stride;
  const uint16_t *cache;
  int64_t block_stride, head_stride;
  const int32_t *block_table, *positions;
  int64_t num_tokens, num_kv_heads, group;
  int head_dim;
  int64_t block_size;
  float scale;
};

struct alignas(64) Scratch {
  uint16_t query[ROWS * HEAD_DIM_MAX];
  float logits[ROWS * CHUNK];
  uint16_t weights[ROWS * CHUNK];
  float output[ROWS * HEAD_DIM_MAX]; // [ROWS][head_dim]
  Context context;
  float maximum[ROWS], sum[ROWS];
};

// Turns one row's logits into weights; with `masked`, only its first `visible` keys count.
template <bool masked>
inline void apply_softmax(Scratch &scratch, int row, int width, int visible, float scale, int head_dim) {
  const float *logits = scratch.logits + row * CHUNK;
  uint16_t *weights = scratch.weights + row * CHUNK;
  __m512 highest_low = _mm512_set1_ps(LOWEST), highest_high = highest_low;
  for (int key = 0; key < width; key += 32) {
    const __m512 low = _mm512_loadu_ps(logits + key), high = _mm512_loadu_ps(logits + key + 16);
    const __mmask16 low_lanes = masked ? lanes_below(visible - key) : 0xffff;
    const __mmask16 high_lanes = masked ? lanes_below(visible - key - 16) : 0xffff;
    highest_low = _mm512_mask_max_ps(highest_low, low_lanes, highest_low, low);
    highest_high = _mm512_mask_max_ps(highest_high, high_lanes, highest_high, high);
  }
  const float before = scratch.maximum[row];
  const float highest = std::max(before, _mm512_reduce_max_ps(_mm512_max_ps(highest_low, highest_high)));
  const __m512 factor = _mm512_set1_ps(scale), offset = _mm512_set1_ps(highest * scale);
  __m512 sum_low = _mm512_setzero_ps(), sum_high = sum_low;
  for (int key = 0; key < width; key += 32) {
    __m512 low = exp2_of(_mm512_fmsub_ps(_mm512_loadu_ps(logits + key), factor, offset));
    __m512 high = exp2_of(_mm512_fmsub_ps(_mm512_loadu_ps(logits + key + 16), factor, offset));
    if (masked) {
      low = _mm512_maskz_mov_ps(lanes_below(visible - key), low);
      high = _mm512_maskz_mov_ps(lanes_below(visible - key - 16), high);
    }
    sum_low = _mm512_add_ps(sum_low, low);
    sum_high = _mm512_add_ps(sum_high, high);
    store_narrow(weights + key, low, high);
  }
  const float sum = _mm512_reduce_add_ps(_mm512_add_ps(sum_low, sum_high));
  if (highest == before) {
    scratch.sum[row] += sum;
    return;
  }
  const __m512 shrink = exp2_of(_mm512_set1_ps((before - highest) * scale));
  scratch.maximum[row] = highest;
  scratch.sum[row] = scratch.sum[row] * _mm512_cvtss_f32(shrink) + sum;
  float *output = scratch.output + row * head_dim;
  for (int column = 0; column < head_dim; column += 16)
    _mm512_storeu_ps(output + column, _mm512_mul_ps(_mm512_loadu_ps(output + column), shrink));
}

void load_queries(const Problem &problem, Scratch &scratch, int64_t head, int64_t first, int rows) {
  const uint16_t *source =
      problem.query + first * problem.query_token_stride + head * problem.group * problem.query_head_stride;
  load_query_rows(scratch.query, source, problem.query_token_stride, problem.query_head_stride, problem.group, rows,
                  problem.head_dim);
  std::fill_n(scratch.maximum, ROWS, LOWEST);
  std::fill_n(scratch.sum, ROWS, 0.0f);
  std::memset(scratch.output, 0, sizeof(float) * ROWS * problem.head_dim);
}

void store_outputs(const Problem &problem, const Scratch &scratch, int64_t head, int64_t first, int rows) {
  const int group = static_cast<int>(problem.group);
  for (int row = 0; row < rows; ++row) {
    uint16_t *target = problem.output + (first + row / group) * problem.output_token_stride +
                       (head * group + row % group) * problem.output_head_stride;
    const __m512 share = _mm512_set1_ps(1.0f / scratch.sum[row]);
    for (int column = 0; column < problem.head_dim; column += 32) {
      const float *source = scratch.output + row * problem.head_dim + column;
      const __m512 low = _mm512_mul_ps(_mm512_loadu_ps(source), share);
      const __m512 high = _mm512_mul_ps(_mm512_loadu_ps(source + 16), share);
      store_narrow(target + column, low, high);
    }
  }
}

void attend_tile(const Problem &problem, Scratch &scratch, int64_t head, int64_t first, int64_t tokens) {
  const int head_dim = problem.head_dim, group = static_cast<int>(problem.group);
  const int rows = static_cast<int>(tokens) * group;
  const float scale = problem.scale * LOG2_E;
  const int32_t *positions = problem.positions + first;
  const int end = positions[tokens - 1] + 1;
  load_queries(problem, scratch, head, first, rows);
  for (int chunk = 0; chunk < end; chunk += CHUNK) {
    const int steps = (std::min(CHUNK, end - chunk) + STEP - 1) / STEP, width = steps * STEP;
    for (int step = 0; step < steps; ++step) {
      const int key = chunk + step * STEP;
      const int64_t slot = key % problem.block_size;
      const uint16_t *block = problem.cache +
                              problem.block_table[key / problem.block_size] * problem.block_stride +
                              head * problem.head_stride;
      const uint16_t *keys = scratch.context.take_step(block, slot, problem.block_size, step,
                                                       std::min(STEP, end - key), head_dim);
      multiply_keys(scratch.query, keys, scratch.logits + step * STEP, CHUNK, head_dim, rows);
    }
    const bool masked = chunk + width > positions[0] + 1;
    for (int row = 0; row < ROWS; ++row) {
      if (row >= rows)
        std::memset(scratch.weights + row * CHUNK, 0, sizeof(uint16_t) * width);
      else if (masked)
        apply_softmax<true>(scratch, row, width, positions[row / group] + 1 - chunk, scale, head_dim);
      else
        apply_softmax<false>(scratch, row, width, width, scale, head_dim);
    }
    scratch.context.add_values(scratch.weights, steps, head_dim, rows, scratch.output);
  }
  store_outputs(problem, scratch, head, first, rows);
}

} // namespace

// Strides in elements. One KV head after the other, so that its context stays in the cache of a core.
extern "C" void attend_packed(const uint16_t *query, int64_t query_token_stride, int64_t query_head_stride,
                              uint16_t *output, int64_t output_token_stride, int64_t output_head_stride,
                              const uint16_t *cache, int64_t block_stride, int64_t head_stride,
                              const int32_t *block_table, const int32_t *positions, int64_t num_tokens,
                              int64_t num_kv_heads, int64_t group, int64_t head_dim, int64_t block_size,
                              float scale) {
  const Problem problem{query,         query_token_stride, query_head_stride,
                        output,        output_token_stride, output_head_stride,
                        cache,         block_stride,       head_stride,
                        block_table,   positions,          num_tokens,
                        num_kv_heads,  group,              static_cast<int>(head_dim),
                        block_size,    scale};
  const int64_t tokens = ROWS / group, tiles = (num_tokens + tokens - 1) / tokens;
#pragma omp parallel
  {
    Scratch scratch;
    start_products();
#pragma omp for schedule(dynamic)
    for (int64_t item = 0; item < num_kv_heads * tiles; ++item) {
      const int64_t first = item % tiles * tokens;
      attend_tile(problem, scratch, item / tiles, first, std::min(tokens, num_tokens - first));
    }
    end_products();
  }
}
