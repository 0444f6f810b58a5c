"""The routed experts for many tokens: two grouped GEMMs over MXFP4 weights that are unpacked in registers.

    sort      (token, choice) rows by expert; a tile is up to TT + REST rows of one expert
    GEMM 1    z W13 and SiTU, into `act`, rows in sorted order
    GEMM 2    act W2, each row to its (token, choice) place
    combine   the weighted sum over the k choices in float32, in a fixed order

Nothing waits for the host: tiles are laid out on the device and the grid is their upper bound. The products are
transposed, acc[out, token] = W x^T, because Hopper's tensor cores take the left operand from registers, where the
weights are unpacked, and only the right one from shared memory.

A 32-bit word holds 8 inputs of a row. Plane j is what one mask picks from it: inputs j and j + 4 in bf16 (two 16-bit
halves), inputs j, j + 2, j + 4 and j + 6 in FP8 (four bytes). x is stored in the order in which the planes of 128
inputs leave the masks (`_columns`), so no nibble ever crosses a thread. Scales are taken relative to the largest of
their row, which is applied in float32 at the end: no power of two overflows on the way, and unpacking is exact.

W4A8 (`triton_w4a8`) also rounds the activations of both GEMMs to e4m3 with a scale per row; the weights stay exact
where a scale is within 2^11 of its row's largest, and are 0 below. It is lossy and runs only when asked for by name.
"""

import torch
import triton
import triton.language as tl

import kernels
from kernels.gated_act import gated

INTERPRETED = tl.constexpr(kernels.interpreted())


def config(rows, experts, fp8, dtype=torch.bfloat16):
    """Rows of a tile TT and REST, rows of W a program OUT, inputs a step BK, warps, stages; by rows per expert."""
    mean = rows / experts
    if dtype == torch.float32 and not fp8:  # no tensor cores: small tiles, for correctness only
        return _settings(16, 0, 64, 4, 2)
    if mean <= 12:
        return _settings(16, 0, 128, 4, 3)
    if mean <= 24:
        return _settings(32, 0, 128, 4, 4)
    if mean <= 48:
        return _settings(64, 0, 64, 4, 3) if fp8 else _settings(64, 0, 128, 8, 3)
    if mean <= 96:
        return _settings(64, 32, 64, 4, 3) if fp8 else _settings(64, 32, 128, 8, 3)
    return _settings(128, 32, 64, 4, 3) if fp8 else _settings(128, 32, 128, 8, 4)


def _settings(TT, REST, OUT, num_warps, num_stages):
    return dict(TT=TT, REST=REST, OUT=OUT, BK=128, num_warps=num_warps, num_stages=num_stages)


@triton.jit
def _power(e):
    """e int32 in -252 .. 252 -> 2^e in float32, as two factors that are normal numbers."""
    half = e >> 1
    return ((half + 127) << 23).to(tl.float32, bitcast=True), ((e - half + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _plane_bf16(w, exponent, j: tl.constexpr):
    """Words w [OUT, W], exponent int32 [OUT, W] in 0 .. 254 -> plane j [OUT, 2 W]: value * 2^(exponent - 253).

    The code's magnitude bits are a bf16 of 2^-126 times its value (a subnormal for 0.5); the product is exact.
    """
    magnitude = w << (6 - 4 * j) if j < 2 else w >> (4 * j - 6)
    pair = ((w << (12 - 4 * j)) & -0x7FFF8000) | (magnitude & 0x01C001C0)
    power = (exponent << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
    high = (pair >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True) * power  # in this order ptxas pairs the products
    low = pair.to(tl.int16).to(tl.bfloat16, bitcast=True) * power
    return tl.join(low, high).reshape(w.shape[0], 2 * w.shape[1])


@triton.jit
def _plane_f32(w, exponent, j: tl.constexpr):
    """The same in float32: for float32 models, and for the interpreter, which has no arithmetic in bf16."""
    power = (exponent << 23).to(tl.float32, bitcast=True)
    low, high = w >> (4 * j), w >> (4 * j + 16)
    low = (((low & 8) << 28) | ((low & 7) << 22)).to(tl.float32, bitcast=True) * power
    high = (((high & 8) << 28) | ((high & 7) << 22)).to(tl.float32, bitcast=True) * power
    return tl.join(low, high).reshape(w.shape[0], 2 * w.shape[1])


@triton.jit
def _bytes(w):
    """int32 [R, W] -> their bytes as e4m3 [R, 4 W]."""
    even = tl.join(w.to(tl.uint8), (w >> 16).to(tl.uint8))
    odd = tl.join((w >> 8).to(tl.uint8), (w >> 24).to(tl.uint8))
    return tl.join(even, odd).reshape(w.shape[0], 4 * w.shape[1]).to(tl.float8e4nv, bitcast=True)


@triton.jit
def _plane_fp8(w, shift, j: tl.constexpr):
    """Words w [OUT, W], shift int32 [OUT, W] at most 12 -> plane j [OUT, 4 W] in e4m3: value * 2^(shift - 6).

    Four codes at once. A code from 2 on is normal, and its exponent grows by the shift; code 1 (0.5) becomes the power
    of two 2^(shift - 7); code 0 stays 0.
    """
    code = (w >> (4 * j)) & 0x07070707
    nonzero = (code + 0x07070707) & 0x08080808
    normal = (code + 0x06060606) & 0x08080808
    magnitude = nonzero * shift + (code << 2) - ((nonzero - normal) >> 1)
    four = tl.where(shift > 0, magnitude, 0) | ((w << (4 - 4 * j)) & -0x7F7F7F80)
    return _bytes(four)


@triton.jit
def _unpack(w, power, DTYPE: tl.constexpr):
    """Words w [OUT, W] and the power of two of each -> [OUT, 8 W], in each block plane after plane."""
    if DTYPE == tl.float8e4nv:
        planes = tl.join(_plane_fp8(w, power, 0), _plane_fp8(w, power, 1))
        planes = planes.reshape(w.shape[0], w.shape[1] // 16, 64, 2).permute(0, 1, 3, 2)
    else:
        if INTERPRETED or DTYPE == tl.float32:
            even = tl.join(_plane_f32(w, power, 0), _plane_f32(w, power, 2))
            odd = tl.join(_plane_f32(w, power, 1), _plane_f32(w, power, 3))
        else:
            even = tl.join(_plane_bf16(w, power, 0), _plane_bf16(w, power, 2))
            odd = tl.join(_plane_bf16(w, power, 1), _plane_bf16(w, power, 3))
        planes = tl.join(even, odd).to(DTYPE)
        planes = planes.reshape(w.shape[0], w.shape[1] // 16, 32, 2, 2).permute(0, 1, 3, 4, 2)
    return planes.reshape(w.shape[0], 8 * w.shape[1])


@triton.jit
def _dot(a, x, acc):
    if INTERPRETED:  # which multiplies the bit patterns of bf16
        a, x = a.to(tl.float32), x.to(tl.float32)
    return tl.dot(a, x, acc, input_precision="ieee", out_dtype=tl.float32)


@triton.jit
def _columns(p, PLANES: tl.constexpr):
    """Position p in a row stored plane by plane in blocks of 128 -> the column it holds. PLANES 1: the same."""
    SIZE: tl.constexpr = 128 // PLANES
    IN_WORD: tl.constexpr = 8 // PLANES
    v = p % SIZE // IN_WORD
    word = v % 4 * 4 + v // 4  # each of four threads unpacks four words in a row: one group of 32, with one scale
    column = word * 8 + p % IN_WORD * PLANES + p % 128 // SIZE
    return p // 128 * 128 + column if PLANES > 1 else p


@triton.jit
def _planes_kernel(x_ptr, out_ptr, scale_ptr, WIDTH, PADDED, PLANES: tl.constexpr, FP8: tl.constexpr,
                   SIZE: tl.constexpr):  # fmt: skip
    """A row of x [n, WIDTH] -> out [n, PADDED] plane by plane, zeros behind it; in FP8 e4m3 and its scale [n]."""
    row = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, SIZE)
    column = _columns(p, PLANES)
    x = tl.load(x_ptr + row * WIDTH + column, (p < PADDED) & (column < WIDTH), other=0.0)
    if FP8:
        largest = tl.max(tl.abs(x.to(tl.float32)))
        scale = tl.where(largest > 0, largest, 448.0) / 448.0
        tl.store(scale_ptr + row, scale)
        x = x.to(tl.float32) / scale
    tl.store(out_ptr + row * PADDED + p, x.to(out_ptr.dtype.element_ty), p < PADDED)


@triton.jit
def _finish(acc, high, low, x_scale_ptr, source, row, real, out, order_ptr, y_ptr, stride, inner, beta, linear,
            SITU: tl.constexpr, ACT: tl.constexpr, FP8: tl.constexpr, NEXT: tl.constexpr):  # fmt: skip
    """acc [OUT, TT] times the scales; ACT: gate and up rows combined; written to y."""
    acc = acc * high[:, None] * low[:, None]
    if FP8:
        acc = acc * tl.load(x_scale_ptr + source, real, other=0.0)[None, :]
    place = row
    if ACT:  # eight gate rows, eight up rows, and so on: both in one thread
        a, u = acc.reshape(acc.shape[0] // 16, 2, 8, acc.shape[1]).permute(0, 2, 3, 1).split()
        acc = gated(a, u, beta, linear, SITU).reshape(out.shape[0], row.shape[0])
        acc = tl.where((_columns(out, NEXT) < inner)[:, None], acc, 0.0)
    else:
        place = tl.load(order_ptr + row, real, other=0)
    y = y_ptr + place.to(tl.int64)[None, :] * stride + out[:, None]
    tl.store(y, acc.to(y_ptr.dtype.element_ty), real[None, :] & (out < stride)[:, None])


@triton.jit
def _rows(x_ptr, order_ptr, row, end, CHOICES, PADDED: tl.constexpr, ACT: tl.constexpr, BK: tl.constexpr):
    """For sorted rows: which are real, the rows of x that they take, and where those begin, [BK, rows]."""
    real, source = row < end, row
    if ACT:
        source = tl.load(order_ptr + row, real, other=0) // CHOICES
    return real, source, x_ptr + tl.arange(0, BK)[:, None] + source.to(tl.int64)[None, :] * PADDED


@triton.jit
def _tile(x_ptr, x_scale_ptr, w_at, s_at, largest, row0, end, out, order_ptr, y_ptr, stride, inner, beta, linear,
          CHOICES, K: tl.constexpr, PADDED: tl.constexpr, ACT: tl.constexpr, SITU: tl.constexpr, FP8: tl.constexpr,
          NEXT: tl.constexpr, TT: tl.constexpr, REST: tl.constexpr, OUT: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """TT + REST rows from row0 on (those before end are real); the weights are unpacked once for both products."""
    row_0 = row0 + tl.arange(0, TT)
    real_0, from_0, x_0 = _rows(x_ptr, order_ptr, row_0, end, CHOICES, PADDED, ACT, BK)
    acc_0 = tl.zeros((OUT, TT), tl.float32)
    if REST > 0:
        row_1 = row0 + TT + tl.arange(0, REST)
        real_1, from_1, x_1 = _rows(x_ptr, order_ptr, row_1, end, CHOICES, PADDED, ACT, BK)
        acc_1 = tl.zeros((OUT, REST), tl.float32)
    words = tl.arange(0, BK // 8)[None, :]
    groups = tl.arange(0, BK // 128)[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    base = (12 if FP8 else 254) - largest[:, None, None]

    for k in range(0, K, BK):
        if K % BK == 0:
            w, s = tl.load(w_at + k // 8), (tl.load(s_at + k // 128) >> (groups % 4 * 8)) & 255
        else:
            w = tl.load(w_at + k // 8, words < (K - k) // 8, other=0)
            s = tl.load(s_at + k // 32, groups < (K - k) // 32, other=0).to(tl.int32)
        w = w.reshape(OUT, BK // 128, 4, 4).permute(0, 1, 3, 2).reshape(OUT, BK // 8)
        power = tl.broadcast_to((base + s)[:, :, None, :], (OUT, BK // 128, 4, 4)).reshape(OUT, BK // 8)
        a = _unpack(w, power, x_ptr.dtype.element_ty)
        acc_0 = _dot(a, tl.load(x_0 + k, real_0[None, :], other=0.0), acc_0)
        if REST > 0:
            acc_1 = _dot(a, tl.load(x_1 + k, real_1[None, :], other=0.0), acc_1)

    high, low = _power(largest - (133 if FP8 else 128))
    _finish(acc_0, high, low, x_scale_ptr, from_0, row_0, real_0, out, order_ptr, y_ptr, stride, inner, beta, linear,
            SITU, ACT, FP8, NEXT)  # fmt: skip
    if REST > 0:
        _finish(acc_1, high, low, x_scale_ptr, from_1, row_1, real_1, out, order_ptr, y_ptr, stride, inner, beta,
                linear, SITU, ACT, FP8, NEXT)  # fmt: skip


@triton.jit(do_not_specialize=["NUM", "CHOICES"])
def _grouped_kernel(x_ptr, x_scale_ptr, w_ptr, s_ptr, y_ptr, order_ptr, start_ptr, tile_ptr, first_ptr, beta, linear,
                    NUM, CHOICES, ROWS, stride, K: tl.constexpr, PADDED: tl.constexpr, ACT: tl.constexpr,
                    SITU: tl.constexpr, FP8: tl.constexpr, NEXT: tl.constexpr, TT: tl.constexpr, REST: tl.constexpr,
                    OUT: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """One tile of up to TT + REST rows of an expert times OUT rows of its W.

    x [., PADDED] plane by plane; w int32 [E, ROWS, K / 8]; s uint8 [E, ROWS, K / 32]; order [n]: sorted row -> token *
    CHOICES + choice; start [E + 1]: an expert's first sorted row; tile [tiles]: tile -> expert, NUM if unused; first
    [E]: an expert's first tile. ACT (GEMM 1): x rows are tokens, y [n, stride] gets sorted rows, NEXT planes; else x
    rows are sorted and y rows are order's.
    """
    per_tile = tl.cdiv(2 * stride if ACT else ROWS, OUT)
    tile, part = tl.program_id(0) // per_tile, tl.program_id(0) % per_tile
    expert = tl.load(tile_ptr + tile)
    if expert >= NUM:
        return
    row0 = tl.load(start_ptr + expert) + (tile - tl.load(first_ptr + expert)) * (TT + REST)
    end = tl.load(start_ptr + expert + 1)

    r = tl.arange(0, OUT)  # the rows of W, and in y the columns of their outputs
    if ACT:
        out = part * (OUT // 2) + tl.arange(0, OUT // 2)
        column = _columns(part * (OUT // 2) + r // 16 * 8 + r % 8, NEXT)
        row_w = tl.where(column < ROWS // 2, column + r // 8 % 2 * (ROWS // 2), 0)
    else:
        out = part * OUT + r
        row_w = tl.where(out < ROWS, out, 0)
    row_w = expert.to(tl.int64) * ROWS + row_w
    groups = tl.arange(0, triton.next_power_of_2(K // 32))[None, :]
    largest = tl.load(s_ptr + row_w[:, None] * (K // 32) + groups, groups < K // 32, other=0)
    largest = tl.max(largest.to(tl.int32), 1)

    w_at = w_ptr + row_w[:, None] * (K // 8) + tl.arange(0, BK // 8)[None, :]
    block, lane = tl.arange(0, BK // 128)[None, :, None], tl.arange(0, 4)[None, None, :]
    if K % BK == 0:  # the four scales of a block as a word, read by each of four threads: copies have 4 bytes at least
        s_at = s_ptr.to(tl.pointer_type(tl.int32)) + row_w[:, None, None] * (K // 128) + block + 0 * lane
    else:
        s_at = s_ptr + row_w[:, None, None] * (K // 32) + block * 4 + lane
    if REST > 0 and end - row0 <= REST:
        _tile(x_ptr, x_scale_ptr, w_at, s_at, largest, row0, end, out, order_ptr, y_ptr, stride, ROWS // 2, beta,
              linear, CHOICES, K, PADDED, ACT, SITU, FP8, NEXT, REST, 0, OUT, BK)  # fmt: skip
    elif REST > 0 and end - row0 > TT:
        _tile(x_ptr, x_scale_ptr, w_at, s_at, largest, row0, end, out, order_ptr, y_ptr, stride, ROWS // 2, beta,
              linear, CHOICES, K, PADDED, ACT, SITU, FP8, NEXT, TT, REST, OUT, BK)  # fmt: skip
    else:
        _tile(x_ptr, x_scale_ptr, w_at, s_at, largest, row0, end, out, order_ptr, y_ptr, stride, ROWS // 2, beta,
              linear, CHOICES, K, PADDED, ACT, SITU, FP8, NEXT, TT, 0, OUT, BK)  # fmt: skip


@triton.jit
def _combine_kernel(y_ptr, weight_ptr, out_ptr, WIDTH, CHOICES: tl.constexpr, SIZE: tl.constexpr):
    """y [N * CHOICES, WIDTH], weight [N, CHOICES] -> out [N, WIDTH], summed in float32 in the order of the choices."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    acc = tl.zeros((SIZE,), tl.float32)
    for c in tl.static_range(CHOICES):
        y = tl.load(y_ptr + (token * CHOICES + c) * WIDTH + column, column < WIDTH, other=0.0)
        y = y.to(tl.float32)
        if weight_ptr is not None:
            y *= tl.load(weight_ptr + token * CHOICES + c).to(tl.float32)
        acc += y
    tl.store(out_ptr + token * WIDTH + column, acc.to(out_ptr.dtype.element_ty), column < WIDTH)


def combine(y, weights, out):
    """y [N k, L], the choices' outputs; weights [N, k], or None where y is weighted -> out [N, L]: their sum."""
    (N, L), k = out.shape, len(y) // len(out)
    _combine_kernel[N, triton.cdiv(L, 1024)](y, None if weights is None else weights.contiguous(), out, L, k, 1024)


def _planes(x, planes, fp8):
    """x [n, width] -> [n, width padded to 256] plane by plane, and the scale of each row in FP8 (else unused)."""
    n, width = x.shape
    out = x.new_empty(n, _padded(width), dtype=torch.float8_e4m3fn if fp8 else x.dtype)
    scale = x.new_empty(n if fp8 else 1, dtype=torch.float32)
    _planes_kernel[(n,)](x, out, scale, width, out.shape[1], planes, fp8, triton.next_power_of_2(out.shape[1]),
                         num_warps=4)  # fmt: skip
    return out, scale


def _padded(width):
    return -(-width // 256) * 256


def tiles(ids, num, size):
    """ids [N, k] -> order [n], start [num + 1], tile [tiles], first [num]: see `_grouped_kernel`. No host sync."""
    ids, order = ids.flatten().int().sort(stable=True)
    start = torch.searchsorted(ids, torch.arange(num + 1, device=ids.device, dtype=ids.dtype), out_int32=True)
    count = (start.diff() + size - 1) // size
    end = count.cumsum(0, dtype=torch.int32)
    used = min(num, len(ids))  # at most so many experts have a last tile that is not full
    tiles = torch.arange(used + (len(ids) - used) // size, device=ids.device, dtype=torch.int32)
    return order, start, torch.searchsorted(end, tiles, right=True, out_int32=True), end - count


def _grouped(z, ids, weights, experts, cfg, fp8, settings=None):
    (N, L), k, num = z.shape, ids.shape[1], cfg.num_experts
    settings = settings or config(N * k, num, fp8, z.dtype)
    planes, inner = 2 if fp8 else 4, experts.inner
    order, start, tile, first = tiles(ids, num, settings["TT"] + settings["REST"])
    x, scale = _planes(z.contiguous(), planes, fp8)
    act, y = z.new_empty(N * k, _padded(inner)), z.new_empty(N * k, L)

    def gemm(x, scale, name, out, K, act):
        w, s = getattr(experts, f"{name}_packed"), getattr(experts, f"{name}_scale")
        rows = 2 * out.shape[1] if act else L
        beta, linear = cfg.activation_situ_beta, cfg.activation_situ_linear_beta
        _grouped_kernel[(len(tile) * triton.cdiv(rows, settings["OUT"]),)](
            x, scale, w.view(torch.int32), s, out, order, start, tile, first, beta or 1.0, linear or 1.0,
            num, k, w.shape[1], out.shape[1], K, x.shape[1], act, cfg.hidden_act != "silu", fp8, planes, **settings,
        )  # fmt: skip

    gemm(x, scale, "w13", act, L, True)
    act, scale = _planes(act, 1, True) if fp8 else (act, scale)  # already plane by plane
    gemm(act, scale, "w2", y, inner, False)
    out = torch.empty_like(z, memory_format=torch.contiguous_format)
    combine(y, weights, out)
    return out


def why_not(z, ids, weights, experts, cfg):
    if not (experts.is_packed("w13") and experts.is_packed("w2")):
        return "the experts are not packed in MXFP4"
    if z.dtype not in (torch.bfloat16, torch.float32):
        return f"{z.dtype} is neither bfloat16 nor float32"
    return "there are no tokens" if not ids.numel() else None


@kernels.implement("experts", "triton_grouped", why_not)
def experts_grouped(z, ids, weights, experts, cfg, settings=None):
    """z [N, L] bf16 or float32, ids [N, k] int64, weights [N, k] float32 -> [N, L]. settings: as from `config`."""
    return _grouped(z, ids, weights, experts, cfg, False, settings)


@kernels.implement("experts", "triton_w4a8", why_not)
def experts_grouped_fp8(z, ids, weights, experts, cfg, settings=None):
    """The same with activations rounded to FP8."""
    return _grouped(z, ids, weights, experts, cfg, True, settings)
