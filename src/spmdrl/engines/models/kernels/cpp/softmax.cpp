// Sums over a vocabulary and their gradients, in float32, built by cpu_library.py.
//
// Each row is computed by itself, in an order that follows from its size alone, so that it gets the same bits in every
// batch.

#include "cpu_vectors.h"

namespace {

// Numbers of a row whose sums are added up before they are added to those of others, for accuracy.
constexpr int64_t COLUMNS_AT_ONCE = 64 * LANES;

}  // namespace

// Of `x` [rows, size] each number becomes z, what it is above its row's `highest`; `sums` and `weighted` [rows] get the
// sums of exp(z) and of z exp(z). A z of -inf adds nothing.
extern "C" void exponential_sums(float* x, const float* highest, int64_t rows, int64_t size, int64_t threads,
                                 float* sums, float* weighted) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; ++row) {
        float* numbers = x + row * size;
        Floats all = {}, all_weighted = {};
        for (int64_t first = 0; first < size; first += COLUMNS_AT_ONCE) {
            const int64_t stop = first + COLUMNS_AT_ONCE < size ? first + COLUMNS_AT_ONCE : size;
            Floats some = {}, some_weighted = {};
            for (int64_t column = first; column < stop; column += LANES) {
                const int64_t num = stop - column;
                const Floats z = load_some(numbers + column, num) - highest[row];
                store_some(numbers + column, z, num);
                Floats power = exp_of(z);
                if (num < LANES) power = first_of(power, num, 0.0f);
                some += power;
                // Where exp(z) is 0, z may be -inf; NaN must spread.
                some_weighted += power == 0.0f ? Floats{} : power * z;
            }
            all += some;
            all_weighted += some_weighted;
        }
        sums[row] = sum(all);
        weighted[row] = sum(all_weighted);
    }
}

// With log p = z - `log_sum` and p its exponential, each z of [rows, size] becomes -p (g + h (log p + entropy)), where
// `by_logprob` has each row's g and `by_entropy` its h; either may be null, for zeros.
extern "C" void minus_expected(float* z, const float* log_sum, const float* entropy, const float* by_logprob,
                               const float* by_entropy, int64_t rows, int64_t size, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; ++row) {
        float* numbers = z + row * size;
        const float g = by_logprob ? by_logprob[row] : 0.0f, h = by_entropy ? by_entropy[row] : 0.0f;
        for (int64_t column = 0; column < size; column += LANES) {
            const int64_t num = size - column;
            const Floats logprobs = load_some(numbers + column, num) - log_sum[row], p = exp_of(logprobs);
            const Floats factors = h == 0.0f ? Floats{} + g : (logprobs + entropy[row]) * h + g;
            store_some(numbers + column, p == 0.0f ? Floats{} : -p * factors, num);
        }
    }
}
