"""Triton: y = x W^T for few rows, where reading W is all the time there is. cuBLAS has the larger products.

One row: a product of W [out, in] with a vector; every program owns some outputs and reads their rows of W once, 16
bytes a thread. 2 to 64 rows: the tensor cores compute y^T = W x^T, so that W, which is large, fills their long side,
and x, padded to 16, 32 or 64 rows, their short one. Where the outputs give too few programs to keep the memory busy,
`in` is split too (split-K): partial sums in float32, which a second launch adds up in a fixed order.
"""

import torch
import triton
import triton.language as tl

import kernels

MOST_ROWS = 64


@triton.jit(do_not_specialize=["blocks"])
def _vector_kernel(
    x, w, y, out, inner, blocks, EVEN: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y [parts, out] = partial sums of x [in] . W [out, in], each over blocks * BLOCK_IN values."""
    o, part = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT), tl.program_id(1)
    rows = tl.where(o < out, o, 0).to(tl.int64)[:, None] * inner  # past the end the first row is read, and not stored
    sums = tl.zeros((BLOCK_OUT, BLOCK_IN), tl.float32)
    for i in tl.range(blocks, num_stages=STAGES):
        cols = (part * blocks + i) * BLOCK_IN + tl.arange(0, BLOCK_IN)
        if EVEN:
            a, b = tl.load(w + rows + cols[None, :]), tl.load(x + cols)
        else:
            a = tl.load(w + rows + cols[None, :], mask=cols[None, :] < inner, other=0.0)
            b = tl.load(x + cols, mask=cols < inner, other=0.0)
        sums += a.to(tl.float32) * b.to(tl.float32)[None, :]
    tl.store(y + part * out + o, tl.sum(sums, 1).to(y.dtype.element_ty), mask=o < out)


@triton.jit(do_not_specialize=["rows", "blocks"])
def _matrix_kernel(
    x, x_stride, w, y, rows, out, inner, blocks, EVEN: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y [parts, rows, out] = partial sums of x [rows, in] . W [out, in], each over blocks * BLOCK_IN values."""
    o, part = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT), tl.program_id(1)
    r = tl.arange(0, ROWS)
    w_rows, x_rows = tl.where(o < out, o, 0).to(tl.int64)[:, None] * inner, r[None, :] * x_stride
    sums = tl.zeros((BLOCK_OUT, ROWS), tl.float32)
    for i in tl.range(blocks, num_stages=STAGES):
        cols = (part * blocks + i) * BLOCK_IN + tl.arange(0, BLOCK_IN)
        if EVEN:
            a = tl.load(w + w_rows + cols[None, :])
            b = tl.load(x + x_rows + cols[:, None], mask=r[None, :] < rows, other=0.0)
        else:
            a = tl.load(w + w_rows + cols[None, :], mask=cols[None, :] < inner, other=0.0)
            b = tl.load(x + x_rows + cols[:, None], mask=(cols[:, None] < inner) & (r[None, :] < rows), other=0.0)
        sums = tl.dot(a, b, sums, input_precision="ieee")
    y_at = y + (part * rows + r[None, :]) * out + o[:, None]
    tl.store(y_at, sums.to(y.dtype.element_ty), mask=(o < out)[:, None] & (r < rows)[None, :])


@triton.jit
def _sum_kernel(parts, y, size, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    """parts [SPLIT, size] float32 -> y [size], added in order."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(parts + at, mask=at < size)
    for i in tl.static_range(1, SPLIT):
        total += tl.load(parts + i * size + at, mask=at < size)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=at < size)


def _block(inner, most):
    """The largest power of two up to `most` that divides inner; where that is small, one that masks the end."""
    even = min(most, inner & -inner)
    return even if even >= 64 else min(most, max(16, triton.next_power_of_2(inner)))


def settings(rows, out, inner, size):
    """Block sizes, split, stages and warps for elements of `size` bytes, as they measured fastest on an H200."""
    if rows == 1:
        block_in = _block(inner, 1024 if out >= 8192 else 512)
        return dict(BLOCK_OUT=2 if block_in == 1024 else 8, BLOCK_IN=block_in, SPLIT=1, STAGES=1, num_warps=4)
    if size == 2 and out >= 6000 and inner >= 2048:  # enough programs without a split
        if rows > 16 and out >= 14000:
            return dict(BLOCK_OUT=128, BLOCK_IN=64, SPLIT=1, STAGES=5, num_warps=4)
        wide = rows > 16 or out >= 14000
        return dict(BLOCK_OUT=64, BLOCK_IN=128 if wide else 256, SPLIT=1, STAGES=4 if wide else 3, num_warps=4)
    block_in, block_out = _block(inner, 256 // size), 64 if rows > 16 or out >= 16384 else 32
    programs, blocks = triton.cdiv(out, block_out), triton.cdiv(inner, block_in)
    split = max(
        [n for n in (1, 2, 3, 4, 6, 7, 8) if blocks % n == 0 and blocks >= 6 * n and programs * n <= 600] or [1]
    )
    return dict(BLOCK_OUT=block_out, BLOCK_IN=block_in, SPLIT=split, STAGES=4, num_warps=4)


def slower(x, weight):
    """Whether cuBLAS is faster, by the same measurements."""
    rows, (out, inner) = x.numel() // x.shape[-1], weight.shape
    if x.dtype == torch.float32:
        return True
    if rows == 1:
        return False
    return 1024 <= inner < 2048 if rows <= 16 else out < 6000 or inner < 7000


def why_not(x, weight):
    """Why these kernels cannot take a product."""
    rows = x.numel() // x.shape[-1]
    if x.dtype != weight.dtype or x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"x is {x.dtype} and the weight {weight.dtype}"
    if torch.is_autocast_enabled(x.device.type):
        return "autocast chooses the dtype of products"
    if not 1 <= rows <= MOST_ROWS:
        return f"{rows} rows, not 1 to {MOST_ROWS}"
    if not weight.is_contiguous():
        return "the weight is not contiguous"


@kernels.implement("linear", "splitk", why_not, slower)
def linear(x, weight, **options):
    (out, inner), shape = weight.shape, x.shape
    x = x if x.ndim == 2 and x.stride(1) == 1 else x.reshape(-1, inner).contiguous()
    rows = len(x)
    options = settings(rows, out, inner, x.element_size()) | options
    split, block_in = options.pop("SPLIT"), options["BLOCK_IN"]
    blocks = triton.cdiv(triton.cdiv(inner, block_in), split)  # of a part
    options["EVEN"] = blocks * block_in * split == inner
    y = torch.empty(*shape[:-1], out, dtype=x.dtype, device=x.device)
    sums = y if split == 1 else torch.empty(split, rows, out, dtype=torch.float32, device=x.device)
    grid = triton.cdiv(out, options["BLOCK_OUT"]), split
    if rows == 1:
        _vector_kernel[grid](x, weight, sums, out, inner, blocks, **options)
    else:
        padded = max(16, triton.next_power_of_2(rows))
        _matrix_kernel[grid](x, x.stride(0), weight, sums, rows, out, inner, blocks, ROWS=padded, **options)
    if split > 1:
        _sum_kernel[(triton.cdiv(rows * out, 1024),)](sums, y, rows * out, split, BLOCK=1024)
    return y
