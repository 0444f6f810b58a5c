// Ops for a few rows on a CPU, float32, on one core; the formulas: kda.py, mla.py, moe.py, attnres.py, layers.py.
// Rows lie side by side but for those with a stride, in values. Built and called by cpu.py.

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef int64_t I;

// ---------------------------------------------------------------- arithmetic

static inline float dot(const float *a, const float *b, I n) {
    float sum = 0;
    for (I i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

// e^x as 2^n e^r, |r| <= ln(2) / 2, and a polynomial (Cephes): unlike the library's, a loop of it becomes vectors.
static inline float exponential(float x) {
    x = x > 88.7f ? 88.7f : x < -87.3f ? -87.3f : x;
    float n = floorf(x * 1.44269504f + 0.5f), p = 1.9875691500e-4f;
    float r = fmaf(n, 2.12194440e-4f, fmaf(n, -0.693359375f, x));  // x - n ln(2), in two parts
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    union { int32_t bits; float value; } power = {((int32_t)n + 127) << 23};
    return (p * r * r + r + 1) * power.value;
}

// A quotient of polynomials (Eigen's); from 7.9 on it is 1.
static inline float hyperbolic_tangent(float x) {
    x = x > 7.90531111f ? 7.90531111f : x < -7.90531111f ? -7.90531111f : x;
    float s = x * x, p = -2.76076847742355e-16f, q = 1.19825839466702e-06f;
    p = p * s + 2.00018790482477e-13f;
    p = p * s - 8.60467152213735e-11f;
    p = p * s + 5.12229709037114e-08f;
    p = p * s + 1.48572235717979e-05f;
    p = p * s + 6.37261928875436e-04f;
    p = p * s + 4.89352455891786e-03f;
    q = q * s + 1.18534705686654e-04f;
    q = q * s + 2.26843463243900e-03f;
    return x * p / (q * s + 4.89352518554385e-03f);
}

static inline float sigmoid(float x) { return 1 / (1 + exponential(-x)); }

static inline float inverse_rms(const float *x, I n, float eps) { return 1 / sqrtf(dot(x, x, n) / n + eps); }

static void softmax(float *x, I n) {
    float top = -INFINITY, total = 0;
    for (I i = 0; i < n; i++) top = x[i] > top ? x[i] : top;
    for (I i = 0; i < n; i++) total += x[i] = exponential(x[i] - top);
    for (I i = 0; i < n; i++) x[i] /= total;
}

// gate and up -> out: SiTU, or SiLU where beta is 0
static void activate(const float *a, const float *u, float *out, I n, float beta, float linear) {
    if (beta == 0)
        for (I i = 0; i < n; i++) out[i] = a[i] * sigmoid(a[i]) * u[i];
    else
        for (I i = 0; i < n; i++)
            out[i] = beta * hyperbolic_tangent(a[i] / beta) * sigmoid(a[i]) * linear * hyperbolic_tangent(u[i] / linear);
}

// ---------------------------------------------------------------- between sub-layers

void rms_norm(const float *x, I stride, const float *weight, float eps, float *out, I N, I D) {
    for (I n = 0; n < N; n++, x += stride, out += D) {
        float scale = inverse_rms(x, D, eps);
        for (I i = 0; i < D; i++) out[i] = x[i] * scale * weight[i];
    }
}

// s + y -> sum; y NULL: sum is s. candidates [J]: the snapshots, and sum. norm NULL: one candidate, no mixture; weight
// NULL: the mixture is not normalized.
void attnres(const float *s, const float *y, float *sum, const float **candidates, I J, const float *norm,
             const float *proj, float eps, const float *weight, float norm_eps, float *out, I N, I H) {
    if (y)
        for (I i = 0; i < N * H; i++) sum[i] = s[i] + y[i];
    for (I n = 0; n < N; n++, out += H) {
        float score[J];
        for (I j = 0; j < J; j++) {
            const float *c = candidates[j] + n * H;
            score[j] = 0;
            if (norm) {
                for (I i = 0; i < H; i++) score[j] += c[i] * norm[i] * proj[i];
                score[j] *= inverse_rms(c, H, eps);
            }
        }
        softmax(score, J);
        memset(out, 0, H * sizeof(float));
        for (I j = 0; j < J; j++)
            for (I i = 0; i < H; i++) out[i] += score[j] * candidates[j][n * H + i];
        if (weight) rms_norm(out, H, weight, norm_eps, out, 1, H);
    }
}

// ---------------------------------------------------------------- MoE

void gated_act(const float *x, I stride, float beta, float linear, float *out, I N, I inner) {
    for (I n = 0; n < N; n++) activate(x + n * stride, x + n * stride + inner, out + n * inner, inner, beta, linear);
}

// In double, and rounded: then rows that are alike give logits that are, in every path (moe.py, in_projection).
void router_logits(const float *x, const float *weight, float *logits, I N, I H, I E) {
    for (I n = 0; n < N; n++)
        for (I e = 0; e < E; e++) {
            double sum = 0;
            for (I i = 0; i < H; i++) sum += (double)x[n * H + i] * weight[e * H + i];
            logits[n * E + e] = sum;
        }
}

void router(const float *logits, const float *bias, I use_sigmoid, I normalize, float scale, I *ids, float *weights,
            I N, I E, I k) {
    for (I n = 0; n < N; n++, logits += E, ids += k, weights += k) {
        float p[E], biased[E], total = 0;
        double top = -INFINITY, sum = 0;
        for (I e = 0; e < E; e++) top = logits[e] > top ? logits[e] : top;
        for (I e = 0; e < E; e++) sum += exp(logits[e] - top);
        for (I e = 0; e < E; e++) {
            p[e] = use_sigmoid ? 1 / (1 + exp(-(double)logits[e])) : exp(logits[e] - top) / sum;
            biased[e] = p[e] + bias[e];
        }
        for (I i = 0; i < k; i++) {  // the largest left, equal ones in order of id; NaN as in a sort: before all
            I best = -1;
            for (I e = 0; e < E; e++) {
                I taken = 0;
                for (I j = 0; j < i; j++) taken |= ids[j] == e;
                if (!taken && (best < 0 || biased[e] > biased[best] || (biased[e] != biased[e] && biased[best] == biased[best])))
                    best = e;
            }
            ids[i] = best;
            total += weights[i] = p[best];
        }
        for (I i = 0; i < k; i++) weights[i] = weights[i] / (normalize ? total + 1e-20f : 1) * scale;
    }
}

// A matrix [rows, columns], the e-th of a stack of float32, or bfloat16 where narrow, times x -> y.
static void multiply(const void *stack, I narrow, I e, const float *x, float *y, I rows, I columns) {
    const float *wide = (const float *)stack + e * rows * columns;
    const uint16_t *half = (const uint16_t *)stack + e * rows * columns;
    if (!narrow)
        for (I i = 0; i < rows; i++) y[i] = dot(wide + i * columns, x, columns);
    else
        for (I i = 0; i < rows; i++, half += columns) {
            float sum = 0;
            for (I j = 0; j < columns; j++) {
                union { uint32_t bits; float value; } w = {(uint32_t)half[j] << 16};
                sum += w.value * x[j];
            }
            y[i] = sum;
        }
}

// w13 [E, 2 inner, L], w2 [E, L, inner]; scratch [3 inner + L]. Expert by expert: its matrices are read once.
void experts(const float *z, I stride, const I *ids, const float *weights, const void *w13, const void *w2, I narrow,
             float beta, float linear, float *scratch, float *out, I N, I k, I E, I L, I inner) {
    float *h = scratch + 2 * inner, *y = h + inner;
    memset(out, 0, N * L * sizeof(float));
    for (I e = 0; e < E; e++)
        for (I c = 0; c < N * k; c++) {
            if (ids[c] != e) continue;
            multiply(w13, narrow, e, z + c / k * stride, scratch, 2 * inner, L);
            activate(scratch, scratch + inner, h, inner, beta, linear);
            multiply(w2, narrow, e, h, y, L, inner);
            for (I i = 0; i < L; i++) out[c / k * L + i] += weights[c] * y[i];
        }
}

// ---------------------------------------------------------------- KDA

// One token of B sequences. rows: qkv, gate, r, b at strides; S [pages, h, d, d] and conv [pages, taps - 1, 3 h d] of
// page and tap strides, as they are read, and S_to and conv_to, as they are written: the same places, or others;
// src, dst [B] at strides; y [3 h d + 2 d]: scratch.
void kda_decode(const float *qkv, const float *gate, const float *r, const float *b, const I *strides,
                const float *taps, const float *A_log, const float *dt_bias, const float *o_norm, float eps,
                float lower_bound, const float *S, const float *conv, const I *pages, float *S_to, float *conv_to,
                const I *pages_to, const I *src, I src_stride, const I *dst, I dst_stride, const int32_t *past, float *y,
                float *out, I B, I h, I d, I K) {
    I hd = h * d;
    for (I s = 0; s < B; s++, out += hd) {
        I from = past[s] ? src[s * src_stride] : -1, to = dst[s * dst_stride];
        if (to < 0) {  // padding
            memset(out, 0, hd * sizeof(float));
            continue;
        }
        const float *x = qkv + s * strides[0], *z = gate + s * strides[1], *rate = r + s * strides[2];
        for (I c = 0; c < 3 * hd; c++) {
            float sum = taps[c * K + K - 1] * x[c];
            for (I t = 0; t < K - 1 && from >= 0; t++) sum += taps[c * K + t] * conv[from * pages[1] + t * pages[2] + c];
            y[c] = sum * sigmoid(sum);
        }
        for (I t = 0; t < K - 1; t++) {  // the window moves by one
            float *target = conv_to + to * pages_to[1] + t * pages_to[2];
            const float *source = t == K - 2 ? x : conv + from * pages[1] + (t + 1) * pages[2];
            if (t == K - 2 || from >= 0) memmove(target, source, 3 * hd * sizeof(float));
            else memset(target, 0, 3 * hd * sizeof(float));
        }
        for (I head = 0; head < h; head++) {
            const float *q = y + head * d, *k = q + hd, *v = k + hd;
            float q_scale = 1 / sqrtf(dot(q, q, d) + 1e-6f) / sqrtf(d), k_scale = 1 / sqrtf(dot(k, k, d) + 1e-6f);
            float beta = sigmoid(b[s * strides[3] + head]), speed = expf(A_log[head]), *error = y + 3 * hd, *o = error + d;
            memcpy(error, v, d * sizeof(float));
            memset(o, 0, d * sizeof(float));
            float *next = S_to + to * pages_to[0] + head * d * d;
            const float *state = from < 0 ? NULL : S + from * pages[0] + head * d * d;
            for (I i = 0; i < d; i++) {  // forget; what the memory answers for k
                float a = rate[head * d + i] + dt_bias[head * d + i], key = k[i] * k_scale;
                float g = lower_bound ? lower_bound * sigmoid(speed * a) : -speed * (a > 20 ? a : log1pf(expf(a)));
                float decay = exponential(g);
                for (I j = 0; j < d; j++) {
                    next[i * d + j] = state ? decay * state[i * d + j] : 0;
                    error[j] -= key * next[i * d + j];
                }
            }
            for (I i = 0; i < d; i++) {  // correct, read
                float key = beta * k[i] * k_scale, query = q[i] * q_scale;
                for (I j = 0; j < d; j++) {
                    next[i * d + j] += key * error[j];
                    o[j] += query * next[i * d + j];
                }
            }
            float scale = inverse_rms(o, d, eps);
            for (I j = 0; j < d; j++) out[head * d + j] = o[j] * scale * o_norm[j] * sigmoid(z[head * d + j]);
        }
    }
}

// ---------------------------------------------------------------- MLA

void latent_write(const float *kv, I stride, const float *norm, float eps, float *stored, const I *slots, I N, I rank,
                  I pe) {
    for (I n = 0; n < N; n++, kv += stride) {
        if (slots[n] < 0) continue;
        float *row = stored + slots[n] * (rank + pe);
        rms_norm(kv, 0, norm, eps, row, 1, rank);
        memcpy(row + rank, kv + rank, pe * sizeof(float));
    }
}

// q [B, T, heads, rank + pe]; table [B, W]; scores [heads, longest]: scratch; o [B, T, heads, rank], lse [B, T, heads].
// Rows below first are not seen: l counts from there.
void mla_decode(const float *q, const float *stored, const int32_t *table, const int32_t *past, float scale,
                float *scores, float *o, float *lse, I B, I T, I heads, I rank, I pe, I W, I page_size, I longest,
                I first) {
    I width = rank + pe;
    for (I b = 0; b < B; b++)
        for (I t = 0; t < T; t++, q += heads * width, o += heads * rank, lse += heads) {
            const int32_t *pages = table + b * W;
            I seen = pages[0] < 0 ? 0 : past[b] + t + 1 - first;
            memset(o, 0, heads * rank * sizeof(float));
            for (I l = 0; l < seen; l++) {
                I at = first + l;
                const float *row = stored + (pages[at / page_size] * page_size + at % page_size) * width;
                for (I h = 0; h < heads; h++) scores[h * longest + l] = scale * dot(q + h * width, row, width);
            }
            for (I h = 0; h < heads; h++) {
                float top = seen ? scores[h * longest] : 0, last = 0;
                for (I l = 0; l < seen; l++) top = scores[h * longest + l] > top ? scores[h * longest + l] : top;
                softmax(scores + h * longest, seen);
                for (I l = 0; l < seen; l++) last = scores[h * longest + l] > last ? scores[h * longest + l] : last;
                lse[h] = top - logf(last);  // the largest weight is exp(top - lse)
            }
            for (I l = 0; l < seen; l++) {
                I at = first + l;
                const float *row = stored + (pages[at / page_size] * page_size + at % page_size) * width;
                for (I h = 0; h < heads; h++)
                    for (I i = 0; i < rank; i++) o[h * rank + i] += scores[h * longest + l] * row[i];
            }
        }
}
