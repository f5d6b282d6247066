// What the CPU kernels share for every instruction set: sizes, powers of 2, rounding to bfloat16, and masks of lanes.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

constexpr int STEP = 32;   // keys of one product
constexpr int CHUNK = 256; // keys between two updates of the running maximum; 128 and 512 are slower
constexpr int HEAD_DIM_MAX = 256;
constexpr float LOWEST = -1e30f; // a real minus infinity would turn a masked row into NaN
constexpr float LOG2_E = 1.44269504f;

// 2^x for x <= 0, with a relative error of 3e-6; 0 far below. scalef rounds its exponent down.
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

// Stores 32 fp32 numbers as bfloat16, rounded to nearest, ties to even.
inline void store_narrow(uint16_t *target, __m512 low, __m512 high) {
#ifdef __AVX512BF16__
  _mm512_storeu_si512(target, (__m512i)_mm512_cvtne2ps_pbh(high, low));
#else
  for (int half = 0; half < 2; ++half) {
    const __m512 value = half ? high : low;
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    rounded = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q),
                                    _mm512_set1_epi32(0x7fc00000)); // NaN stays NaN
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(target + half * 16),
                        _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
  }
#endif
}
