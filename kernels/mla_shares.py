"""MLA decode in shares of a history: into how many it is cut, and how their outputs become one."""

import functools

import torch
import triton
import triton.language as tl


@triton.jit
def _merge_kernel(
    parts,  # [splits, rows, RANK] float32
    parts_lse,  # [splits, rows] float32
    o,  # [rows, RANK]
    lse,  # [rows] float32
    splits,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,  # padded to a power of two
    BLOCK_R: tl.constexpr,
):
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    s, c = tl.arange(0, SPLITS), tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    each = tl.load(parts_lse + s * rows + row, mask=s < splits, other=float("-inf"))
    part = tl.load(parts + (s * rows + row)[:, None] * RANK + c, mask=(s < splits)[:, None] & (c < RANK), other=0.0)
    top = tl.max(each, 0)
    weight = tl.exp(each - tl.where(top == float("-inf"), 0.0, top))  # no share has seen anything: padding
    total = tl.sum(weight, 0)
    out = tl.sum(weight[:, None] * part, 0) / tl.where(total == 0, 1.0, total)
    tl.store(o + row * RANK + c, out, mask=c < RANK)
    tl.store(lse + row, top + tl.log(total), mask=tl.program_id(1) == 0)


@functools.cache
def decode_splits(programs, tiles, processors):
    """How many shares a history of at most `tiles` tiles is cut into, where one share makes so many programs.

    The fewest with the least time, counted in tiles: waves of programs, each of so many tiles and some for its ends.
    """
    cost = lambda s: triton.cdiv(programs * s, processors) * (triton.cdiv(tiles, s) + 3)
    return min(range(1, min(tiles, 2 * processors) + 1), key=cost)


def in_shares(run, q, rank, splits):
    """q [B, T, h, d]; run(o, lse) fills [splits, h, B, T, rank] and [splits, h, B, T] -> the whole, [B, T, h, ...]."""
    B, T, heads, _ = q.shape
    empty = functools.partial(torch.empty, device=q.device)
    o, lse = empty(heads, B, T, rank, dtype=q.dtype), empty(heads, B, T, dtype=torch.float32)
    if splits == 1:
        run(o, lse)
    else:
        parts, parts_lse = (empty(splits, *x.shape, dtype=torch.float32) for x in (o, lse))
        run(parts, parts_lse)
        SPLITS = triton.next_power_of_2(splits)
        block_r = min(max(2048 // SPLITS, 16), triton.next_power_of_2(rank))
        num_warps = triton.cdiv(SPLITS * block_r, 2048)  # so few, for what takes time is to start them and to wait
        grid = heads * B * T, triton.cdiv(rank, block_r)
        _merge_kernel[grid](parts, parts_lse, o, lse, splits, rank, SPLITS, block_r, num_warps=num_warps)
    return o.permute(1, 2, 0, 3), lse.permute(1, 2, 0)


def processors(device):
    """How many programs run side by side."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3
