"""Triton kernels of KDA prefill, the part that does not need the state: all chunks of 64 tokens at once (kda.py here).

    prepare   conv, SiLU, l2norm, gates; beta k e^G, beta v, q e^G, k e^{G_C - G}, the pair products A and P, e^{G_C}
    inverse   T = (I + A)^-1

Exponents span at most 16 tokens, or are negative; the inverse is in float32 and rounded when it is done.
"""

import triton
import triton.language as tl


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
