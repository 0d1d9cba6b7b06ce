// Vectors of numbers as the CPU's operations compute with them, in float32.

#pragma once

#include <stdint.h>

namespace {

#ifdef __AVX512F__
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Integers __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
typedef float Floats8 __attribute__((vector_size(32)));

struct bfloat16 {
    uint16_t bits;
};

inline Floats load(const float* from) {
    Floats x;
    __builtin_memcpy(&x, from, sizeof x);
    return x;
}

inline Floats load(const bfloat16* from) {
    Halves halves;
    __builtin_memcpy(&halves, from, sizeof halves);
    const Integers bits = __builtin_convertvector(halves, Integers) << 16;
    Floats x;
    __builtin_memcpy(&x, &bits, sizeof x);
    return x;
}

// The first `num` numbers, and zeros.
template <typename T>
inline Floats load_first(const T* from, int64_t num) {
    T some[LANES] = {};
    for (int64_t i = 0; i < num; ++i) some[i] = from[i];
    return load(some);
}

inline void store(float* to, Floats x) { __builtin_memcpy(to, &x, sizeof x); }

inline void round_to(float* to, float x) { *to = x; }

inline void round_to(bfloat16* to, float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    // To the nearest, ties to even.
    to->bits = x == x ? uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) : uint16_t(0x7fc0);
}

inline Floats8 halved(Floats x) {
#ifdef __AVX512F__
    return __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
           __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
#else
    return x;
#endif
}

inline float sum(Floats x) {
    const Floats8 eight = halved(x);
    const auto four = __builtin_shufflevector(eight, eight, 0, 1, 2, 3) +
                      __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
    return (four[0] + four[2]) + (four[1] + four[3]);
}

inline Floats8 larger_half(Floats x) {
#ifdef __AVX512F__
    const Floats8 a = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7);
    const Floats8 b = __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
    return a > b ? a : b;
#else
    return x;
#endif
}

inline float largest(Floats x) {
    const Floats8 eight = larger_half(x);
    const auto low = __builtin_shufflevector(eight, eight, 0, 1, 2, 3);
    const auto high = __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
    const auto four = low > high ? low : high;
    const float a = four[0] > four[2] ? four[0] : four[2], b = four[1] > four[3] ? four[1] : four[3];
    return a > b ? a : b;
}

// exp of numbers that aren't above 0, within 2 units in the last place (the polynomial of Cephes' expf); below -87, 0.
inline Floats exp_of(Floats x) {
    const Floats zero = {};
    const Floats bounded = x < -87.0f ? zero - 87.0f : x;
    // Adding 1.5 * 2**23 rounds to an integer.
    const Floats power = (bounded * 1.44269504088896341f + 12582912.0f) - 12582912.0f;
    const Floats rest = (bounded - power * 0.693359375f) + power * 2.12194440e-4f;
    Floats series = zero + 1.9875691500e-4f;
    series = series * rest + 1.3981999507e-3f;
    series = series * rest + 8.3334519073e-3f;
    series = series * rest + 4.1665795894e-2f;
    series = series * rest + 1.6666665459e-1f;
    series = series * rest + 5.0000001201e-1f;
    series = series * rest * rest + rest + 1.0f;
    const Integers bits = (__builtin_convertvector(power, Integers) + 127) << 23;
    Floats scale;
    __builtin_memcpy(&scale, &bits, sizeof scale);
    return x < -87.0f ? zero : series * scale;
}

// `x` where the lane's number is below `num`, and `other` elsewhere.
inline Floats first_of(Floats x, int64_t num, float other) {
    Integers lane;
    for (int i = 0; i < LANES; ++i) lane[i] = i;
    const Floats others = Floats{} + other;
    return lane < int32_t(num) ? x : others;
}

inline int64_t whole_vectors(int64_t num) { return (num + LANES - 1) / LANES * LANES; }

}  // namespace
