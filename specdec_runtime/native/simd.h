// Sixteen floats at a time, the same arithmetic on every CPU.
//
// Vec16 is the only thing the kernels compute with. Each operation here is exactly one IEEE
// operation per lane (multiply_add is fused), and sums across lanes go through one fixed tree.
// So a kernel written with Vec16 gives the same bits with AVX2, AVX-512 or the portable version.
//
// Column order in memory: pack_column() says where column c of 16 bfloat16 weights is stored.
// AVX2 reads two columns as one 32-bit word and splits it with a shift and a mask, which is half
// the work of widening; so there columns c and c + 8 are neighbours. int8 keeps their order.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#endif

struct BFloat16 {
    uint16_t bits;
};

inline float to_float(BFloat16 value) {
    const uint32_t wide = uint32_t(value.bits) << 16;
    float result;
    std::memcpy(&result, &wide, sizeof result);
    return result;
}
inline float to_float(float value) { return value; }

constexpr int LANES = 16;

#if defined(__AVX512F__)

// A tile of several panels may have this many sums: 32 registers of 16 floats, some for weights.
constexpr int TILE_ACCUMULATORS = 24;
constexpr int MAX_TILE_ROWS = 10;  // 12 would fit, but the compiler spills

struct Vec16 {
    __m512 v;
};
inline int pack_column(int column) { return column; }
inline Vec16 zeros() { return {_mm512_setzero_ps()}; }
inline Vec16 broadcast(float x) { return {_mm512_set1_ps(x)}; }
inline Vec16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Vec16 load(const BFloat16* p) {
    const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16))};
}
inline Vec16 load(const int8_t* p) {
    const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(raw))};
}
inline void store(float* p, Vec16 a) { _mm512_storeu_ps(p, a.v); }
inline Vec16 add(Vec16 a, Vec16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec16 subtract(Vec16 a, Vec16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec16 multiply(Vec16 a, Vec16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec16 divide(Vec16 a, Vec16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec16 maximum(Vec16 a, Vec16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec16 minimum(Vec16 a, Vec16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Vec16 multiply_add(Vec16 a, Vec16 b, Vec16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// 2^n, where n is the integer that adding 1.5 * 2^23 left in the low bits of `shifted`.
inline Vec16 power_of_two(Vec16 shifted) {
    const __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(shifted.v), 23);
    return {_mm512_castsi512_ps(_mm512_add_epi32(exponent, _mm512_set1_epi32(0x3f800000)))};
}
// `a` where x > limit, else 0.
inline Vec16 keep_above(Vec16 a, Vec16 x, Vec16 limit) {
    return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, limit.v, _CMP_GT_OQ), a.v)};
}

#elif defined(__AVX2__) && defined(__FMA__)

// 16 registers of 8 floats: 6 rows of one panel take 12, the weights 2, a broadcast 1. With several
// panels at once the compiler keeps more broadcasts alive; beyond 4 sums it would spill.
constexpr int TILE_ACCUMULATORS = 4;
constexpr int MAX_TILE_ROWS = 6;

struct Vec16 {
    __m256 low, high;
};
inline int pack_column(int column) { return column < 8 ? 2 * column : 2 * (column - 8) + 1; }
inline Vec16 zeros() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Vec16 broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Vec16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline Vec16 load(const BFloat16* p) {
    const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m256i upper_half = _mm256_set1_epi32(int(0xffff0000u));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(raw, 16)),
            _mm256_castsi256_ps(_mm256_and_si256(raw, upper_half))};
}
inline __m256 load_8(const int8_t* p) {
    const __m128i raw = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(raw));
}
inline Vec16 load(const int8_t* p) { return {load_8(p), load_8(p + 8)}; }
inline void store(float* p, Vec16 a) {
    _mm256_storeu_ps(p, a.low);
    _mm256_storeu_ps(p + 8, a.high);
}
inline Vec16 add(Vec16 a, Vec16 b) {
    return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
}
inline Vec16 subtract(Vec16 a, Vec16 b) {
    return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)};
}
inline Vec16 multiply(Vec16 a, Vec16 b) {
    return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}
inline Vec16 divide(Vec16 a, Vec16 b) {
    return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)};
}
inline Vec16 maximum(Vec16 a, Vec16 b) {
    return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
}
inline Vec16 minimum(Vec16 a, Vec16 b) {
    return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)};
}
inline Vec16 multiply_add(Vec16 a, Vec16 b, Vec16 c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline __m256 power_of_two(__m256 shifted) {
    const __m256i exponent = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(exponent, _mm256_set1_epi32(0x3f800000)));
}
// 2^n, where n is the integer that adding 1.5 * 2^23 left in the low bits of `shifted`.
inline Vec16 power_of_two(Vec16 shifted) {
    return {power_of_two(shifted.low), power_of_two(shifted.high)};
}
// `a` where x > limit, else 0.
inline Vec16 keep_above(Vec16 a, Vec16 x, Vec16 limit) {
    return {_mm256_and_ps(a.low, _mm256_cmp_ps(x.low, limit.low, _CMP_GT_OQ)),
            _mm256_and_ps(a.high, _mm256_cmp_ps(x.high, limit.high, _CMP_GT_OQ))};
}

#else

// Any other CPU: plain loops that the compiler turns into whatever vectors it has.
constexpr int TILE_ACCUMULATORS = 4;
constexpr int MAX_TILE_ROWS = 6;

struct Vec16 {
    float v[LANES];
};
template <class F>
inline Vec16 for_each_lane(F value_of) {
    Vec16 result;
    for (int i = 0; i < LANES; ++i) result.v[i] = value_of(i);
    return result;
}
inline int pack_column(int column) { return column; }
inline Vec16 zeros() {
    return for_each_lane([](int) { return 0.0f; });
}
inline Vec16 broadcast(float x) {
    return for_each_lane([=](int) { return x; });
}
inline Vec16 load(const float* p) {
    return for_each_lane([=](int i) { return p[i]; });
}
inline Vec16 load(const BFloat16* p) {
    return for_each_lane([=](int i) { return to_float(p[i]); });
}
inline Vec16 load(const int8_t* p) {
    return for_each_lane([=](int i) { return float(p[i]); });
}
inline void store(float* p, const Vec16& a) { std::memcpy(p, a.v, sizeof a.v); }
inline Vec16 add(const Vec16& a, const Vec16& b) {
    return for_each_lane([&](int i) { return a.v[i] + b.v[i]; });
}
inline Vec16 subtract(const Vec16& a, const Vec16& b) {
    return for_each_lane([&](int i) { return a.v[i] - b.v[i]; });
}
inline Vec16 multiply(const Vec16& a, const Vec16& b) {
    return for_each_lane([&](int i) { return a.v[i] * b.v[i]; });
}
inline Vec16 divide(const Vec16& a, const Vec16& b) {
    return for_each_lane([&](int i) { return a.v[i] / b.v[i]; });
}
inline Vec16 maximum(const Vec16& a, const Vec16& b) {
    return for_each_lane([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline Vec16 minimum(const Vec16& a, const Vec16& b) {
    return for_each_lane([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
inline Vec16 multiply_add(const Vec16& a, const Vec16& b, const Vec16& c) {
    return for_each_lane([&](int i) { return __builtin_fmaf(a.v[i], b.v[i], c.v[i]); });
}
// 2^n, where n is the integer that adding 1.5 * 2^23 left in the low bits of `shifted`.
inline Vec16 power_of_two(const Vec16& shifted) {
    return for_each_lane([&](int i) {
        uint32_t bits;
        std::memcpy(&bits, &shifted.v[i], sizeof bits);
        bits = (bits << 23) + 0x3f800000u;
        float result;
        std::memcpy(&result, &bits, sizeof result);
        return result;
    });
}
// `a` where x > limit, else 0.
inline Vec16 keep_above(const Vec16& a, const Vec16& x, const Vec16& limit) {
    return for_each_lane([&](int i) { return x.v[i] > limit.v[i] ? a.v[i] : 0.0f; });
}

#endif

// Sum of the lanes: pairs 8 apart, then 4, 2, 1.
inline float sum_lanes(Vec16 a) {
    float x[LANES];
    store(x, a);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) x[i] += x[i + width];
    return x[0];
}

inline float largest_lane(Vec16 a) {
    float x[LANES];
    store(x, a);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) x[i] = x[i] > x[i + width] ? x[i] : x[i + width];
    return x[0];
}

// e^x, relative error below 2e-7; 0 below -87, where float32 would soon be denormal.
// x = n ln 2 + r with |r| <= 0.35, and the Taylor series of e^r to r^7 (next term: 6e-9).
inline Vec16 exponential(Vec16 x) {
    const Vec16 lowest = broadcast(-87.0f), highest = broadcast(88.0f);
    const Vec16 clamped = minimum(maximum(x, lowest), highest);
    const Vec16 shift = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const Vec16 shifted = multiply_add(clamped, broadcast(1.44269504f), shift);
    const Vec16 n = subtract(shifted, shift);
    // ln 2 in two parts: the first has few bits, so n times it is exact.
    Vec16 r = multiply_add(n, broadcast(-0.693359375f), clamped);
    r = multiply_add(n, broadcast(2.12194440e-4f), r);
    Vec16 series = broadcast(1.0f / 5040.0f);
    for (float coefficient :
         {1.0f / 720.0f, 1.0f / 120.0f, 1.0f / 24.0f, 1.0f / 6.0f, 0.5f, 1.0f, 1.0f})
        series = multiply_add(series, r, broadcast(coefficient));
    return keep_above(multiply(series, power_of_two(shifted)), x, lowest);
}
