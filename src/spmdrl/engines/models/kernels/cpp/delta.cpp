// The gated delta rule and its causal convolution on a CPU, token by token, in float32, built by cpu_library.py.
//
// A row begins with its state and ends with the next one in the same place. Each token is computed by itself, in an
// order that follows from the sizes alone, so that it gets the same bits in every batch and however a row is cut into
// calls. The columns of a state don't meet: a panel of them stays in the nearest cache while a row's tokens pass.
//
// Shapes: T tokens, G heads of queries and keys, H heads of values, K and U their sizes, C channels and W width of the
// convolution, S slots of states.

#include <stdlib.h>

#include "cpu_vectors.h"

namespace {

constexpr int VECTORS = 4;  // Of a panel's columns.
constexpr int64_t PANEL = VECTORS * LANES;
constexpr int64_t CHANNELS = 256;  // Convolved at once: in fewer, rows of one token would be read in tiny pieces.

// Rows of packed tokens: by their ends, or one of each token; with the slots of their states, or one each in order.
struct RowsOfSlots {
    const int32_t* offsets;
    const int64_t* slots;
    int64_t num, threads;

    int64_t start(int64_t row) const { return offsets ? offsets[row] : row; }
    int64_t length(int64_t row) const { return offsets ? offsets[row + 1] - offsets[row] : 1; }
    int64_t slot(int64_t row) const { return slots ? slots[row] : row; }
    int64_t num_tokens() const { return offsets ? offsets[num] : num; }
    bool share_work(int64_t per_token) const { return threads > 1 && num_tokens() * per_token >= 1 << 17; }
    int64_t longest() const {
        int64_t most = 0;
        for (int64_t row = 0; row < num; ++row) most = length(row) > most ? length(row) : most;
        return most;
    }
};

// Vectors [T, heads, size], each in one piece.
struct HeadsOfTokens {
    const float* numbers;
    int64_t token_stride, head_stride;

    const float* at(int64_t token, int64_t head) const { return numbers + token * token_stride + head * head_stride; }
};

struct DeltaSizes {
    int64_t key_heads, heads, key_size, value_size;
    float eps;
};

struct Token {
    float decay, beta;
};

// One token's change of NUM vectors of a state's columns, whose K rows are `step` apart; returns S^T q in `out`. Not
// inlined, so that there is one order of roundings.
template <int NUM>
__attribute__((noinline)) void pass_token(const float* k, const float* q, Token token, const Floats* v, float* state,
                                          int64_t step, int64_t key_size, Floats* out) {
    // Two sums of each, as one would wait for itself.
    Floats recalled[2][NUM] = {}, found[2][NUM] = {}, fresh[NUM];
    const auto recall = [&](int64_t i, int part) {
#pragma GCC unroll 4
        for (int n = 0; n < NUM; ++n) recalled[part][n] += k[i] * load(state + i * step + n * LANES);
    };
    const auto write = [&](int64_t i, int part) {
#pragma GCC unroll 4
        for (int n = 0; n < NUM; ++n) {
            float* place = state + i * step + n * LANES;
            const Floats next = load(place) * token.decay + k[i] * fresh[n];
            store(place, next);
            found[part][n] += q[i] * next;
        }
    };
    const int64_t last = key_size - 1;
    for (int64_t i = 0; i < last; i += 2) recall(i, 0), recall(i + 1, 1);
    if (key_size % 2) recall(last, 0);
    for (int n = 0; n < NUM; ++n) fresh[n] = token.beta * (v[n] - token.decay * (recalled[0][n] + recalled[1][n]));
    for (int64_t i = 0; i < last; i += 2) write(i, 0), write(i + 1, 1);
    if (key_size % 2) write(last, 0);
    for (int n = 0; n < NUM; ++n) out[n] = found[0][n] + found[1][n];
}

// A vector times a factor over its norm.
inline void copy_unit(const float* x, int64_t size, float eps, float factor, float* to) {
    Floats squares = {};
    each_vector(size, [&](int64_t column, int64_t num) {
        const Floats some = load_some(x + column, num);
        squares += some * some;
    });
    const float scale = factor / __builtin_sqrtf(sum(squares) + eps);
    each_vector(size, [&](int64_t column, int64_t num) {
        store_some(to + column, load_some(x + column, num) * scale, num);
    });
}

struct DeltaRule {
    DeltaSizes sizes;
    HeadsOfTokens queries, keys, values;
    const float *log_decay, *beta;  // [T, H]
    float *states, *out;            // [S, H, K, U], [T, H, U]

    int64_t state_size() const { return sizes.heads * sizes.key_size * sizes.value_size; }
    int64_t scratch_size(int64_t longest) const { return longest * (2 * sizes.key_size + 2) + sizes.key_size * PANEL; }

    void row(int64_t start, int64_t length, int64_t slot, int64_t head, float* scratch) const {
        const int64_t K = sizes.key_size, U = sizes.value_size, key_head = head * sizes.key_heads / sizes.heads;
        float *k = scratch, *q = k + length * K, *panel = q + length * K;
        Token* tokens = reinterpret_cast<Token*>(panel + K * PANEL);
        for (int64_t t = 0; t < length; ++t) {
            copy_unit(keys.at(start + t, key_head), K, sizes.eps, 1.0f, k + t * K);
            copy_unit(queries.at(start + t, key_head), K, sizes.eps, 1.0f / __builtin_sqrtf(float(K)), q + t * K);
            const int64_t place = (start + t) * sizes.heads + head;
            tokens[t] = {exp_of(Floats{} + log_decay[place])[0], beta[place]};
        }
        float* state = states + (slot * sizes.heads + head) * K * U;
        for (int64_t column = 0; column < U; column += PANEL) {
            const int64_t width = U - column < PANEL ? U - column : PANEL;
            // A copy isn't worth it for one token, but in bigger steps rows would share few places of the cache.
            if (length == 1 && width % LANES == 0) {
                pass_columns(start, 1, head, column, width, k, q, tokens, state + column, U);
                continue;
            }
            for (int64_t i = 0; i < K; ++i)
                for (int64_t c = 0; c < whole_vectors(width); ++c)
                    panel[i * PANEL + c] = c < width ? state[i * U + column + c] : 0.0f;
            pass_columns(start, length, head, column, width, k, q, tokens, panel, PANEL);
            for (int64_t i = 0; i < K; ++i)
                __builtin_memcpy(state + i * U + column, panel + i * PANEL, width * sizeof(float));
        }
    }

    void pass_columns(int64_t start, int64_t length, int64_t head, int64_t column, int64_t width, const float* k,
                      const float* q, const Token* tokens, float* state, int64_t step) const {
        const int64_t K = sizes.key_size, vectors = (width + LANES - 1) / LANES;
        for (int64_t t = 0; t < length; ++t) {
            Floats v[VECTORS], o[VECTORS];
            const float* value = values.at(start + t, head) + column;
            float* to = out + ((start + t) * sizes.heads + head) * sizes.value_size + column;
            for (int64_t n = 0; n < vectors; ++n) v[n] = load_some(value + n * LANES, width - n * LANES);
            static_assert(VECTORS == 4, "a case for each number of vectors");
            switch (vectors) {
                case 4: pass_token<4>(k + t * K, q + t * K, tokens[t], v, state, step, K, o); break;
                case 3: pass_token<3>(k + t * K, q + t * K, tokens[t], v, state, step, K, o); break;
                case 2: pass_token<2>(k + t * K, q + t * K, tokens[t], v, state, step, K, o); break;
                default: pass_token<1>(k + t * K, q + t * K, tokens[t], v, state, step, K, o);
            }
            for (int64_t n = 0; n < vectors; ++n) store_some(to + n * LANES, o[n], width - n * LANES);
        }
    }
};

}  // namespace

// `inputs` are queries, keys and values. Returns whether there was memory for it.
extern "C" bool gated_delta(const HeadsOfTokens* inputs, const float* log_decay, const float* beta,
                            const DeltaSizes* sizes, const RowsOfSlots* rows, float* states, float* out) {
    const DeltaRule rule{*sizes, inputs[0], inputs[1], inputs[2], log_decay, beta, states, out};
    const int64_t size = rule.scratch_size(rows->longest());
    bool has_memory = true;
#pragma omp parallel num_threads(rows->threads) if (rows->share_work(rule.state_size()))
    {
        float* scratch = static_cast<float*>(malloc(size * sizeof(float)));
        if (!scratch) has_memory = false;
#pragma omp for collapse(2) schedule(dynamic, 1)
        for (int64_t row = 0; row < rows->num; ++row)
            for (int64_t head = 0; head < sizes->heads; ++head)
                if (scratch) rule.row(rows->start(row), rows->length(row), rows->slot(row), head, scratch);
        free(scratch);
    }
    return has_memory;
}

// `values` are [T, C] with tokens `token_stride` apart, `weight` [C, W], `columns` [S, W - 1, C] those before a row and
// then its last ones, `out` [T, C].
extern "C" void causal_conv(const float* values, int64_t token_stride, const float* weight, int64_t channels,
                            int64_t width, const RowsOfSlots* rows, float* columns, float* out) {
#pragma omp parallel for num_threads(rows->threads) if (rows->share_work(channels * width))
    for (int64_t first = 0; first < channels; first += CHANNELS) {
        const int64_t before = width - 1, last = channels - first < CHANNELS ? channels : first + CHANNELS;
        Floats weights[CHANNELS / LANES][width];
        for (int64_t i = 0; i < last - first; ++i)
            for (int64_t w = 0; w < width; ++w) {
                Floats& factors = weights[i / LANES][w];
                if (i % LANES == 0) factors = Floats{};
                factors[i % LANES] = weight[(first + i) * width + w];
            }
        for (int64_t row = 0; row < rows->num; ++row)
            for (int64_t channel = first; channel < last; channel += LANES) {
                const int64_t length = rows->length(row), num = channels - channel;
                const Floats* factors = weights[(channel - first) / LANES];
                const float* own = values + rows->start(row) * token_stride + channel;
                float *earlier = columns + rows->slot(row) * before * channels + channel,
                      *to = out + rows->start(row) * channels + channel;
                const auto column = [&](int64_t t) {
                    return load_some(t < 0 ? earlier + (before + t) * channels : own + t * token_stride, num);
                };
                for (int64_t t = 0; t < length; ++t) {
                    Floats total = {};
                    for (int64_t w = 0; w < width; ++w) total += factors[w] * column(t - before + w);
                    store_some(to + t * channels, total * sigmoid(total), num);
                }
                for (int64_t w = 0; w < before; ++w)
                    store_some(earlier + w * channels, column(length - before + w), num);
            }
    }
}
