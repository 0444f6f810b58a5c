"""Triton kernels of Kimi Delta Attention (formulas: kda.py, `kda_chunked`; Kimi Linear report, arXiv 2510.26692).

`kda_prefill`: sequences of any lengths, cut into chunks of 64 tokens. What does not need the state is done
for all chunks at once, and only a few products per chunk remain for the ordered part:

    prepare   grid chunks x heads    conv, SiLU, l2norm, gates; beta k e^G, beta v, q e^G, k e^{G_C - G}, A, P, e^{G_C}
    inverse   grid chunks x heads    T = (I + A)^-1
    scan      grid texts x heads     U = T (beta v - beta (k e^G) S),  o = (q e^G) S + P U,
                                     S = e^{G_C} S + (k e^{G_C - G})^T U: the state stays in registers
    norm      grid tokens x heads    RMSNorm(o) * sigmoid(gate)

Few long texts leave most of a GPU idle in the scan. Then a text is cut into groups of chunks, a group being a linear
map S -> M S + N: all maps at once (the scan itself, from S = I without v and from S = 0), one ordered pass over the
groups (`carry`), and the scan of all groups at once from the states they are entered with.
"""

import torch
import triton
import triton.language as tl

import kernels

CHUNK = 64  # tokens; the kernels cut it into 4 blocks of 16
TAPS = 4
SMS = 132  # the scan is cut into groups where it has far fewer programs than this


def registers(n):
    """A launch's limit of registers per thread, for more programs per SM; only NVIDIA's compiler takes one."""
    return {} if torch.version.hip or kernels.interpreted() else dict(maxnreg=n)


PREPARE = dict(num_warps=8, num_stages=1, **registers(128))
PREPARE_WIDE = dict(num_warps=8, num_stages=1)  # float32
INVERSE = dict(num_warps=1, **registers(168))
SCAN = dict(num_warps=4, STAGES=3, TILE=64)  # value channels of one program
SCAN_WIDE = dict(num_warps=8, STAGES=1, TILE=128)
CARRY = dict(num_warps=8, num_stages=2)
# Products of float32 as six of bfloat16 parts: exact to 2^-24, on tensor cores. As FMAs ("ieee") they spill registers.
WIDE_PRECISION = "ieee" if kernels.interpreted() else "bf16x6"
SOLVE_PRECISION = "ieee" if kernels.interpreted() else "bf16x3"  # to 2^-16, below the rounding of T and S to 16 bits


@triton.jit
def _chain_of(chains, count, chunk):
    """The text that a chunk belongs to: the last i with chains[i] <= chunk."""
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        below = tl.load(chains + middle) <= chunk
        low, high = tl.where(below, middle, low), tl.where(below, high, middle)
    return low


@triton.jit
def _fine(pointer):
    """Where keys are alike, a chunk's corrections U cancel: with bfloat16 inputs, what meets them is float16."""
    if pointer.dtype.element_ty == tl.bfloat16:
        pointer = pointer.to(tl.pointer_type(tl.float16))
    return pointer


@triton.jit
def _narrow(x, dtype: tl.constexpr):
    """x, in the range of float16, for products with `_fine` operands."""
    return x.to(tl.float16) if dtype == tl.bfloat16 else x


@triton.jit
def _round(x, dtype: tl.constexpr):
    """The same of any x, none of which is near the ends of float16 but by a fault."""
    return _narrow(tl.clamp(x, -65504.0, 65504.0) if dtype == tl.bfloat16 else x, dtype)


@triton.jit
def _sigmoid(x):
    """The reciprocal by a root, which has an instruction (2 ulp); a division is several."""
    root = tl.rsqrt(1 + tl.exp2(-1.4426950408889634 * x))
    return root * root


@triton.jit
def _stack(a, b, D: tl.constexpr):
    """[2, 16, D] twice -> [2, 2, 16, D]."""
    return tl.permute(tl.join(a, b), (3, 0, 1, 2))


@triton.jit
def _interleave(x0, x1, x2, x3, D: tl.constexpr):
    """[8, D] each, rows 4 g + m of 32 tokens -> [32, D]: a thread holds neighbouring rows, which makes shifts cheap."""
    return tl.reshape(tl.permute(tl.join(tl.join(x0, x2), tl.join(x1, x3)), (0, 2, 3, 1)), [32, D])


@triton.jit
def _input(x, page, at, rows, text, known, ROW: tl.constexpr, TAP: tl.constexpr, D: tl.constexpr):
    """Raw inputs [len(at), D] at rows `at` of the chunk: of the text, which begins at row `text`, or of its page."""
    row = tl.where(at[:, None] < text, page + (at - text + 3)[:, None] * TAP, x + at[:, None] * ROW)
    there = (at < rows) & ((at >= text) | known)
    return tl.load(row + tl.arange(0, D), mask=there[:, None], other=0.0)


@triton.jit
def _quads(x, half, rows, ROW: tl.constexpr, D: tl.constexpr):
    """Rows 4 g, 4 g + 1, 4 g + 2 and 4 g + 3 of half a chunk, [8, D] each."""
    at = 32 * half + 4 * tl.arange(0, 8)[:, None]
    x += at * ROW + tl.arange(0, D)
    x0, x1 = tl.load(x, mask=at < rows, other=0.0), tl.load(x + ROW, mask=at + 1 < rows, other=0.0)
    x2, x3 = tl.load(x + 2 * ROW, mask=at + 2 < rows, other=0.0), tl.load(x + 3 * ROW, mask=at + 3 < rows, other=0.0)
    return x0, x1, x2, x3


@triton.jit
def _window(x, page, weight, half, rows, text, known, ROW: tl.constexpr, TAP: tl.constexpr, D: tl.constexpr):
    """What the convolution of half a chunk reads: the taps, and rows 4 g - 3 to 4 g + 3 [8, D] each. x, page, weight:
    the chunk's first row, the page's and the taps of the head's first channel.
    """
    g = 32 * half + 4 * tl.arange(0, 8)
    a = _input(x, page, g - 3, rows, text, known, ROW, TAP, D)
    b = _input(x, page, g - 2, rows, text, known, ROW, TAP, D)
    c = _input(x, page, g - 1, rows, text, known, ROW, TAP, D)
    return tl.load(weight + tl.arange(0, 4 * D)), a, b, c, _quads(x, half, rows, ROW, D)


@triton.jit
def _conv_silu(window, D: tl.constexpr):
    """SiLU of the causal convolution -> [32, D] float32; behind the text's end anything finite."""
    w, a, b, c, quads = window
    x0, x1, x2, x3 = quads
    even, odd = tl.split(tl.reshape(w.to(tl.float32), [D, 2, 2]))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    a, b, c, x0 = a.to(tl.float32), b.to(tl.float32), c.to(tl.float32), x0.to(tl.float32)
    x1, x2, x3 = x1.to(tl.float32), x2.to(tl.float32), x3.to(tl.float32)
    y0, y1 = w0 * a + w1 * b + w2 * c + w3 * x0, w0 * b + w1 * c + w2 * x0 + w3 * x1
    y2, y3 = w0 * c + w1 * x0 + w2 * x1 + w3 * x2, w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3
    y = _interleave(y0, y1, y2, y3, D)
    return y * _sigmoid(y)


@triton.jit
def _log_decay(r, bias, rate, lower_bound, real, GATE: tl.constexpr):
    """log2 of the gates, r [8, D]; 0 where no token is real [8]."""
    z = r.to(tl.float32) + bias
    if GATE == "free":
        y = tl.exp(tl.minimum(z, 20.0))
        log1p = tl.where(y < 0.01, y * (1 - y * (0.5 - y * (1 / 3 - y / 4))), tl.log(1 + y))
        g = (-1.4426950408889634 * rate) * tl.where(z > 20, z, log1p)
    else:
        g = (1.4426950408889634 * lower_bound) * _sigmoid(rate * z)
    return tl.where(real[:, None], g, 0.0)


@triton.jit
def _decays(quads, bias, rate, lower_bound, half, rows, D: tl.constexpr, GATE: tl.constexpr):
    """log2 of the decays of half a chunk, from its `_quads` -> G [2, 16, D], from the start of each block of 16 to
    behind a token, or in "bounded" from the middle between both; and the sums of the two blocks [D]. Sums are taken
    inside blocks, and of whole blocks: a difference of two long sums would lose digits.
    """
    r0, r1, r2, r3 = quads
    at, second = 32 * half + 4 * tl.arange(0, 8), tl.arange(0, 2)[:, None] == 1
    g0 = _log_decay(r0, bias, rate, lower_bound, at < rows, GATE)
    g1 = g0 + _log_decay(r1, bias, rate, lower_bound, at + 1 < rows, GATE)
    g2 = g1 + _log_decay(r2, bias, rate, lower_bound, at + 2 < rows, GATE)
    g3 = g2 + _log_decay(r3, bias, rate, lower_bound, at + 3 < rows, GATE)
    quads = tl.reshape(g3, [2, 4, D])
    total, lead = tl.sum(quads, 1), tl.cumsum(quads, 1) - quads  # of a block; before four tokens, from its start
    if GATE == "bounded":
        lead -= tl.where(second, 0.0, total)[:, None, :]
    lead = tl.reshape(lead, [8, D])
    G = tl.reshape(_interleave(g0 + lead, g1 + lead, g2 + lead, g3 + lead, D), [2, 16, D])
    return G, tl.sum(tl.where(second, 0.0, total), 0), tl.sum(tl.where(second, total, 0.0), 0)


@triton.jit
def _exact_pairs(p, k, G):
    """Inside the blocks of 16, p [2, 2, 16, D] and k, G [2, 16, D]: sum over channels of p_i e^{G_i - G_j} k_j
    -> [64, 32], zero elsewhere. The difference comes before the exponential: without a bound on the gates no split of
    it is safe.
    """
    i, block = tl.arange(0, 16), tl.arange(0, 2)
    pairs = tl.zeros([2, 2, 16, 16], tl.float32)
    for j in range(16):
        at = (i == j)[:, None]
        G_j, k_j = tl.sum(tl.where(at, G, 0.0), 1)[:, None, :], tl.sum(tl.where(at, k, 0.0), 1)[:, None, :]
        column = tl.sum(p * (k_j * tl.exp2(tl.minimum(G - G_j, 0.0)))[None, :, :, :], 3)
        pairs = tl.where(i == j, column[:, :, :, None], pairs)
    same = block[:, None, None, None] == block[None, None, :, None]
    return tl.reshape(tl.where(same[None, :, :, :, :], pairs[:, :, :, None, :], 0.0), [64, 32])


@triton.jit(do_not_specialize=["n_chains"])
def _prepare_kernel(
    qkv, r, b, conv_weight, A_log, dt_bias, conv, src, past, table, chains, scratch, pairs, decay, windows,
    n_chains, lower_bound,
    ROW: tl.constexpr, R_ROW: tl.constexpr, B_ROW: tl.constexpr, SRC: tl.constexpr, PAGE: tl.constexpr,
    TAP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, GATE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Everything of a chunk and head that does not need the state, in two halves of 32 tokens."""
    h, chunk = tl.program_id(0), tl.program_id(1)
    dtype: tl.constexpr = scratch.dtype.element_ty
    HD: tl.constexpr = HEADS * D
    row, rows = tl.load(table + chunk * 4).to(tl.int64), tl.load(table + chunk * 4 + 1)
    start = table + tl.load(chains + _chain_of(chains, n_chains, chunk)) * 4  # the first chunk of this text
    text, first = (tl.load(start) - row).to(tl.int32), tl.load(start + 2)
    page = tl.load(src + first * SRC)
    known = (tl.load(past + first) > 0) & (page >= 0)
    qkv += row * ROW + h * D
    conv += page * PAGE + h * D
    conv_weight += h * D * 4
    r += row * R_ROW + h * D
    index = chunk.to(tl.int64) * HEADS + h
    pairs += index * 64 * 64
    scratch += index * (4 * 64 * D + 2 * 64 * 64)

    ch, i, both, block = tl.arange(0, D), tl.arange(0, 32), tl.arange(0, 64)[:, None], tl.arange(0, 2)[:, None, None]
    rate, bias = tl.exp(tl.load(A_log + h).to(tl.float32)), tl.load(dt_bias + h * D + ch).to(tl.float32)
    tile, square = i[:, None] * D + ch, both % 32 * 64 + i
    to_end = _narrow(tl.zeros([32, D], tl.float32), dtype)  # k e^{..} of the half before, to its end
    so_far = tl.full([D], 1.0, tl.float32)
    for half in range(2):
        at = 32 * half + i
        # Loads before the barriers that they could not cross: several latencies become one.
        rates = _quads(r, half, rows, R_ROW, D)
        k = _window(qkv + HD, conv + HD, conv_weight + HD * 4, half, rows, text, known, ROW, TAP, D)
        q = _window(qkv, conv, conv_weight, half, rows, text, known, ROW, TAP, D)
        beta = tl.load(b + (row + at) * B_ROW + h, mask=at < rows, other=-1000.0)  # 0 behind the end
        beta = tl.sigmoid(beta.to(tl.float32))[:, None]
        G, one, two = _decays(rates, bias, rate, lower_bound, half, rows, D, GATE)
        k = _conv_silu(k, D)
        k = tl.reshape(k * tl.rsqrt(tl.sum(k * k, 1) + 1e-6)[:, None], [2, 16, D])
        q = _conv_silu(q, D)
        q = tl.reshape(q * (tl.rsqrt(tl.sum(q * q, 1) + 1e-6) * D**-0.5)[:, None], [2, 16, D])

        v = _window(qkv + 2 * HD, conv + 2 * HD, conv_weight + 2 * HD * 4, half, rows, text, known, ROW, TAP, D)
        # Pair products A_ij = <k_i e^{G_i - G_j}, k_j>, and P_ij with q_i. An exponent spans 16 tokens, or is negative.
        one, two = tl.exp2(one), tl.exp2(two)
        if GATE == "bounded":  # at five a token, to and back are within e^-80 and e^80
            to, back = tl.exp2(G), tl.exp2(-G)
            before, behind = one[None, None, :], two[None, None, :]
        else:
            end = tl.sum(tl.where(tl.arange(0, 16)[:, None] == 15, G, 0.0), 1)
            to, back = tl.exp2(G), tl.exp2(end[:, None, :] - G)
            before, behind = tl.where(block == 1, one, 1.0), tl.where(block == 0, two, 1.0)
        left_k, left_q, right = k * to, q * to, k * back
        left = tl.reshape(_stack(left_k.to(dtype), left_q.to(dtype), D), [64, D])  # A and P are one product
        near = tl.dot(left, tl.trans(tl.reshape(right.to(dtype), [32, D])), input_precision=PRECISION)
        if GATE != "bounded":
            near = tl.where(both % 32 // 16 > i // 16, near, 0.0) + _exact_pairs(_stack(k, q, D), k, G)
        from_k, from_q = left_k * before, left_q * before
        left = tl.reshape(_stack(_narrow(from_k, dtype), _narrow(from_q, dtype), D), [64, D])
        far = tl.dot(left, tl.trans(to_end), input_precision=PRECISION)  # of the first half zeros, above the diagonal
        here, there = 32 * half * 65 + square, 32 * half * 63 + 32 + square
        token = 32 * half + both % 32
        scale = tl.sigmoid(tl.load(b + (row + token) * B_ROW + h, mask=token < rows, other=-1000.0).to(tl.float32))
        tl.store(pairs + here, near * scale, mask=both < 32)
        tl.store(pairs + there, far * scale, mask=(both < 32) & (half == 1))
        P = _fine(scratch + 4 * 64 * D)
        tl.store(P + here, _narrow(tl.where(both % 32 >= i, near, 0.0), dtype), mask=both >= 32)
        tl.store(P + there, _narrow(far, dtype), mask=both >= 32)

        out = scratch + 32 * D * half
        tl.store(out + tile, (tl.reshape(from_k * so_far, [32, D]) * -beta).to(dtype))
        tl.store(out + 64 * D + tile, tl.reshape(from_q * so_far, [32, D]).to(dtype))
        whole = one * two
        last = _narrow(to_end.to(tl.float32) * whole, dtype)
        tl.store(_fine(scratch + 2 * 64 * D) + tile, last, mask=(tile >= 0) & (half == 1))
        to_end = _narrow(tl.reshape(right * behind, [32, D]), dtype)
        so_far *= whole
        v = _conv_silu(v, D) * beta
        tl.store(scratch + 3 * 64 * D + ch[:, None] * 64 + at, tl.trans(v.to(dtype)))
    tl.store(_fine(scratch + 2 * 64 * D) + 32 * D + tile, to_end)
    tl.store(decay + index * D + ch, so_far)

    if tl.load(table + chunk * 4 + 3) != 0:  # the last inputs of a sequence; only the scan may write pages
        windows += tl.load(table + chunk * 4 + 2).to(tl.int64) * 3 * 3 * HD + h * D
        m = tl.arange(0, 4)
        for x in tl.static_range(3):
            window = _input(qkv + x * HD, conv + x * HD, rows - 3 + m, rows, text, known, ROW, TAP, D)
            tl.store(windows + (m[:, None] * 3 + x) * HD + ch, window.to(dtype), mask=m[:, None] < 3)


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
        X -= tl.dot(tl.dot(X, corner, input_precision=PRECISION), X, input_precision=PRECISION)

    n, half = tl.arange(0, 2)[:, None, None], tl.arange(0, 2)
    corner = tl.load(A + (32 * n + 16 + i) * 64 + 32 * n + j)  # [2, 16, 16]
    X = tl.reshape(X, [2, 2, 16, 16])
    second = half[:, None, None] == 1
    upper, lower = tl.sum(tl.where(second, 0.0, X), 1), tl.sum(tl.where(second, X, 0.0), 1)
    corner = tl.dot(tl.dot(lower, corner, input_precision=PRECISION), upper, input_precision=PRECISION)
    row, column = half[:, None, None, None], half[None, None, :, None]
    corner = tl.where(row > column, -corner[:, None, :, None, :], 0.0)
    X = tl.reshape(tl.where(row == column, X[:, :, :, None, :], corner), [2, 32, 32])

    i, j = tl.arange(0, 32)[:, None], tl.arange(0, 32)[None, :]
    corner = tl.load(A + (32 + i) * 64 + j)  # [32, 32]
    upper, lower = tl.sum(tl.where(second, 0.0, X), 0), tl.sum(tl.where(second, X, 0.0), 0)
    corner = tl.dot(tl.dot(lower, corner, input_precision=PRECISION), upper, input_precision=PRECISION)
    tl.store(T + (32 * n + i) * 64 + 32 * n + j, _round(X, dtype))
    tl.store(T + (32 + i) * 64 + j, _round(-corner, dtype))
    tl.store(T + i * 64 + 32 + j, _round(tl.zeros([32, 32], tl.float32), dtype))


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
    v = tile * TILE % D + tl.arange(0, TILE)
    states += (tl.program_id(2).to(tl.int64) * HEADS + h) * 3 * D * D + v[:, None] * D + ch
    at = h * D * D + ch * D + v[:, None]  # of a page
    if MODE == "pages":
        state = _page_state(S, src, past, seq, at, SRC, PAGE)
    elif MODE == "entered":
        state = tl.load(states + 2 * D * D)
    else:
        state = tl.where((v[:, None] == ch) & (tile * TILE >= D), 1.0, 0.0)

    for chunk in tl.range(first, end, num_stages=STAGES):
        index = chunk * HEADS + head
        this = scratch + index * (4 * 64 * D + 2 * 64 * 64)
        w = tl.load(this + i[:, None] * D + ch)
        k = tl.load(_fine(this + 2 * 64 * D) + i[:, None] * D + ch)
        value = tl.load(this + 3 * 64 * D + v[:, None] * 64 + i)
        T = tl.load(_fine(this + 4 * 64 * D + 64 * 64) + i[:, None] * 64 + i)
        if MODE == "maps":
            value = tl.where(lone, value, 0.0)
        kept = tl.load(decay + index * D + ch)
        left = state.to(dtype)
        error = _round(tl.dot(left, tl.trans(w), acc=value.to(tl.float32), input_precision=PRECISION), dtype)
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
    _prepare_kernel[heads, chunks](
        qkv, r, b, w.conv, w.A_log, w.dt_bias, conv, src, part.past, table, chains, scratch, pairs, decay, windows,
        texts, w.lower_bound or 0.0,
        qkv.stride(0), r.stride(0), b.stride(0), src.stride(0), conv.stride(0), conv.stride(1),
        heads, d, gate_kind, precision, **(PREPARE_WIDE if wide else PREPARE),
    )  # fmt: skip
    _inverse_kernel[heads, chunks](pairs, scratch, heads, d, solve, **INVERSE)
    length, groups = groups_of(texts, heads, _longest(part))
    launch = SCAN_WIDE if wide else SCAN
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
