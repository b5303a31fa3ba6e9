// Matrix product, RMSNorm, softmax and argmax, each with one order of summation.
//
// The rule that makes speculative decoding exact to the bit: what is computed for a row must not
// depend on the other rows, on the tile that held it, or on the thread that ran it. So every
// output of a matrix product starts at 0 and adds a[i] * w[i] for i = 0, 1, 2, ... with fused
// multiply-adds. Tiles choose how many outputs run side by side, never the order within one.
//
// A matrix [outputs, inputs] is stored as panels of 16 outputs: [outputs / 16][inputs][16].
// One pass over a panel then reads memory in a straight line whatever the number of rows.

#pragma once

#include <algorithm>
#include "simd.h"

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t multiple) { return divide_up(a, multiple) * multiple; }

struct Linear {
    const void* weight;  // panels of BFloat16 or float
    const float* bias;   // [outputs] or null
    int64_t outputs;     // a multiple of 16 (padded with zero rows)
    int64_t inputs;
};

// A thread takes whole chunks of panels: small enough to stay in its L2 cache while the rows pass.
constexpr int64_t CHUNK_BYTES = 128 * 1024;
constexpr int64_t WIDEST_TILE = std::min(8, TILE_ACCUMULATORS);
constexpr int64_t MAX_CHUNK_PANELS = 32;

// R rows times P panels: out[r * out_stride + p * 16 + lane] = sum over i of a[r][i] * w[p][i][lane].
template <int R, int P, class Weight>
inline void multiply_tile(const float* const* a, const Weight* w, int64_t panel_stride,
                          int64_t inputs, float* out, int64_t out_stride) {
    Vec16 sums[R][P];
    const float* row[R];
    for (int r = 0; r < R; ++r) {
        row[r] = a[r];
        for (int p = 0; p < P; ++p) sums[r][p] = zeros();
    }
    for (int64_t i = 0; i < inputs; ++i, w += LANES)
        for (int p = 0; p < P; ++p) {
            const Vec16 weights = load(w + p * panel_stride);
            for (int r = 0; r < R; ++r)
                sums[r][p] = multiply_add(broadcast(row[r][i]), weights, sums[r][p]);
        }
    for (int r = 0; r < R; ++r)
        for (int p = 0; p < P; ++p) store(out + r * out_stride + p * LANES, sums[r][p]);
}

template <int R, class Weight>
void multiply_panels(const float* const* a, const Weight* w, int64_t panel_stride, int64_t panels,
                     int64_t inputs, float* out, int64_t out_stride) {
    // Few rows: several panels at once, so that enough independent sums hide the FMA latency.
    constexpr int P = std::min<int>(WIDEST_TILE, TILE_ACCUMULATORS / R);
    int64_t p = 0;
    for (; p + P <= panels; p += P)
        multiply_tile<R, P>(a, w + p * panel_stride, panel_stride, inputs, out + p * LANES, out_stride);
    for (; p < panels; ++p)
        multiply_tile<R, 1>(a, w + p * panel_stride, panel_stride, inputs, out + p * LANES, out_stride);
}

// The same for a number of rows (1..MAX_TILE_ROWS) known at run time.
template <class Weight, int R = MAX_TILE_ROWS>
inline void multiply_rows(int64_t rows, const float* const* a, const Weight* w, int64_t panel_stride,
                          int64_t panels, int64_t inputs, float* out, int64_t out_stride) {
    if (rows == R)
        multiply_panels<R>(a, w, panel_stride, panels, inputs, out, out_stride);
    else if constexpr (R > 1)
        multiply_rows<Weight, R - 1>(rows, a, w, panel_stride, panels, inputs, out, out_stride);
}

// Splits rows into the fewest tiles of nearly equal height; calls body(first_row, num_rows).
template <class Body>
inline void for_each_tile(int64_t rows, Body body) {
    const int64_t tiles = divide_up(rows, MAX_TILE_ROWS);
    for (int64_t t = 0, first = 0; t < tiles; ++t) {
        const int64_t height = rows / tiles + (t < rows % tiles);
        body(first, height);
        first += height;
    }
}

// Chunks of about CHUNK_BYTES, as many for one thread as for another, in multiples of `granule`.
inline int64_t panels_per_chunk(int64_t panels, int64_t panel_bytes, int64_t threads, int64_t granule) {
    const int64_t cached = CHUNK_BYTES / panel_bytes / WIDEST_TILE * WIDEST_TILE;
    const int64_t largest = std::clamp(cached, WIDEST_TILE, MAX_CHUNK_PANELS);
    const int64_t chunks = round_up(divide_up(panels, largest), threads);
    return round_up(divide_up(panels, chunks), granule);
}

// x[rows, inputs] times the matrix. Call inside a parallel region; ends with its barrier.
// done(row, first_output, count, values) receives the finished outputs, bias included; count is a
// multiple of 16 * granule.
template <class Weight, class Done>
void matrix_product(const Linear& linear, const float* x, int64_t x_stride, int64_t rows,
                    int64_t threads, int64_t granule, Done done) {
    const auto* weight = static_cast<const Weight*>(linear.weight);
    const int64_t panel_stride = linear.inputs * LANES, panels = linear.outputs / LANES;
    const int64_t panel_bytes = panel_stride * int64_t(sizeof(Weight));
    const int64_t chunk = panels_per_chunk(panels, panel_bytes, threads, granule);
    const int64_t num_chunks = divide_up(panels, chunk);
#pragma omp for schedule(dynamic, 1)
    for (int64_t c = 0; c < num_chunks; ++c) {
        const int64_t first_panel = c * chunk, count = std::min(chunk, panels - first_panel);
        const int64_t first_output = first_panel * LANES, width = count * LANES;
        for_each_tile(rows, [&](int64_t first_row, int64_t height) {
            float block[MAX_TILE_ROWS * MAX_CHUNK_PANELS * LANES];
            const float* a[MAX_TILE_ROWS];
            for (int64_t r = 0; r < height; ++r) a[r] = x + (first_row + r) * x_stride;
            multiply_rows(height, a, weight + first_panel * panel_stride, panel_stride, count,
                          linear.inputs, block, width);
            for (int64_t r = 0; r < height; ++r) {
                float* values = block + r * width;
                if (linear.bias != nullptr)
                    for (int64_t i = 0; i < width; ++i) values[i] += linear.bias[first_output + i];
                done(first_row + r, first_output, width, values);
            }
        });
    }
}

// out = x / sqrt(mean(x^2) + epsilon) * weight. Zhang and Sennrich 2019, arXiv:1910.07467.
// `padded` >= size is a multiple of 16; x and weight are 0 from size on.
inline void rms_norm(const float* x, const float* weight, int64_t size, int64_t padded, float epsilon,
                     float* out) {
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
// Lane of a term in the sum = its index modulo 16, so `begin` must be a function of the query alone.
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

// Index of the largest value; the lowest one where several are equal.
inline int64_t argmax(const float* values, int64_t count) {
    Vec16 largest = broadcast(-INFINITY);
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) largest = maximum(largest, load(values + i));
    float best = largest_lane(largest);
    for (; i < count; ++i) best = std::max(best, values[i]);
    for (int64_t j = 0; j < count; ++j)
        if (values[j] == best) return j;
    return 0;
}
