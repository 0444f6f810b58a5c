"""Mixture of experts: the layer's input projection, the router, the gated activation, and the experts of a few tokens.

A routed expert is read as it is stored, MXFP4. Few tokens use most of their experts alone, so the products are
matrix-vector products, bound by the bytes of the experts: every 16-byte load is one group of 32 codes, which become
floats in registers (`_halves`). Many tokens: moe_grouped.py.
"""

import torch
import triton
import triton.language as tl

import kernels
from kernels.moe_grouped import combine, experts_grouped, why_not

MASKS = 0x80808080 - 2**32, 0x8E008E00 - 2**32  # of 4 bytes, of 2 float16: see `_halves`
FEW = 64  # up to so many tokens the products with one weight are bound by its bytes
ALONE = 16  # up to so many tokens each choice reads its expert by itself; tokens of more share it
W13_TILE = dict(BLOCK_R=16, BLOCK_G=16, num_warps=4)
W2_TILE = dict(BLOCK_R=16, BLOCK_G=16, num_warps=4)


# ---------------------------------------------------------------- the input projection


@triton.jit
def _in_kernel(
    x, w, logits, features, N, outs, x_row,
    H: tl.constexpr, E: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    n, o, h = tl.arange(0, BLOCK_N), tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O), tl.arange(0, BLOCK_K)
    rows = w + o[:, None].to(tl.int64) * H
    acc = tl.zeros([BLOCK_O, BLOCK_N], tl.float32)
    for k in range(0, H, BLOCK_K):
        wk = tl.load(rows + (k + h), mask=(o[:, None] < outs) & (k + h < H), other=0)
        xk = tl.load(x + n * x_row + (k + h)[:, None], mask=(n < N) & ((k + h)[:, None] < H), other=0)
        acc = tl.dot(wk, xk, acc, input_precision="ieee")
    acc, n = acc.T, n[:, None]
    tl.store(logits + n * E + o, acc, mask=(n < N) & (o < E))
    tl.store(features + n * (outs - E) + (o - E), acc, mask=(n < N) & (o >= E) & (o < outs))


def in_tile(N):
    """Stages of weights on their way as deep as shared memory; at K3's size the programs are one for each SM."""
    rows = max(16, triton.next_power_of_2(N))
    return dict(BLOCK_N=rows, BLOCK_O=128, BLOCK_K=128, num_warps=4, num_stages=5 if rows <= 32 else 4)


def _in_why_not(x, weight, num_experts):
    if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        return "it is for bfloat16"
    if len(x) > FEW:
        return f"more than {FEW} rows: cuBLAS has it"
    return None if x.stride(1) == 1 and weight.is_contiguous() else "rows are strided"


@kernels.implement("moe_in", "splitk", _in_why_not)
def in_projection(x, weight, num_experts, tile=None):
    """x [N, H], weight [E + F, H] bf16 -> logits [N, E] float32, features [N, F] bf16: one read of one weight."""
    (N, H), (outs, _) = x.shape, weight.shape
    logits = x.new_empty(N, num_experts, dtype=torch.float32)
    features = x.new_empty(N, outs - num_experts)
    tile = tile or in_tile(N)
    _in_kernel[triton.cdiv(outs, tile["BLOCK_O"]),](
        x, weight, logits, features, N, outs, x.stride(0), H=H, E=num_experts, **tile
    )  # fmt: skip
    return logits, features


@kernels.implement("moe_in", "cublas", lambda x, *_: None if x.is_cuda and x.dtype == torch.bfloat16 else "not bf16")
def in_projection_of_many(x, weight, num_experts):
    """The same as two products: of many rows the outputs cost more than a launch, and only the logits need float32."""
    router, others = weight[:num_experts], weight[num_experts:]
    return torch.mm(x, router.T, out_dtype=torch.float32), torch.nn.functional.linear(x, others)


# ---------------------------------------------------------------- the router


@triton.jit
def _sortable(x):
    """float32 -> int32 in the same order (NaN last); applied to the int32 bits again it is the inverse."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _score(x, top, total, SOFTMAX: tl.constexpr):
    return tl.exp(x - top) / total if SOFTMAX else 1 / (1 + tl.exp(-x))


@triton.jit
def _router_kernel(
    logits, bias, ids, weights, row_stride, scaling,
    E: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, SOFTMAX: tl.constexpr,
    NORMALIZE: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program a token. Experts lie in a tile [groups, members]; a key is (score, -id), so that keys differ."""
    SIZE: tl.constexpr = E // GROUPS
    LOWEST: tl.constexpr = -(2**63)
    row = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, BLOCK_G)[:, None], tl.arange(0, BLOCK_S)[None, :]
    expert = group * SIZE + member
    real = (group < GROUPS) & (member < SIZE)
    x = tl.load(logits + row * row_stride + expert, mask=real, other=float("-inf"))
    top, total = 0.0, 1.0
    if SOFTMAX:
        top = tl.max(x)
        total = tl.sum(tl.exp(x - top))
    biased = _score(x, top, total, SOFTMAX) + tl.load(bias + expert, mask=real, other=0)
    keys = tl.where(real, (_sortable(biased).to(tl.int64) << 32) | (0x7FFFFFFF - expert), LOWEST)

    if GROUPS > 1:  # the groups with the largest sum of their best two members
        first = tl.max(keys, 1, keep_dims=True)
        two = tl.max(tl.where(keys == first, biased, float("-inf")), 1, keep_dims=True)
        if SIZE > 1:
            two += tl.max(tl.where(real & (keys != first), biased, float("-inf")), 1, keep_dims=True)
        sums = tl.where(group < GROUPS, (_sortable(two).to(tl.int64) << 32) | (0x7FFFFFFF - group), LOWEST)
        left = sums
        for _ in range(KEPT):
            left = tl.where(left == tl.max(left), LOWEST, left)
        keys = tl.where(left == sums, LOWEST, keys)

    place = tl.arange(0, BLOCK_K)
    chosen = tl.zeros([BLOCK_K], tl.int32)
    for k in range(K):
        best = tl.max(keys)
        keys = tl.where(keys == best, LOWEST, keys)
        chosen = tl.where(place == k, 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32), chosen)
    p = _score(tl.load(logits + row * row_stride + chosen), top, total, SOFTMAX)  # without the bias
    if NORMALIZE:
        p /= tl.sum(tl.where(place < K, p, 0)) + 1e-20
    tl.store(ids + row * K + place, chosen.to(tl.int64), mask=place < K)
    tl.store(weights + row * K + place, p * scaling, mask=place < K)


def _router_why_not(logits, bias, cfg):
    if logits.dtype != torch.float32 or bias.dtype != torch.float32:
        return "it is for float32 logits"
    return None if cfg.num_experts <= 4096 and logits.stride(1) == 1 else "more than 4096 experts, or strided logits"


@kernels.implement("router", "triton", _router_why_not)
def route(logits, bias, cfg):
    """logits [N, E], bias [E], float32 -> ids [N, k] int64, weights [N, k] float32: k rounds of a maximum."""
    (N, E), K = logits.shape, cfg.num_experts_per_token
    groups = cfg.num_expert_group if cfg.use_grouped_topk else 1
    ids, weights = logits.new_empty(N, K, dtype=torch.int64), torch.empty_like(logits[:, :K])
    _router_kernel[N,](
        logits, bias, ids, weights, logits.stride(0), cfg.routed_scaling_factor,
        E=E, K=K, GROUPS=groups, KEPT=cfg.topk_group, SOFTMAX=cfg.moe_router_activation_func == "softmax",
        NORMALIZE=cfg.moe_renormalize, BLOCK_G=triton.next_power_of_2(groups),
        BLOCK_S=triton.next_power_of_2(E // groups), BLOCK_K=triton.next_power_of_2(K), num_warps=1,
    )  # fmt: skip
    return ids, weights


# ---------------------------------------------------------------- the gated activation


@triton.jit
def _tanh(x):
    """By exp, and near zero, where that cancels, by its series: a relative error of a few 1e-7 everywhere."""
    square = x * x
    series = x * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    e = tl.exp(-2 * tl.abs(x))
    far = (1 - e) / (1 + e)
    return tl.where(tl.abs(x) < 0.25, series, tl.where(x < 0, -far, far))


@triton.jit
def _gated(a, u, beta, linear, SITU: tl.constexpr):
    gate = 1 / (1 + tl.exp(-a))
    return beta * _tanh(a / beta) * gate * linear * _tanh(u / linear) if SITU else a * gate * u


@triton.jit
def _act_kernel(x, out, inner, x_row, beta, linear, SITU: tl.constexpr, BLOCK: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + row * x_row + i, mask=i < inner, other=0).to(tl.float32)
    u = tl.load(x + row * x_row + inner + i, mask=i < inner, other=0).to(tl.float32)
    tl.store(out + row * inner + i, _gated(a, u, beta, linear, SITU), mask=i < inner)


def _act_why_not(x, cfg):
    if x.dtype not in (torch.float32, torch.bfloat16):
        return f"{x.dtype}"
    return None if x.stride(1) == 1 else "strided columns"


@kernels.implement("gated_act", "triton", _act_why_not)
def gated_act(x, cfg, block=1024):
    """x [N, 2 I], gate | up, rows at any stride -> SiTU or SwiGLU [N, I]; float32 inside."""
    N, inner = x.shape[0], x.shape[1] // 2
    out = x.new_empty(N, inner)
    _act_kernel[N, triton.cdiv(inner, block)](
        x, out, inner, x.stride(0), cfg.activation_situ_beta, cfg.activation_situ_linear_beta,
        SITU=cfg.hidden_act == "situ", BLOCK=block,
    )  # fmt: skip
    return out


# ---------------------------------------------------------------- the experts of a few tokens
#
# A group is 32 codes of 4 bits: 16 bytes, loaded as 4 words. Shifted into place, a code is the top of a float16 (sign,
# two bits of exponent, one of mantissa; zero and the subnormal 0.5 included) of 2^-14 its value. Codes j and j + 4 of a
# word become the low and high half of one. Inputs are kept as [8, width / 8]: row j has the inputs 8 m + j, so that the
# words m of a tile meet neighbours. The masks are arguments: were they constants, LLVM would
# take the halves and bytes apart, and need more operations.


@triton.jit
def _halves(words, signs, floats, J: tl.constexpr):
    """words int32 of 8 codes -> the codes J and J + 4 as float32, times 2^-14."""
    sign = words if J % 2 else words << 4
    rest = words >> 3 if J % 2 else words << 1
    spread = (sign & signs) | (rest & ~signs)  # every second code lies in a byte, like a float8 e5m2
    pair = (spread if J >= 2 else spread << 8) & floats
    low = pair.to(tl.int16).to(tl.float16, bitcast=True)
    high = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def _by_group(p, scale, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """p [ROWS, 4 GROUPS], products of words; scale bytes [ROWS, GROUPS]: s is 2^(s - 127) -> [ROWS, GROUPS]."""
    power = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)  # s = 0, 2^-127, counts as zero
    return tl.sum(p.reshape(ROWS, GROUPS, 4), 2) * power


@triton.jit
def _w13_kernel(
    z, ids, packed, scale, act, inner, K, beta, linear, signs, floats,
    L: tl.constexpr, SITU: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_R of the inner units of one (token, choice). z [N, 8, L/8], act [N k, 8, I/8], float32."""
    WORDS: tl.constexpr = L // 8
    choice = tl.program_id(0).to(tl.int64)
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    row = (tl.load(ids + choice) * 2 * inner + r)[:, None]  # of the gate; the row of up is inner further
    packed += row * WORDS
    scale += row * (L // 32)
    z += choice // K * L
    a = tl.zeros([BLOCK_R, BLOCK_G], tl.float32)
    u = tl.zeros([BLOCK_R, BLOCK_G], tl.float32)
    for start in range(0, L // 32, BLOCK_G):
        g, m = start + tl.arange(0, BLOCK_G), start * 4 + tl.arange(0, BLOCK_G * 4)
        real = (r < inner)[:, None] & (m < WORDS)
        wa = tl.load(packed + m, mask=real, other=0)
        wu = tl.load(packed + inner * WORDS + m, mask=real, other=0)
        real = (r < inner)[:, None] & (g < L // 32)
        sa = tl.load(scale + g, mask=real, other=0)
        su = tl.load(scale + inner * (L // 32) + g, mask=real, other=0)
        pa = tl.zeros([BLOCK_R, BLOCK_G * 4], tl.float32)
        pu = tl.zeros([BLOCK_R, BLOCK_G * 4], tl.float32)
        for j in tl.static_range(4):
            z0 = tl.load(z + j * WORDS + m, mask=m < WORDS, other=0)
            z4 = tl.load(z + (j + 4) * WORDS + m, mask=m < WORDS, other=0)
            low, high = _halves(wa, signs, floats, j)
            pa += low * z0
            pa += high * z4
            low, high = _halves(wu, signs, floats, j)
            pu += low * z0
            pu += high * z4
        a += _by_group(pa, sa, BLOCK_R, BLOCK_G)
        u += _by_group(pu, su, BLOCK_R, BLOCK_G)
    out = _gated(tl.sum(a, 1) * 16384, tl.sum(u, 1) * 16384, beta, linear, SITU)
    tl.store(act + choice * inner + r % 8 * (inner // 8) + r // 8, out, mask=r < inner)


@triton.jit
def _w2_kernel(
    act, ids, weights, packed, scale, y, L, signs, floats,
    INNER: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_R outputs of one (token, choice), weighted. act [N k, 8, I/8], y [N k, L], float32."""
    WORDS: tl.constexpr = INNER // 8
    choice = tl.program_id(0).to(tl.int64)
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    row = (tl.load(ids + choice) * L + r)[:, None]
    act += choice * INNER
    acc = tl.zeros([BLOCK_R, BLOCK_G], tl.float32)
    for start in range(0, INNER // 32, BLOCK_G):
        g, m = start + tl.arange(0, BLOCK_G), start * 4 + tl.arange(0, BLOCK_G * 4)
        words = tl.load(packed + row * WORDS + m, mask=(r < L)[:, None] & (m < WORDS), other=0)
        s = tl.load(scale + row * (INNER // 32) + g, mask=(r < L)[:, None] & (g < INNER // 32), other=0)
        p = tl.zeros([BLOCK_R, BLOCK_G * 4], tl.float32)
        for j in tl.static_range(4):
            low, high = _halves(words, signs, floats, j)
            p += low * tl.load(act + j * WORDS + m, mask=m < WORDS, other=0)
            p += high * tl.load(act + (j + 4) * WORDS + m, mask=m < WORDS, other=0)
        acc += _by_group(p, s, BLOCK_R, BLOCK_G)
    tl.store(y + choice * L + r, tl.sum(acc, 1) * (tl.load(weights + choice) * 16384), mask=r < L)


@kernels.implement("experts", "triton", why_not)
def routed_experts(z, ids, weights, experts, cfg):
    """z [N, L], ids [N, k] int64, weights [N, k] float32 -> sum over the k chosen experts, [N, L] in z's dtype."""
    return (experts_of_few if len(z) <= ALONE else experts_grouped)(z, ids, weights, experts, cfg)


def experts_of_few(z, ids, weights, experts, cfg, w13_tile=None, w2_tile=None):
    """The same, each choice reading its expert by itself: activations of all choices, then their weighted sum."""
    (N, L), K, inner = z.shape, ids.shape[1], experts.inner
    eighths = z.new_empty(N, 8, L // 8, dtype=torch.float32).copy_(z.unflatten(-1, (-1, 8)).mT)
    act, each = (z.new_empty(N * K, width, dtype=torch.float32) for width in (inner, L))
    ids, weights, y = ids.contiguous(), weights.contiguous(), z.new_empty(N, L)
    tile = w13_tile or W13_TILE
    _w13_kernel[N * K, triton.cdiv(inner, tile["BLOCK_R"])](
        eighths, ids, experts.w13_packed.view(torch.int32), experts.w13_scale, act, inner, K,
        cfg.activation_situ_beta, cfg.activation_situ_linear_beta, *MASKS, L=L, SITU=cfg.hidden_act == "situ", **tile,
    )  # fmt: skip
    tile = w2_tile or W2_TILE
    _w2_kernel[N * K, triton.cdiv(L, tile["BLOCK_R"])](
        act, ids, weights, experts.w2_packed.view(torch.int32), experts.w2_scale, each, L, *MASKS, INNER=inner, **tile
    )
    combine(each, None, y)
    return y
