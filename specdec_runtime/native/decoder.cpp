// A Llama-family decoder over a key/value cache: one call runs all layers for all rows.
//
// What is here: embedding, attention with grouped heads, rotary positions, gated MLP, head, greedy
// drafting. Weights are int8, BFloat16 or float; activations, cache and arithmetic are float.
// What is not: loading (weights.py), other architectures.
//
// Shapes: T tokens of one segment, D hidden, H heads, KV key/value heads, E head_dim, Ep = E
// rounded up to 16. Every head occupies Ep columns of the activations; the columns from E on are 0.
// Cache: keys   [layers, batch, KV, capacity / 16, E, 16]   16 neighbouring slots side by side
//        values [layers, batch, KV, Ep / 16, capacity, 16]  16 neighbouring dimensions side by side
// Both are panels as in kernels.h, so scores and weighted sums are matrix products as well.

#include <type_traits>
#include <vector>

#include "kernels.h"

namespace {

// What the matrices of a model are stored in; the numbers are those of weights.py.
enum WeightType : int64_t { FLOAT = 0, BFLOAT16 = 1, INT8 = 2 };

// Calls body with a value of the type.
template <class Body>
void with_weight_type(int64_t type, Body body) {
    switch (type) {
        case INT8: return body(int8_t{});
        case BFLOAT16: return body(BFloat16{});
        default: return body(float{});
    }
}

struct Layer {
    Linear qkv, attention_out;  // rows of qkv: H query heads, KV key heads, KV value heads
    Linear gate_up, down;       // rows of gate_up: 16 of gate, 16 of up, alternating
    const float *norm_attention, *norm_mlp;  // [D rounded up to 16]
    const float *norm_query, *norm_key;      // [Ep] or null
    int64_t window;  // a query sees this many positions including its own; 0: all
};

struct Model {
    const Layer* layers;
    Linear head;
    const void* embedding;             // [vocabulary, D], plain rows of Embedding<Weight>
    const float* norm_final;           // [D rounded up to 16]
    // [D rounded up to 16] or null. If given, attention reads [norm(embedding); norm(residual)], each
    // D rounded up to 16 wide, and the residual comes from hidden_in (a layer of EAGLE-3).
    const float* norm_embedding;
    const float* inverse_frequencies;  // [E / 2]
    const int64_t* head_token_ids;     // [num_logits]: the token of each logit column
    int64_t num_layers, hidden_size, mlp_size, num_heads, num_kv_heads, head_dim, num_logits,
        weight_type;
    float norm_epsilon, attention_scale, rotary_scale;
};

struct Cache {
    float *keys, *values;
    int64_t* lengths;  // [batch]
    int64_t batch, capacity;
};

// `draftloop_check` says whether a request fits; the other functions take that for granted.
struct Request {
    const int64_t* token_ids;   // [rows, width]
    const int64_t* num_new;     // [rows]
    const int64_t* cache_rows;  // [rows]
    const int64_t* positions;   // [rows, width] or null: position = slot
    const uint8_t* visible;     // [rows, width, width] or null: all earlier tokens
    const float* hidden_in;     // [rows, width, D] or null: the embedding
    // Outputs; what belongs to padding is set to 0, so that no stray NaN gets into a caller's sums.
    float* logits;              // [rows, width or 1, num_logits] or null
    int64_t* likeliest;         // [rows, width or 1] or null: the largest of the first num_choices
    float* const* hidden_out;  // [num_layers + 2] of [rows, width, D] or null; last: after the norm
    int64_t rows, width, first_layer, end_layer, last_only, num_choices, threads;
};

// One new token, where it goes and what it sees.
struct Token {
    int64_t cache_row, slot, position;
    int64_t past;              // slots of this row that were filled before the call
    int64_t index;             // row * width + column in the request
    const uint8_t* visible;    // [width] or null
    const int64_t* positions;  // [width] or null: of all new tokens of the row
    float* logits;             // [num_logits] or null
    int64_t* likeliest;        // or null

    bool is_scored() const { return logits != nullptr || likeliest != nullptr; }
};

// Neighbouring tokens of one row whose attention is computed together.
struct QueryBlock {
    int64_t first, count;
};

// Long prompts run in segments, so that the activations stay small.
constexpr int64_t MAX_SEGMENT_TOKENS = 512;
// Query rows (tokens times heads) of one attention task: a few tiles, so keys are read rarely.
constexpr int64_t ATTENTION_ROWS = 24;
constexpr int64_t MAX_TOKENS_NORMALISED_ALONE = 8;

// The activations of one segment. Kept by each calling thread: no page faults from call to call.
struct Buffers {
    std::vector<float> residual, embedded, fused, normed, wanted, qkv, attended, gated, cosine, sine, scores;
    std::vector<Largest> largest;  // [threads, tokens whose scores are wanted]

    void resize(std::vector<float>& buffer, int64_t size) {
        if (int64_t(buffer.size()) < size) buffer.resize(size);
    }
};

class Segment {
  public:
    Segment(const Model& model, const Cache& cache, const Request& request,
            const std::vector<Token>& tokens, Buffers& buffers);

    void run() {
        with_weight_type(model.weight_type, [this](auto weight) {
            Team::run(request.threads,
                      [this](Team& team) { run_in_team<decltype(weight)>(team); });
        });
    }

  private:
    const Model& model;
    const Cache& cache;
    const Request& request;
    const std::vector<Token>& tokens;
    Buffers& buffers;
    std::vector<QueryBlock> blocks;
    std::vector<int64_t> scored_tokens;  // tokens whose logits, or the largest of them, are wanted
    int64_t num_tokens, hidden_stride, head_stride, qkv_stride, attended_stride, gated_stride;
    int64_t heads_per_task, scores_stride, scratch_size;

    template <class Weight>
    void run_in_team(Team& team);
    template <class Weight>
    void embed(Team& team);
    template <class Weight>
    void run_layer(Team& team, int64_t index);
    template <class Weight>
    void add_product(Team& team, const Linear& linear, const std::vector<float>& x, int64_t stride);
    template <class Weight>
    void run_head(Team& team);
    void compute_angles(int64_t t);
    const float* normalise(Team& team, const float* weight);
    const float* fuse(Team& team, const float* weight);
    void write_hidden(Team& team, int64_t k, const float* x);
    void place_head(const Layer& layer, int64_t layer_index, int64_t t, int64_t head);
    void rotate(int64_t t, float* head) const;
    void attend(int64_t layer_index, int64_t window, const QueryBlock& block, int64_t first_head,
                float* scores);
    float softmax_tree(const Token& token, int64_t window, float* scores, int64_t origin) const;

    float* query(int64_t t, int64_t head) {
        return &buffers.qkv[t * qkv_stride + head * head_stride];
    }
    float* keys(int64_t layer, int64_t row, int64_t kv_head) const {
        return cache.keys + ((layer * cache.batch + row) * model.num_kv_heads + kv_head) *
                                cache.capacity * model.head_dim;
    }
    float* values(int64_t layer, int64_t row, int64_t kv_head) const {
        return cache.values + ((layer * cache.batch + row) * model.num_kv_heads + kv_head) *
                                  cache.capacity * head_stride;
    }
};

Segment::Segment(const Model& model, const Cache& cache, const Request& request,
                 const std::vector<Token>& tokens, Buffers& buffers)
    : model(model), cache(cache), request(request), tokens(tokens), buffers(buffers) {
    num_tokens = int64_t(tokens.size());
    hidden_stride = round_up(model.hidden_size, LANES);
    head_stride = round_up(model.head_dim, LANES);
    qkv_stride = (model.num_heads + 2 * model.num_kv_heads) * head_stride;
    attended_stride = model.num_heads * head_stride;
    gated_stride = round_up(model.mlp_size, LANES);

    const int64_t group = model.num_heads / model.num_kv_heads;
    const int64_t block_tokens = std::max<int64_t>(1, ATTENTION_ROWS / group);
    int64_t longest = 0;
    for (int64_t t = 0; t < num_tokens; ++t) {
        const bool same_row = t > 0 && tokens[t].cache_row == tokens[t - 1].cache_row;
        if (!same_row || blocks.back().count == block_tokens) blocks.push_back({t, 0});
        ++blocks.back().count;
        longest = std::max(longest, tokens[t].slot + 1);
        if (tokens[t].is_scored()) scored_tokens.push_back(t);
    }
    // Few tasks: one per head, so that all threads have work. The arithmetic is the same.
    const bool few = int64_t(blocks.size()) * model.num_kv_heads < 4 * request.threads;
    heads_per_task = few ? 1 : group;
    scores_stride = round_up(longest, LANES);
    scratch_size = MAX_TILE_ROWS * (scores_stride + head_stride);

    buffers.resize(buffers.residual, num_tokens * hidden_stride);
    const int64_t copies = num_tokens <= MAX_TOKENS_NORMALISED_ALONE ? request.threads : 1;
    buffers.resize(buffers.normed, copies * num_tokens * hidden_stride);
    if (model.norm_embedding != nullptr) {
        buffers.resize(buffers.embedded, num_tokens * hidden_stride);
        buffers.resize(buffers.fused, num_tokens * 2 * hidden_stride);
    }
    buffers.resize(buffers.wanted, int64_t(scored_tokens.size()) * hidden_stride);
    if (request.likeliest != nullptr)
        buffers.largest.assign(request.threads * scored_tokens.size(), Largest{});
    buffers.resize(buffers.qkv, num_tokens * qkv_stride);
    buffers.resize(buffers.attended, num_tokens * attended_stride);
    buffers.resize(buffers.gated, num_tokens * gated_stride);
    buffers.resize(buffers.cosine, num_tokens * model.head_dim / 2);
    buffers.resize(buffers.sine, num_tokens * model.head_dim / 2);
    buffers.resize(buffers.scores, request.threads * scratch_size);
}

template <class Weight>
void Segment::run_in_team(Team& team) {
    embed<Weight>(team);
    for (int64_t layer = request.first_layer; layer < request.end_layer; ++layer) {
        write_hidden(team, layer, buffers.residual.data());
        run_layer<Weight>(team, layer);
    }
    write_hidden(team, request.end_layer, buffers.residual.data());
    if (!scored_tokens.empty() || request.hidden_out[model.num_layers + 1] != nullptr)
        run_head<Weight>(team);
}

// Of a pass only a few rows of the embedding are read, so int8 would save nothing there.
template <class Weight>
using Embedding = std::conditional_t<std::is_same_v<Weight, float>, float, BFloat16>;

template <class Weight>
void Segment::embed(Team& team) {
    const auto* embedding = static_cast<const Embedding<Weight>*>(model.embedding);
    const int64_t size = model.hidden_size;
    team.share(num_tokens, [&](int64_t t) {
        float* x = &buffers.residual[t * hidden_stride];
        const int64_t index = tokens[t].index;
        const auto embed_into = [&](float* out) {
            for (int64_t i = 0; i < size; ++i)
                out[i] = to_float(embedding[request.token_ids[index] * size + i]);
            std::fill(out + size, out + hidden_stride, 0.0f);
        };
        if (model.norm_embedding != nullptr) embed_into(&buffers.embedded[t * hidden_stride]);
        if (request.hidden_in != nullptr) {
            std::copy_n(request.hidden_in + index * size, size, x);
            std::fill(x + size, x + hidden_stride, 0.0f);
        } else {
            embed_into(x);
        }
        compute_angles(t);
    });
}

// Su et al. 2021, arXiv:2104.09864. The angle is a float product, as in transformers.
void Segment::compute_angles(int64_t t) {
    const int64_t half = model.head_dim / 2;
    for (int64_t i = 0; i < half; ++i) {
        const double angle = float(tokens[t].position) * model.inverse_frequencies[i];
        buffers.cosine[t * half + i] = float(std::cos(angle)) * model.rotary_scale;
        buffers.sine[t * half + i] = float(std::sin(angle)) * model.rotary_scale;
    }
}

void Segment::write_hidden(Team& team, int64_t k, const float* x) {
    float* out = request.hidden_out[k];
    if (out == nullptr) return;
    team.share(num_tokens, [&](int64_t t) {
        std::copy_n(x + t * hidden_stride, model.hidden_size,
                    out + tokens[t].index * model.hidden_size);
    });
}

// The residual after RMSNorm. Of few tokens every thread makes its own copy: that costs less than
// waiting for the others. A thread that is so late that others change the residual meanwhile finds
// the stage that would use its copy over: the residual changes two stages later at the earliest.
const float* Segment::normalise(Team& team, const float* weight) {
    const bool alone = num_tokens <= MAX_TOKENS_NORMALISED_ALONE;
    float* out =
        buffers.normed.data() + (alone ? omp_get_thread_num() * num_tokens * hidden_stride : 0);
    const auto normalise_token = [&](int64_t t) {
        rms_norm(&buffers.residual[t * hidden_stride], weight, model.hidden_size, hidden_stride,
                 model.norm_epsilon, out + t * hidden_stride);
    };
    if (alone)
        for (int64_t t = 0; t < num_tokens; ++t) normalise_token(t);
    else
        team.share(num_tokens, normalise_token);
    return out;
}

// [norm(embedding); norm(residual)] of every token.
const float* Segment::fuse(Team& team, const float* weight) {
    team.share(num_tokens, [&](int64_t t) {
        float* out = &buffers.fused[t * 2 * hidden_stride];
        rms_norm(&buffers.embedded[t * hidden_stride], model.norm_embedding, model.hidden_size,
                 hidden_stride, model.norm_epsilon, out);
        rms_norm(&buffers.residual[t * hidden_stride], weight, model.hidden_size, hidden_stride,
                 model.norm_epsilon, out + hidden_stride);
    });
    return buffers.fused.data();
}

// residual += x times the matrix.
template <class Weight>
void Segment::add_product(Team& team, const Linear& linear, const std::vector<float>& x,
                          int64_t stride) {
    matrix_product<Weight>(team, linear, x.data(), stride, num_tokens, 1,
                           [this](int64_t row, int64_t first, int64_t count, const float* product) {
                               float* sum = &buffers.residual[row * hidden_stride + first];
                               for (int64_t i = 0; i < count; ++i) sum[i] += product[i];
                           });
}

template <class Weight>
void Segment::run_layer(Team& team, int64_t index) {
    const Layer& layer = model.layers[index];
    const bool fused = model.norm_embedding != nullptr;
    const float* normed =
        fused ? fuse(team, layer.norm_attention) : normalise(team, layer.norm_attention);
    matrix_product<Weight>(team, layer.qkv, normed, hidden_stride * (fused ? 2 : 1), num_tokens, 1,
                           [this](int64_t row, int64_t first, int64_t count, const float* product) {
                               std::copy_n(product, count, &buffers.qkv[row * qkv_stride + first]);
                           });

    const int64_t heads = model.num_heads + 2 * model.num_kv_heads;
    team.share(num_tokens, [&](int64_t t) {
        for (int64_t head = 0; head < heads; ++head) place_head(layer, index, t, head);
    });

    const int64_t tasks_per_block = model.num_heads / heads_per_task;
    team.share(int64_t(blocks.size()) * tasks_per_block, [&](int64_t task) {
        attend(index, layer.window, blocks[task / tasks_per_block],
               task % tasks_per_block * heads_per_task,
               &buffers.scores[omp_get_thread_num() * scratch_size]);
    });

    add_product<Weight>(team, layer.attention_out, buffers.attended, attended_stride);
    normed = normalise(team, layer.norm_mlp);
    matrix_product<Weight>(team, layer.gate_up, normed, hidden_stride, num_tokens, 2,
                           [this](int64_t row, int64_t first, int64_t count, const float* product) {
                               float* out = &buffers.gated[row * gated_stride + first / 2];
                               for (int64_t i = 0; i < count; i += 2 * LANES, out += LANES)
                                   store(out, gated(load(product + i), load(product + i + LANES)));
                           });
    add_product<Weight>(team, layer.down, buffers.gated, gated_stride);
}

// Norm and rotation of one head of one token; keys and values go to the cache.
void Segment::place_head(const Layer& layer, int64_t layer_index, int64_t t, int64_t head) {
    const Token& token = tokens[t];
    float* x = query(t, head);
    const bool is_query = head < model.num_heads;
    const int64_t kv_head = (head - model.num_heads) % model.num_kv_heads;
    if (!is_query && head >= model.num_heads + model.num_kv_heads) {
        float* out = values(layer_index, token.cache_row, kv_head) + token.slot * LANES;
        for (int64_t i = 0; i < head_stride; i += LANES)
            std::copy_n(x + i, LANES, out + i * cache.capacity);
        return;
    }
    const float* norm = is_query ? layer.norm_query : layer.norm_key;
    if (norm != nullptr) rms_norm(x, norm, model.head_dim, head_stride, model.norm_epsilon, x);
    rotate(t, x);
    if (is_query) {
        for (int64_t i = 0; i < model.head_dim; ++i) x[i] *= model.attention_scale;
        return;
    }
    float* out =
        keys(layer_index, token.cache_row, kv_head) + token.slot / LANES * LANES * model.head_dim;
    for (int64_t i = 0; i < model.head_dim; ++i) out[i * LANES + token.slot % LANES] = x[i];
}

void Segment::rotate(int64_t t, float* head) const {
    const int64_t half = model.head_dim / 2;
    const float *cosine = &buffers.cosine[t * half], *sine = &buffers.sine[t * half];
    for (int64_t i = 0; i < half; ++i) {
        const float first = head[i], second = head[i + half];
        head[i] = first * cosine[i] - second * sine[i];
        head[i + half] = second * cosine[i] + first * sine[i];
    }
}

inline int64_t first_visible(const Token& token, int64_t window) {
    return window > 0 ? std::max<int64_t>(0, token.position - window + 1) : 0;
}

// Attention of a block of tokens, for heads_per_task heads that share one key/value head.
// Weights of slots that a token does not see are exactly 0; adding 0 * value changes no sum, so a
// token gets the same bits whichever tokens share its block, and in a tree the same as in a chain.
void Segment::attend(int64_t layer_index, int64_t window, const QueryBlock& block,
                     int64_t first_head, float* scores) {
    const int64_t row = tokens[block.first].cache_row;
    const int64_t kv_head = first_head / (model.num_heads / model.num_kv_heads);
    int64_t begin = tokens[block.first].slot;
    for (int64_t t = block.first; t < block.first + block.count; ++t)
        begin = std::min(begin, first_visible(tokens[t], window));
    begin = begin / LANES * LANES;
    const int64_t end = round_up(tokens[block.first + block.count - 1].slot + 1, LANES);
    const float* key_panels = keys(layer_index, row, kv_head) + begin * model.head_dim;
    const float* value_panels = values(layer_index, row, kv_head) + begin * LANES;
    float* sums = scores + MAX_TILE_ROWS * scores_stride;

    for_each_tile(block.count * heads_per_task, [&](int64_t, int64_t first, int64_t height) {
        const float* a[MAX_TILE_ROWS];
        for (int64_t r = 0; r < height; ++r)
            a[r] = query(block.first + (first + r) / heads_per_task,
                         first_head + (first + r) % heads_per_task);
        multiply_panels(height, a, key_panels, model.head_dim * LANES, (end - begin) / LANES,
                        model.head_dim, scores, scores_stride, read_ahead(key_panels));

        float scale[MAX_TILE_ROWS];
        for (int64_t r = 0; r < height; ++r) {
            const Token& token = tokens[block.first + (first + r) / heads_per_task];
            float* line = scores + r * scores_stride;
            const int64_t from = first_visible(token, window) - begin, to = token.slot + 1 - begin;
            scale[r] = token.visible == nullptr ? softmax_numerators(line, from, to)
                                                : softmax_tree(token, window, line, begin);
            std::fill(line, line + from / LANES * LANES, 0.0f);
            std::fill(line + to, line + (end - begin), 0.0f);
            a[r] = line;
        }
        multiply_panels(height, a, value_panels, cache.capacity * LANES, head_stride / LANES,
                        end - begin, sums, head_stride, read_ahead(value_panels));
        for (int64_t r = 0; r < height; ++r) {
            const int64_t t = block.first + (first + r) / heads_per_task;
            float* out =
                &buffers.attended[t * attended_stride +
                                  (first_head + (first + r) % heads_per_task) * head_stride];
            for (int64_t i = 0; i < head_stride; ++i) out[i] = sums[r * head_stride + i] * scale[r];
        }
    });
}

// Softmax over the past and the token's ancestors. Their scores move together first, so that each
// has the lane it would have in a chain, and back afterwards. scores[0] belongs to slot `origin`.
float Segment::softmax_tree(const Token& token, int64_t window, float* scores,
                            int64_t origin) const {
    const int64_t begin = first_visible(token, window);
    const int64_t own = token.slot - token.past;
    const auto sees = [&](int64_t i) {
        return (i == own || token.visible[i]) && token.positions[i] >= begin;
    };
    float* fresh = scores + token.past - origin;
    int64_t count = std::max(begin, token.past) - origin;
    for (int64_t i = 0; i <= own; ++i)
        if (sees(i)) scores[count++] = fresh[i];
    const float scale = softmax_numerators(scores, begin - origin, count);
    for (int64_t i = own; i >= 0; --i) fresh[i] = sees(i) ? scores[--count] : 0.0f;
    return scale;
}

template <class Weight>
void Segment::run_head(Team& team) {
    const float* normed = normalise(team, model.norm_final);
    write_hidden(team, model.num_layers + 1, normed);
    const int64_t count = int64_t(scored_tokens.size());
    if (count == 0) return;
    if (count < num_tokens) {  // the rows that are scored, side by side
        team.share(count, [&](int64_t i) {
            std::copy_n(normed + scored_tokens[i] * hidden_stride, hidden_stride,
                        &buffers.wanted[i * hidden_stride]);
        });
        normed = buffers.wanted.data();
    }
    matrix_product<Weight>(
        team, model.head, normed, hidden_stride, count, 1,
        [this, count](int64_t row, int64_t first, int64_t width, const float* product) {
            const Token& token = tokens[scored_tokens[row]];
            const auto real = [&](int64_t columns) {
                return std::clamp<int64_t>(columns - first, 0, width);
            };
            if (token.logits != nullptr)
                std::copy_n(product, real(model.num_logits), token.logits + first);
            if (token.likeliest != nullptr)
                buffers.largest[omp_get_thread_num() * count + row].look_at(
                    product, real(request.num_choices), first);
        });
    if (request.likeliest != nullptr)
        team.share(count, [&](int64_t i) {
            Largest largest;
            for (size_t place = i; place < buffers.largest.size(); place += count)
                largest.merge(buffers.largest[place]);
            *tokens[scored_tokens[i]].likeliest = largest.index;
        });
}

std::vector<Token> list_tokens(const Model& model, const Cache& cache, const Request& request) {
    std::vector<Token> tokens;
    for (int64_t r = 0; r < request.rows; ++r) {
        const int64_t row = request.cache_rows[r], past = cache.lengths[row],
                      count = request.num_new[r];
        const int64_t* positions =
            request.positions ? request.positions + r * request.width : nullptr;
        for (int64_t j = 0; j < count; ++j) {
            const int64_t index = r * request.width + j;
            const int64_t place = request.last_only ? r : index;
            const bool is_scored = !request.last_only || j == count - 1;
            tokens.push_back(
                {row, past + j, positions ? positions[j] : past + j, past, index,
                 request.visible ? request.visible + index * request.width : nullptr, positions,
                 is_scored && request.logits ? request.logits + place * model.num_logits : nullptr,
                 is_scored && request.likeliest ? request.likeliest + place : nullptr});
        }
    }
    return tokens;
}

void clear_padding(const Model& model, const Request& request) {
    for (int64_t r = 0; r < request.rows; ++r) {
        const int64_t first = r * request.width + request.num_new[r];
        const int64_t count = request.width - request.num_new[r];
        if (request.logits != nullptr && !request.last_only)
            std::fill_n(request.logits + first * model.num_logits, count * model.num_logits, 0.0f);
        if (request.likeliest != nullptr && !request.last_only)
            std::fill_n(request.likeliest + first, count, 0);
        for (int64_t k = 0; k < model.num_layers + 2; ++k)
            if (request.hidden_out[k] != nullptr)
                std::fill_n(request.hidden_out[k] + first * model.hidden_size,
                            count * model.hidden_size, 0.0f);
    }
}

// What about a request does not fit; call.py says it in words.
enum Problem : int64_t { NONE = 0, ROW, COUNT, ROOM, TOKEN, POSITION };

Buffers& thread_buffers() {
    thread_local Buffers buffers;
    return buffers;
}

}  // namespace

extern "C" {

// Sizes of the structures, so that engine.py can check that its mirror of them is right.
void draftloop_sizes(int64_t* sizes) {
    const int64_t all[] = {sizeof(Linear), sizeof(Layer), sizeof(Model), sizeof(Cache),
                           sizeof(Request)};
    std::copy(std::begin(all), std::end(all), sizes);
}

// Plain rows [outputs, inputs] to panels [outputs / 16 rounded up][inputs][16], padded with 0.
void draftloop_pack(const void* rows, int64_t outputs, int64_t inputs, int64_t weight_type,
                    void* panels) {
    with_weight_type(weight_type, [&](auto weight) {
        using Weight = decltype(weight);
        const auto* source = static_cast<const Weight*>(rows);
        auto* target = static_cast<Weight*>(panels);
        const int64_t num_panels = divide_up(outputs, LANES);
#pragma omp parallel for
        for (int64_t p = 0; p < num_panels; ++p)
            for (int64_t i = 0; i < inputs; ++i)
                for (int c = 0; c < LANES; ++c) {
                    const int64_t row = p * LANES + c;
                    const int column = std::is_same_v<Weight, BFloat16> ? pack_column(c) : c;
                    target[(p * inputs + i) * LANES + column] =
                        row < outputs ? source[row * inputs + i] : Weight{};
                }
    });
}

// The first problem of a request, with the number that is wrong in `found`.
// room: tokens that a row may hold, `extra` further ones included.
int64_t draftloop_check(const Cache* cache, const Request* request, int64_t vocabulary,
                        int64_t room, int64_t extra, int64_t* found) {
    const int64_t width = request->width;
    std::vector<bool> taken(cache->batch);
    for (int64_t r = 0; r < request->rows; ++r) {
        const int64_t row = *found = request->cache_rows[r];
        if (row < 0 || row >= cache->batch || taken[row]) return ROW;
        taken[row] = true;
        const int64_t count = *found = request->num_new[r];
        if (count < 1 || count > width) return COUNT;
        const int64_t past = cache->lengths[row];
        *found = past + count + extra;
        if (*found > room) return ROOM;
        for (int64_t j = 0; j < count; ++j) {
            *found = request->token_ids[r * width + j];
            if (*found < 0 || *found >= vocabulary) return TOKEN;
            if (request->positions == nullptr) continue;
            *found = request->positions[r * width + j];  // a node's depth: in [past, slot]
            if (*found < past || *found > past + j) return POSITION;
        }
    }
    return NONE;
}

void draftloop_forward(const Model* model, const Cache* cache, const Request* request) {
    clear_padding(*model, *request);
    const std::vector<Token> tokens = list_tokens(*model, *cache, *request);
    for (size_t first = 0; first < tokens.size(); first += MAX_SEGMENT_TOKENS) {
        const size_t end = std::min(tokens.size(), first + MAX_SEGMENT_TOKENS);
        const std::vector<Token> part(tokens.begin() + first, tokens.begin() + end);
        Segment(*model, *cache, *request, part, thread_buffers()).run();
    }
    for (int64_t r = 0; r < request->rows; ++r)
        cache->lengths[request->cache_rows[r]] += request->num_new[r];
}

// logits[rows, num_logits] of hidden[rows, D], to which the final norm has been applied.
void draftloop_logits(const Model* model, const float* hidden, int64_t rows, int64_t threads,
                      float* logits) {
    const auto done = [&](int64_t row, int64_t first, int64_t width, const float* product) {
        const int64_t real = std::min(width, model->num_logits - first);
        std::copy_n(product, std::max<int64_t>(real, 0), logits + row * model->num_logits + first);
    };
    with_weight_type(model->weight_type, [&](auto weight) {
        Team::run(threads, [&](Team& team) {
            matrix_product<decltype(weight)>(team, model->head, hidden, model->hidden_size, rows, 1,
                                             done);
        });
    });
}

// The same of rows that are made of equally long parts, each normed with weights of its own first:
// norms [parts] of [D / parts rounded up to 16].
void draftloop_normed_logits(const Model* model, const float* const* norms, int64_t parts,
                             const float* hidden, int64_t rows, int64_t threads, float* logits) {
    const int64_t size = model->hidden_size / parts, padded = round_up(size, LANES);
    std::vector<float> whole(rows * model->hidden_size), part(padded), normed(padded);
    for (int64_t i = 0; i < rows * parts; ++i) {
        std::copy_n(hidden + i * size, size, part.data());
        rms_norm(part.data(), norms[i % parts], size, padded, model->norm_epsilon, normed.data());
        std::copy_n(normed.data(), size, &whole[i * size]);
    }
    draftloop_logits(model, whole.data(), rows, threads, logits);
}

// Runs the request (which wants the last logits), then drafts greedily: drafted [rows, steps].
// The last drafted token is not fed, so each row grows by num_new + steps - 1. If the request wants
// hidden states (of one kind), those of a row's last token enter the next step as its hidden_in.
// proceed or null: called after every step, with the probabilities of its tokens in `confidences`
// [rows]; where it returns 0 the chain ends. Returns the number of steps taken.
int64_t draftloop_greedy_chain(const Model* model, const Cache* cache, const Request* request,
                               int64_t steps, int64_t* drafted, float* confidences,
                               int64_t (*proceed)()) {
    std::vector<int64_t> latest(request->rows);
    const std::vector<int64_t> ones(request->rows, 1);
    const int64_t size = model->hidden_size;
    const float* states = nullptr;
    for (int64_t k = 0; k < model->num_layers + 2; ++k)
        if (request->hidden_out[k] != nullptr) states = request->hidden_out[k];
    std::vector<float> entering(states == nullptr ? 0 : request->rows * size);
    Request next = *request;
    for (int64_t step = 0; step < steps; ++step) {
        draftloop_forward(model, cache, &next);
        if (states != nullptr) {
            for (int64_t r = 0; r < request->rows; ++r)
                std::copy_n(states + (r * next.width + next.num_new[r] - 1) * size, size,
                            &entering[r * size]);
            next.hidden_in = entering.data();
        }
        for (int64_t r = 0; r < request->rows; ++r) {
            const float* logits = request->logits + r * model->num_logits;
            const int64_t column = argmax(logits, model->num_logits);
            latest[r] = model->head_token_ids[column];
            drafted[r * steps + step] = latest[r];
            if (proceed != nullptr)
                confidences[r] = probability(logits, model->num_logits, logits[column]);
        }
        if (proceed != nullptr && !proceed()) return step + 1;
        next.token_ids = latest.data();
        next.num_new = ones.data();
        next.width = 1;
    }
    return steps;
}

// Moves slots of one row to start, start + 1, ...: the accepted path of a tree becomes a chain.
// slots must ascend with slots[i] >= start + i, so nothing is overwritten before it has moved.
void draftloop_keep_path(const Model* model, const Cache* cache, int64_t row, int64_t start,
                         const int64_t* slots, int64_t count) {
    const int64_t size = model->head_dim, padded = round_up(size, LANES),
                  capacity = cache->capacity;
    for (int64_t layer = 0; layer < model->num_layers; ++layer)
        for (int64_t h = 0; h < model->num_kv_heads; ++h) {
            const int64_t head = (layer * cache->batch + row) * model->num_kv_heads + h;
            float* keys = cache->keys + head * capacity * size;
            float* values = cache->values + head * capacity * padded;
            for (int64_t i = 0; i < count; ++i) {
                const int64_t from = slots[i], to = start + i;
                const float* key = keys + from / LANES * LANES * size + from % LANES;
                float* new_key = keys + to / LANES * LANES * size + to % LANES;
                for (int64_t e = 0; e < size; ++e) new_key[e * LANES] = key[e * LANES];
                for (int64_t p = 0; p < padded; p += LANES)
                    std::copy_n(values + p * capacity + from * LANES, LANES,
                                values + p * capacity + to * LANES);
            }
        }
}

}  // extern "C"
