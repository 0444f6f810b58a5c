"""Triton: all that stands between two sub-layers, fused - running sum, AttnRes mixture, RMSNorm; RMSNorm alone.

One program per token. It reads each candidate once and holds its H values in registers; scores and mixture are an
online softmax (Milakov and Gimelshein, arXiv 1805.02867), so the mixture is never in memory. With 9 candidates the op
moves 10 to 12 rows of H values per token and computes next to nothing: what counts is loads in flight.

Up to SLICED tokens are each cut into slices for many programs. Sums over channels then have another order, not s + y.
"""

import torch
import triton
import triton.language as tl

import kernels
from kernels.launch import overlap

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 16384  # values of a row that fit the registers of one program
SLICED = 16  # tokens up to which each is cut into slices for several programs


@triton.jit
def _add_pairs(a0, b0, a1, b1):
    return a0 + a1, b0 + b1


@triton.jit
def _load_terms(s_row, y_row, inside):
    s = tl.load(s_row, mask=inside, other=0.0)
    return s, s if y_row is None else tl.load(y_row, mask=inside, other=0.0)


@triton.jit
def _add_terms(terms, y, s_out, inside):
    """s + y, rounded to the stream's dtype, as s is when the next layer reads it, and stored; s where there is no y."""
    total = terms[0]
    if y is not None:
        total = (total.to(tl.float32) + terms[1].to(tl.float32)).to(total.dtype)
        tl.store(s_out, total, mask=inside)
    return total


@triton.jit
def _candidates(blocks, j, row, inside):
    """Values `row` [C] of the snapshots j [G] -> [G, C] in float32; zeros where j is beyond the last."""
    J: tl.constexpr = len(blocks)
    block = blocks[0] + 0 * j
    for i in tl.static_range(1, J):
        block = tl.where(j == i, blocks[i], block)
    return tl.load(block[:, None] + row[None, :], mask=(j < J)[:, None] & inside[None, :], other=0.0).to(tl.float32)


@triton.jit
def _scores(c, query, eps, H, AXIS: tl.constexpr):
    """RMSNorm(c) . query of candidates c, in float32."""
    square, dot = tl.reduce((c * c, c * query), AXIS, _add_pairs)
    return dot * tl.rsqrt(square / H + eps)


@triton.jit
def _residual_kernel(
    s, s_stride, y, blocks, mix_norm, mix_proj, mix_eps, norm, norm_eps, s_out, x_out, H,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """s + y -> s_out; RMSNorm(mixture of blocks, a tuple of pointers, and s + y) -> x_out. A part that is None is left
    out."""
    token, cols = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside, row = cols < H, token * H + cols
    s_row, y_row = s + token * s_stride + cols, None if y is None else y + row
    if EARLY:  # costs registers while the snapshots pass, and saves a wait after them
        terms = _load_terms(s_row, y_row, inside)

    J: tl.constexpr = len(blocks)
    if J > 0:
        query = tl.load(mix_norm + cols, mask=inside, other=0.0).to(tl.float32)
        query *= tl.load(mix_proj + cols, mask=inside, other=0.0).to(tl.float32)
        largest, weight = -3e38, 0.0  # of the scores so far; the sum of their exponentials
        mixture = tl.zeros((BLOCK,), tl.float32)  # of which `weight` is still to be divided out
        for first in tl.range(0, J, GROUP, num_stages=STAGES):  # the loads of the next STAGES - 1 groups are under way
            j = first + tl.arange(0, GROUP)
            c = _candidates(blocks, j, row, inside)
            score = tl.where(j < J, _scores(c, query[None, :], mix_eps, H, 1), -3e38)
            larger = tl.maximum(largest, tl.max(score, 0))
            old, new = tl.exp(largest - larger), tl.exp(score - larger)
            mixture = mixture * old + tl.sum(c * new[:, None], 0)
            largest, weight = larger, weight * old + tl.sum(new, 0)

    if norm is not None:
        scale = tl.load(norm + cols, mask=inside, other=0.0)
    if not EARLY:
        terms = _load_terms(s_row, y_row, inside)
    total = _add_terms(terms, y, None if y is None else s_out + row, inside)
    c = total.to(tl.float32)
    if J > 0:
        score = _scores(c, query, mix_eps, H, 0)
        larger = tl.maximum(largest, score)
        old, new = tl.exp(largest - larger), tl.exp(score - larger)
        x = (mixture * old + c * new) / (weight * old + new)
    else:
        x = c

    if norm is not None:
        x *= tl.rsqrt(tl.sum(x * x) / H + norm_eps) * scale.to(tl.float32)
    if x_out is not None:
        tl.store(x_out + row, x.to(x_out.dtype.element_ty), mask=inside)


# A few tokens. One multiprocessor alone needs 4.6 us to load the 9 candidates of a token (H200), so their channels are
# cut into P slices, one a program. Sums over all channels pass from launch to launch; on NVIDIA each starts before the
# one ahead of it ends, and waits for that only when it has loaded what is older.


@triton.jit
def _sums_kernel(
    s, y, blocks, mix_norm, mix_proj, s_out, sums, H, P, ROWS: tl.constexpr, C: tl.constexpr, OVERLAP: tl.constexpr
):
    """Program (token, slice): s + y -> s_out; every candidate's sums of squares, and of products with the query ->
    sums [N, 2, ROWS + 1, P]."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cols, j = part * C + tl.arange(0, C), tl.arange(0, ROWS)
    inside, row = cols < H, token * H + cols
    c = _candidates(blocks, j, row, inside)
    terms = _load_terms(s + row, None if y is None else y + row, inside)
    query = tl.load(mix_norm + cols, mask=inside, other=0.0).to(tl.float32)
    query *= tl.load(mix_proj + cols, mask=inside, other=0.0).to(tl.float32)
    total = _add_terms(terms, y, None if y is None else s_out + row, inside).to(tl.float32)
    square, dot = tl.reduce((c * c, c * query[None, :]), 1, _add_pairs)
    own_square, own_dot = tl.reduce((total * total, total * query), 0, _add_pairs)
    squares = sums + token * 2 * (ROWS + 1) * P + part
    dots = squares + (ROWS + 1) * P
    tl.store(squares + j * P, square)
    tl.store(squares + ROWS * P, own_square)
    tl.store(dots + j * P, dot)
    tl.store(dots + ROWS * P, own_dot)


@triton.jit
def _mix_kernel(
    s, blocks, mix_eps, sums, mixture, lengths, H, P,
    ROWS: tl.constexpr, C: tl.constexpr, PARTS: tl.constexpr, LAST: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (token, slice): a slice of the mixture, in float32; unless LAST, its sum of squares -> lengths [N, P]."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cols, j, p = part * C + tl.arange(0, C), tl.arange(0, ROWS), tl.arange(0, PARTS)
    inside, row = cols < H, token * H + cols
    J: tl.constexpr = len(blocks)
    c = _candidates(blocks, j, row, inside)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    total = tl.load(s + row, mask=inside, other=0.0).to(tl.float32)
    squares = sums + token * 2 * (ROWS + 1) * P
    dots = squares + (ROWS + 1) * P
    at, there = j[:, None] * P + p[None, :], (j < J)[:, None] & (p < P)[None, :]
    parts = tl.load(squares + at, mask=there, other=0.0), tl.load(dots + at, mask=there, other=0.0)
    own_square = tl.load(squares + ROWS * P + p, mask=p < P, other=0.0)
    own_dot = tl.load(dots + ROWS * P + p, mask=p < P, other=0.0)
    square, dot = tl.reduce(parts, 1, _add_pairs)
    own_square, own_dot = tl.reduce((own_square, own_dot), 0, _add_pairs)
    score = tl.where(j < J, dot * tl.rsqrt(square / H + mix_eps), -3e38)
    own = own_dot * tl.rsqrt(own_square / H + mix_eps)
    largest = tl.maximum(tl.max(score, 0), own)
    weight, own = tl.exp(score - largest), tl.exp(own - largest)
    x = (tl.sum(c * weight[:, None], 0) + total * own) / (tl.sum(weight, 0) + own)
    tl.store(mixture + row, x, mask=inside)
    if not LAST:
        tl.store(lengths + token * P + part, tl.sum(x * x, 0))


@triton.jit
def _norm_kernel(
    mixture, lengths, norm, norm_eps, x_out, H, P, C: tl.constexpr, PARTS: tl.constexpr, OVERLAP: tl.constexpr
):
    """Program (token, slice): the mixture, normalized."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cols, p = part * C + tl.arange(0, C), tl.arange(0, PARTS)
    inside, row = cols < H, token * H + cols
    scale = tl.load(norm + cols, mask=inside, other=0.0).to(tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    x = tl.load(mixture + row, mask=inside, other=0.0)
    square = tl.sum(tl.load(lengths + token * P + p, mask=p < P, other=0.0), 0)
    x *= tl.rsqrt(square / H + norm_eps) * scale
    tl.store(x_out + row, x.to(x_out.dtype.element_ty), mask=inside)


def in_slices(s, y, total, blocks, mix, norm, x):
    """attnres_norm of a few tokens with snapshots: writes x, and total unless y is None."""
    (N, H), C = s.shape, 256
    P, rows, early = triton.cdiv(H, C), triton.next_power_of_2(len(blocks)), overlap(s.device)
    new = lambda *shape: torch.empty(shape, dtype=torch.float32, device=s.device)
    sums, lengths, mixture = new(N, 2, rows + 1, P), new(N, P), new(N, H) if norm else x
    options = dict(C=C, OVERLAP=bool(early), num_warps=2)
    _sums_kernel[N, P](s, y, blocks, *mix[:2], total, sums, H, P, ROWS=rows, **options)
    options |= dict(PARTS=triton.next_power_of_2(P), **early)
    _mix_kernel[N, P](total, blocks, mix[2], sums, mixture, lengths, H, P, ROWS=rows, LAST=not norm, **options)
    if norm:
        _norm_kernel[N, P](mixture, lengths, *norm, x, H, P, **options)


def settings(x, snapshots):
    """Block size, candidates at a time, stages and warps for rows x.

    Many programs keep the memory busy together. Few must load far ahead, and what counts is how often their threads
    wait for each other: once a group of candidates.
    """
    block = max(32, triton.next_power_of_2(x.shape[-1]))
    few = len(x) <= 264  # two for each of 132 multiprocessors
    group = max(1, min(4, 2**15 // block, triton.next_power_of_2(snapshots))) if few else 1
    room = 1 + 2**17 // (group * block * x.element_size())  # stages whose buffers fit 128 KiB
    stages = min(triton.cdiv(snapshots, group) + 1 if few else 4, room)
    return dict(BLOCK=block, GROUP=group, STAGES=stages, EARLY=few, num_warps=min(8, max(1, block // 512)))


def why_not(terms, blocks, mix, norm):
    rows = [t for t in (*terms, *blocks) if t is not None]
    if any(t.dtype != rows[0].dtype for t in rows):
        return "the residuals differ in dtype"
    return _why_not(rows[0])


def _why_not(x):
    if x.dtype not in DTYPES:
        return f"{x.dtype}"
    if x.shape[-1] > WIDEST:
        return f"{x.shape[-1]} values a row, more than {WIDEST}"


@kernels.implement("attnres", "triton", why_not)
def attnres_norm(terms, blocks, mix, norm, **options):
    s, y = ([t.contiguous() for t in terms if t is not None] + [None])[:2]
    blocks, (N, H) = tuple(t.contiguous() for t in blocks), s.shape
    total, x = s if y is None else torch.empty_like(s), None
    if norm or blocks:
        x = torch.empty_like(s, dtype=norm[0].dtype if norm else torch.float32)
    if blocks and N <= SLICED and not options:
        in_slices(s, y, total, blocks, mix, norm, x)
        return total, x
    mix, norm = mix if blocks else (None, None, 0.0), norm or (None, 0.0)
    options = settings(s, len(blocks)) | options
    _residual_kernel[(N,)](s, H, y, blocks, *mix, *norm, total, x, H, **options)
    return total, total if x is None else x


@kernels.implement("rms_norm", "triton", lambda x, weight, eps: _why_not(x))
def rms_norm(x, weight, eps, **options):
    """x may be a slice of wider rows."""
    H, rows = x.shape[-1], x if x.ndim == 2 and x.stride(1) == 1 else x.reshape(-1, x.shape[-1]).contiguous()
    out = torch.empty(x.shape, dtype=weight.dtype, device=x.device)
    stride, options = rows.stride(0), settings(rows, 0) | options
    _residual_kernel[(len(rows),)](rows, stride, None, (), None, None, 0.0, weight, eps, None, out, H, **options)
    return out
