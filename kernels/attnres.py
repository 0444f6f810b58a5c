"""Triton: all that stands between two sub-layers in one launch - running sum, AttnRes mixture, RMSNorm; RMSNorm alone.

One program per token. It reads each candidate once and holds its H values in registers; scores and mixture are an
online softmax (Milakov and Gimelshein, arXiv 1805.02867), so the mixture is never in memory. With 9 candidates the op
moves 10 to 12 rows of H values per token and computes next to nothing: what counts is loads in flight.
"""

import torch
import triton
import triton.language as tl

import kernels

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 16384  # values of a row that fit the registers of one program


@triton.jit
def _add_pairs(a0, b0, a1, b1):
    return a0 + a1, b0 + b1


@triton.jit
def _load_terms(s_row, y_row, inside):
    s = tl.load(s_row, mask=inside, other=0.0)
    return s, s if y_row is None else tl.load(y_row, mask=inside, other=0.0)


@triton.jit
def _mix_in(c, query, mixture, largest, weight, eps, H):
    """One more candidate c [H]: its score, and the mixture so far, of which `weight` is still to be divided out."""
    c = c.to(tl.float32)
    square, dot = tl.reduce((c * c, c * query), 0, _add_pairs)
    score = dot * tl.rsqrt(square / H + eps)  # RMSNorm(c) . query
    larger = tl.maximum(largest, score)
    old, new = tl.exp(largest - larger), tl.exp(score - larger)
    return mixture * old + c * new, larger, weight * old + new


@triton.jit
def _residual_kernel(
    s, s_stride, y, blocks, mix_norm, mix_proj, mix_eps, norm, norm_eps, s_out, x_out, H,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
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
        mixture = tl.zeros((BLOCK,), tl.float32)
        for j in tl.range(J, num_stages=STAGES):  # the loads of the next STAGES - 1 snapshots are under way
            block = blocks[0]
            for i in tl.static_range(1, J):
                block = tl.where(j == i, blocks[i], block)
            c = tl.load(block + row, mask=inside, other=0.0)
            mixture, largest, weight = _mix_in(c, query, mixture, largest, weight, mix_eps, H)

    if not EARLY:
        terms = _load_terms(s_row, y_row, inside)
    total = terms[0]
    if y is not None:  # rounded to the stream's dtype, as s is when the next layer reads it
        total = (total.to(tl.float32) + terms[1].to(tl.float32)).to(total.dtype)
        tl.store(s_out + row, total, mask=inside)
    if J > 0:
        mixture, largest, weight = _mix_in(total, query, mixture, largest, weight, mix_eps, H)
        mixture /= weight
    else:
        mixture = total.to(tl.float32)

    if norm is not None:
        scale = tl.rsqrt(tl.sum(mixture * mixture) / H + norm_eps)
        mixture *= scale * tl.load(norm + cols, mask=inside, other=0.0).to(tl.float32)
    if x_out is not None:
        tl.store(x_out + row, mixture.to(x_out.dtype.element_ty), mask=inside)


def settings(x, snapshots):
    """Block size, stages and warps for rows x. Many programs keep the memory busy together, few must load far ahead."""
    block = max(32, triton.next_power_of_2(x.shape[-1]))
    room = 1 + 2**17 // (block * x.element_size())  # stages whose buffers fit 128 KiB
    few = len(x) <= 264  # two for each of 132 multiprocessors
    stages = min(snapshots + 1 if few else 4, room)
    return dict(BLOCK=block, STAGES=stages, EARLY=few, num_warps=min(8, max(1, block // 512)))


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
