// Operations of a decoder between its products, in float32, with their gradients, built by cpu_library.py.
//
// Each row is computed by itself, in an order that follows from its size alone, so that it gets the same bits in every
// batch; only the gradient of a norm's weight adds up over rows.
//
// Rows come in groups that are `group_stride` numbers apart, and `row_stride` inside a group: heads of tokens, say.

#include <stdlib.h>

#include "cpu_vectors.h"

namespace {

struct Rows {
    int64_t num_groups, rows_per_group, size, group_stride, row_stride, threads;

    int64_t num() const { return num_groups * rows_per_group; }
    // Where a row begins.
    int64_t place(int64_t row) const {
        return row / rows_per_group * group_stride + row % rows_per_group * row_stride;
    }
    bool shares_work() const { return threads > 1 && num() * size >= 1 << 15; }
};

inline float norm_scale(const float* x, int64_t size, float eps) {
    Floats squares = {};
    each_vector(size, [&](int64_t column, int64_t num) {
        const Floats some = load_some(x + column, num);
        squares += some * some;
    });
    return 1.0f / __builtin_sqrtf(sum(squares) / float(size) + eps);
}

// With n = s x and y = w n: dL/dx = s (g w - n mean(g w n)); g n is added to `by_weight`.
void norm_row_backward(const float* x, const float* weight, const float* gradient, float scale, int64_t size,
                       float* by_x, float* by_weight) {
    Floats products = {};
    each_vector(size, [&](int64_t column, int64_t num) {
        const Floats by_product = load_some(gradient + column, num) * load_some(x + column, num);
        products += by_product * load_some(weight + column, num);
        store_some(by_weight + column, load_some(by_weight + column, num) + by_product * scale, num);
    });
    const float share = sum(products) * scale * scale / float(size);
    each_vector(size, [&](int64_t column, int64_t num) {
        const Floats weighed = load_some(gradient + column, num) * load_some(weight + column, num);
        store_some(by_x + column, (weighed - load_some(x + column, num) * share) * scale, num);
    });
}

inline void add_to(float* to, const float* from, int64_t size) {
    for (int64_t i = 0; i < size; ++i) to[i] += from[i];
}

// Rows whose gradients of a weight are added up before they are added to those of others, for accuracy.
constexpr int64_t ROWS_AT_ONCE = 64;

}  // namespace

// `out` is [rows, size] in one piece; `scales` gets what each row was multiplied by, unless it is null.
extern "C" void rms_norm(const float* x, const float* weight, float eps, const Rows* rows, float* out, float* scales) {
#pragma omp parallel for num_threads(rows->threads) if (rows->shares_work())
    for (int64_t row = 0; row < rows->num(); ++row) {
        const float* from = x + rows->place(row);
        const float scale = norm_scale(from, rows->size, eps);
        if (scales) scales[row] = scale;
        each_vector(rows->size, [&](int64_t column, int64_t num) {
            const Floats normed = load_some(from + column, num) * scale;
            store_some(out + row * rows->size + column, normed * load_some(weight + column, num), num);
        });
    }
}

// `gradient` and `by_x` are in one piece; `by_weight` [size] is zeros. Returns whether there was memory for it.
extern "C" bool rms_norm_backward(const float* x, const float* weight, const float* gradient, const float* scales,
                                  const Rows* rows, float* by_x, float* by_weight) {
    const int64_t size = rows->size, num_parts = (rows->num() + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
    float* parts = static_cast<float*>(calloc(num_parts * size + 1, sizeof(float)));
    if (!parts) return false;
#pragma omp parallel for num_threads(rows->threads) if (rows->shares_work())
    for (int64_t part = 0; part < num_parts; ++part) {
        const int64_t first = part * ROWS_AT_ONCE, stop = first + ROWS_AT_ONCE;
        for (int64_t row = first; row < stop && row < rows->num(); ++row)
            norm_row_backward(x + rows->place(row), weight, gradient + row * size, scales[row], size,
                              by_x + row * size, parts + part * size);
    }
    for (int64_t part = 0; part < num_parts; ++part) add_to(by_weight, parts + part * size, size);
    free(parts);
    return true;
}

// Turn the halves of each row by the angle of its group; cosines and sines are [groups, size / 2]. With `sign` -1, back.
extern "C" void rotate(const float* x, const float* cos, const float* sin, float sign, const Rows* rows, float* out) {
    const int64_t half = rows->size / 2;
#pragma omp parallel for num_threads(rows->threads) if (rows->shares_work())
    for (int64_t row = 0; row < rows->num(); ++row) {
        const int64_t angles = row / rows->rows_per_group * half;
        const float *first = x + rows->place(row), *second = first + half;
        float* to = out + row * rows->size;
        each_vector(half, [&](int64_t column, int64_t num) {
            const Floats c = load_some(cos + angles + column, num), s = load_some(sin + angles + column, num) * sign;
            const Floats a = load_some(first + column, num), b = load_some(second + column, num);
            store_some(to + column, a * c - b * s, num);
            store_some(to + half + column, b * c + a * s, num);
        });
    }
}

// silu(gate) * up, of two tensors whose rows lie alike; `out` is in one piece.
extern "C" void swiglu(const float* gate, const float* up, const Rows* rows, float* out) {
#pragma omp parallel for num_threads(rows->threads) if (rows->shares_work())
    for (int64_t row = 0; row < rows->num(); ++row) {
        const int64_t place = rows->place(row);
        each_vector(rows->size, [&](int64_t column, int64_t num) {
            const Floats x = load_some(gate + place + column, num);
            store_some(out + row * rows->size + column, x * sigmoid(x) * load_some(up + place + column, num), num);
        });
    }
}

// `gradient` and the results are in one piece.
extern "C" void swiglu_backward(const float* gate, const float* up, const float* gradient, const Rows* rows,
                                float* by_gate, float* by_up) {
#pragma omp parallel for num_threads(rows->threads) if (rows->shares_work())
    for (int64_t row = 0; row < rows->num(); ++row) {
        const int64_t place = rows->place(row), to = row * rows->size;
        each_vector(rows->size, [&](int64_t column, int64_t num) {
            const Floats x = load_some(gate + place + column, num), g = load_some(gradient + to + column, num);
            const Floats s = sigmoid(x), silu = x * s;
            store_some(by_up + to + column, g * silu, num);
            store_some(by_gate + to + column, g * load_some(up + place + column, num) * (s + silu * (1.0f - s)), num);
        });
    }
}
