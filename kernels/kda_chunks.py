"""Triton kernels of KDA prefill, the part that does not need the state: all chunks of 64 tokens at once (kda.py here).

    values    conv, SiLU; beta v
    prepare   conv, SiLU, l2norm, gates; beta k e^G, q e^G, k e^{G_C - G}, the pair products A and P, e^{G_C}

A thread holds eight neighbouring tokens of a few channels: convolution, sums of gates and stores move nothing between
threads. Exponents span at most 16 tokens, or are those of decays: a product of a large and a small factor would be lost
where the small one is 0.
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
    if dtype == tl.bfloat16:
        x = tl.clamp(x, -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL)
    return _narrow(x, dtype)


@triton.jit
def _sigmoid(x):
    """The reciprocal by a root, which has an instruction (2 ulp); a division is several."""
    root = tl.rsqrt(1 + tl.exp2(-1.4426950408889634 * x))
    return root * root


@triton.jit
def _stack(x, D: tl.constexpr):
    """Eight [8, D], rows 8 g + m of a chunk for each m -> [8 g, 8 m, D]."""
    even, odd = tl.join(tl.join(x[0], x[4]), tl.join(x[2], x[6])), tl.join(tl.join(x[1], x[5]), tl.join(x[3], x[7]))
    return tl.permute(tl.reshape(tl.join(even, odd), [8, D, 8]), (0, 2, 1))


@triton.jit
def _store(pointer, x, D: tl.constexpr):
    """x [8 g, 8 m, D] to 64 rows."""
    pointer += tl.arange(0, 8)[:, None] * 8 * D + tl.arange(0, D)
    even, odd = tl.split(tl.reshape(tl.permute(x, (0, 2, 1)), [8, D, 2, 2, 2]))
    x04, x26 = tl.split(even)
    x15, x37 = tl.split(odd)
    pairs = (x04, x15, x26, x37)
    for m in tl.static_range(4):
        low, high = tl.split(pairs[m])
        tl.store(pointer + m * D, low)
        tl.store(pointer + (m + 4) * D, high)


@triton.jit
def _place(table, chains, n_chains, chunk, src, past, SRC: tl.constexpr):
    """A chunk's first row and its rows; where its text begins, relative to it (or far before, where all it needs is in
    the text); the page that the text starts from, and whether it does. Most chunks follow one of the same sequence, and
    wait for no more than a load.
    """
    row, rows = tl.load(table + chunk * 4).to(tl.int64), tl.load(table + chunk * 4 + 1)
    before = tl.load(table + tl.maximum(chunk - 1, 0) * 4 + 2)
    if (chunk > 0) & (before == tl.load(table + chunk * 4 + 2)):
        text, page, known = -64, row * 0, chunk < 0
    else:
        start = table + tl.load(chains + _chain_of(chains, n_chains, chunk)) * 4  # the first chunk of this text
        text, first = (tl.load(start) - row).to(tl.int32), tl.load(start + 2)
        page = tl.load(src + first * SRC)
        known = (tl.load(past + first) > 0) & (page >= 0)
    return row, rows, text, page, known


@triton.jit
def _input(x, page, at, rows, text, known, ROW: tl.constexpr, TAP: tl.constexpr, D: tl.constexpr):
    """Raw inputs [len(at), D] at rows `at` of the chunk: of the text, which begins at row `text`, or of its page."""
    row = tl.where(at[:, None] < text, page + (at - text + 3)[:, None] * TAP, x + at[:, None] * ROW)
    there = (at < rows) & ((at >= text) | known)
    return tl.load(row + tl.arange(0, D), mask=there[:, None], other=0.0)


@triton.jit
def _rows(x, rows, other, ROW: tl.constexpr, D: tl.constexpr):
    """Rows 8 g + m of a chunk, [8, D] for each m; `other` behind its end."""
    at, out = 8 * tl.arange(0, 8)[:, None], ()
    for m in tl.static_range(8):
        out += (tl.load(x + at * ROW + tl.arange(0, D) + m * ROW, mask=at + m < rows, other=other),)
    return out


@triton.jit
def _window(x, page, taps, rows, text, known, ROW: tl.constexpr, TAP: tl.constexpr, HD: tl.constexpr, D: tl.constexpr):
    """What the convolution of a chunk reads: rows 8 g - 3 to 8 g + 7 and the taps, [8, D] each. x, page, taps: at the
    first channel of the head, of the chunk's first row, the page's and of taps [4, 3 HD].
    """
    at = 8 * tl.arange(0, 8)
    a = _input(x, page, at - 3, rows, text, known, ROW, TAP, D)
    b = _input(x, page, at - 2, rows, text, known, ROW, TAP, D)
    c = _input(x, page, at - 1, rows, text, known, ROW, TAP, D)
    taps += tl.zeros([8, 1], tl.int32) + tl.arange(0, D)
    w0, w1, w2, w3 = tl.load(taps), tl.load(taps + 3 * HD), tl.load(taps + 6 * HD), tl.load(taps + 9 * HD)
    return (a, b, c) + _rows(x, rows, 0.0, ROW, D), w0, w1, w2, w3


@triton.jit
def _conv_silu(window, D: tl.constexpr):
    """SiLU of the causal convolution of a `_window` -> [8, 8, D] float32; behind the text's end anything finite."""
    x, w0, w1, w2, w3 = window
    out = ()
    for m in tl.static_range(8):
        y = w2 * x[m + 2].to(tl.float32) + w3 * x[m + 3].to(tl.float32)
        y = w0 * x[m].to(tl.float32) + (w1 * x[m + 1].to(tl.float32) + y)
        out += (y * _sigmoid(y),)
    return _stack(out, D)


@triton.jit
def _log_decay(r, bias, rate, lower_bound, GATE: tl.constexpr):
    """log2 of the gates, r [8, D]; 0 where r is -inf. bias and rate as `_decays` has them."""
    z = rate * r.to(tl.float32) + bias
    if GATE == "free":
        y = tl.exp(tl.minimum(z, 20.0))
        log1p = tl.where(y < 0.01, y * (1 - y * (0.5 - y * (1 / 3 - y / 4))), tl.log(1 + y))
        return lower_bound * tl.where(z > 20, z, log1p)
    root = tl.rsqrt(1 + tl.exp2(z))
    return lower_bound * (root * root)


@triton.jit
def _decays(r, bias, rate, lower_bound, D: tl.constexpr, GATE: tl.constexpr):
    """log2 of the decays of a chunk, from the `_rows` of r -> G [8, 8, D], from the start of each block of 16 to behind
    a token, or in "bounded" from the middle of each half; and the sums of the four blocks, [D] each. Sums are taken
    inside blocks, and of whole blocks: a difference of two long sums would lose digits.
    """
    if GATE == "free":  # - rate log(1 + e^z)
        rate, lower_bound = 1.0, -1.4426950408889634 * rate
    else:  # lower_bound / (1 + 2^z)
        rate, lower_bound = -1.4426950408889634 * rate, 1.4426950408889634 * lower_bound
    bias *= rate
    out, total = (), tl.zeros([8, D], tl.float32)
    for m in tl.static_range(8):
        total += _log_decay(r[m], bias, rate, lower_bound, GATE)
        out += (total,)
    block, pair = tl.arange(0, 8)[:, None] // 2, tl.reshape(total, [4, 2, D])
    lead = tl.reshape(tl.cumsum(pair, 1) - pair, [8, D])  # of the eight tokens before, in the same block
    sums = tl.sum(tl.where(tl.arange(0, 4)[:, None] == block[:, :, None], total[:, None, :], 0.0), 0)  # [4, D]
    even, odd = tl.split(tl.reshape(tl.trans(sums), [D, 2, 2]))
    s0, s2 = tl.split(even)
    s1, s3 = tl.split(odd)
    if GATE == "bounded":
        lead -= tl.where(block == 0, s0, tl.where(block == 2, s2, 0.0))
    return _stack(out, D) + lead[:, None, :], s0, s1, s2, s3


@triton.jit
def _exact_pairs(p, k, G):
    """Inside the blocks of 16, p, k, G [4, 16, D]: sum over channels of p_i e^{G_i - G_j} k_j -> [64, 64], zero
    elsewhere. The difference comes before the exponential: without a bound on the gates no split of it is safe.
    """
    i, block = tl.arange(0, 16), tl.arange(0, 4)
    pairs = tl.zeros([4, 16, 16], tl.float32)
    for j in range(16):
        at = (i == j)[:, None]
        G_j, k_j = tl.sum(tl.where(at, G, 0.0), 1)[:, None, :], tl.sum(tl.where(at, k, 0.0), 1)[:, None, :]
        column = tl.sum(p * (k_j * tl.exp2(tl.minimum(G - G_j, 0.0))), 2)
        pairs = tl.where(i == j, column[:, :, None], pairs)
    same = block[:, None, None, None] == block[None, None, :, None]
    return tl.reshape(tl.where(same, pairs[:, :, None, :], 0.0), [64, 64])


@triton.jit(do_not_specialize=["n_chains"])
def _values_kernel(
    qkv, b, taps, conv, src, past, table, chains, scratch, n_chains,
    ROW: tl.constexpr, B_ROW: tl.constexpr, SRC: tl.constexpr, PAGE: tl.constexpr, TAP: tl.constexpr,
    HEADS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """beta v of a chunk and head, transposed: apart, since it needs few registers."""
    h, chunk = tl.program_id(0), tl.program_id(1)
    dtype: tl.constexpr = scratch.dtype.element_ty
    HD: tl.constexpr = HEADS * D
    row, rows, text, page, known = _place(table, chains, n_chains, chunk, src, past, SRC)
    at = 2 * HD + h * D
    scratch += (chunk.to(tl.int64) * HEADS + h) * (4 * 64 * D + 2 * 64 * 64) + 3 * 64 * D
    v = _window(qkv + row * ROW + at, conv + page * PAGE + at, taps + at, rows, text, known, ROW, TAP, HD, D)
    token = 8 * tl.arange(0, 8)[:, None] + tl.arange(0, 8)
    beta = tl.load(b + (row + token) * B_ROW + h, mask=token < rows, other=-1000.0)
    v = tl.reshape((_conv_silu(v, D) * _sigmoid(beta.to(tl.float32))[:, :, None]).to(dtype), [64, D])
    tl.store(scratch + tl.arange(0, D)[:, None] * 64 + tl.arange(0, 64), tl.trans(v))


@triton.jit(do_not_specialize=["n_chains"])
def _prepare_kernel(
    qkv, r, b, taps, A_log, dt_bias, conv, src, past, table, chains, scratch, pairs, decay, windows,
    n_chains, lower_bound,
    ROW: tl.constexpr, R_ROW: tl.constexpr, B_ROW: tl.constexpr, SRC: tl.constexpr, PAGE: tl.constexpr,
    TAP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, GATE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Everything else of a chunk and head that does not need the state."""
    h, chunk = tl.program_id(0), tl.program_id(1)
    dtype: tl.constexpr = scratch.dtype.element_ty
    HD: tl.constexpr = HEADS * D
    row, rows, text, page, known = _place(table, chains, n_chains, chunk, src, past, SRC)
    qkv += row * ROW + h * D
    conv += page * PAGE + h * D
    taps += h * D
    r += row * R_ROW + h * D
    index = chunk.to(tl.int64) * HEADS + h
    pairs += index * 64 * 64
    scratch += index * (4 * 64 * D + 2 * 64 * 64)
    ch, g, i = tl.arange(0, D), tl.arange(0, 8)[:, None], tl.arange(0, 64)
    # Loads before the barriers that they could not cross: several latencies become one.
    rates = _rows(r, rows, float("-inf"), R_ROW, D)
    k = _window(qkv + HD, conv + HD, taps + HD, rows, text, known, ROW, TAP, HD, D)
    token = 8 * g + tl.arange(0, 8)
    beta = tl.load(b + (row + token) * B_ROW + h, mask=token < rows, other=-1000.0)  # 0 behind the end
    beta = _sigmoid(beta.to(tl.float32))[:, :, None]
    bias = tl.load(dt_bias + h * D + tl.zeros([8, 1], tl.int32) + ch).to(tl.float32)
    rate = tl.exp(tl.maximum(tl.load(A_log + h).to(tl.float32), -80.0))  # not 0, which times -inf is NaN
    G, s0, s1, s2, s3 = _decays(rates, bias, rate, lower_bound, D, GATE)
    e0, e1, e2, e3 = tl.exp2(s0), tl.exp2(s1), tl.exp2(s2), tl.exp2(s3)
    tl.store(decay + index * D + ch, e0 * e1 * e2 * e3)

    # Decays `to` a token from a point near it, and `back` to one; from the `start` of the chunk to that point, and to
    # the `end`; behind * before: from the point of a token in the first half to that of one in the second.
    late, odd = g // 4 == 1, g // 2 % 2 == 1
    if GATE == "bounded":  # the middle of the half: at five a token, to and back are within e^-80 and e^80
        to, back = tl.exp2(G), tl.exp2(-G)
        start, end = tl.where(late, e0 * e1 * e2, e0), tl.where(late, e3, e1 * e2 * e3)
        before, behind = e2, e1  # to * e2 and back * e1 are decays; one factor for both would be 0 where they are not
    else:  # the start, or the end, of the block of 16
        last = tl.where(odd, tl.where(late, s3, s1), tl.where(late, s2, s0))
        to, back = tl.exp2(G), tl.exp2(last[:, None, :] - G)
        start = tl.where(odd, tl.where(late, e0 * e1 * e2, e0), tl.where(late, e0 * e1, 1.0))
        end = tl.where(odd, tl.where(late, 1.0, e2 * e3), tl.where(late, e3, e1 * e2 * e3))
        before, behind = tl.where(odd, e2, 1.0)[:, None, :], tl.where(odd, 1.0, e1)[:, None, :]
    start, end = start[:, None, :], end[:, None, :]

    k = _conv_silu(k, D)
    k = k * tl.rsqrt(tl.sum(k * k, 2) + 1e-6)[:, :, None]
    right = k * back
    near = tl.trans(tl.reshape(right.to(dtype), [64, D]))
    far = tl.trans(tl.reshape(_narrow(right * behind, dtype), [64, D]))
    _store(_fine(scratch + 2 * 64 * D), _narrow(right * end, dtype), D)

    # Pair products A_ij = beta_i <k_i e^{G_i - G_j}, k_j>, and P_ij with q_i: inside halves, and of the second with
    # the first. What is above the diagonal is anything in A, zero in P.
    near_pairs, lower = i[:, None] // 32 == i // 32, i[:, None] // 16 > i // 16
    left = k * beta * to
    _store(scratch, (left * -start).to(dtype), D)
    A = tl.dot(tl.reshape(left.to(dtype), [64, D]), near, input_precision=PRECISION)
    far_A = tl.dot(tl.reshape(_narrow(left * before, dtype), [64, D]), far, input_precision=PRECISION)
    q = _window(qkv, conv, taps, rows, text, known, ROW, TAP, HD, D)
    if GATE != "bounded":
        G, k, k_beta = tl.reshape(G, [4, 16, D]), tl.reshape(k, [4, 16, D]), tl.reshape(k * beta, [4, 16, D])
        A = tl.where(lower, A, 0.0) + _exact_pairs(k_beta, k, G)
    square = i[:, None] * 64 + i
    tl.store(pairs + square, tl.where(near_pairs, A, far_A))

    q = _conv_silu(q, D)
    q = q * (tl.rsqrt(tl.sum(q * q, 2) + 1e-6) * D**-0.5)[:, :, None]
    left = q * to
    _store(scratch + 64 * D, (left * start).to(dtype), D)
    P = tl.dot(tl.reshape(left.to(dtype), [64, D]), near, input_precision=PRECISION)
    far_P = tl.dot(tl.reshape(_narrow(left * before, dtype), [64, D]), far, input_precision=PRECISION)
    if GATE != "bounded":
        P = tl.where(lower, P, 0.0) + _exact_pairs(tl.reshape(q, [4, 16, D]), k, G)
    P = tl.where(i[:, None] >= i, tl.where(near_pairs, P, far_P), 0.0)
    tl.store(_fine(scratch + 4 * 64 * D) + square, _narrow(P, dtype))

    if tl.load(table + chunk * 4 + 3) != 0:  # the last inputs of a sequence; only the scan may write pages
        windows += tl.load(table + chunk * 4 + 2).to(tl.int64) * 3 * 3 * HD + h * D
        m = tl.arange(0, 4)
        for x in tl.static_range(3):
            window = _input(qkv + x * HD, conv + x * HD, rows - 3 + m, rows, text, known, ROW, TAP, D)
            tl.store(windows + (m[:, None] * 3 + x) * HD + ch, window.to(dtype), mask=m[:, None] < 3)
