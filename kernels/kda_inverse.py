"""Triton kernel of KDA prefill: the inverses of all chunks' triangular systems (kda.py here)."""

import triton
import triton.language as tl

from kernels.kda_chunks import _fine, _round


@triton.jit
def _upper(bits):
    """The upper half of a float32's bits, a bfloat16: quicker than a conversion."""
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _halves(x):
    """float32 as the sum of two bfloat16, to 2^-16."""
    bits = x.to(tl.int32, bitcast=True)
    rest = x - (bits & -65536).to(tl.float32, bitcast=True)
    return _upper(bits), _upper(rest.to(tl.int32, bitcast=True))


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr):
    """a @ b of float32; "bf16x3" is Triton's, without its checks for infinities."""
    if PRECISION == "bf16x3":
        a0, a1 = _halves(a)
        b0, b1 = _halves(b)
        return tl.dot(a0, b0, acc=tl.dot(a0, b1, acc=tl.dot(a1, b0)))
    else:
        return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _inverse_kernel(pairs, scratch, HEADS: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr):
    """T = (I + A)^-1 of the strictly lower triangle of A [64, 64] in float32, rounded at the end. By doubling of the
    blocks whose inverse is known, which is as stable as substitution: no power of A is ever taken, so nothing grows and
    cancels where keys are alike.
    """
    index = tl.program_id(1).to(tl.int64) * HEADS + tl.program_id(0)
    A = pairs + index * 64 * 64
    T = _fine(scratch + index * (4 * 64 * D + 2 * 64 * 64) + 4 * 64 * D + 64 * 64)
    dtype: tl.constexpr = scratch.dtype.element_ty
    i, j, n = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :], tl.arange(0, 4)[:, None, None]
    diagonal = tl.load(A + (16 * n + i) * 64 + 16 * n + j)  # [4, 16, 16]
    X = tl.where(i == j, 1.0, tl.where((i > j) & (i // 2 == j // 2), -diagonal, 0.0))
    for level in tl.static_range(1, 4):
        corner = tl.where((i >> level > j >> level) & (i >> level + 1 == j >> level + 1), diagonal, 0.0)
        X -= _dot(_dot(X, corner, PRECISION), X, PRECISION)

    n, half = tl.arange(0, 2)[:, None, None], tl.arange(0, 2)
    corner = tl.load(A + (32 * n + 16 + i) * 64 + 32 * n + j)  # [2, 16, 16]
    X = tl.reshape(X, [2, 2, 16, 16])
    second = half[:, None, None] == 1
    upper, lower = tl.sum(tl.where(second, 0.0, X), 1), tl.sum(tl.where(second, X, 0.0), 1)
    corner = _dot(_dot(lower, corner, PRECISION), upper, PRECISION)
    row, column = half[:, None, None, None], half[None, None, :, None]
    corner = tl.where(row > column, -corner[:, None, :, None, :], 0.0)
    X = tl.reshape(tl.where(row == column, X[:, :, :, None, :], corner), [2, 32, 32])

    i, j = tl.arange(0, 32)[:, None], tl.arange(0, 32)[None, :]
    corner = tl.load(A + (32 + i) * 64 + j)  # [32, 32]
    upper, lower = tl.sum(tl.where(second, 0.0, X), 0), tl.sum(tl.where(second, X, 0.0), 0)
    corner = _dot(_dot(lower, corner, PRECISION), upper, PRECISION)
    tl.store(T + (32 * n + i) * 64 + 32 * n + j, _round(X, dtype))
    tl.store(T + (32 + i) * 64 + j, _round(-corner, dtype))
    tl.store(T + i * 64 + 32 + j, _round(tl.zeros([32, 32], tl.float32), dtype))
