"""Kimi Delta Attention token by token: decode, and the verification and commitment of drafted tokens.

One kernel, `_step`: a program holds one head's state S [d, d] of one sequence in registers and takes it through T
tokens, from raw projections to the normalized, gated output. The state is read once and written at most once.

    decode    1 token              reads src, writes dst, outputs
    verify    T tokens             reads src, outputs, keeps the raw projections
    commit    `accepted` tokens    reads src, writes dst; all layers of the model in one launch

The recurrence is that of the Kimi Linear report (arXiv 2510.26692), as in `kda.py`.
"""

import functools

import torch
import triton
import triton.language as tl

import kernels
from kernels.launch import overlap

# Shapes for the compiler's sake. q and k are handled side by side, [D, 2], one element a thread. A vector [D], shorter
# than the program has threads, would be loaded and computed again in every thread that needs an element of it. So the
# decay is computed twice, [D, 2], rather than 32 times. And the state is [D, C, W], C groups of W value channels: with
# rows of 64 values rather than 128, a thread holds parts of half as many, and needs half as many elements of q and k.


@triton.jit
def _window(conv, conv_row, c, live):
    """The three inputs of channels c before the first token, oldest first."""
    x0 = tl.load(conv + c, mask=live, other=0.0)
    x1 = tl.load(conv + conv_row + c, mask=live, other=0.0)
    x2 = tl.load(conv + 2 * conv_row + c, mask=live, other=0.0)
    return x0, x1, x2


@triton.jit
def _keep(conv, conv_row, c, x0, x1, x2):
    tl.store(conv + c, x0)
    tl.store(conv + conv_row + c, x1)
    tl.store(conv + 2 * conv_row + c, x2)


@triton.jit
def _token(qkv, r, b, cqk, cv, cr, head, there):
    """The raw projections of one row: qk [D, 2], v [BV], r [D, 2] and b; zeros unless `there`."""
    qk, v = tl.load(qkv + cqk, mask=there, other=0.0), tl.load(qkv + cv, mask=there, other=0.0)
    return qk, v, tl.load(r + cr, mask=there, other=0.0), tl.load(b + head, mask=there, other=0.0)


@triton.jit
def _taps(weight, c):
    w = weight + 4 * c
    return tl.load(w), tl.load(w + 1), tl.load(w + 2), tl.load(w + 3)


@triton.jit
def _conv_silu(x0, x1, x2, x3, w):
    """SiLU of the causal convolution with the taps w of channels' last four inputs, oldest first."""
    y = x0.to(tl.float32) * w[0] + x1.to(tl.float32) * w[1]
    y += x2.to(tl.float32) * w[2] + x3.to(tl.float32) * w[3]
    return y * tl.sigmoid(y)


@triton.jit
def _add(a0, b0, c0, d0, e0, a1, b1, c1, d1, e1):
    return a0 + a1, b0 + b1, c0 + c1, d0 + d1, e0 + e1


@triton.jit
def _gated_norm(o, weight, gate, eps, D: tl.constexpr):
    """RMSNorm(o) * sigmoid(gate) of one head, [D]."""
    return o * tl.rsqrt(tl.sum(o * o, axis=0) / D + eps) * weight.to(tl.float32) * tl.sigmoid(gate.to(tl.float32))


@triton.jit
def _step(
    qkv, gate, r, b, out, weight, A_log, dt_bias, o_norm, S, conv, src, dst, past, accepted, raw, table, eps,
    qkv_row, gate_row, r_row, b_row, S_page, conv_page, conv_row, src_stride, dst_stride,
    raw_row, raw_layer, S_slab, conv_slab, src_group, dst_group,
    H: tl.constexpr, D: tl.constexpr, BV: tl.constexpr, LOWER_BOUND: tl.constexpr, T: tl.constexpr,
    OVERLAP: tl.constexpr, PER_GROUP: tl.constexpr,
):  # fmt: skip
    """Program (head, sequence, tile of BV value channels). out None: nothing is output; dst None: nothing is written;
    accepted None: all T tokens count; raw None: the projections are not kept. Where BV < D, out takes o before its
    norm, in float32. PER_GROUP > 0: program (head, sequence, layer); a group of the state has so many layers, and
    table [layers, 3] the addresses of weight, A_log and dt_bias of each.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()  # `_norm` may start; it waits for this kernel's end where it must
    head, seq, tile = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    if PER_GROUP > 0:
        layer, tile = tile.to(tl.int64), 0
        kind = tl.pointer_type(tl.float32)
        weight = tl.load(table + 3 * layer).to(kind)
        A_log, dt_bias = tl.load(table + 3 * layer + 1).to(kind), tl.load(table + 3 * layer + 2).to(kind)
        qkv, r, b = qkv + layer * raw_layer, r + layer * raw_layer, b + layer * raw_layer
        S, conv = S + layer % PER_GROUP * S_slab, conv + layer % PER_GROUP * conv_slab
        src, dst = src + layer // PER_GROUP * src_group, dst + layer // PER_GROUP * dst_group
    source, before = tl.load(src + seq * src_stride), tl.load(past + seq)
    live = (before > 0) & (source >= 0)  # else the sequence starts from zero, whatever the page holds
    W: tl.constexpr = min(BV, 64)
    C: tl.constexpr = BV // W
    ik, iv = tl.arange(0, D), tile * BV + tl.arange(0, BV)  # key and value channels
    pair = tl.arange(0, 2)[None, :]
    cr = head * D + ik[:, None] + 0 * pair
    cqk, cv = cr + H * D * pair, (2 * H + head) * D + iv

    row = seq * T
    qkv, r, b, gate = qkv + row * qkv_row, r + row * r_row, b + row * b_row, gate + row * gate_row + head * D
    if out is not None:
        out += (row * H + head) * D
    if dst is not None:
        target = tl.load(dst + seq * dst_stride)
        if target < 0:  # padding
            if out is not None:
                tl.store(out + iv, tl.zeros([BV], out.dtype.element_ty))
            return
    steps = T
    if accepted is not None:
        steps = tl.minimum(tl.maximum(tl.load(accepted + seq), 0), T)

    # 64 bits, for one address with constants added; no mask, under which not all loads would be under way at once.
    column = tile * BV + tl.arange(0, C)[:, None] * W + tl.arange(0, W)[None, :]  # iv as [C, W]
    at = head * D * D + (ik[:, None, None] * D).to(tl.int64) + column[None, :, :].to(tl.int64)
    state = tl.where(live, tl.load(S + tl.where(live, source, 0) * S_page + at), 0.0)
    x0, x1, x2 = _window(conv + source * conv_page, conv_row, cqk, live)
    y0, y1, y2 = _window(conv + source * conv_page, conv_row, cv, live)
    wqk, wv = _taps(weight, cqk), _taps(weight, cv)
    x3, y3, r3, b3 = _token(qkv, r, b, cqk, cv, cr, head, steps > 0)
    rate, bias = tl.exp(tl.load(A_log + head).to(tl.float32)), tl.load(dt_bias + cr).to(tl.float32)
    if out is not None:
        norm = tl.load(o_norm + iv)

    for t in range(T):
        if t < steps:
            qkv, r, b = qkv + qkv_row, r + r_row, b + b_row
            x4, y4, r4, b4 = _token(qkv, r, b, cqk, cv, cr, head, t + 1 < steps)  # the next token's, ahead of their use
            if raw is not None:
                kept = raw + (row + t) * raw_row
                tl.store(kept + cqk, x3, mask=tile == 0)
                tl.store(kept + cv, y3)
                tl.store(kept + 3 * H * D + cr, r3, mask=tile == 0)
                tl.store(kept + 4 * H * D + head, b3, mask=tile == 0)
            if out is not None:
                opening = tl.load(gate + t * gate_row + iv)
            qk = _conv_silu(x0, x1, x2, x3, wqk)
            v = _conv_silu(y0, y1, y2, y3, wv)
            z = r3.to(tl.float32) + bias
            if LOWER_BOUND is None:
                g = -rate * (tl.maximum(z, 0.0) + tl.log(1 + tl.exp(-tl.abs(z))))  # softplus
            else:
                g = LOWER_BOUND * tl.sigmoid(rate * z)
            decay, _ = tl.split(tl.exp(g))
            beta = tl.sigmoid(b3.to(tl.float32))
            if BV == D:
                qk *= tl.rsqrt(tl.sum(qk * qk, axis=0) + 1e-6)[None, :]
            q, k = tl.split(qk)
            q, k = q[:, None, None], k[:, None, None]

            state *= decay[:, None, None]
            if BV == D:
                u = beta * (v - tl.reshape(tl.sum(state * k, axis=0), [BV]))
                state += k * tl.reshape(u, [C, W])[None, :, :]
                if out is not None:
                    o = tl.reshape(tl.sum(state * q, axis=0), [BV]) * D**-0.5
                    o = _gated_norm(o, norm, opening, eps, D)
            else:  # what counts is how often the threads wait for each other: one sum, also of the norms of q and k
                one = tl.full([1, C, W], 1.0, tl.float32)
                products = state * k, state * q, k * k * one, q * q * one, q * k * one
                kS, qS, kk, qq, qk = [tl.reshape(x, [BV]) for x in tl.reduce(products, 0, _add)]
                u = beta * (v - kS * tl.rsqrt(kk + 1e-6)) * tl.rsqrt(kk + 1e-6)
                state += k * tl.reshape(u, [C, W])[None, :, :]
                o = (qS + qk * u) * (tl.rsqrt(qq + 1e-6) * D**-0.5)
            if out is not None:
                tl.store(out + t * H * D + iv, o.to(out.dtype.element_ty))
            x0, x1, x2, x3 = x1, x2, x3, x4
            y0, y1, y2, y3, r3, b3 = y1, y2, y3, y4, r4, b4

    if dst is not None:
        tl.debug_barrier()  # where dst is src, no thread may still be reading what another overwrites
        tl.store(S + target * S_page + at, state)
        _keep(conv + target * conv_page, conv_row, cqk, x0, x1, x2)
        _keep(conv + target * conv_page, conv_row, cv, y0, y1, y2)


@triton.jit
def _norm(o, gate, out, o_norm, gate_row, eps, H: tl.constexpr, D: tl.constexpr, OVERLAP: tl.constexpr):
    """The norm and gate that `_step` leaves where it cuts heads into tiles: program (head, row)."""
    head, row, v = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.arange(0, D)
    at = (row * H + head) * D + v
    weight, opening = tl.load(o_norm + v), tl.load(gate + row * gate_row + head * D + v)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    y = _gated_norm(tl.load(o + at), weight, opening, eps, D)
    tl.store(out + at, y.to(out.dtype.element_ty))


def config(d, heads, output_only):
    """Head dim, heads of all sequences, whether nothing is written -> value channels of a program, its warps.

    Only what is not written can be cut into tiles: programs of one head would overwrite its q and k inputs while others
    read them. It pays where there are few heads.
    """
    if output_only and d == 128 and heads <= 48:
        return 16, 4
    return d, {32: 1, 64: 4, 128: 4}[d]


def launch(qkv, gate, r, b, w, S, conv, src, dst, past, T, raw=None):
    """Runs `_step` of one layer over the rows [B T, .] of B sequences -> out [B T, hd]."""
    B, (h, d) = len(past), S.shape[1:3]
    width, warps = config(d, B * h, dst is None)
    out = torch.empty(B * T, h * d, dtype=gate.dtype, device=qkv.device)
    o = out if width == d else torch.empty_like(out, dtype=torch.float32)
    strides = [x.stride(0) for x in (qkv, gate, r, b, S, conv)] + [conv.stride(1), src.stride(0)]
    strides += [0 if dst is None else dst.stride(0), 0 if raw is None else raw.stride(0), 0, 0, 0, 0, 0]
    early = {} if o is out else overlap(qkv.device)
    _step[h, B, d // width](
        qkv, gate, r, b, o, w.conv, w.A_log, w.dt_bias, w.o_norm, S, conv, src, dst, past, None, raw, None, w.eps,
        *strides,
        H=h, D=d, BV=width, LOWER_BOUND=w.lower_bound or None, T=T, OVERLAP=bool(early), PER_GROUP=0, num_warps=warps,
    )  # fmt: skip
    if o is not out:
        args = o, gate, out, w.o_norm, gate.stride(0), w.eps
        _norm[h, B * T](*args, H=h, D=d, OVERLAP=bool(early), num_warps=1, **early)
    return out


def cannot(rows, w, S, conv, vectors):
    """Why these tensors do not fit, or None. rows: qkv, r, b, ... [N, .]; vectors: [B]."""
    d, taps = S.shape[-1], w.conv.shape[1]
    if not {x.dtype for x in rows} <= {torch.float32, torch.bfloat16} or S.dtype != torch.float32:
        return f"it takes float32 and bfloat16 inputs and a float32 state, not {rows[0].dtype} and {S.dtype}"
    if conv.dtype != rows[0].dtype:
        return f"the pool keeps inputs of the convolution in {conv.dtype}, they come in {rows[0].dtype}"
    if d not in (32, 64, 128) or taps != 4:
        return f"it takes head dims 32, 64 and 128 and 4 taps, not {d} and {taps}"
    if any(x.stride(-1) != 1 for x in (*rows, conv)) or S.stride()[1:] != (d * d, d, 1):
        return "the values of a row, or of a page, are not contiguous"
    if not all(x.is_contiguous() for x in (*vectors, w.conv, w.A_log, w.dt_bias, w.o_norm)):
        return "a weight, past or accepted is not contiguous"


def no_decode(qkv, gate, r, b, w, S, conv, src, dst, past):
    return cannot((qkv, gate, r, b), w, S, conv, (past,))


@kernels.implement("kda_decode", "triton", no_decode)
def kda_decode(qkv, gate, r, b, w, S, conv, src, dst, past):
    return launch(qkv, gate, r, b, w, S, conv, src, dst, past, 1)


def no_verify(qkv, gate, r, b, w, S, conv, src, past, T, raw):
    return cannot((qkv, gate, r, b, raw), w, S, conv, (past,))


@kernels.implement("kda_verify", "triton", no_verify)
def kda_verify(qkv, gate, r, b, w, S, conv, src, past, T, raw):
    return launch(qkv, gate, r, b, w, S, conv, src, None, past, T, raw)


def no_commit(raw, weights, pool, src, dst, past, accepted, T):
    S, conv = pool.state(0)
    return next(filter(None, (cannot((raw[0],), w, S, conv, (past, accepted)) for w in weights)), None)


@functools.lru_cache(maxsize=64)
def addresses(device, *pointers):
    """The table that `_step` reads: uploaded once, for a graph cannot."""
    return torch.tensor(pointers, dtype=torch.int64, device=device)


@kernels.implement("kda_commit", "triton", no_commit)
def kda_commit(raw, weights, pool, src, dst, past, accepted, T):
    (S, conv), B = pool.state(0), len(past)
    h, d, (L, _, width) = *S.shape[1:3], raw.shape
    table = addresses(raw.device, *(x.data_ptr() for w in weights for x in w[:3]))
    qkv, r, b, w = raw, raw[..., 3 * h * d :], raw[..., 4 * h * d :], weights[0]
    strides = [width] * 4 + [S.stride(0), conv.stride(0), conv.stride(1), src.stride(0), dst.stride(0)]
    strides += [0, raw.stride(0), *pool.slab_strides(), src.stride(1), dst.stride(1)]
    _step[h, B, L](
        qkv, r, r, b, None, w.conv, w.A_log, w.dt_bias, w.o_norm, S, conv, src, dst, past, accepted, None, table, w.eps,
        *strides, H=h, D=d, BV=d, LOWER_BOUND=w.lower_bound or None, T=T, OVERLAP=False, PER_GROUP=pool.per_group,
        num_warps=config(d, B * h * L, False)[1],
    )  # fmt: skip
