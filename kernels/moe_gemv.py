"""The routed experts of one token, or of a few: matrix-vector products over MXFP4, each choice reading its expert.

Bound by the bytes of the experts. A group is 32 codes of 4 bits: 16 bytes, loaded as 4 words. Shifted into place, a
code is the top of a float16 (sign, two bits of exponent, one of mantissa; zero and the subnormal 0.5 included) of 2^-14
its value. Codes j and j + 4 of a word become the low and high half of one. Inputs are kept as [8, width / 8]: row j has
the inputs 8 m + j, so that the words m of a tile meet neighbours. The masks are arguments: were they constants, LLVM
would take the halves and bytes apart, and need more operations.
"""

import torch
import triton
import triton.language as tl

import kernels
from kernels.gated_act import gated
from kernels.moe_grouped import combine, why_not

MASKS = 0x80808080 - 2**32, 0x8E008E00 - 2**32  # of 4 bytes, of 2 float16: see `_halves`
W13_TILE = dict(BLOCK_R=16, BLOCK_G=16, num_warps=4)
W2_TILE = dict(BLOCK_R=16, BLOCK_G=16, num_warps=4)


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
    out = gated(tl.sum(a, 1) * 16384, tl.sum(u, 1) * 16384, beta, linear, SITU)
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


@kernels.implement("experts", "triton_gemv", why_not)
def experts_gemv(z, ids, weights, experts, cfg, w13_tile=None, w2_tile=None):
    """z [N, L], ids [N, k] int64, weights [N, k] float32 -> [N, L]: activations of all choices, then their sum."""
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
