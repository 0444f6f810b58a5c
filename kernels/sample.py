"""Choosing tokens: argmax of logits over temperature and Gumbel noise, which a hash makes where it is needed.

    _tops     program (row, block of the vocabulary): its largest logit, where it is, whether all are finite
    _scores   the same programs, where there is noise: the largest sum of scaled logit and noise, and where
    _pick     a program a row: the largest of its blocks

The sums are float64, and the hash that of sampling.py, so the choice is the one of its PyTorch path.
"""

import torch
import triton
import triton.language as tl

import kernels

BLOCK = 2048


@triton.jit
def _scramble(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _tops(logits, tops, ats, bad, row_stride, V, NB, BLOCK: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * row_stride + c, mask=c < V, other=float("-inf"))
    wrong = (x != x) | (tl.abs(x) == float("inf"))
    tl.store(bad + row * NB + block, tl.max(((c < V) & wrong).to(tl.int32), axis=0))
    top, at = tl.max(x, axis=0, return_indices=True)
    tl.store(tops + row * NB + block, top.to(tl.float64))
    tl.store(ats + row * NB + block, block * BLOCK + at)


@triton.jit
def _scores(
    logits, filters, draws, cut, tops, scores, ats, row_stride, filter_stride, filter_row, draw_stride, draw_row, V, NB,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """tops are read, scores and ats written: the ones of the other kernel are not its own."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n = tl.arange(0, BLOCKS)
    top = tl.max(tl.load(tops + row * NB + n, mask=n < NB, other=float("-inf")), axis=0)
    filters += row * filter_row
    temperature, min_p = tl.load(filters), tl.load(filters + 3 * filter_stride)
    c = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * row_stride + c, mask=c < V, other=float("-inf")).to(tl.float64)
    scaled = (x - top) / tl.where(temperature > 0, temperature, 1.0)
    draws += row * draw_row
    seed, position = tl.load(draws).to(tl.uint64), tl.load(draws + draw_stride).to(tl.uint64)
    golden: tl.constexpr = 0x9E3779B97F4A7C15
    key = _scramble(_scramble(seed) + position * golden)
    bits = _scramble(key + c.to(tl.uint64) * golden) >> 12
    u = (bits.to(tl.int64).to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2^-52
    score = scaled + tl.where(temperature > 0, -tl.log(-tl.log(u)), 0.0)
    gone = (c >= V) | (scaled < tl.log(min_p))
    if cut is not None:
        gone |= tl.load(cut + row * V + c, mask=c < V, other=0) != 0
    best, at = tl.max(tl.where(gone, float("-inf"), score), axis=0, return_indices=True)
    tl.store(scores + row * NB + block, best)
    tl.store(ats + row * NB + block, block * BLOCK + at)


@triton.jit
def _pick(scores, ats, bad, ids, finite, NB, BLOCKS: tl.constexpr):
    row, n = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCKS)
    score = tl.load(scores + row * NB + n, mask=n < NB, other=float("-inf"))
    _, at = tl.max(score, axis=0, return_indices=True)
    wrong = tl.max(tl.load(bad + row * NB + n, mask=n < NB, other=0), axis=0)
    chosen = tl.load(ats + row * NB + at)
    tl.store(ids + row, tl.where(wrong != 0, 0, chosen).to(tl.int64))
    tl.store(finite + row, wrong == 0)


def why_not(logits, filters, draws, cut):
    if logits.dtype != torch.float32 or logits.stride(-1) != 1 or not len(logits):
        return f"it takes float32 rows, not {logits.dtype}"
    if cut is not None and not cut.is_contiguous():
        return "what is cut is not contiguous"


@kernels.implement("gumbel_max", "triton", why_not)
def gumbel_max(logits, filters, draws, cut):
    R, V = logits.shape
    NB = triton.cdiv(V, BLOCK)
    new = lambda n, kind: torch.empty(n, dtype=kind, device=logits.device)
    tops, ats, bad = new(R * NB, torch.float64), new(R * NB, torch.int32), new(R * NB, torch.int32)
    ids, finite = new(R, torch.int64), new(R, torch.bool)
    size, blocks = (logits.stride(0), V, NB), triton.next_power_of_2(NB)
    _tops[R, NB](logits, tops, ats, bad, *size, BLOCK=BLOCK, num_warps=4)
    scores = tops
    if filters is not None:
        scores, strides = torch.empty_like(tops), (*filters.stride(), *draws.stride())
        args = logits, filters, draws, cut, tops, scores, ats, size[0], *strides, V, NB
        _scores[R, NB](*args, BLOCK=BLOCK, BLOCKS=blocks, num_warps=4)
    _pick[R,](scores, ats, bad, ids, finite, NB, BLOCKS=blocks, num_warps=1)
    return ids, finite
