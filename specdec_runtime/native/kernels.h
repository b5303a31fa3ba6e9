// Matrix product, RMSNorm, softmax and argmax, each with one order of summation.
//
// The rule that makes speculative decoding exact to the bit: what is computed for a row must not
// depend on the other rows, on the tile that held it, or on the thread that ran it. So every
// output of a matrix product starts at 0 and adds a[i] * w[i] for i = 0, 1, 2, ... with fused
// multiply-adds. Tiles choose how many outputs run side by side, never the order within one.
// Weights in int8 are multiples of a power of two per output, which multiplies the finished sum: the
// bits are those of the same weights in float, as scaling by a power of two commutes with rounding.
//
// A matrix [outputs, inputs] is stored as panels of 16 outputs: [outputs / 16][inputs][16].
// One pass over a panel then reads memory in a straight line whatever the number of rows.

#pragma once

#include <algorithm>
#include "simd.h"
#include "team.h"

struct Linear {
    const void* weight;  // panels of int8_t, BFloat16 or float
    const float* scale;  // [outputs] or null: what the weights of an output are multiples of
    const float* bias;   // [outputs] or null
    int64_t outputs;     // a multiple of 16 (padded with zero rows)
    int64_t inputs;
};

// A thread takes chunks of neighbouring panels of about this size: long straight reads.
constexpr int64_t CHUNK_BYTES = 512 * 1024;
// Within a chunk, this much of the weights stays in the L2 cache while the tiles pass over it, and
// the next group comes in beside it ...
constexpr int64_t GROUP_BYTES = 128 * 1024;
constexpr int64_t MAX_GROUP_PANELS = 4;
// ... and this much of the inputs while the groups do.
constexpr int64_t ROW_BLOCK_BYTES = 256 * 1024;
// How far ahead numbers are fetched where the next group would be too far.
constexpr int64_t PREFETCH_BYTES = 4096;

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t multiple) { return divide_up(a, multiple) * multiple; }

// What a tile fetches into the cache while it computes: lines of two streams in turns, each of them
// `advance` bytes for each weight row of 16. A core reads up to a third more a second from two places
// in turns than from one.
struct Prefetch {
    const char* from;
    int64_t apart;  // bytes from the first stream to the second
    int64_t advance;
};
template <class Number>
inline Prefetch read_ahead(const Number* panels) {
    return {reinterpret_cast<const char*>(panels) + PREFETCH_BYTES, 64, LANES * sizeof(Number)};
}

// R rows times P panels: out[r * out_stride + p * 16 + lane] = sum over i of a[r][i] *
// w[p][i][lane].
template <int R, int P, class Weight>
void multiply_tile(const float* const* a, const Weight* w, int64_t panel_stride, int64_t inputs,
                   float* out, int64_t out_stride, Prefetch ahead) {
    constexpr int INPUTS_PER_LINE = 64 / (LANES * sizeof(Weight)), UNROLL = 2 * INPUTS_PER_LINE;
    Vec16 sums[R][P];
    const float* row[R];
    for (int r = 0; r < R; ++r) {
        row[r] = a[r];
        for (int p = 0; p < P; ++p) sums[r][p] = zeros();
    }
    const auto add_input = [&](int64_t i) __attribute__((always_inline)) {
        for (int p = 0; p < P; ++p) {
            const Vec16 weights = load(w + p * panel_stride + i * LANES);
            for (int r = 0; r < R; ++r)
                sums[r][p] = multiply_add(broadcast(row[r][i]), weights, sums[r][p]);
        }
    };
    int64_t i = 0;
    for (; i + UNROLL <= inputs; i += UNROLL)
        for (int j = 0; j < UNROLL; ++j) {
            if (j % INPUTS_PER_LINE == 0)
                for (int p = 0; p < P; ++p)
                    __builtin_prefetch(ahead.from + (p * inputs + i) * ahead.advance +
                                       (j == 0 ? 0 : ahead.apart));
            add_input(i + j);
        }
    for (; i < inputs; ++i) add_input(i);
    for (int r = 0; r < R; ++r)
        for (int p = 0; p < P; ++p) store(out + r * out_stride + p * LANES, sums[r][p]);
}

// Picks the tile for `rows` (1..MAX_TILE_ROWS) at run time.
template <int P, class Weight, int R = MAX_TILE_ROWS>
inline void multiply_rows(int64_t rows, const float* const* a, const Weight* w,
                          int64_t panel_stride, int64_t inputs, float* out, int64_t out_stride,
                          Prefetch ahead) {
    if constexpr (P == 1 || R * P <= TILE_ACCUMULATORS)
        if (rows == R)
            return multiply_tile<R, P>(a, w, panel_stride, inputs, out, out_stride, ahead);
    if constexpr (R > 1)
        multiply_rows<P, Weight, R - 1>(rows, a, w, panel_stride, inputs, out, out_stride, ahead);
}

// One tile of rows times neighbouring panels. Few rows take several panels at once, so that there
// are enough independent sums to hide the latency of a multiply-add.
template <class Weight>
void multiply_panels(int64_t rows, const float* const* a, const Weight* w, int64_t panel_stride,
                     int64_t panels, int64_t inputs, float* out, int64_t out_stride,
                     Prefetch ahead) {
    for (int64_t p = 0, width; p < panels; p += width) {
        const auto fits = [&](int64_t wide) {
            return rows * wide <= TILE_ACCUMULATORS && p + wide <= panels;
        };
        width = fits(4) ? 4 : fits(2) ? 2 : 1;
        const auto run = width == 4   ? multiply_rows<4, Weight>
                         : width == 2 ? multiply_rows<2, Weight>
                                      : multiply_rows<1, Weight>;
        run(rows, a, w + p * panel_stride, panel_stride, inputs, out + p * LANES, out_stride,
            {ahead.from + p * inputs * ahead.advance, ahead.apart, ahead.advance});
    }
}

// Splits rows into the fewest tiles of nearly equal height; calls body(tile, first_row, num_rows).
template <class Body>
inline void for_each_tile(int64_t rows, Body body) {
    const int64_t tiles = divide_up(rows, MAX_TILE_ROWS);
    for (int64_t t = 0, first = 0; t < tiles; ++t) {
        const int64_t height = rows / tiles + (t < rows % tiles);
        body(t, first, height);
        first += height;
    }
}

// Where tile t of several looks while it works on a group of weights: into the next group, from its
// start and from its middle. Of several tiles the first two fetch one half each, so that memory is
// busy while they compute.
template <class Weight>
inline Prefetch prefetch_for(int64_t tile, int64_t tiles, const Weight* group, int64_t bytes) {
    if (bytes > 2 * GROUP_BYTES) return read_ahead(group);
    const int64_t shares = std::min<int64_t>(tiles, 2), half = bytes / 2;
    const char* next = reinterpret_cast<const char*>(group) + bytes;
    return {next + std::min(tile, shares - 1) * half / shares, half,
            LANES * int64_t(sizeof(Weight)) / 2 / shares};
}

// A chunk of panels times all rows: blocks of rows, groups of panels, tiles.
template <class Weight, class Done>
void multiply_chunk(const Linear& linear, int64_t first_panel, int64_t panels, const float* x,
                    int64_t x_stride, int64_t rows, int64_t granule, Done done) {
    const auto* weight = static_cast<const Weight*>(linear.weight);
    const int64_t panel_stride = linear.inputs * LANES,
                  panel_bytes = panel_stride * int64_t(sizeof(Weight));
    const int64_t block_rows =
        std::max<int64_t>(MAX_TILE_ROWS, ROW_BLOCK_BYTES / (linear.inputs * 4));
    const int64_t group =
        std::clamp(GROUP_BYTES / panel_bytes, granule, MAX_GROUP_PANELS) / granule * granule;
    float block[MAX_TILE_ROWS * MAX_GROUP_PANELS * LANES];
    const float* a[MAX_TILE_ROWS];

    for (int64_t block_start = 0; block_start < rows; block_start += block_rows)
        for (int64_t p = first_panel; p < first_panel + panels; p += group) {
            const int64_t height_of_block = std::min(block_rows, rows - block_start);
            const int64_t count = std::min(group, first_panel + panels - p), width = count * LANES;
            const Weight* w = weight + p * panel_stride;
            for_each_tile(height_of_block, [&](int64_t tile, int64_t tile_start, int64_t height) {
                const int64_t first_row = block_start + tile_start;
                for (int64_t r = 0; r < height; ++r) a[r] = x + (first_row + r) * x_stride;
                const Prefetch ahead = prefetch_for(tile, divide_up(height_of_block, MAX_TILE_ROWS),
                                                    w, count * panel_bytes);
                multiply_panels(height, a, w, panel_stride, count, linear.inputs, block, width,
                                ahead);
                for (int64_t r = 0; r < height; ++r) {
                    float* values = block + r * width;
                    if (linear.scale != nullptr)
                        for (int64_t i = 0; i < width; ++i)
                            values[i] *= linear.scale[p * LANES + i];
                    if (linear.bias != nullptr)
                        for (int64_t i = 0; i < width; ++i) values[i] += linear.bias[p * LANES + i];
                    done(first_row + r, p * LANES, width, values);
                }
            });
        }
}

// x[rows, inputs] times the matrix, by the whole team.
// done(row, first_output, count, values) receives finished outputs, bias included; first_output and
// count are multiples of 16 * granule.
template <class Weight, class Done>
void matrix_product(Team& team, const Linear& linear, const float* x, int64_t x_stride,
                    int64_t rows, int64_t granule, Done done) {
    const int64_t panels = linear.outputs / LANES,
                  bytes = linear.outputs * linear.inputs * int64_t(sizeof(Weight));
    const int64_t wanted = round_up(divide_up(bytes, CHUNK_BYTES), omp_get_num_threads());
    const int64_t chunk = round_up(divide_up(panels, wanted), granule);
    team.share(divide_up(panels, chunk), [&](int64_t c) {
        multiply_chunk<Weight>(linear, c * chunk, std::min(chunk, panels - c * chunk), x, x_stride,
                               rows, granule, done);
    });
}

// out = x / sqrt(mean(x^2) + epsilon) * weight. Zhang and Sennrich 2019, arXiv:1910.07467.
// `padded` >= size is a multiple of 16; x and weight are 0 from size on.
inline void rms_norm(const float* x, const float* weight, int64_t size, int64_t padded,
                     float epsilon, float* out) {
    Vec16 squares = zeros();
    for (int64_t i = 0; i < padded; i += LANES) {
        const Vec16 value = load(x + i);
        squares = multiply_add(value, value, squares);
    }
    const Vec16 scale = broadcast(1.0f / std::sqrt(sum_lanes(squares) / float(size) + epsilon));
    for (int64_t i = 0; i < padded; i += LANES)
        store(out + i, multiply(multiply(load(x + i), scale), load(weight + i)));
}

// silu(gate) * up, for 16 values. silu(x) = x / (1 + e^-x).
inline Vec16 gated(Vec16 gate, Vec16 up) {
    const Vec16 denominator = add(broadcast(1.0f), exponential(subtract(zeros(), gate)));
    return multiply(divide(gate, denominator), up);
}

// In place: scores[begin, end) become e^(score - max); returns 1 / their sum.
// Everything in the blocks of 16 around [begin, end) is overwritten; outside the range with 0.
// Lane of a term in the sum = its index modulo 16, so `begin` must be a function of the query
// alone.
inline float softmax_numerators(float* scores, int64_t begin, int64_t end) {
    const int64_t first = begin / LANES * LANES, last = round_up(end, LANES);
    std::fill(scores + first, scores + begin, -INFINITY);
    std::fill(scores + end, scores + last, -INFINITY);
    Vec16 largest = broadcast(-INFINITY);
    for (int64_t i = first; i < last; i += LANES) largest = maximum(largest, load(scores + i));
    const Vec16 offset = broadcast(largest_lane(largest));
    Vec16 sum = zeros();
    for (int64_t i = first; i < last; i += LANES) {
        const Vec16 value = exponential(subtract(load(scores + i), offset));
        sum = add(sum, value);
        store(scores + i, value);
    }
    return 1.0f / sum_lanes(sum);
}

inline float largest_of(const float* values, int64_t count) {
    Vec16 largest = broadcast(-INFINITY);
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) largest = maximum(largest, load(values + i));
    float best = largest_lane(largest);
    for (; i < count; ++i) best = std::max(best, values[i]);
    return best;
}

// Index of the largest value; the lowest one where several are equal.
inline int64_t argmax(const float* values, int64_t count) {
    const float best = largest_of(values, count);
    for (int64_t j = 0; j < count; ++j)
        if (values[j] == best) return j;
    return 0;
}

// The largest of values that come in parts and in any order; the lowest index where several are equal.
struct Largest {
    float value = -INFINITY;
    int64_t index = 0;

    void merge(const Largest& other) {
        if (other.value > value || (other.value == value && other.index < index)) *this = other;
    }
    // values[0] has the index `first`.
    void look_at(const float* values, int64_t count, int64_t first) {
        if (count == 0 || largest_of(values, count) < value) return;  // nearly always
        const int64_t place = argmax(values, count);
        merge({values[place], first + place});
    }
};

// Softmax probability of the largest of the values.
inline float probability(const float* values, int64_t count, float largest) {
    const Vec16 offset = broadcast(largest);
    Vec16 sum = zeros();
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        sum = add(sum, exponential(subtract(load(values + i), offset)));
    float total = sum_lanes(sum);
    for (; i < count; ++i) total += std::exp(values[i] - largest);
    return 1.0f / total;
}
