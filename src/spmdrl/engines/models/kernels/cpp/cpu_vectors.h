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

// The first `num` of a vector's numbers, or all where there are more.
inline Floats load_some(const float* from, int64_t num) { return num >= LANES ? load(from) : load_first(from, num); }

inline void store_some(float* to, Floats x, int64_t num) {
    if (num >= LANES) return store(to, x);
    for (int64_t i = 0; i < num; ++i) to[i] = x[i];
}

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

// Each run of WIDTH numbers becomes one of half as many, sums of its two halves: those of a and of b by turns.
template <int WIDTH>
Floats halves_added(Floats a, Floats b);

#ifdef __AVX512F__
template <>
inline Floats halves_added<16>(Floats a, Floats b) {
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}
template <>
inline Floats halves_added<8>(Floats a, Floats b) {
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
           __builtin_shufflevector(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
}
template <>
inline Floats halves_added<4>(Floats a, Floats b) {
    return __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
}
template <>
inline Floats halves_added<2>(Floats a, Floats b) {
    return __builtin_shufflevector(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
           __builtin_shufflevector(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
}
#else
template <>
inline Floats halves_added<8>(Floats a, Floats b) {
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11) +
           __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
}
template <>
inline Floats halves_added<4>(Floats a, Floats b) {
    return __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13) +
           __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
}
template <>
inline Floats halves_added<2>(Floats a, Floats b) {
    return __builtin_shufflevector(a, b, 0, 8, 2, 10, 4, 12, 6, 14) +
           __builtin_shufflevector(a, b, 1, 9, 3, 11, 5, 13, 7, 15);
}
#endif

// The sums of LANES vectors, in their order; the vectors are overwritten.
inline Floats sums(Floats* x) {
#ifdef __AVX512F__
    for (int i = 0; i < 8; ++i) x[i] = halves_added<16>(x[i], x[i + 8]);
#endif
    for (int i = 0; i < 4; ++i) x[i] = halves_added<8>(x[i], x[i + 4]);
    for (int i = 0; i < 2; ++i) x[i] = halves_added<4>(x[i], x[i + 2]);
    return halves_added<2>(x[0], x[1]);
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

// 1 / (1 + exp(-x)).
inline Floats sigmoid(Floats x) {
    const Floats zero = {}, power = exp_of(x < 0.0f ? x : -x);
    return (x < 0.0f ? power : zero + 1.0f) / (power + 1.0f);
}

// `x` where the lane's number is below `num`, and `other` elsewhere.
inline Floats first_of(Floats x, int64_t num, Floats other) {
    Integers lane;
    for (int i = 0; i < LANES; ++i) lane[i] = i;
    return lane < int32_t(num) ? x : other;
}
inline Floats first_of(Floats x, int64_t num, float other) { return first_of(x, num, Floats{} + other); }

// Call `work(column, num)` for each vector of a row, whose last may hold fewer than LANES numbers.
template <typename Work>
inline void each_vector(int64_t size, Work work) {
    int64_t column = 0;
    for (; column + LANES <= size; column += LANES) work(column, LANES);
    if (column < size) work(column, size - column);
}

inline int64_t whole_vectors(int64_t num) { return (num + LANES - 1) / LANES * LANES; }

// Turn the first `num` scores into exponentials of what they are above the highest, and those behind them, up to
// `width`, into zeros; returns the highest and one over the sum. A sink is one more score of both; -inf for none.
struct Softmax {
    float highest, factor;
};

inline Softmax exponentials(float* scores, int64_t num, int64_t width, float sink) {
    const int64_t last = whole_vectors(num) - LANES;
    const Floats last_scores = first_of(load(scores + last), num - last, -__builtin_inff());
    Floats top = last_scores;
    for (int64_t s = 0; s < last; s += LANES) {
        const Floats next = load(scores + s);
        top = next > top ? next : top;
    }
    const float top_score = largest(top), highest = top_score > sink ? top_score : sink;
    Floats total = {};
    for (int64_t s = 0; s < last; s += LANES) {
        const Floats weights = exp_of(load(scores + s) - highest);
        store(scores + s, weights);
        total += weights;
    }
    const Floats weights = exp_of(last_scores - highest);
    store(scores + last, weights);
    for (int64_t s = last + LANES; s < width; s += LANES) store(scores + s, Floats{});
    return {highest, 1.0f / (sum(total + weights) + exp_of(Floats{} + (sink - highest))[0])};
}

}  // namespace
