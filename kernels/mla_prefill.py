"""MLA prefill on the GPU: flash attention over the expanded heads of rows that lie in pages.

A history may be far longer than its expanded keys and values could be held, so the rows of all texts are worked off in
passes of at most PASS_ROWS: gather them from their pages, expand them (one cuBLAS product with W_kvb), and attend. A
text that a pass ends within goes on in the next one from the running state of its softmax (Milakov and Gimelshein,
arXiv 1805.02867): the same numbers in the same order as without the cut.

The Triton kernel is FlashAttention-2 (arXiv 2307.08691). It reads k_nope and v where the product left them and k_pe,
which the heads share, from the rows themselves: no key is ever put together.
"""

import functools

import numpy as np
import torch
import triton
import triton.language as tl

import kernels

PASS_ROWS = 8192  # rows expanded at a time: at 96 heads of 128 + 128 in bfloat16 a workspace of 403 MB
CUT = 128  # a text is cut at multiples of this, which are multiples of every BLOCK_N
FP8 = torch.float8_e4m3fn
LOG2E = 1.4426950408889634


def config(dtype, widest):
    """Blocks of queries and keys for heads of at most `widest`, and what the compiler is told."""
    if dtype == torch.float32:
        return dict(BLOCK_M=32, BLOCK_N=32, num_warps=8, num_stages=1)  # products by FMA: larger blocks spill
    if widest > 128:
        return dict(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=2)
    return dict(BLOCK_M=128, BLOCK_N=64, num_warps=8, num_stages=3)


@triton.jit
def _load(base, rows, stride, valid, width: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    """base[rows, :width], zeros up to WIDTH and in the rows that are not valid."""
    columns = tl.arange(0, WIDTH)
    at = base + rows[:, None] * stride + columns[None, :]
    if MASKED:
        block = tl.load(at, valid[:, None] & (columns < width)[None, :], other=0)
    elif width < WIDTH:
        block = tl.load(at, (columns < width)[None, :], other=0)
    else:
        block = tl.load(at)
    return block


@triton.jit
def _attend(
    q_nope, q_pe, kv, pe, kv_stride, pe_stride, position, first, last,
    acc, peak, total, scale_log2, n: tl.constexpr, p: tl.constexpr, v: tl.constexpr,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The running softmax (acc [M, V]; peak [M]: the maximum, in log2; total [M]) after the keys first..last of a text.

    kv, pe: at its key 0; position [M]: of the queries, which see no key behind theirs. MASKED: not every query sees
    every key.
    """
    for key in tl.range(first, last, BLOCK_N):
        keys = key + tl.arange(0, BLOCK_N)
        k_nope = _load(kv, keys, kv_stride, keys < last, n, q_nope.shape[1], MASKED)
        k_pe = _load(pe, keys, pe_stride, keys < last, p, q_pe.shape[1], MASKED)
        s = tl.dot(q_nope, tl.trans(k_nope), input_precision="ieee")
        s = tl.dot(q_pe, tl.trans(k_pe), s, input_precision="ieee")
        if MASKED:
            s = tl.where((keys < last)[None, :] & (keys[None, :] <= position[:, None]), s, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(s, 1) * scale_log2)  # finite: every query sees key 0, or has a state
        weights = tl.exp2(s * scale_log2 - new_peak[:, None])
        decay = tl.exp2(peak - new_peak)
        total = total * decay + tl.sum(weights, 1)
        values = _load(kv + n, keys, kv_stride, keys < last, v, acc.shape[1], MASKED)
        acc = tl.dot(weights.to(values.dtype), values, acc * decay[:, None], input_precision="ieee")
        peak = new_peak
    return acc, peak, total


@triton.jit(do_not_specialize=["sums_stride"])
def _prefill_kernel(
    q, kv, rows, out, state, sums, tiles,
    q_stride, q_head_stride, kv_stride, rows_stride, sums_stride, scale_log2,
    h: tl.constexpr, n: tl.constexpr, p: tl.constexpr, v: tl.constexpr, r: tl.constexpr,
    N: tl.constexpr, P: tl.constexpr, V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """One head of one tile of queries over the keys of its text that this pass holds.

    q [rows, h, n+p]; kv [L, h, n+v], rows [L, r+p]: the pass; out [rows, h, v]; state [rows, h, v] and sums [2, rows,
    h] float32: acc, peak and total of a text that is cut; tiles: see `plan`. N, P, V: n, p, v up to a power of two.
    """
    tile, head = tl.program_id(0), tl.program_id(1)
    row, count, past = tl.load(tiles + 6 * tile), tl.load(tiles + 6 * tile + 1), tl.load(tiles + 6 * tile + 2)
    start, end, offset = tl.load(tiles + 6 * tile + 3), tl.load(tiles + 6 * tile + 4), tl.load(tiles + 6 * tile + 5)
    i = tl.arange(0, BLOCK_M)
    real, fresh = i < count, start == 0

    q += row.to(tl.int64) * q_stride + head * q_head_stride
    q_nope = _load(q, i, q_stride, real, n, N, True)
    q_pe = _load(q + n, i, q_stride, real, p, P, True)
    at = (row.to(tl.int64) + i) * h + head
    columns = tl.arange(0, V)
    here = real[:, None] & (columns < v)[None, :]
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, V], tl.float32)
    if SPLIT:
        peak = tl.load(sums + at, real & ~fresh, other=float("-inf"))
        total = tl.load(sums + sums_stride + at, real & ~fresh, other=0)
        acc = tl.load(state + at[:, None] * v + columns[None, :], here & ~fresh, other=0)

    position = past + i - start  # from here on keys count from the first one in this pass
    last = tl.minimum(end, past + count) - start  # no query of the tile sees more
    clear = tl.maximum(tl.minimum(end, past + 1) - start, 0) // BLOCK_N * BLOCK_N  # every query sees these
    kv += offset.to(tl.int64) * kv_stride + head * (n + v)
    pe = rows + offset.to(tl.int64) * rows_stride + r
    acc, peak, total = _attend(
        q_nope, q_pe, kv, pe, kv_stride, rows_stride, position,
        0, clear, acc, peak, total, scale_log2, n, p, v, BLOCK_N, False,
    )  # fmt: skip
    acc, peak, total = _attend(
        q_nope, q_pe, kv, pe, kv_stride, rows_stride, position,
        clear, last, acc, peak, total, scale_log2, n, p, v, BLOCK_N, True,
    )  # fmt: skip

    if SPLIT and end < past + count:
        tl.store(sums + at, peak, real)
        tl.store(sums + sums_stride + at, total, real)
        tl.store(state + at[:, None] * v + columns[None, :], acc, here)
    else:
        o = acc / total[:, None]
        tl.store(out + at[:, None] * v + columns[None, :], o.to(out.dtype.element_ty), here)


def plan(part, block_m):
    """-> [(at [L] int64: where in a slab the rows of a pass lie; tiles [t, 6] int32)], whether any text is cut.

    A tile: first row of q, rows, position of the first; first and end of its text's keys in this pass, and the row of
    the pass that holds the first. Pieces that follow one another are one text. Positions count from part.first: what
    lies below it is never gathered. Made once for all layers.
    """
    plans = vars(part).setdefault("mla_prefill_plans", {})
    if (block_m, PASS_ROWS) in plans:
        return plans[block_m, PASS_ROWS]
    texts, row = [], 0  # [first row, rows, past, sequence]; of pieces, the last one has all pages
    for i, (length, past) in enumerate(zip(part.lengths, part.pasts)):
        if part.follows[i]:
            texts[-1][1:] = texts[-1][1] + length, texts[-1][2], i
        else:
            texts.append([row, length, past - part.first, i])
        row += length

    passes, space = [([], [])], PASS_ROWS
    for row, length, past, i in texts:
        start, total = 0, past + length
        while start < total:
            if space < min(CUT, total - start):
                passes.append(([], []))
                space = PASS_ROWS
            end = total if total - start <= space else start + space // CUT * CUT
            offset, (at, tiles) = PASS_ROWS - space, passes[-1]
            at.append(slots(part, i, start, end))
            for t in reversed(range(0, length, block_m)):  # those that see the most go first
                count = min(block_m, length - t)
                if past + t + count > start:
                    tiles.append((row + t, count, past + t, start, end, offset))
            start, space = end, space - (end - start)

    table = np.array([tile for _, tiles in passes for tile in tiles], dtype=np.int32)
    table = torch.from_numpy(table).to(part.table.device, non_blocking=True)
    tables = table.split([len(tiles) for _, tiles in passes])
    cut = any(tile[3] > 0 for _, tiles in passes for tile in tiles)
    plans[block_m, PASS_ROWS] = [(torch.cat(at), tiles) for (at, _), tiles in zip(passes, tables)], cut
    return plans[block_m, PASS_ROWS]


def slots(part, i, start, end):
    """Where in a slab the rows start..end of sequence i lie, counted from part.first: [end - start] int64."""
    position = part.first + torch.arange(start, end, device=part.table.device)
    return part.table[i].long()[position // part.page_size] * part.page_size + position % part.page_size


def gather(stored, at, row_scale, dtype):
    """Rows as stored, [L, r+p]; FP8 rows times row_scale."""
    if stored.dtype == FP8:
        return stored.view(torch.uint8)[at].view(FP8).to(dtype) * row_scale
    return stored[at]


def why_not(q, W_kvb, stored, part, scale, row_scale):
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"{q.dtype} is not float32, bfloat16 or float16"
    if W_kvb.dtype != q.dtype or stored.dtype not in (q.dtype, FP8):
        return "queries, weights and stored rows differ in dtype"
    if q.stride(-1) != 1:
        return "the channels of a head do not lie side by side"
    if max(q.shape[-1], W_kvb.shape[1]) > 512:
        return "heads above 256"
    return None


@kernels.implement("mla_prefill", "triton", why_not)
def mla_prefill(q, W_kvb, stored, part, scale, row_scale, **options):
    """q [N, h, n+p], W_kvb [h, n+v, r], stored [slots, r+p] -> [N, h, v]."""
    h, r, p = q.shape[1], W_kvb.shape[-1], stored.shape[-1] - W_kvb.shape[-1]
    n = q.shape[-1] - p
    v = W_kvb.shape[1] - n
    N, P, V = (max(16, triton.next_power_of_2(size)) for size in (n, p, v))
    options = config(q.dtype, max(N, P, V)) | options
    passes, cut = plan(part, options["BLOCK_M"])
    out = q.new_empty(len(q), h, v)
    state = q.new_empty(out.shape if cut else 0, dtype=torch.float32)
    sums = q.new_empty((2, len(q), h) if cut else 0, dtype=torch.float32)
    workspace = q.new_empty(max(len(at) for at, _ in passes), h * (n + v))
    for at, tiles in passes:
        rows, kv = gather(stored, at, row_scale, q.dtype), workspace[: len(at)]
        torch.mm(rows[:, :r], W_kvb.flatten(0, 1).T, out=kv)
        _prefill_kernel[len(tiles), h](
            q, kv, rows, out, state, sums, tiles, q.stride(0), q.stride(1), kv.stride(0), rows.stride(0),
            len(q) * h, scale * LOG2E, h=h, n=n, p=p, v=v, r=r, N=N, P=P, V=V, SPLIT=cut, **options,
        )  # fmt: skip
    return out


@functools.cache
def _cudnn_refuses(dtype, qk, v, device):
    """None if cuDNN attends with heads of qk and v on this GPU, by trying it; else its reason."""
    q, k, v = (torch.zeros(1, 1, 64, d, dtype=dtype, device=device) for d in (qk, qk, v))
    try:
        for causal in (False, True):
            torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)
    except RuntimeError as error:
        return f"cuDNN: {str(error).strip().splitlines()[0]}"


def cudnn_why_not(q, W_kvb, stored, part, scale, row_scale):
    if not q.is_cuda or q.dtype == torch.float32:
        return "cuDNN attends on a GPU, in bfloat16 or float16"
    v = W_kvb.shape[1] - (q.shape[-1] - (stored.shape[-1] - W_kvb.shape[-1]))
    return why_not(q, W_kvb, stored, part, scale, row_scale) or _cudnn_refuses(q.dtype, q.shape[-1], v, q.device)


@kernels.implement("mla_prefill", "cudnn", cudnn_why_not)
def mla_prefill_cudnn(q, W_kvb, stored, part, scale, row_scale):
    """As `mla_prefill`, text by text: the keys before the chunk in pieces, then the chunk itself, causal; the outputs
    are merged by the log-sum-exp of their scores.
    """
    h, r, p = q.shape[1], W_kvb.shape[-1], stored.shape[-1] - W_kvb.shape[-1]
    n = q.shape[-1] - p
    out, first = q.new_empty(len(q), h, W_kvb.shape[1] - n), 0
    size = min(PASS_ROWS, part.longest)
    workspace, keys = q.new_empty(size, h * W_kvb.shape[1]), q.new_empty(size, h, n + p)

    def attend(queries, start, end, i, causal):
        rows, L = gather(stored, slots(part, i, start, end), row_scale, q.dtype), end - start
        kv = torch.mm(rows[:, :r], W_kvb.flatten(0, 1).T, out=workspace[:L]).unflatten(-1, (h, -1))
        keys[:L, :, :n], keys[:L, :, n:] = kv[..., :n], rows[:, None, r:]
        qkv = (x.transpose(0, 1)[None] for x in (queries, keys[:L], kv[..., n:]))
        o, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(*qkv, None, True, 0.0, causal, scale=scale)
        return o[0].transpose(0, 1), lse.view(h, -1).T[..., None]

    for i, (length, past) in enumerate(zip(part.lengths, part.pasts)):
        past -= part.first
        for t in range(0, length, size):  # more new tokens than the workspace holds: the earlier ones are past
            count, o = min(size, length - t), None
            queries = q[first + t : first + t + count]
            pieces = [(at, min(at + size, past + t), False) for at in range(0, past + t, size)]
            for start, end, causal in [*pieces, (past + t, past + t + count, True)]:
                new, new_lse = attend(queries, start, end, i, causal)
                if o is None:
                    o, lse = new.float() if pieces else new, new_lse
                else:
                    o = o.lerp_(new.float(), (new_lse - lse).sigmoid())
                    lse = torch.logaddexp(lse, new_lse)
            out[first + t : first + t + count] = o
        first += length
    return out
