// The CPU kernel of `kintsugi.fusor.kernels.native`: RoPE on bfloat16 keys, in fp32 and rounded once.
//
// Every product is rounded to fp32 before the difference, as in torch: the build forbids the compiler to
// contract them into fused multiply-adds. One thread, because the engine computes at the same time.

#include <cstdint>
#include <cstring>

namespace {

inline float widen(uint16_t value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

// Rounds to nearest, ties to even; NaN stays NaN.
inline uint16_t narrow(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

// `distance` between the two elements of a pair, `step` between two pairs.
template <int step>
inline void rotate_head(const uint16_t *__restrict from, uint16_t *__restrict to, const float *__restrict cos,
                        const float *__restrict sin, int64_t half, int64_t distance) {
  for (int64_t pair = 0; pair < half; ++pair) {
    const float first = widen(from[pair * step]), second = widen(from[pair * step + distance]);
    to[pair * step] = narrow(first * cos[pair] - second * sin[pair]);
    to[pair * step + distance] = narrow(second * cos[pair] + first * sin[pair]);
  }
}

} // namespace

// keys, rotated: [tokens][heads][head_dim]; cos, sin: fp32 [rows][half], whose rows `positions` select.
extern "C" void rotate_keys(const uint16_t *keys, uint16_t *rotated, const int64_t *positions,
                            const float *cos, const float *sin, int64_t num_tokens, int64_t num_heads,
                            int64_t head_dim, int64_t half, int64_t is_neox) {
  const int64_t rest = head_dim - 2 * half;
  for (int64_t token = 0; token < num_tokens; ++token) {
    const float *mine_cos = cos + positions[token] * half, *mine_sin = sin + positions[token] * half;
    for (int64_t head = 0; head < num_heads; ++head) {
      const int64_t place = (token * num_heads + head) * head_dim;
      if (is_neox)
        rotate_head<1>(keys + place, rotated + place, mine_cos, mine_sin, half, half);
      else
        rotate_head<2>(keys + place, rotated + place, mine_cos, mine_sin, half, 1);
      if (rest)
        std::memcpy(rotated + place + 2 * half, keys + place + 2 * half, sizeof(uint16_t) * rest);
    }
  }
}
