"""MLA decode on Hopper, in Gluon: the flash decoding of kernels/mla.py with specialized warps.

As in FlashMLA (github.com/deepseek-ai/FlashMLA), a tile of 64 (token, head) pairs stays, and the history passes through
two buffers of 64 rows, which the copy engine fills. Four warps compute the scores and the softmax of one tile while
eight others, which hold the accumulator, multiply the weights of the tile before with its values. The shares that this
leaves are those of kernels/mla_shares.py.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

import kernels
from kernels.mla_shares import decode_splits, in_shares, processors

BLOCK, RANK, PE = gl.constexpr(64), gl.constexpr(512), gl.constexpr(64)
LN2, LOG2E = gl.constexpr(0.6931471805599453), gl.constexpr(1.4426950408889634)
barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # the new names, and those of Triton 3.6
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit
def _load(c_desc, e_desc, k_c, k_e, k_full, row, slot, pred):
    """Starts the copy of 64 rows into a buffer. Whoever waits for its barrier has them."""
    async_load(c_desc, [row, 0], k_full.index(slot), k_c.index(slot), pred=pred)
    async_load(e_desc, [row, RANK], k_full.index(slot), k_e.index(slot), pred=pred)


@gluon.jit
def _row_of(pages, PAGE: gl.constexpr, tile):
    """Where a tile of the history begins in the slab."""
    return gl.load(pages + tile * BLOCK // PAGE).to(gl.int32) * PAGE + tile * BLOCK % PAGE


@gluon.jit
def _weigh(q_c, q_e, k_c, k_e, fades, totals, bars, lse, place, seen, length, first, last, scale, FIRST: gl.constexpr):
    """Four warps: the weights of each tile go to where its k_e was; and by how much the sums before it fade."""
    q_full, k_full, p_full, done = bars
    b, B, T, heads, at = place
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    row = at + gl.arange(0, BLOCK, gl.SliceLayout(1, layout))
    n = gl.arange(0, BLOCK, gl.SliceLayout(0, layout))
    token, head = row // heads, row % heads
    to_log2 = scale * LOG2E  # of scores, which stay as they are until they are exponents
    m = gl.full([BLOCK], float("-inf"), gl.float32, gl.SliceLayout(1, layout))
    total = gl.full([BLOCK, BLOCK], 0.0, gl.float32, layout)  # its rows are summed at the end
    zero = gl.full([BLOCK, BLOCK], 0.0, gl.float32, layout)
    mbarrier.wait(q_full, 0)
    for i in range(first, last):
        slot, phase, start = (i - first) % 2, (i - first) // 2 & 1, i * BLOCK
        c, e = k_c.index(slot), k_e.index(slot)
        mbarrier.wait(k_full.index(slot), phase)
        s = warpgroup_mma(q_e, e.permute([1, 0]), zero, use_acc=False, is_async=True)
        s = warpgroup_mma(q_c, c.permute([1, 0]), s, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        if start + BLOCK > seen + 1:  # not the whole tile is seen by all
            s = gl.where((start + n)[None, :] <= (seen + token)[:, None], s, float("-inf"))
        if FIRST:
            if start < FIRST:
                s = gl.where((start + n >= FIRST)[None, :], s, float("-inf"))
        top = gl.maximum(m, gl.max(s, 1))
        base = gl.where(top == float("-inf"), 0.0, top) * to_log2  # of a pair that sees nothing yet
        fade = gl.exp2(m * to_log2 - base)
        weight = gl.exp2(s * to_log2 - base[:, None])
        total = total * fade[:, None] + weight
        m = top
        fades.index(slot).store(fade)
        e.store(weight.to(e.dtype))
        edge = start + BLOCK > length
        if FIRST:
            edge = edge | (start < FIRST)
        if edge:  # rows that are not there hold anything, and 0 * NaN is NaN
            blocked: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
            position = start + gl.arange(0, BLOCK, gl.SliceLayout(1, blocked))
            there = position < length
            if FIRST:
                there = there & (position >= FIRST)
            for j in gl.static_range(RANK // 64):
                part = c.slice(64 * j, 64, dim=1)
                part.store(gl.where(there[:, None], part.load(blocked), 0.0).to(e.dtype))
        fence_async_shared()
        mbarrier.arrive(p_full.index(slot), count=1)
    total = gl.sum(total, 1)
    totals.store(total)
    mbarrier.arrive(done, count=1)
    gl.store(lse + (head * B + b) * T + token, (m * to_log2 + gl.log2(total)) * LN2, mask=row < T * heads)


@gluon.jit
def _add_values(c_desc, e_desc, k_c, k_e, fades, totals, bars, o, place, first, last, pages, PAGE: gl.constexpr):
    """Eight warps: add each tile's weights times its values, refill its buffer, write the share's output."""
    k_full, p_full, done = bars
    b, B, T, heads, at = place
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, RANK // 2, 16])
    BYTES: gl.constexpr = c_desc.block_type.nbytes + e_desc.block_type.nbytes
    acc = gl.full([BLOCK, RANK], 0.0, gl.float32, layout)
    for i in range(first, last):
        slot, phase, more = (i - first) % 2, (i - first) // 2 & 1, i + 2 < last
        row = _row_of(pages, PAGE, gl.minimum(i + 2, last - 1))
        mbarrier.wait(k_full.index(slot), phase)
        mbarrier.expect(k_full.index(slot), BYTES, pred=more)
        mbarrier.wait(p_full.index(slot), phase)
        acc = acc * fades.index(slot).load(gl.SliceLayout(1, layout))[:, None]
        acc = warpgroup_mma(k_e.index(slot), k_c.index(slot), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        barrier()  # all warps are done with the buffer
        _load(c_desc, e_desc, k_c, k_e, k_full, row, slot, more)
    mbarrier.wait(done, 0)
    total = totals.load(gl.SliceLayout(1, layout))
    acc = acc * (1 / gl.where(total == 0, 1.0, total))[:, None]
    row = at + gl.arange(0, BLOCK, gl.SliceLayout(1, layout))
    token, head = row // heads, row % heads
    c = gl.arange(0, RANK, gl.SliceLayout(0, layout))
    to = ((head * B + b).to(gl.int64) * T + token) * RANK
    gl.store(o + to[:, None] + c[None, :], acc.to(o.dtype.element_ty), mask=(row < T * heads)[:, None])


@gluon.jit
def _decode_kernel(
    q_c_desc,  # q [B * T * heads, 576] as tiles [64, 512]
    q_e_desc,  # and [64, 64]
    c_desc,  # stored [slots, 576] as tiles [64, 512]
    e_desc,  # and [64, 64]
    table,  # [B, W] int32, or int64 as graphs have it
    past,  # [B] likewise
    o,  # [splits, heads, B, T, 512]
    lse,  # [splits, heads, B, T] float32
    scale,
    T,
    heads,
    W,
    PAGE: gl.constexpr,
    FIRST: gl.constexpr,  # rows below it are not seen, and may hold anything
):
    tile, split, b = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    splits, B, at = gl.num_programs(1), gl.num_programs(2), tile * BLOCK
    seen = gl.load(past + b).to(gl.int32)  # token t of the sequence sees rows <= seen + t
    pages = table + b.to(gl.int64) * W
    length = gl.where(gl.load(pages) < 0, 0, seen + T)  # a sequence without pages has no history
    tiles = gl.cdiv(length, BLOCK)
    first, last = tiles * split // splits, tiles * (split + 1) // splits
    o += split.to(gl.int64) * heads * B * T * RANK
    lse += split * heads * B * T

    dtype: gl.constexpr = c_desc.dtype
    q_c = gl.allocate_shared_memory(dtype, [BLOCK, RANK], q_c_desc.layout)
    q_e = gl.allocate_shared_memory(dtype, [BLOCK, PE], q_e_desc.layout)
    k_c = gl.allocate_shared_memory(dtype, [2, BLOCK, RANK], c_desc.layout)
    k_e = gl.allocate_shared_memory(dtype, [2, BLOCK, PE], e_desc.layout)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    fades = gl.allocate_shared_memory(gl.float32, [2, BLOCK], flat)
    totals = gl.allocate_shared_memory(gl.float32, [BLOCK], flat)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    p_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    mbarrier.init(done, count=1)
    for i in gl.static_range(2):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(p_full.index(i), count=1)
    fence_async_shared()

    mbarrier.expect(q_full, q_c_desc.block_type.nbytes + q_e_desc.block_type.nbytes)
    async_load(q_c_desc, [b * T * heads + at, 0], q_full, q_c)
    async_load(q_e_desc, [b * T * heads + at, RANK], q_full, q_e)
    end = gl.maximum(last - 1, 0)
    row = _row_of(pages, PAGE, gl.minimum(first, end)), _row_of(pages, PAGE, gl.minimum(first + 1, end))
    for i in gl.static_range(2):
        mbarrier.expect(k_full.index(i), c_desc.block_type.nbytes + e_desc.block_type.nbytes, pred=first + i < last)
        _load(c_desc, e_desc, k_c, k_e, k_full, row[i], i, first + i < last)

    place = b, B, T, heads, at
    values = c_desc, e_desc, k_c, k_e, fades, totals, (k_full, p_full, done), o, place, first, last, pages, PAGE
    bars = q_full, k_full, p_full, done
    weights = q_c, q_e, k_c, k_e, fades, totals, bars, lse, place, seen, length, first, last, scale, FIRST
    gl.warp_specialize([(_add_values, values), (_weigh, weights)], [4], [168])  # 168 registers a thread: all there are


def why_not(q, stored, rank, part, scale, row_scale):
    if not q.is_cuda or torch.version.hip or torch.cuda.get_device_capability(q.device) != (9, 0):
        return "no Hopper GPU"
    if scale <= 0:
        return f"scores times {scale}"
    if q.dtype not in (torch.bfloat16, torch.float16) or stored.dtype != q.dtype:
        return f"queries in {q.dtype} and latents in {stored.dtype}"
    if (rank, q.shape[-1]) != (512, 576):
        return f"a latent row of {rank} + {q.shape[-1] - rank} values, not 512 + 64"
    return f"pages of {part.page_size} tokens, no multiple of 64" if part.page_size % 64 else None


def slower(q, *_):
    """Where a tile of 64 pairs would stand mostly empty."""
    return q.shape[1] * q.shape[2] <= 16


@kernels.implement("mla_decode", "gluon", why_not, slower)
def mla_decode(q, stored, rank, part, scale, row_scale, splits=None):
    """As in kernels/mla.py, for bfloat16 or float16 in and 512 + 64 values a row."""
    B, T, heads, width = q.shape
    q, tiles = q.contiguous(), triton.cdiv(T * heads, 64)
    splits = splits or decode_splits(tiles * B, triton.cdiv(part.longest, 64), processors(q.device))
    describe = lambda x, columns: TensorDescriptor(
        x, [len(x), width], [width, 1], [64, columns], gl.NVMMASharedLayout.get_default_for([64, columns], gl.bfloat16)
    )

    def run(o, lse):
        _decode_kernel[tiles, splits, B](
            describe(q.view(-1, width), 512),
            describe(q.view(-1, width), 64),
            describe(stored, 512),
            describe(stored, 64),
            part.table,
            part.past,
            o,
            lse,
            scale,
            T,
            heads,
            part.table.stride(0),
            part.page_size,
            part.first,
            num_warps=8,
            maxnreg=168,
        )

    return in_shares(run, q, rank, splits)
