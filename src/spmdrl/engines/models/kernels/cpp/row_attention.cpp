// Causal attention inside packed rows on a CPU, with its gradients, in float32, built by cpu_library.py.
//
// The queries of a row see the row's tokens up to their own and, before these, a prefix: tokens elsewhere in the batch,
// which several rows may have in common. Each query is computed by itself, in an order that follows from its own
// position alone, so that it gets the same bits in every batch and whether its prefix is shared or not. With a window it
// sees the last keys of these only, and none before them is computed but those of its panel.
//
// Shapes: T tokens, H query heads, J key and value heads, F = H / J queries that share a key head, K head size of keys,
// U head size of values, S keys that a row's last query sees.

#include <stdlib.h>

#include "cpu_vectors.h"

namespace {

constexpr int TILE = 6;                            // Rows of a product whose sums stay in registers,
constexpr int VECTORS = LANES == 16 ? 4 : 2;       // and vectors of each.
constexpr int64_t PANEL = VECTORS * LANES;
constexpr int64_t QUERIES = 4 * TILE;              // Whose gradients are computed at once.

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// The factors of a product: numbers [rows, depth] by their two steps, and [depth, columns], of which each PANEL columns
// lie `panel` apart, or a matrix by rows if that is PANEL.
struct Left {
    const float* numbers;
    int64_t row, step;
};
struct Right {
    const float* numbers;
    int64_t panel, step;
};

template <int ROWS, int NUM>
inline void multiply(Left a, const float* b, int64_t b_step, int64_t depth, float* out, int64_t out_row, bool adds) {
    Floats sums[ROWS][NUM] = {};
    if (adds)
        for (int r = 0; r < ROWS; ++r)
            for (int i = 0; i < NUM; ++i) sums[r][i] = load(out + r * out_row + i * LANES);
    for (int64_t d = 0; d < depth; ++d) {
        Floats columns[NUM];
#pragma GCC unroll 4
        for (int i = 0; i < NUM; ++i) columns[i] = load(b + d * b_step + i * LANES);
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; ++r) {
            const float x = a.numbers[r * a.row + d * a.step];
#pragma GCC unroll 4
            for (int i = 0; i < NUM; ++i) sums[r][i] += x * columns[i];
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int i = 0; i < NUM; ++i) store(out + r * out_row + i * LANES, sums[r][i]);
}

template <int ROWS>
void multiply_tile(Left a, Right b, int64_t vectors, int64_t depth, float* out, int64_t out_row, bool adds) {
    int64_t v = 0;
    for (; v + VECTORS <= vectors; v += VECTORS, b.numbers += b.panel, out += PANEL)
        multiply<ROWS, VECTORS>(a, b.numbers, b.step, depth, out, out_row, adds);
    if (VECTORS > 3 && vectors - v == 3) multiply<ROWS, 3>(a, b.numbers, b.step, depth, out, out_row, adds);
    if (VECTORS > 2 && vectors - v == 2) multiply<ROWS, 2>(a, b.numbers, b.step, depth, out, out_row, adds);
    if (vectors - v == 1) multiply<ROWS, 1>(a, b.numbers, b.step, depth, out, out_row, adds);
}

// out [rows, vectors x LANES] = or += a b, of at most TILE rows.
void multiply_rows(int64_t rows, Left a, Right b, int64_t vectors, int64_t depth, float* out, int64_t out_row,
                   bool adds = false) {
    static_assert(TILE == 6, "a case for each number of rows");
    switch (rows) {
        case 6: return multiply_tile<6>(a, b, vectors, depth, out, out_row, adds);
        case 5: return multiply_tile<5>(a, b, vectors, depth, out, out_row, adds);
        case 4: return multiply_tile<4>(a, b, vectors, depth, out, out_row, adds);
        case 3: return multiply_tile<3>(a, b, vectors, depth, out, out_row, adds);
        case 2: return multiply_tile<2>(a, b, vectors, depth, out, out_row, adds);
        default: return multiply_tile<1>(a, b, vectors, depth, out, out_row, adds);
    }
}

// A tensor [T, heads, size] whose vectors lie in one piece each.
struct Heads {
    const float* numbers;
    int64_t token_stride, head_stride;

    const float* at(int64_t token, int64_t head) const { return numbers + token * token_stride + head * head_stride; }
};

// A row: its own tokens, and those of its prefix.
struct Row {
    int64_t start, length, prefix, prefix_length;

    int64_t num_keys() const { return prefix_length + length; }
    int64_t token_of_key(int64_t s) const { return s < prefix_length ? prefix + s : start + s - prefix_length; }
};

struct Shape {
    int64_t num_heads, num_kv_heads, key_size, value_size, num_groups, threads;
    int64_t window;      // Keys that a query sees at most,
    const float* sinks;  // and the score of a key without a value of each head, or null.

    int64_t first_seen(int64_t position) const { return most(0, position + 1 - window); }
    float sink(int64_t head) const { return sinks ? sinks[head] : -__builtin_inff(); }
    int64_t share() const { return num_heads / num_kv_heads; }
    int64_t keys_padded() const { return whole_vectors(key_size); }
    int64_t values_padded() const { return whole_vectors(value_size); }
    float scale() const { return 1.0f / __builtin_sqrtf(float(key_size)); }
};

inline int64_t panels(int64_t num) { return (num + PANEL - 1) / PANEL * PANEL; }

// Copy a vector times a factor, with zeros behind it up to whole vectors.
inline void copy_scaled(const float* from, float factor, int64_t size, float* to) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) store(to + i, load(from + i) * factor);
    if (i < size) store(to + i, load_first(from + i, size - i) * factor);
}

// The same to where other numbers follow.
inline void put_scaled(const float* from, float factor, int64_t size, float* to) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) store(to + i, load(from + i) * factor);
    for (; i < size; ++i) to[i] = from[i] * factor;
}

// The keys of a row in a cache whose blocks are [J, block_size, size]; of the first head, a token is a place in a block.
struct CachedKeys {
    const int32_t* table;
    int64_t num, block_size, num_heads;

    int64_t num_keys() const { return num; }
    int64_t token_of_key(int64_t s) const {
        return table[s / block_size] * num_heads * block_size + s % block_size;
    }
};

// Copy one head of a row's keys or values, from the `first`, to [S, padded].
template <typename Keys>
void copy_keys(Heads heads, const Keys& row, int64_t first, int64_t head, int64_t size, float* to) {
    for (int64_t s = first; s < row.num_keys(); ++s)
        copy_scaled(heads.at(row.token_of_key(s), head), 1.0f, size, to + s * whole_vectors(size));
}

inline Floats8 load8(const float* from) {
    Floats8 x;
    __builtin_memcpy(&x, from, sizeof x);
    return x;
}

// Turn 8 rows of 8 numbers into columns that lie `step` apart.
inline void transpose8(const float* const rows[8], float* to, int64_t step) {
    Floats8 x[8], y[8];
    for (int i = 0; i < 8; ++i) x[i] = load8(rows[i]);
    for (int i = 0; i < 8; i += 2) {
        y[i] = __builtin_shufflevector(x[i], x[i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
        y[i + 1] = __builtin_shufflevector(x[i], x[i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; ++j) {
            x[i + j] = __builtin_shufflevector(y[i + j], y[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
            x[i + j + 2] = __builtin_shufflevector(y[i + j], y[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
    for (int i = 0; i < 4; ++i) {
        y[i] = __builtin_shufflevector(x[i], x[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        y[i + 4] = __builtin_shufflevector(x[i], x[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
    for (int i = 0; i < 8; ++i) __builtin_memcpy(to + i * step, &y[i], sizeof y[i]);
}

// Copy one head of a row's keys or values, from the `first`, to panels [S / PANEL, size, PANEL]; other places stay as
// they are, or get copies of the nearest.
template <typename Keys>
void copy_panels(Heads heads, const Keys& row, int64_t first, int64_t head, int64_t size, float* to) {
    const int64_t num = row.num_keys(), in_eights = size / 8 * 8;
    for (int64_t s = first / 8 * 8; s < num; s += 8) {
        const float* from[8];
        for (int64_t i = 0; i < 8; ++i)
            from[i] = heads.at(row.token_of_key(most(first, least(s + i, num - 1))), head);
        float* place = to + s / PANEL * PANEL * size + s % PANEL;
        for (int64_t k = 0; k < in_eights; k += 8) {
            const float* parts[8];
            for (int i = 0; i < 8; ++i) parts[i] = from[i] + k;
            transpose8(parts, place + k * PANEL, PANEL);
        }
        for (int64_t k = in_eights; k < size; ++k)
            for (int i = 0; i < 8; ++i) place[k * PANEL + i] = from[i][k];
    }
}

// Turn the numbers from place `low` to `from` into zeros, but for those in a vector with later ones; returns its place.
inline int64_t clear_before(int64_t low, int64_t from, float* numbers) {
    const int64_t first = from / LANES * LANES;
    for (int64_t s = low / LANES * LANES; s < first; s += LANES) store(numbers + s, Floats{});
    return first;
}

// Hands out parts of one piece of memory.
struct Scratch {
    float* next;

    float* take(int64_t num) {
        float* part = next;
        next += whole_vectors(num);
        return part;
    }
};


struct Forward {
    Shape shape;
    Heads queries, keys, values;
    float *out, *stats;  // [T, H, U], and [T, H, 2] or null

    int64_t scratch_size(int64_t longest) const {
        return panels(longest) * shape.key_size + longest * shape.values_padded() + TILE * panels(longest) +
               TILE * (shape.keys_padded() + shape.values_padded()) + 5 * LANES;
    }

    void row(const Row& row, int64_t kv_head, Scratch scratch) const { this->row(row, row, kv_head, scratch); }

    // The queries of a row, whose keys may lie elsewhere.
    template <typename Keys>
    void row(const Row& row, const Keys& where, int64_t kv_head, Scratch scratch) const {
        const int64_t width = panels(row.num_keys());
        float *keys_by_panels = scratch.take(width * shape.key_size),
              *values_by_rows = scratch.take(row.num_keys() * shape.values_padded());
        const int64_t first_key = shape.first_seen(row.prefix_length), first = kv_head * shape.share();
        copy_panels(keys, where, first_key, kv_head, shape.key_size, keys_by_panels);
        copy_keys(values, where, first_key, kv_head, shape.value_size, values_by_rows);
        for (int64_t head = first; head < first + shape.share(); ++head)
            for (int64_t q = 0; q < row.length; q += TILE)
                tile(row, head, q, least(TILE, row.length - q), keys_by_panels, values_by_rows, width, scratch);
    }

    void tile(const Row& row, int64_t head, int64_t q, int64_t num, const float* keys_by_panels,
              const float* values_by_rows, int64_t width, Scratch scratch) const {
        const int64_t padded = shape.keys_padded(), out_padded = shape.values_padded();
        float *scaled = scratch.take(TILE * padded), *scores = scratch.take(TILE * width),
              *sums = scratch.take(TILE * out_padded);
        for (int64_t i = 0; i < num; ++i)
            copy_scaled(queries.at(row.start + q + i, head), shape.scale(), shape.key_size, scaled + i * padded);
        const int64_t position = row.prefix_length + q, seen = position + num, end = whole_vectors(seen);
        const int64_t low = shape.first_seen(position), panel = low / PANEL * PANEL;
        multiply_rows(num, {scaled, padded, 1}, {keys_by_panels + panel * shape.key_size, PANEL * shape.key_size, PANEL},
                      (end - panel) / LANES, shape.key_size, scores + panel, width);
        Softmax softmax[TILE];
        for (int64_t i = 0; i < num; ++i) {
            const int64_t from = shape.first_seen(position + i), first = clear_before(low, from, scores + i * width);
            float* own = scores + i * width + first;
            store(own, first_of(Floats{} - __builtin_inff(), from - first, load(own)));
            softmax[i] = exponentials(own, position + i + 1 - first, end - first, shape.sink(head));
        }
        multiply_rows(num, {scores + low, width, 1}, {values_by_rows + low * out_padded, PANEL, out_padded},
                      out_padded / LANES, seen - low, sums, out_padded);
        for (int64_t i = 0; i < num; ++i) {
            const int64_t place = (row.start + q + i) * shape.num_heads + head;
            put_scaled(sums + i * out_padded, softmax[i].factor, shape.value_size, out + place * shape.value_size);
            if (!stats) continue;
            stats[2 * place] = softmax[i].highest;
            stats[2 * place + 1] = softmax[i].factor;
        }
    }
};

// With P the weights and O = P V: dV = P' dO, dS = P (dO V' - rowsum(dO O)), dQ = scale dS K, dK = dS' (scale Q).
struct Backward {
    Shape shape;
    Heads queries, keys, values, gradient;
    const float *out, *stats;
    float *by_queries, *by_keys, *by_values;  // in one piece each; the latter two are added to

    int64_t scratch_size(int64_t longest) const {
        const int64_t padded = shape.keys_padded() + shape.values_padded();
        return panels(longest) * (shape.key_size + shape.value_size) + longest * (shape.keys_padded() + padded) +
               2 * QUERIES * panels(longest) + QUERIES * (shape.keys_padded() + padded) + 10 * LANES;
    }

    struct Parts {
        float *keys_by_panels, *values_by_panels, *keys, *by_keys, *by_values;
    };

    void row(const Row& row, int64_t kv_head, Scratch scratch) const {
        const int64_t num = row.num_keys(), width = panels(num);
        const int64_t padded = shape.keys_padded(), values_padded = shape.values_padded();
        Parts parts{scratch.take(width * shape.key_size), scratch.take(width * shape.value_size),
                    scratch.take(num * padded), scratch.take(num * padded), scratch.take(num * values_padded)};
        const int64_t first_key = shape.first_seen(row.prefix_length), first = kv_head * shape.share();
        copy_panels(keys, row, first_key, kv_head, shape.key_size, parts.keys_by_panels);
        copy_panels(values, row, first_key, kv_head, shape.value_size, parts.values_by_panels);
        copy_keys(keys, row, first_key, kv_head, shape.key_size, parts.keys);
        for (int64_t i = first_key * padded; i < num * padded; ++i) parts.by_keys[i] = 0.0f;
        for (int64_t i = first_key * values_padded; i < num * values_padded; ++i) parts.by_values[i] = 0.0f;
        for (int64_t head = first; head < first + shape.share(); ++head)
            for (int64_t q = 0; q < row.length; q += QUERIES)
                some_queries(row, head, q, least(QUERIES, row.length - q), parts, width, scratch);
        add_keys(row, kv_head, parts.by_keys, shape.key_size, by_keys);
        add_keys(row, kv_head, parts.by_values, shape.value_size, by_values);
    }

    void add_keys(const Row& row, int64_t kv_head, const float* from, int64_t size, float* to) const {
        for (int64_t s = shape.first_seen(row.prefix_length); s < row.num_keys(); ++s) {
            float* place = to + (row.token_of_key(s) * shape.num_kv_heads + kv_head) * size;
            for (int64_t i = 0; i < size; ++i) place[i] += from[s * whole_vectors(size) + i];
        }
    }

    void some_queries(const Row& row, int64_t head, int64_t q, int64_t num, const Parts& parts, int64_t width,
                      Scratch scratch) const {
        const int64_t padded = shape.keys_padded(), values_padded = shape.values_padded();
        float *scaled = scratch.take(QUERIES * padded), *by_out = scratch.take(QUERIES * values_padded),
              *weights = scratch.take(QUERIES * width), *by_scores = scratch.take(QUERIES * width),
              *by_scaled = scratch.take(QUERIES * padded);
        for (int64_t i = 0; i < num; ++i) {
            const int64_t token = row.start + q + i;
            copy_scaled(queries.at(token, head), shape.scale(), shape.key_size, scaled + i * padded);
            copy_scaled(gradient.at(token, head), 1.0f, shape.value_size, by_out + i * values_padded);
        }
        const int64_t position = row.prefix_length + q, low = shape.first_seen(position), panel = low / PANEL * PANEL;
        const float *keys_by_panels = parts.keys_by_panels + panel * shape.key_size,
                    *values_by_panels = parts.values_by_panels + panel * shape.value_size;
        for (int64_t i = 0; i < num; i += TILE) {
            const int64_t some = least(TILE, num - i), seen = position + i + some;
            float *weights_of = weights + i * width, *by_scores_of = by_scores + i * width;
            // Products over the queries below go through the keys by tiles, which may reach behind what was seen.
            const int64_t vectors = (whole_vectors(seen) - panel) / LANES;
            const int64_t filled = least(width, whole_vectors(seen + TILE));
            multiply_rows(some, {scaled + i * padded, padded, 1}, {keys_by_panels, PANEL * shape.key_size, PANEL},
                          vectors, shape.key_size, weights_of + panel, width);
            multiply_rows(some, {by_out + i * values_padded, values_padded, 1},
                          {values_by_panels, PANEL * shape.value_size, PANEL}, vectors, shape.value_size,
                          by_scores_of + panel, width);
            for (int64_t j = 0; j < some; ++j)
                scores_backward(row.start + q + i + j, head, low, position + i + j, filled, weights_of + j * width,
                                by_scores_of + j * width);
            multiply_rows(some, {by_scores_of + low, width, 1}, {parts.keys + low * padded, PANEL, padded},
                          padded / LANES, seen - low, by_scaled + i * padded, padded);
        }
        for (int64_t i = 0; i < num; ++i) {
            float* place = by_queries + ((row.start + q + i) * shape.num_heads + head) * shape.key_size;
            put_scaled(by_scaled + i * padded, shape.scale(), shape.key_size, place);
        }
        for (int64_t s = low; s < position + num; s += TILE) {
            // The queries before this see none of these keys; those of its tile have zeros for what they don't see.
            const int64_t from = most(0, s - position) / TILE * TILE, some = least(TILE, position + num - s);
            multiply_rows(some, {weights + from * width + s, 1, width},
                          {by_out + from * values_padded, PANEL, values_padded}, values_padded / LANES, num - from,
                          parts.by_values + s * values_padded, values_padded, true);
            multiply_rows(some, {by_scores + from * width + s, 1, width}, {scaled + from * padded, PANEL, padded},
                          padded / LANES, num - from, parts.by_keys + s * padded, padded, true);
        }
    }

    // From scores and the gradient of weights, of one query, to the weights and the gradient of scores, with zeros from
    // place `low` on to `width` for the keys that it doesn't see.
    void scores_backward(int64_t token, int64_t head, int64_t low, int64_t position, int64_t width, float* weights,
                         float* by_scores) const {
        const int64_t place = token * shape.num_heads + head;
        const float *by_out = gradient.at(token, head), *result = out + place * shape.value_size;
        const float highest = stats[2 * place], factor = stats[2 * place + 1];
        Floats products = {};
        int64_t u = 0;
        for (; u + LANES <= shape.value_size; u += LANES) products += load(by_out + u) * load(result + u);
        if (u < shape.value_size)
            products += load_first(by_out + u, shape.value_size - u) * load_first(result + u, shape.value_size - u);
        const float mean = sum(products);
        const int64_t num = position + 1, last = whole_vectors(num) - LANES, from = shape.first_seen(position);
        const int64_t first = clear_before(low, from, weights);
        clear_before(low, from, by_scores);
        for (int64_t s = first; s <= last; s += LANES) {
            Floats weight = exp_of(load(weights + s) - highest) * factor, by_score = (load(by_scores + s) - mean) * weight;
            if (s == last) {
                weight = first_of(weight, num - s, 0.0f);
                by_score = first_of(by_score, num - s, 0.0f);
            }
            if (s < from) {
                weight = first_of(Floats{}, from - s, weight);
                by_score = first_of(Floats{}, from - s, by_score);
            }
            store(weights + s, weight);
            store(by_scores + s, by_score);
        }
        for (int64_t s = last + LANES; s < width; s += LANES) {
            store(weights + s, Floats{});
            store(by_scores + s, Floats{});
        }
    }
};

// Queries [B, H, K] of rows in a cache, each of which sees the first `lengths` positions of its table. Queries beside
// each other that are of consecutive positions of one row are computed together.
struct CachedForward {
    Forward pass;
    const int32_t *tables, *lengths;
    int64_t num_queries, table_size, block_size;

    bool follow(int64_t query) const {
        const int32_t *before = tables + (query - 1) * table_size, *now = before + table_size;
        return lengths[query] == lengths[query - 1] + 1 &&
               !__builtin_memcmp(before, now, (lengths[query] + block_size - 1) / block_size * sizeof(int32_t));
    }

    void run(int64_t first, int64_t num, int64_t kv_head, Scratch scratch) const {
        const Row row{first, num, 0, lengths[first] - 1};
        const CachedKeys keys{tables + (first + num - 1) * table_size, row.num_keys(), block_size,
                              pass.shape.num_kv_heads};
        pass.row(row, keys, kv_head, scratch);
    }
};

// Call `pass.row` for all rows and key heads. Rows of a group may have a prefix in common and follow one another in one
// thread; `group_ends` are numbers of rows.
template <typename Pass>
bool over_rows(const Pass& pass, const Row* rows, const int64_t* group_ends) {
    const Shape& shape = pass.shape;
    int64_t longest = 1;
    for (int64_t r = 0; shape.num_groups && r < group_ends[shape.num_groups - 1]; ++r)
        longest = most(longest, rows[r].num_keys());
    bool has_memory = true;
#pragma omp parallel num_threads(shape.threads) if (shape.threads > 1)
    {
        float* memory = static_cast<float*>(malloc(pass.scratch_size(longest) * sizeof(float)));
        if (!memory) has_memory = false;
#pragma omp for collapse(2) schedule(dynamic, 1)
        for (int64_t group = 0; group < shape.num_groups; ++group)
            for (int64_t j = 0; j < shape.num_kv_heads; ++j)
                for (int64_t r = group ? group_ends[group - 1] : 0; memory && r < group_ends[group]; ++r)
                    pass.row(rows[r], j, Scratch{memory});
        free(memory);
    }
    return has_memory;
}

}  // namespace

// Each returns whether there was memory for it.
extern "C" bool packed_attention(const Heads* inputs, const Shape* shape, const Row* rows, const int64_t* group_ends,
                                 float* out, float* stats) {
    return over_rows(Forward{*shape, inputs[0], inputs[1], inputs[2], out, stats}, rows, group_ends);
}

// `inputs` are queries [B, H, K], and keys and values of a cache as tensors of its places.
extern "C" bool cached_attention(const Heads* inputs, const Shape* shape, const int32_t* tables, const int32_t* lengths,
                                 int64_t num_queries, int64_t table_size, int64_t block_size, float* out) {
    const CachedForward all{Forward{*shape, inputs[0], inputs[1], inputs[2], out, nullptr}, tables, lengths,
                            num_queries, table_size, block_size};
    int64_t longest = 1;
    for (int64_t b = 0; b < num_queries; ++b) longest = most(longest, lengths[b]);
    float* memory = static_cast<float*>(malloc(all.pass.scratch_size(longest) * sizeof(float)));
    if (!memory) return false;
    for (int64_t first = 0, num = 1; first < num_queries; first += num) {
        for (num = 1; first + num < num_queries && all.follow(first + num);) ++num;
        for (int64_t j = 0; j < shape->num_kv_heads; ++j) all.run(first, num, j, Scratch{memory});
    }
    free(memory);
    return true;
}

// `inputs` are queries, keys, values and the gradient of `out`; gradients of keys and values are zeros before.
extern "C" bool packed_attention_backward(const Heads* inputs, const Shape* shape, const Row* rows,
                                          const int64_t* group_ends, const float* out, const float* stats,
                                          float* by_queries, float* by_keys, float* by_values) {
    const Backward pass{*shape, inputs[0], inputs[1], inputs[2], inputs[3], out, stats, by_queries, by_keys, by_values};
    return over_rows(pass, rows, group_ends);
}
