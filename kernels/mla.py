"""MLA over the latent rows of the page pool: split-KV flash decoding, and the write of new rows.

Decode is Flash-Decoding (Dao et al. 2023, pytorch.org/blog/flash-decoding) on FlashMLA's tile: all heads attend to the
same rows [c | k_pe], and the first r values of a row are also its value, so a tile of rows is loaded once and serves
both products. Each program takes a tile of (token, head) pairs and a share of one sequence's history, and leaves a
partial output with the log-sum-exp of its scores; a second kernel weighs the shares by them (mla_shares.py).
"""

import contextlib

import torch
import triton
import triton.language as tl

import kernels
from kernels.launch import no_fp8
from kernels.mla_shares import decode_splits, in_shares, processors

FP8 = torch.float8_e4m3fn
LN2, LOG2E = tl.constexpr(0.6931471805599453), tl.constexpr(1.4426950408889634)


# ---------------------------------------------------------------- decode


@triton.jit
def _decode_kernel(
    q,  # [B, T, heads, RANK + PE]
    stored,  # [slots, RANK + PE]
    table,  # [B, W] int32
    past,  # [B] int32
    row_scale,  # [RANK + PE] where FP8
    o,  # [splits, heads, B, T, RANK]
    lse,  # [splits, heads, B, T] float32
    scale,
    T,
    heads,
    W,
    page_size,
    RANK: tl.constexpr,
    PE: tl.constexpr,
    R: tl.constexpr,  # RANK and PE padded to powers of two
    E: tl.constexpr,
    FIRST: tl.constexpr,  # rows below it are not seen, and may hold anything
    FP8: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    FORKED: tl.constexpr,
):
    tile, split, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)  # neighbours read the same rows: from L2
    splits, B = tl.num_programs(1), tl.num_programs(2)
    row = tile * BLOCK_H + tl.arange(0, BLOCK_H)
    token, head, real = row // heads, row % heads, row < T * heads
    c, e, n = tl.arange(0, R), tl.arange(0, E), tl.arange(0, BLOCK_N)
    in_c, in_e = c < RANK, e < PE

    at = (b.to(tl.int64) * T * heads + row) * (RANK + PE)
    q_c = tl.load(q + at[:, None] + c, mask=real[:, None] & in_c, other=0.0)
    q_e = tl.load(q + at[:, None] + RANK + e, mask=real[:, None] & in_e, other=0.0)
    to_log2_c, to_log2_e, unit = scale * LOG2E, scale * LOG2E, 1.0  # scores are exponents of two from here on
    if FP8:  # one number a part
        unit = tl.load(row_scale).to(tl.float32)
        to_log2_c, to_log2_e = to_log2_c * unit, to_log2_e * tl.load(row_scale + RANK).to(tl.float32)

    # This share's tiles of the history. A sequence without pages has none.
    seen = tl.load(past + b)  # token t of the sequence sees rows <= seen + t
    pages = table + b.to(tl.int64) * W
    length = tl.where(tl.load(pages) < 0, 0, seen + T)
    tiles = tl.cdiv(length, BLOCK_N)
    first, last = tiles * split // splits, tiles * (split + 1) // splits

    # FORKED: each product stands in a branch (always taken), for Triton then divides the scores among the warps instead
    # of giving all of them to every warpgroup, and starts the copy of the next tile before this one's products.
    m = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, R], tl.float32)
    page = tl.load(pages + first * BLOCK_N // page_size, mask=first < last, other=0)
    for i in tl.range(first, last, num_stages=STAGES):
        start = i * BLOCK_N
        rows = stored + (page.to(tl.int64) * page_size + start % page_size + n)[:, None] * (RANK + PE)
        there = start + n < length
        if FIRST:
            there = there & (start + n >= FIRST)
        there = there[:, None]
        k_c = tl.load(rows + c, mask=there & in_c, other=0.0)
        k_e = tl.load(rows + RANK + e, mask=there & in_e, other=0.0)
        page = tl.load(pages + tl.minimum(i + 1, last - 1) * BLOCK_N // page_size)  # the next tile's, ahead of its rows
        if FP8:  # by way of float32, from and to which there are packed instructions
            k_c = k_c.to(tl.float16).to(tl.float32).to(q.dtype.element_ty)
            k_e = k_e.to(tl.float16).to(tl.float32).to(q.dtype.element_ty)
        if FORKED:
            k_e = tl.where(there, k_e, 0.0)  # changes nothing; straight from memory it would get a third buffer
        top, fade = m, m
        p = tl.broadcast_to(m[:, None], [BLOCK_H, BLOCK_N]).to(k_c.dtype)
        if not FORKED or start < length:
            s = tl.dot(q_c, tl.trans(k_c), input_precision="ieee") * to_log2_c
            s += tl.dot(q_e, tl.trans(k_e), input_precision="ieee") * to_log2_e
            s = tl.where(start + n <= (seen + token)[:, None], s, float("-inf"))
            if FIRST:
                s = tl.where((start + n >= FIRST)[None, :], s, float("-inf"))
            top = tl.maximum(m, tl.max(s, 1))
            base = tl.where(top == float("-inf"), 0.0, top)  # of a row that sees nothing yet
            weight = tl.exp2(s - base[:, None])
            fade = tl.exp2(m - base)
            total = total * fade + tl.sum(weight, 1)
            p = weight.to(k_c.dtype)
        if not FORKED or i < tiles:
            acc = tl.dot(p, k_c, acc * fade[:, None], input_precision="ieee")
        m = top

    acc = acc * (unit / tl.where(total == 0, 1.0, total))[:, None]
    at = ((split * heads + head).to(tl.int64) * B + b) * T + token
    tl.store(o + at[:, None] * RANK + c, acc, mask=real[:, None] & in_c)
    tl.store(lse + at, (m + tl.log2(total)) * LN2, mask=real)


def decode_config(rows, q_dtype, fp8):
    """(token, head) pairs of a sequence, dtype of queries -> BLOCK_H, BLOCK_N, num_warps, num_stages, FORKED."""
    if q_dtype == torch.float32:
        return 16, 16, 4, 1, False
    if torch.version.hip:
        return (16 if rows <= 16 else 64), 32, 4, 1, False
    if rows <= 16:
        return 16, 32, 4, 3, False
    return 64, 64, 8, 3 if fp8 else 2, True  # 64: the least M of a warpgroup's product; 221 of 227 KB shared memory


def _decode_why_not(q, stored, rank, part, scale, row_scale):
    pe = q.shape[-1] - rank
    if rank > 512 or pe > 64:
        return f"a latent row of {rank} + {pe} values, at most 512 + 64 fit"
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16) or stored.dtype not in (q.dtype, FP8):
        return f"queries in {q.dtype} and latents in {stored.dtype}"
    if part.page_size % 128:
        return f"pages of {part.page_size} tokens, no multiple of 128"
    return no_fp8(stored) if stored.dtype == FP8 else None


@kernels.implement("mla_decode", "triton", _decode_why_not)
def mla_decode(q, stored, rank, part, scale, row_scale, config=None, splits=None):
    """As the op; o and its log-sum-exp lie as [h, B, T, ...]: what follows is a product per head."""
    B, T, heads, width = q.shape
    q, pe, rows = q.contiguous(), width - rank, T * heads
    config = config or decode_config(rows, q.dtype, stored.dtype == FP8)
    block_h, block_n, num_warps, num_stages, forked = config
    tiles = triton.cdiv(rows, block_h)
    splits = splits or decode_splits(tiles * B, triton.cdiv(part.longest, block_n), processors(q.device))
    run = lambda o, lse: _decode_kernel[tiles, splits, B](
        q,
        stored,
        part.table,
        part.past,
        row_scale,
        o,
        lse,
        scale,
        T,
        heads,
        part.table.stride(0),
        part.page_size,
        RANK=rank,
        PE=pe,
        R=max(16, triton.next_power_of_2(rank)),
        E=max(16, triton.next_power_of_2(pe)),
        FIRST=part.first,
        FP8=stored.dtype == FP8,
        BLOCK_H=block_h,
        BLOCK_N=block_n,
        STAGES=num_stages,
        FORKED=forked,
        num_warps=num_warps,
    )
    return in_shares(run, q, rank, splits)


# ---------------------------------------------------------------- the write


@triton.jit
def _write_kernel(
    kv,  # [N, RANK + PE], rows kv_stride apart
    norm,  # [RANK]
    stored,  # [slots, RANK + PE]
    slots,  # [N] int64
    scale,  # [RANK + PE] where FP8
    eps,
    kv_stride,
    RANK: tl.constexpr,
    PE: tl.constexpr,
    R: tl.constexpr,
    E: tl.constexpr,
    FP8: tl.constexpr,
):
    i = tl.program_id(0)
    slot = tl.load(slots + i)
    c, e = tl.arange(0, R), tl.arange(0, E)
    kv += i.to(tl.int64) * kv_stride
    latent = tl.load(kv + c, mask=c < RANK, other=0.0).to(tl.float32)
    latent *= tl.rsqrt(tl.sum(latent * latent) / RANK + eps)
    latent = (latent * tl.load(norm + c, mask=c < RANK, other=0.0).to(tl.float32)).to(norm.dtype.element_ty)
    key = tl.load(kv + RANK + e, mask=e < PE, other=0.0)
    if FP8:
        latent = _to_fp8(latent, tl.load(scale + c, mask=c < RANK, other=1.0))
        key = _to_fp8(key, tl.load(scale + RANK + e, mask=e < PE, other=1.0))
    stored += slot * (RANK + PE)
    tl.store(stored + c, latent, mask=(c < RANK) & (slot >= 0))
    tl.store(stored + RANK + e, key, mask=(e < PE) & (slot >= 0))


@triton.jit
def _to_fp8(x, scale):
    """x / scale, rounded as PyTorch rounds it: to x's dtype, then, saturating, to e4m3. NaN stays NaN."""
    x = tl.div_rn(x.to(tl.float32), scale.to(tl.float32)).to(x.dtype).to(tl.float32)
    return tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)


def _write_why_not(kv, norm, eps, stored, slots, scale):
    if kv.stride(-1) != 1:
        return "rows that are not contiguous"
    if kv.dtype not in (torch.float32, torch.bfloat16, torch.float16) or stored.dtype not in (norm.dtype, FP8):
        return f"rows in {kv.dtype}, latents in {stored.dtype}"
    return no_fp8(stored) if stored.dtype == FP8 else None


@kernels.implement("latent_write", "triton", _write_why_not)
def latent_write(kv, norm, eps, stored, slots, scale):
    rank, pe = len(norm), kv.shape[-1] - len(norm)
    R, E = triton.next_power_of_2(rank), triton.next_power_of_2(pe)
    fp8, grid = stored.dtype == FP8, (len(kv),)
    _write_kernel[grid](kv, norm, stored, slots, scale, eps, kv.stride(0), rank, pe, R, E, fp8, num_warps=2)


with contextlib.suppress(ImportError, AttributeError):  # Gluon is experimental: other Tritons may have other names
    import kernels.mla_hopper  # noqa: E402, F401
