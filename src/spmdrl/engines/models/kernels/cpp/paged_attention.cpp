// Attention over the paged cache on a CPU, built by cpu_library.py for the machine that it runs on.
//
// Each row is computed by itself, in an order that follows from its own length alone, so that it gets the same bits in
// every batch. Sums are in float32, whatever the inputs.
//
// Shapes: B rows, H query heads, J key and value heads, F = H / J queries that share a key head, K head size of keys,
// U head size of values, S cached positions.

#include <stdlib.h>

#include "cpu_vectors.h"

namespace {

// Blocks lie anywhere, so that a processor doesn't foresee where the next one is: so many are fetched ahead, to the
// second level, as the first one waits for too few lines at once.
constexpr int64_t BLOCKS_AHEAD = 4;

// Compilers leave out calls that do nothing but fetch, unless they are inlined first.
#define INLINED inline __attribute__((always_inline))

template <typename T>
INLINED void fetch(const T* from, int64_t num) {
    const char* bytes = reinterpret_cast<const char*>(from);
    for (int64_t i = 0; i < num * int64_t(sizeof(T)); i += 64) __builtin_prefetch(bytes + i, 0, 2);
}

// One layer's cache: keys [blocks, J, block_size, K] and values [blocks, J, block_size, U].
template <typename T>
struct Pages {
    const T* keys;
    const T* values;
    int64_t num_heads, block_size, key_size, value_size;

    const T* keys_of(int32_t block, int64_t head) const {
        return keys + (block * num_heads + head) * block_size * key_size;
    }
    const T* values_of(int32_t block, int64_t head) const {
        return values + (block * num_heads + head) * block_size * value_size;
    }
};

// The cached positions of one row and one key head that a query sees: from `first` to `length`.
template <typename T>
struct Cached {
    const Pages<T>& pages;
    const int32_t* table;
    int64_t first, length, head;
    // What is attended to after this, or null.
    const Cached* next;

    // The first block's start. Its positions before `first` are skipped.
    int64_t first_block() const { return first / pages.block_size * pages.block_size; }
    int64_t skipped(int64_t start) const { return start < first ? first - start : 0; }
    int64_t num_from(int64_t start) const {
        return length - start < pages.block_size ? length - start : pages.block_size;
    }
    int64_t num_seen() const { return length - first; }
    const T* keys(int64_t start) const { return pages.keys_of(table[start / pages.block_size], head); }
    const T* values(int64_t start) const { return pages.values_of(table[start / pages.block_size], head); }

    // Fetch what is read BLOCKS_AHEAD after the keys, or the values, from `start`: all keys come first, then all values.
    INLINED void fetch_behind_keys(int64_t start) const {
        start += BLOCKS_AHEAD * pages.block_size;
        if (start < length) return fetch(keys(start), pages.block_size * pages.key_size);
        start -= whole_blocks() - first_block();
        if (start < length) fetch(values(start), pages.block_size * pages.value_size);
    }
    INLINED void fetch_behind_values(int64_t start) const {
        start += BLOCKS_AHEAD * pages.block_size;
        if (start < length) return fetch(values(start), pages.block_size * pages.value_size);
        if (!next) return;
        start -= whole_blocks() - next->first_block();
        if (start < next->length) fetch(next->keys(start), pages.block_size * pages.key_size);
    }
    int64_t whole_blocks() const { return (length + pages.block_size - 1) / pages.block_size * pages.block_size; }
};

// One key's products with a query [K padded by zeros], to be added up.
template <typename T>
inline Floats multiplied(const float* query, const T* key, int64_t size) {
    Floats products = {};
    int64_t k = 0;
    for (; k + LANES <= size; k += LANES) products += load(query + k) * load(key + k);
    if (k < size) products += load(query + k) * load_first(key + k, size - k);
    return products;
}

// Fill scores [F, stride] of queries [F, K padded by zeros], from the first position seen on; KEY is K, or 0 where it is
// none of the usual sizes. Up to LANES numbers behind the last score are written too.
template <int KEY, typename T>
void score(const float* queries, const Cached<T>& cached, int64_t share, int64_t stride, float* scores) {
    const int64_t size = KEY ? KEY : cached.pages.key_size, padded = whole_vectors(size);
    for (int64_t start = cached.first_block(); start < cached.length; start += cached.pages.block_size) {
        const T* keys = cached.keys(start);
        const int64_t num = cached.num_from(start);
        cached.fetch_behind_keys(start);
        for (int64_t f = 0; f < share; ++f) {
            const float* query = queries + f * padded;
            float* of_block = scores + f * stride + start - cached.first;
            int64_t s = cached.skipped(start);
            // Sums of many keys take fewer additions together, in the same order as by themselves.
            for (; num - s >= LANES / 2; s += LANES) {
                Floats products[LANES];
#pragma GCC unroll 16
                for (int64_t i = 0; i < LANES; ++i)
                    products[i] = multiplied(query, keys + (s + i < num ? s + i : num - 1) * size, size);
                store(of_block + s, sums(products));
            }
            for (; s < num; ++s) of_block[s] = sum(multiplied(query, keys + s * size, size));
        }
    }
}

// Fill VECTORS x LANES columns of the weighted sums [SHARE, stride] of values; weights are `width` apart.
template <int SHARE, int VECTORS, typename T>
void weigh_columns(const float* weights, int64_t width, const Cached<T>& cached, int64_t column, float* sums,
                   int64_t stride) {
    const int64_t value_size = cached.pages.value_size;
    Floats totals[SHARE][VECTORS] = {};
    weights -= cached.first;
    for (int64_t start = cached.first_block(); start < cached.length; start += cached.pages.block_size) {
        const T* values = cached.values(start) + column;
        const int64_t num = cached.num_from(start);
        if (column == 0) cached.fetch_behind_values(start);
        for (int64_t s = cached.skipped(start); s < num; ++s)
#pragma GCC unroll 4
            for (int i = 0; i < VECTORS; ++i) {
                const Floats value = load(values + s * value_size + i * LANES);
#pragma GCC unroll 4
                for (int f = 0; f < SHARE; ++f) totals[f][i] += weights[f * width + start + s] * value;
            }
    }
    for (int f = 0; f < SHARE; ++f)
        for (int i = 0; i < VECTORS; ++i) store(sums + f * stride + column + i * LANES, totals[f][i]);
}

// The last columns, fewer than LANES.
template <int SHARE, typename T>
void weigh_last_columns(const float* weights, int64_t width, const Cached<T>& cached, int64_t column, float* sums,
                        int64_t stride) {
    const int64_t value_size = cached.pages.value_size;
    Floats totals[SHARE] = {};
    weights -= cached.first;
    for (int64_t start = cached.first_block(); start < cached.length; start += cached.pages.block_size) {
        const T* values = cached.values(start) + column;
        for (int64_t s = cached.skipped(start); s < cached.num_from(start); ++s) {
            const Floats value = load_first(values + s * value_size, value_size - column);
            for (int f = 0; f < SHARE; ++f) totals[f] += weights[f * width + start + s] * value;
        }
    }
    for (int f = 0; f < SHARE; ++f) store(sums + f * stride + column, totals[f]);
}

template <int SHARE, typename T>
void weigh(const float* weights, int64_t width, const Cached<T>& cached, float* sums, int64_t stride) {
    const int64_t value_size = cached.pages.value_size;
    int64_t column = 0;
    for (; column + 4 * LANES <= value_size; column += 4 * LANES)
        weigh_columns<SHARE, 4>(weights, width, cached, column, sums, stride);
    for (; column + 2 * LANES <= value_size; column += 2 * LANES)
        weigh_columns<SHARE, 2>(weights, width, cached, column, sums, stride);
    for (; column + LANES <= value_size; column += LANES)
        weigh_columns<SHARE, 1>(weights, width, cached, column, sums, stride);
    if (column < value_size) weigh_last_columns<SHARE>(weights, width, cached, column, sums, stride);
}

// Attend from the queries [F, K] of one key head to its cached positions; `scratch` holds what `scratch_size` counts.
template <int KEY, typename T>
void attend(const T* queries, const float* sinks, const Cached<T>& cached, int64_t share, float* scratch, T* out) {
    const int64_t key_size = cached.pages.key_size, value_size = cached.pages.value_size;
    const int64_t padded = whole_vectors(key_size), stride = whole_vectors(value_size);
    // Scores are written by vectors, and blocks may begin anywhere in one.
    const int64_t width = whole_vectors(cached.num_seen()), row = width + LANES;
    float *scores = scratch, *scaled = scores + share * row, *sums = scaled + share * padded, *factors = sums + share * stride;
    const float scale = 1.0f / __builtin_sqrtf(float(key_size));
    for (int64_t f = 0; f < share; ++f) {
        const T* query = queries + f * key_size;
        for (int64_t k = 0; k < padded; k += LANES)
            store(scaled + f * padded + k, load_first(query + k, key_size - k < LANES ? key_size - k : LANES) * scale);
    }
    score<KEY>(scaled, cached, share, row, scores);
    for (int64_t f = 0; f < share; ++f) {
        const float sink = sinks ? sinks[f] : -__builtin_inff();
        factors[f] = exponentials(scores + f * row, cached.num_seen(), width, sink).factor;
    }
    int64_t f = 0;
    for (; f + 4 <= share; f += 4) weigh<4>(scores + f * row, row, cached, sums + f * stride, stride);
    for (; f + 2 <= share; f += 2) weigh<2>(scores + f * row, row, cached, sums + f * stride, stride);
    for (; f < share; ++f) weigh<1>(scores + f * row, row, cached, sums + f * stride, stride);
    for (f = 0; f < share; ++f)
        for (int64_t u = 0; u < value_size; ++u) round_to(out + f * value_size + u, sums[f * stride + u] * factors[f]);
}

struct Sizes {
    int64_t num_rows, num_heads, num_kv_heads, key_size, value_size, block_size, table_size, threads, window;

    int64_t first_seen(int64_t length) const { return length > window ? length - window : 0; }
};

template <int KEY, typename T>
bool attend_rows(const T* queries, const Pages<T>& pages, const int32_t* tables, const int32_t* lengths,
                 const float* sinks, const Sizes& sizes, T* out) {
    const int64_t share = sizes.num_heads / sizes.num_kv_heads;
    int64_t longest = 1;
    for (int64_t b = 0; b < sizes.num_rows; ++b) longest = lengths[b] > longest ? lengths[b] : longest;
    const int64_t scratch_size = share * (whole_vectors(longest) + LANES + whole_vectors(sizes.key_size) +
                                          whole_vectors(sizes.value_size) + 1);
    bool has_memory = true;
#pragma omp parallel num_threads(sizes.threads) if (sizes.threads > 1)
    {
        float* scratch = static_cast<float*>(malloc(scratch_size * sizeof(float)));
        if (!scratch) has_memory = false;
#pragma omp for schedule(dynamic, 4)
        for (int64_t b = 0; b < sizes.num_rows; ++b)
            for (int64_t j = 0; scratch && j < sizes.num_kv_heads; ++j) {
                const bool is_last = j + 1 == sizes.num_kv_heads;
                const int64_t after = b + is_last;
                const int64_t after_length = after < sizes.num_rows ? lengths[after] : 0;
                const Cached<T> next{pages, tables + after * sizes.table_size, sizes.first_seen(after_length),
                                     after_length, is_last ? 0 : j + 1, nullptr};
                const Cached<T> cached{pages, tables + b * sizes.table_size, sizes.first_seen(lengths[b]), lengths[b], j,
                                       &next};
                const int64_t first = b * sizes.num_heads + j * share;
                attend<KEY>(queries + first * sizes.key_size, sinks ? sinks + j * share : nullptr, cached, share,
                            scratch, out + first * sizes.value_size);
            }
        free(scratch);
    }
    return has_memory;
}

template <typename T>
bool attend_pages(const void* queries, const void* keys, const void* values, const int32_t* tables,
                  const int32_t* lengths, const float* sinks, const Sizes& sizes, void* out) {
    const Pages<T> pages{static_cast<const T*>(keys), static_cast<const T*>(values), sizes.num_kv_heads,
                         sizes.block_size, sizes.key_size, sizes.value_size};
    const auto run = sizes.key_size == 32    ? attend_rows<32, T>
                     : sizes.key_size == 64  ? attend_rows<64, T>
                     : sizes.key_size == 128 ? attend_rows<128, T>
                                             : attend_rows<0, T>;
    return run(static_cast<const T*>(queries), pages, tables, lengths, sinks, sizes, static_cast<T*>(out));
}

}  // namespace

// Each returns whether there was memory for it.
extern "C" bool paged_attention_float32(const void* queries, const void* keys, const void* values,
                                        const int32_t* tables, const int32_t* lengths, const float* sinks,
                                        const Sizes* sizes, void* out) {
    return attend_pages<float>(queries, keys, values, tables, lengths, sinks, *sizes, out);
}

extern "C" bool paged_attention_bfloat16(const void* queries, const void* keys, const void* values,
                                         const int32_t* tables, const int32_t* lengths, const float* sinks,
                                         const Sizes* sizes, void* out) {
    return attend_pages<bfloat16>(queries, keys, values, tables, lengths, sinks, *sizes, out);
}
