"""The routed experts for one to about a thousand tokens, in FP8 products that are as exact as bfloat16.

With few rows an expert, unpacking its weights costs more than reading them. FP8 has room for a 4-bit code as it is: a
shift puts sign, exponent and mantissa of e2m1 where e4m3 has them (2^-6 of the value, the subnormal 0.5 included), four
codes at once. So scales stay out of the unpacking: a product spans one group of 32 inputs, and its sums are scaled and
added in float32 (as in DeepSeek-V3's FP8 GEMM, arXiv 2412.19437, section 3.3.2).

Activations keep their 8 significant bits as the sum of two e4m3 numbers, high and low (`_split_kernel`). Of a group the
even inputs come first, then the odd: low nibbles of the weights, then high ones.

    sort      (token, choice) rows by expert; a tile is up to TT rows of one expert
    split     z into its two parts
    GEMM 1    z W13 and SiTU, rows in sorted order
    split     the activations
    GEMM 2    act W2, each row to its (token, choice) place
    combine   the weighted sum over the k choices in float32, in a fixed order
"""

import torch
import triton
import triton.language as tl

import kernels
from kernels.gated_act import gated
from kernels.launch import no_fp8, registers
from kernels.moe_grouped import _bytes, combine, tiles, why_not

INTERPRETED = tl.constexpr(kernels.interpreted())
MOST = 26  # rows per expert, on average


def config(mean):
    """Rows of a tile TT, rows of W a program OUT, blocks of 128 inputs a step, warps, stages; by rows per expert.

    DEEP: high and low part follow each other along the inputs; else they are columns side by side, which takes half the
    products, and twice the sums.
    """
    if mean <= 6:
        return dict(TT=8, OUT=128, BLOCKS=2, DEEP=False, num_warps=4, STAGES=3)
    if mean <= 12:
        return dict(TT=16, OUT=128, BLOCKS=1, DEEP=True, num_warps=4, STAGES=4)
    return dict(TT=32, OUT=128, BLOCKS=1, DEEP=True, num_warps=4, STAGES=3, **registers(128))


# ---------------------------------------------------------------- rows by expert


@triton.jit
def _rank_kernel(ids_ptr, order_ptr, start_ptr, n, NUM, BLOCK: tl.constexpr):
    """ids [n] int64 -> order [n]: the places of ids in ascending order, ties by place; start [NUM + 1]: how many are
    below e. All against all: for a few thousand that is faster than to sort.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # first the places, then the experts, as if each stood first
    blocks = tl.cdiv(n, BLOCK)
    is_row = tl.program_id(0) < blocks
    expert = i - blocks * BLOCK
    value = tl.load(ids_ptr + i, is_row & (i < n), other=0) if is_row else expert.to(tl.int64)
    key = value << 32 | (i if is_row else 0 * i)
    rank = tl.zeros([BLOCK], tl.int32)
    for first in range(0, n, 256):
        j = first + tl.arange(0, 256)
        other = tl.load(ids_ptr + j, j < n, other=1 << 30) << 32 | j
        rank += tl.sum((other[None, :] < key[:, None]).to(tl.int32), 1)
    if is_row:
        tl.store(order_ptr + rank, i.to(tl.int64), i < n)
    else:
        tl.store(start_ptr + expert, rank, expert <= NUM)


@triton.jit
def _tile_kernel(start_ptr, tile_ptr, first_ptr, tiles, NUM, TT: tl.constexpr, SIZE: tl.constexpr):
    """start [NUM + 1] -> tile [tiles]: tile -> expert, NUM if unused; first [NUM]: an expert's first tile."""
    e = tl.arange(0, SIZE)
    count = tl.load(start_ptr + e + 1, e < NUM, other=0) - tl.load(start_ptr + e, e < NUM, other=0)
    used = (count + TT - 1) // TT
    first = tl.cumsum(used, 0) - used
    tl.store(first_ptr + e, first, e < NUM)
    for i in range(tl.max(used, 0)):
        tl.store(tile_ptr + first + i, e, i < used)
    for t in range(0, tiles, SIZE):
        tl.store(tile_ptr + t + e, NUM + 0 * e, (t + e >= tl.sum(used, 0)) & (t + e < tiles))


def tiles_of_few(ids, num, TT):
    """As in moe_grouped.py, in two launches."""
    n, new = ids.numel(), lambda size, dtype=torch.int32: torch.empty(size, dtype=dtype, device=ids.device)
    used = min(num, n)  # at most so many experts have a last tile that is not full
    order, start, tile, first = new(n, torch.int64), new(num + 1), new(used + (n - used) // TT), new(num)
    _rank_kernel[(triton.cdiv(n, 32) + triton.cdiv(num + 1, 32),)](ids.contiguous(), order, start, n, num, 32)
    _tile_kernel[(1,)](start, tile, first, len(tile), num, TT, triton.next_power_of_2(num))
    return order, start, tile, first


# ---------------------------------------------------------------- activations in two parts


@triton.jit
def _split_kernel(x_ptr, out_ptr, scale_ptr, stride, WIDTH, SIZE: tl.constexpr):
    """A row of x [n, WIDTH] bf16 -> out [n, WIDTH / 32, 2, 32] e4m3, whose sum, times scale [n], is x.

    Exact down to 2^-9 of the row's largest value; below, the error is at most 2^-17 of it (and of 2^-111).
    """
    row, p = tl.program_id(0).to(tl.int64), tl.arange(0, SIZE)
    column = p // 32 * 32 + p % 16 * 2 + p % 32 // 16
    x = tl.load(x_ptr + row * stride + column, p < WIDTH, other=0.0).to(tl.float32)
    exponent = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0) >> 23  # of the largest value
    finite = exponent < 255
    exponent = tl.minimum(tl.maximum(exponent, 16), 254)
    x *= ((261 - exponent) << 23).to(tl.float32, bitcast=True)  # below 2^8
    high = x.to(tl.float8e4nv)
    at = row * (2 * WIDTH) + p // 32 * 64 + p % 32
    tl.store(out_ptr + at, high, p < WIDTH)
    tl.store(out_ptr + at + 32, (x - high.to(tl.float32)).to(tl.float8e4nv), p < WIDTH)
    scale = ((exponent - 7) << 23).to(tl.float32, bitcast=True)
    tl.store(scale_ptr + row, tl.where(finite, scale, float("nan")))


# ---------------------------------------------------------------- the products


@triton.jit
def _unpack(w, DEEP: tl.constexpr):
    """The four words of a group, int32 [R, 4] -> e4m3 [R, 32]: even inputs, odd inputs. DEEP: twice, [R, 64]."""
    even = ((w << 2) & 0x1C1C1C1C) | ((w << 4) & -0x7F7F7F80)
    odd = ((w >> 2) & 0x1C1C1C1C) | (w & -0x7F7F7F80)
    group = tl.join(_bytes(even), _bytes(odd)).permute(0, 2, 1).reshape(w.shape[0], 32)
    return tl.join(group, group).permute(0, 2, 1).reshape(w.shape[0], 64) if DEEP else group


@triton.jit
def _product(w, s, x):
    """A group: words w [OUT, 4], scales in bits 23 to 30 of s [OUT], inputs x -> float32, times 2^-6.

    Of scales the byte 0 counts as zero, and 255, which no checkpoint has, as infinity.
    """
    a = _unpack(w, x.shape[0] == 64)
    if INTERPRETED:
        a, x = a.to(tl.float32), x.to(tl.float32)
    return tl.dot(a, x, out_dtype=tl.float32) * (s & 0x7F800000).to(tl.float32, bitcast=True)[:, None]


@triton.jit
def _scales(s, g, K: tl.constexpr):
    """The scale bytes of groups g to g + 3, in one word. s: of each row's first."""
    if K % 128 == 0:
        return tl.load(s.to(tl.pointer_type(tl.int32)) + g // 4)
    word = tl.load(s + g).to(tl.int32)
    for i in tl.static_range(1, 4):
        word |= tl.load(s + g + i, g + i < K // 32, other=0).to(tl.int32) << (8 * i)
    return word


@triton.jit
def _inputs(x, g, real, K: tl.constexpr):
    """Both parts of the tile's rows in group g."""
    there = real[None, :] if K % 128 == 0 else real[None, :] & (g < K // 32)
    return tl.load(x + g * 64, there, other=0.0)


@triton.jit
def _block(acc, w, s, x, real, g, K: tl.constexpr):
    """acc and the products of groups g to g + 3."""
    if K % 128 == 0:
        words = tl.load(w + g * 4)
    else:
        words = tl.load(w + g * 4, tl.arange(0, 16)[None, :] < K // 8 - g * 4, other=0)
    scales = _scales(s, g, K)
    x_0, x_1 = _inputs(x, g, real, K), _inputs(x, g + 1, real, K)
    x_2, x_3 = _inputs(x, g + 2, real, K), _inputs(x, g + 3, real, K)
    even, odd = words.reshape(words.shape[0], 2, 2, 4).permute(0, 3, 1, 2).split()
    w_0, w_2 = even.split()
    w_1, w_3 = odd.split()
    acc += _product(w_0, scales << 23, x_0)
    acc += _product(w_1, scales << 15, x_1)
    acc += _product(w_2, scales << 7, x_2)
    return acc + _product(w_3, scales >> 1, x_3)


@triton.jit(do_not_specialize=["NUM", "CHOICES"])
def _split_gemm(x_ptr, x_scale_ptr, w_ptr, s_ptr, y_ptr, order_ptr, start_ptr, tile_ptr, first_ptr, beta, linear,
                NUM, CHOICES, ROWS, stride, K: tl.constexpr, ACT: tl.constexpr, SITU: tl.constexpr, TT: tl.constexpr,
                OUT: tl.constexpr, BLOCKS: tl.constexpr, DEEP: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """One tile of up to TT rows of an expert times OUT rows of its W. The products are transposed, acc[out, row].

    x [., K / 32, 2, 32], its scale [.]; w int32 [E, ROWS, K / 8]; s uint8 [E, ROWS, K / 32]; order [n]: sorted row ->
    token * CHOICES + choice; start [E + 1]: an expert's first sorted row; tile [tiles]: tile -> expert, NUM if unused;
    first [E]: an expert's first tile. ACT (GEMM 1): x rows are tokens, y [n, stride] gets sorted rows, activated; else
    x rows are sorted and y rows are order's.
    """
    per_tile = tl.cdiv(ROWS, OUT)
    tile, part = tl.program_id(0) // per_tile, tl.program_id(0) % per_tile
    expert = tl.load(tile_ptr + tile)
    if expert >= NUM:
        return
    row0 = tl.load(start_ptr + expert) + (tile - tl.load(first_ptr + expert)) * TT
    end = tl.load(start_ptr + expert + 1)
    column, k = tl.arange(0, TT if DEEP else 2 * TT), tl.arange(0, 64 if DEEP else 32)[:, None]
    if not DEEP:  # a row's two parts are neighbours
        k, column = k + column % 2 * 32, column // 2
    row = row0 + column
    real = row < end
    source = tl.load(order_ptr + row, real, other=0) // CHOICES if ACT else row
    x_at = x_ptr + source.to(tl.int64)[None, :] * (2 * K) + k

    r = tl.arange(0, OUT)
    if ACT:  # eight gate rows, eight up rows, and so on: both of a column in one thread
        out = part * (OUT // 2) + tl.arange(0, OUT // 2)
        row_w = part * (OUT // 2) + r // 16 * 8 + r % 8
        row_w = tl.where(row_w < ROWS // 2, row_w + r // 8 % 2 * (ROWS // 2), 0)
    else:
        out = part * OUT + r
        row_w = tl.where(out < ROWS, out, 0)
    row_w += expert.to(tl.int64) * ROWS
    w_at, s_at = w_ptr + row_w[:, None] * (K // 8) + tl.arange(0, 16)[None, :], s_ptr + row_w * (K // 32)

    acc = tl.zeros((OUT, TT if DEEP else 2 * TT), tl.float32)
    for g in tl.range(0, K // 32, 4 * BLOCKS, num_stages=STAGES):
        for block in tl.static_range(BLOCKS):
            acc = _block(acc, w_at, s_at, x_at, real, g + 4 * block, K)

    row = row0 + tl.arange(0, TT)
    real = row < end
    place = tl.load(order_ptr + row, real, other=0)
    acc = acc if DEEP else tl.sum(acc.reshape(OUT, TT, 2), 2)
    acc *= 64 * tl.load(x_scale_ptr + (place // CHOICES if ACT else row), real, other=0.0)[None, :]
    if ACT:
        a, u = acc.reshape(OUT // 16, 2, 8, TT).permute(0, 2, 3, 1).split()
        acc, place = gated(a, u, beta, linear, SITU).reshape(OUT // 2, TT), row
    y = y_ptr + place.to(tl.int64)[None, :] * stride + out[:, None]
    tl.store(y, acc.to(y_ptr.dtype.element_ty), real[None, :] & (out < stride)[:, None])


def split(x):
    """x [n, width] bf16 -> its parts [n, width / 32, 2, 32] e4m3 and the rows' scales [n] float32."""
    n, width = x.shape
    out = x.new_empty(n, width // 32, 2, 32, dtype=torch.float8_e4m3fn)
    scale = x.new_empty(n, dtype=torch.float32)
    _split_kernel[(n,)](x, out, scale, x.stride(0), width, triton.next_power_of_2(width))
    return out, scale


def split_why_not(z, ids, weights, experts, cfg):
    if z.dtype != torch.bfloat16:
        return f"{z.dtype}: two FP8 numbers have the bits of a bfloat16"
    return no_fp8(z) or why_not(z, ids, weights, experts, cfg)


def too_many(N, cfg):
    """Whether N tokens are so many that arithmetic is the bound: moe_grouped.py has them."""
    return N * cfg.num_experts_per_token > MOST * cfg.num_experts


@kernels.implement("experts", "triton_split", split_why_not)
def experts_split(z, ids, weights, experts, cfg, settings=None):
    """z [N, L] bf16, ids [N, k] int64, weights [N, k] float32 -> [N, L]. settings: as from `config`."""
    (N, L), k, num = z.shape, ids.shape[1], cfg.num_experts
    settings = settings or config(N * k / num)
    order, start, tile, first = (tiles_of_few if N * k <= 4096 else tiles)(ids, num, settings["TT"])
    act, y = z.new_empty(N * k, experts.inner), z.new_empty(N * k, L)
    beta, linear = cfg.activation_situ_beta, cfg.activation_situ_linear_beta

    def gemm(x, name, out):
        K, act = x.shape[1], name == "w13"
        w, s = getattr(experts, f"{name}_packed"), getattr(experts, f"{name}_scale")
        blocks = settings["BLOCKS"] if K % (128 * settings["BLOCKS"]) == 0 else 1
        _split_gemm[(len(tile) * triton.cdiv(w.shape[1], settings["OUT"]),)](
            *split(x), w.view(torch.int32), s, out, order, start, tile, first,
            beta or 1.0, linear or 1.0, num, k, w.shape[1], out.shape[1], K, act, cfg.hidden_act != "silu",
            **settings | dict(BLOCKS=blocks),
        )  # fmt: skip

    gemm(z if z.stride(1) == 1 else z.contiguous(), "w13", act)
    gemm(act, "w2", y)
    out = torch.empty_like(z, memory_format=torch.contiguous_format)
    combine(y, weights, out)
    return out
