"""Triton kernels of Kimi Delta Attention (formulas: kda.py, `kda_chunked`; Kimi Linear report, arXiv 2510.26692).

`kda_prefill`: sequences of any lengths, cut into chunks of 64 tokens. What does not need the state is done
for all chunks at once, and only a few products per chunk remain for the ordered part:

    prepare   grid chunks x heads    conv, SiLU, l2norm, gates; beta k e^G, q e^G, k e^{G_C - G}, A, P, e^{G_C}
    values    grid chunks x heads    conv, SiLU; beta v                  (both: kda_chunks.py)
    inverse   grid chunks x heads    T = (I + A)^-1                      (kda_inverse.py)
    scan      grid texts x heads     U = T (beta v - beta (k e^G) S),  o = (q e^G) S + P U,
                                     S = e^{G_C} S + (k e^{G_C - G})^T U: the state stays in registers
    norm      grid tokens x heads    RMSNorm(o) * sigmoid(gate)

A NaN in a token comes out there and in all that follows, and may in the tokens before it in its chunk: products with
zeros stand for what they do not see. It reaches no other chunk before it, and no other text.

Few long texts leave most of a GPU idle in the scan. Then a text is cut into groups of chunks, a group being a linear
map S -> M S + N: all maps at once (the scan itself, from S = I without v and from S = 0), one ordered pass over the
groups (`carry`), and the scan of all groups at once from the states they are entered with.
"""

import torch
import triton
import triton.language as tl

import kernels
from kernels.kda_chunks import _fine, _prepare_kernel, _round, _sigmoid, _values_kernel
from kernels.kda_inverse import _inverse_kernel
from kernels.launch import registers

CHUNK = 64  # tokens; the kernels cut it into 4 blocks of 16
TAPS = 4
SMS = 132  # the scan is cut into groups where it has far fewer programs than this


PREPARE = dict(num_warps=8, num_stages=1, **registers(128))
PREPARE_WIDE = dict(num_warps=8, num_stages=1)  # float32
VALUES = dict(num_warps=4, num_stages=1)
INVERSE = dict(num_warps=1, **registers(168))
SCAN = dict(num_warps=8, STAGES=3, TILE=128)  # value channels of one program
SCAN_GROUPS = dict(num_warps=4, STAGES=3, TILE=64)  # many programs: smaller ones fill the card more evenly
SCAN_WIDE = dict(num_warps=8, STAGES=1, TILE=128)
CARRY = dict(num_warps=8, num_stages=2)
# Products of float32 as six of bfloat16 parts: exact to 2^-24, on tensor cores. As FMAs ("ieee") they spill registers.
WIDE_PRECISION = "ieee" if kernels.interpreted() else "bf16x6"
SOLVE_PRECISION = "ieee" if kernels.interpreted() else "bf16x3"  # to 2^-16, below the rounding of T and S to 16 bits


@triton.jit
def _group(table, chains, groups, length):
    """This program's chunks [first, end), and the first sequence of their text."""
    group = tl.program_id(2)
    begin, end = tl.load(chains + group // groups), tl.load(chains + group // groups + 1)
    first = tl.minimum(begin + group % groups * length, end)
    return first, tl.minimum(first + length, end), tl.load(table + begin * 4 + 2)


@triton.jit
def _page_state(S, src, past, seq, at, SRC: tl.constexpr, PAGE: tl.constexpr):
    """The state that a text starts from, zero where it has no past."""
    page = tl.load(src + seq * SRC)
    return tl.load(S + page * PAGE + at, mask=(tl.load(past + seq) > 0) & (page >= 0) & (at >= 0), other=0.0)


@triton.jit(do_not_specialize=["groups", "length"])
def _scan_kernel(
    scratch, decay, out, S, conv, windows, states, src, dst, past, table, chains, groups, length,
    SRC: tl.constexpr, DST: tl.constexpr, PAGE: tl.constexpr, CONV: tl.constexpr, TAP: tl.constexpr,
    HEADS: tl.constexpr, D: tl.constexpr, MODE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """MODE "pages": whole texts; "maps": groups, as maps; "entered": groups, from the states they are entered with.

    All is transposed, S^T [d_v, d_k]: then the state and U are left operands, and stay in registers between products.
    """
    tile, h = tl.program_id(0), tl.program_id(1)
    dtype: tl.constexpr = scratch.dtype.element_ty
    HD: tl.constexpr = HEADS * D
    first, end, seq = _group(table, chains, groups, length)
    head = h.to(tl.int64)
    i, ch = tl.arange(0, 64), tl.arange(0, D)
    lone = tile * TILE < D  # "maps" has two sets of tiles: N, from a zero state, and M, from the identity without u
    v = tile % (D // TILE) * TILE + tl.arange(0, TILE)
    states += (tl.program_id(2).to(tl.int64) * HEADS + h) * 3 * D * D + v[:, None] * D + ch
    at = h * D * D + ch * D + v[:, None]  # of a page
    if MODE == "pages":
        state = _page_state(S, src, past, seq, at, SRC, PAGE)
    elif MODE == "entered":
        state = tl.load(states + 2 * D * D)
    else:
        state = tl.where((v[:, None] == ch) & (tile * TILE >= D), 1.0, 0.0)

    SIZE: tl.constexpr = 4 * 64 * D + 2 * 64 * 64
    values = scratch + head * SIZE + 3 * 64 * D + v[:, None] * 64 + i
    value = tl.load(values + tl.minimum(first, end - 1).to(tl.int64) * (HEADS * SIZE))
    for chunk in tl.range(first, end, num_stages=STAGES):
        index = chunk * HEADS + head
        this = scratch + index * SIZE
        # A load ahead in registers: shared memory has no room for three stages of everything.
        beta_v, value = value, tl.load(values + tl.minimum(chunk + 1, end - 1).to(tl.int64) * (HEADS * SIZE))
        w = tl.load(this + i[:, None] * D + ch)
        k = tl.load(_fine(this + 2 * 64 * D) + i[:, None] * D + ch)
        T = tl.load(_fine(this + 4 * 64 * D + 64 * 64) + i[:, None] * 64 + i)
        if MODE == "maps":
            beta_v = tl.where(lone, beta_v, 0.0)
        kept = tl.load(decay + index * D + ch)
        left = state.to(dtype)
        error = _round(tl.dot(left, tl.trans(w), acc=beta_v.to(tl.float32), input_precision=PRECISION), dtype)
        U = _round(tl.dot(error, tl.trans(T), input_precision=PRECISION), dtype)
        if MODE != "maps":
            row, rows = tl.load(table + chunk * 4).to(tl.int64), tl.load(table + chunk * 4 + 1)
            q = tl.load(this + 64 * D + i[:, None] * D + ch)
            P = tl.load(_fine(this + 4 * 64 * D) + i[:, None] * 64 + i)
            o = tl.dot(left, tl.trans(q), input_precision=PRECISION)
            o = tl.dot(U, tl.trans(P), acc=o, input_precision=PRECISION)
        state = tl.dot(U, k, acc=state * kept, input_precision=PRECISION)
        if MODE != "maps":
            tl.store(out + (row + i[:, None]) * HD + h * D + v, tl.trans(o.to(dtype)), mask=(i < rows)[:, None])
            if tl.load(table + chunk * 4 + 3) != 0:
                seq = tl.load(table + chunk * 4 + 2)
                page = tl.load(dst + seq * DST)
                tl.store(S + page * PAGE + at, state, mask=(page >= 0) & (at >= 0))
                if tile == 0:
                    m = tl.arange(0, 4)[:, None]
                    for x in tl.static_range(3):
                        window = tl.load(
                            windows + (seq.to(tl.int64) * 3 + m) * 3 * HD + x * HD + h * D + ch, mask=m < 3
                        )
                        tl.store(conv + page * CONV + m * TAP + x * HD + h * D + ch, window, mask=(m < 3) & (page >= 0))
    if MODE == "maps":
        tl.store(states + tl.where(lone, 0, D * D), state)


@triton.jit(do_not_specialize=["groups", "length"])
def _carry_kernel(
    states, S, src, past, table, chains, groups, length,
    SRC: tl.constexpr, PAGE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The states that a text's groups are entered with, from their maps: S^T = S^T M^T + N^T, in float32."""
    h, text = tl.program_id(1), tl.program_id(2)
    v, ch = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, D)
    begin, end = tl.load(chains + text), tl.load(chains + text + 1)
    at = h * D * D + ch * D + v[:, None]
    state = _page_state(S, src, past, tl.load(table + begin * 4 + 2), at, SRC, PAGE)
    states += (text * groups.to(tl.int64) * HEADS + h) * 3 * D * D
    for _ in range(tl.cdiv(end - begin, length)):
        tl.store(states + 2 * D * D + v[:, None] * D + ch, state)
        M = tl.load(states + D * D + ch[:, None] * D + ch)
        state = tl.dot(state, M, acc=tl.load(states + v[:, None] * D + ch), input_precision=PRECISION)
        states += HEADS * 3 * D * D


@triton.jit(do_not_specialize=["N"])
def _norm_kernel(
    out, gate, o_norm, N, eps, GATE_ROW: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr
):
    """RMSNorm(o) * sigmoid(gate) in place: several programs of the scan made a head."""
    row, ch = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, D)
    at, real = tl.program_id(0) * D + ch, row < N
    o = tl.load(out + row * HEADS * D + at, mask=real, other=0.0).to(tl.float32)
    z = tl.load(gate + row * GATE_ROW + at, mask=real, other=0.0).to(tl.float32)
    o *= tl.rsqrt(tl.sum(o * o, 1) / D + eps)[:, None] * tl.load(o_norm + ch)
    tl.store(out + row * HEADS * D + at, (o * _sigmoid(z)).to(out.dtype.element_ty), mask=real)


def groups_of(texts, heads, chunks):
    """-> chunks per group and groups per text, for texts of at most so many chunks; 1 group: one pass is faster."""
    groups = min(SMS // (texts * heads), chunks // 32)
    length = -(-chunks // groups) if groups > 3 else chunks
    return length, -(-chunks // length)


def why_not(qkv, gate, r, b, w, S, conv, src, dst, part):
    d, inputs = S.shape[-1], (qkv, gate, r, b, conv)
    if qkv.dtype not in (torch.float32, torch.bfloat16) or any(t.dtype != qkv.dtype for t in inputs):
        return f"its kernels take inputs in float32 or bfloat16, not {', '.join(str(t.dtype) for t in inputs)}"
    if S.dtype != torch.float32 or d not in (32, 64, 128):
        return f"its kernels take float32 states and head_dim 32, 64 or 128, not {S.dtype} and {d}"
    if w.conv.shape[1] != TAPS:
        return f"its kernels have {TAPS} conv taps, not {w.conv.shape[1]}"
    if any(t.stride(-1) != 1 for t in inputs) or S.stride()[1:] != (d * d, d, 1):
        return "rows and states must be contiguous"
    return None


@kernels.implement("kda_prefill", "triton", why_not)
def kda_prefill(qkv, gate, r, b, w, S, conv, src, dst, part):
    (N, HD), heads, d = gate.shape, S.shape[1], S.shape[-1]
    table, chains = part.chunks(CHUNK)
    chunks, texts, new = len(table), len(chains) - 1, qkv.new_empty
    scratch, out = new(chunks, heads, 4 * CHUNK * d + 2 * CHUNK * CHUNK), new(N, HD)
    pairs = new(chunks, heads, CHUNK, CHUNK, dtype=torch.float32)
    windows = new(len(part.lengths), TAPS - 1, 3 * HD)
    decay = new(chunks, heads, d, dtype=torch.float32)
    wide = qkv.dtype == torch.float32
    exact = wide or not w.lower_bound or w.lower_bound < -5  # float32 keeps its digits only without splits
    gate_kind = "free" if not w.lower_bound else "deep" if exact else "bounded"
    precision, solve = (WIDE_PRECISION, WIDE_PRECISION) if wide else ("ieee", SOLVE_PRECISION)
    taps = w.conv.t().contiguous()  # neighbouring channels of a tap
    _prepare_kernel[heads, chunks](
        qkv, r, b, taps, w.A_log, w.dt_bias, conv, src, part.past, table, chains, scratch, pairs, decay, windows,
        texts, w.lower_bound or 0.0,
        qkv.stride(0), r.stride(0), b.stride(0), src.stride(0), conv.stride(0), conv.stride(1),
        heads, d, gate_kind, precision, **(PREPARE_WIDE if wide else PREPARE),
    )  # fmt: skip
    _values_kernel[heads, chunks](
        qkv, b, taps, conv, src, part.past, table, chains, scratch, texts,
        qkv.stride(0), b.stride(0), src.stride(0), conv.stride(0), conv.stride(1), heads, d, **VALUES,
    )  # fmt: skip
    _inverse_kernel[heads, chunks](pairs, scratch, heads, d, solve, **INVERSE)
    length, groups = groups_of(texts, heads, _longest(part))
    launch = SCAN_WIDE if wide else SCAN_GROUPS if groups > 1 else SCAN
    launch = launch | dict(TILE=min(d, launch["TILE"]))

    def scan(mode, tiles):
        _scan_kernel[tiles, heads, texts * groups](
            scratch, decay, out, S, conv, windows, states, src, dst, part.past, table, chains, groups, length,
            src.stride(0), dst.stride(0), S.stride(0), conv.stride(0), conv.stride(1),
            heads, d, mode, precision, **launch,
        )  # fmt: skip

    states = new(texts * groups if groups > 1 else 0, heads, 3, d, d, dtype=torch.float32)
    if groups > 1:
        scan("maps", 2 * d // launch["TILE"])
        _carry_kernel[d // 32, heads, texts](
            states, S, src, part.past, table, chains, groups, length, src.stride(0), S.stride(0), heads, d, 32,
            solve, **CARRY,
        )  # fmt: skip
    scan("entered" if groups > 1 else "pages", d // launch["TILE"])
    _norm_kernel[heads, triton.cdiv(N, 32)](out, gate, w.o_norm, N, w.eps, gate.stride(0), heads, d, 32)
    return out


def _longest(part):
    """Chunks of the longest text."""
    longest = chunks = 0
    for length, follows in zip(part.lengths, part.follows):
        chunks = (chunks if follows else 0) - -length // CHUNK
        longest = max(longest, chunks)
    return longest
