"""Kimi Delta Attention (KDA): linear attention with a per-channel decay and the delta rule.

Per head, with d = head_dim and a state S [d_k, d_v] in float32 (Kimi Linear report, arXiv 2510.26692):

    q, k, v = SiLU(conv(x W_q)), SiLU(conv(x W_k)), SiLU(conv(x W_v))      causal, depthwise, over the last 4 inputs
    q = l2norm(q) d^-1/2,   k = l2norm(k),   beta = sigmoid(x W_b)
    r = (x W_fa) W_fb + dt_bias
    g = gate_lower_bound * sigmoid(exp(A_log) r)        log-decay per key channel; unbounded: -exp(A_log) softplus(r)

    S = diag(e^g) S                                     forget
    S = S + beta k (v - S^T k)^T                        correct what the memory answers for k
    o = S^T q                                           read

    out = (RMSNorm(o) * sigmoid(x W_g)) W_o

`kda_recurrent` is that recurrence, token by token. `kda_chunked` is the same function for 64 tokens at a time.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import kernels
from layers import Linear, RMSNorm, join, no_autocast, rms_norm, wide, wide_dtype

CHUNK, BLOCK = 64, 16


def short_conv(x, past, weight):
    """Causal depthwise convolution. x [B, T, C], past [B, K-1, C] (the inputs before), weight [C, K] -> y, new past."""
    window = torch.cat([past.to(x.dtype), x], dim=1)
    taps, length = weight.shape[1], x.shape[1]
    y = sum(window[:, i : i + length] * weight[:, i] for i in range(taps))  # the last tap is the current token
    return y, window[:, length:]


def l2norm(x):
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def log_decay(r, A_log, lower_bound):
    """r [..., h, d] (dt_bias added), A_log [h] -> log-decay g <= 0, float32."""
    rate = wide(A_log).exp()[:, None]
    if lower_bound:
        return lower_bound * torch.sigmoid(rate * wide(r))
    return -rate * F.softplus(wide(r))


def kda_recurrent(q, k, v, g, beta, state):
    """q, k, v, g [B, T, h, d], beta [B, T, h], state [B, h, d, d] -> o [B, T, h, d], state. One token at a time."""
    q, k, v, g, beta, state = (wide(x) for x in (q, k, v, g, beta, state))
    out = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp()[..., None]
        error = v[:, t] - (k[:, t, :, None] @ state)[..., 0, :]
        state = state + (beta[:, t, :, None] * k[:, t])[..., None] * error[..., None, :]
        out.append((q[:, t, :, None] @ state)[..., 0, :])
    return torch.stack(out, dim=1), state


def kda_chunked(q, k, v, g, beta, state):
    """The same function, CHUNK tokens at a time. Shapes as `kda_recurrent`.

    With G the inclusive sum of g in the chunk and S the state before it, all corrections of a chunk solve one
    triangular system:

        A_ij = beta_i <k_i e^{G_i - G_j}, k_j>, j < i;      (I + A) U = diag(beta) (V - (k e^G) S)
        o_i = S^T (q_i e^{G_i}) + sum_{j<=i} <q_i e^{G_i - G_j}, k_j> U_j
        S'  = diag(e^{G_C}) S + sum_j (k_j e^{G_C - G_j}) U_j^T

    No exponent is ever positive: G falls by up to 5 a token (more without a bound), so e^{-G_j} alone would overflow.
    Inside a BLOCK of 16 tokens the difference G_i - G_j is taken first; between blocks it is split at the start of i's.
    """
    q, k, v, g, beta, state = (wide(x) for x in (q, k, v, g, beta, state))
    B, T, h, d = q.shape
    size = min(CHUNK, -(-T // BLOCK) * BLOCK)
    n, m = -(-T // size), size // BLOCK
    # [B, T, h, .] -> [B, h, n, size, .]; padding tokens have k = beta = g = 0 and change nothing
    q, k, v, g, beta = (
        F.pad(x, (0, 0, 0, 0, 0, n * size - T)).unflatten(1, (n, size)).movedim(3, 1)
        for x in (q, k, v, g, beta[..., None])
    )

    # Sums of g are taken inside a block, and of whole blocks: a difference of two long sums would lose digits.
    gb, kb = g.unflatten(3, (m, BLOCK)).cumsum(-2), k.unflatten(3, (m, BLOCK))  # [B, h, n, m, BLOCK, d]
    total = gb[..., -1, :]  # [B, h, n, m, d]
    ones = q.new_ones(m, m)
    before, behind = ones.tril(-1) @ total, ones.triu(1) @ total
    between = torch.einsum("ac,bc,...cd->...abd", ones.tril(-1), ones.triu(1), total)  # of the blocks b < c < a
    rest = total[..., None, :] - gb  # from j to the end of its block
    G = (gb + before[..., None, :]).flatten(3, 4)

    # pair products for k and q at once, p = [k, q]: P[i, j] = <p_i e^{G_i - G_j}, k_j>
    p = torch.stack([k, q], dim=3)  # [B, h, n, 2, size, d]
    pb = p.unflatten(4, (m, BLOCK))
    left = pb * gb.exp()[:, :, :, None]
    right = kb[:, :, :, None] * (rest[:, :, :, None] + between[..., None, :]).exp()  # [B, h, n, a, b, BLOCK, d]
    P = (left @ right.flatten(4, 5)[:, :, :, None].mT).flatten(4, 5)  # right where j is in an earlier block than i
    decay = (gb[..., :, None, :] - gb[..., None, :, :]).clamp(max=0).exp()  # [B, h, n, m, i, j, d]
    same = ((decay * kb[..., None, :, :]) @ pb.movedim(3, -1)).movedim(-1, 3)  # [B, h, n, 2, m, i, j]: inside a block
    block = torch.arange(size, device=q.device) // BLOCK
    P = torch.where(block[:, None] == block, same.tile(m).flatten(-3, -2), P).tril()

    # one solve for both right-hand sides: U = Uv - Uk S
    eye = torch.eye(size, dtype=q.dtype, device=q.device)
    rhs = beta * torch.cat([v, k * G.exp()], dim=-1)
    solved = torch.linalg.solve_triangular(eye + beta * P[:, :, :, 0].tril(-1), rhs, upper=False, unitriangular=True)
    Uv, Uk = solved.split(d, dim=-1)
    k_out = (kb * (rest + behind[..., None, :]).exp()).flatten(3, 4).mT
    q_in, G_end = q * G.exp(), G[..., -1, :, None].exp()

    out = []
    for c in range(n):  # the only sequential part: once per chunk
        U = Uv[:, :, c] - Uk[:, :, c] @ state
        out.append(q_in[:, :, c] @ state + P[:, :, c, 1] @ U)
        state = G_end[:, :, c] * state + k_out[:, :, c] @ U
    return torch.cat(out, dim=2)[:, :, :T].transpose(1, 2), state


@kernels.op("kda_recurrence")
def kda(q, k, v, g, beta, state):
    """Chooses the form: the recurrence for a few tokens, chunks for many. Shapes as `kda_recurrent`."""
    with no_autocast(q):
        return (kda_recurrent if q.shape[1] < BLOCK else kda_chunked)(q, k, v, g, beta, state)


class Weights(NamedTuple):
    """What a KDA layer applies between its projections; all float32."""

    conv: torch.Tensor  # [3 h d, K]
    A_log: torch.Tensor  # [h]
    dt_bias: torch.Tensor  # [h d]
    o_norm: torch.Tensor  # [d]
    eps: float
    lower_bound: float | None


def kda_mix(qkv, r, b, w, past, state):
    """B sequences from raw projections: qkv [B, T, 3hd], r [B, T, hd], b [B, T, h], conv past [B, K-1, 3hd], state
    [B, h, d, d] -> o [B, T, h, d] before its norm, past, state.
    """
    y, past = short_conv(qkv, past, w.conv)
    qk, v = F.silu(y).unflatten(-1, (3, len(w.A_log), -1)).split([2, 1], dim=2)
    q, k = l2norm(qk).unbind(2)
    g = log_decay((r + w.dt_bias).unflatten(-1, q.shape[2:]), w.A_log, w.lower_bound)
    o, state = kda(q * q.shape[-1] ** -0.5, k, v[:, :, 0], g, wide(b).sigmoid(), state)
    return o, past, state


def gated_norm(o, gate, w):
    """o [..., h, d], gate [..., hd] -> RMSNorm(o) * sigmoid(gate), [..., hd] in gate's dtype."""
    return (rms_norm(o, w.o_norm, w.eps).flatten(-2) * wide(gate).sigmoid()).to(gate.dtype)


def read_state(S, conv, src, past):
    """Conv inputs [B, K-1, 3hd] and state [B, h, d, d] of pages src, or zero at the start of a text."""
    fresh, src = (past == 0) | (src < 0), src.clamp(min=0)
    return conv[src].masked_fill(fresh[:, None, None], 0), S[src].masked_fill(fresh[:, None, None, None], 0)


def write_state(S, conv, dst, before, state):
    """The other way, to pages dst; those below 0 are of padding."""
    real = (dst >= 0).nonzero()[:, 0]
    S[dst[real]], conv[dst[real]] = state[real].to(S.dtype), before[real].to(conv.dtype)


@kernels.op("kda_prefill", parts=("kda_recurrence",))
def kda_prefill(qkv, gate, r, b, w, S, conv, src, dst, part):
    """Sequences of any lengths, in the page pool.

    qkv [N, 3hd], gate [N, hd], r [N, hd], b [N, h]: raw projections of the part's rows; S [pages, h, d, d],
    conv [pages, K-1, 3hd]: the layer's slab; src, dst [B] int64: pages read (a sequence with past 0 starts from zero)
    and written; part: lengths and places (cache.Part) -> o [N, hd], normalized and gated.
    """
    out = torch.empty_like(gate)
    for first, last, T, rows in part.runs:
        x = (t[rows].unflatten(0, (last - first, T)) for t in (qkv, r, b))
        o, *new = kda_mix(*x, w, *read_state(S, conv, src[first:last], part.past[first:last]))
        write_state(S, conv, dst[first:last], *new)
        out[rows] = gated_norm(o.flatten(0, 1), gate[rows], w)
    return out


@kernels.op("kda_decode", parts=("kda_recurrence",))
def kda_decode(qkv, gate, r, b, w, S, conv, src, dst, past):
    """One token of each of B sequences, [B] int32 tokens after `past`; the rest as in `kda_prefill`. Rows whose dst is
    below 0 are padding: their output is anything, and they write nothing.
    """
    o, *new = kda_mix(qkv[:, None], r[:, None], b[:, None], w, *read_state(S, conv, src, past))
    write_state(S, conv, dst, *new)
    return gated_norm(o[:, 0], gate, w)


@kernels.op("kda_verify", parts=("kda_recurrence",))
def kda_verify(qkv, gate, r, b, w, S, conv, src, past, T, raw):
    """T tokens of each of B sequences, of which all but the first are drafts: as if they were accepted, but no state is
    written. What `kda_commit` needs of them goes to raw [B T, 4hd + h]. -> o [B T, hd]; the rest as in `kda_decode`.
    """
    x = (t.unflatten(0, (-1, T)) for t in (qkv, r, b))
    o, _, _ = kda_mix(*x, w, *read_state(S, conv, src, past))
    torch.cat([qkv, r, b], dim=-1, out=raw)
    return gated_norm(o.flatten(0, 1), gate, w)


@kernels.op("kda_commit", parts=("kda_recurrence",))
def kda_commit(raw, weights, pool, src, dst, past, accepted, T):
    """Writes the state of all KDA layers after the first accepted[i] (int32 [B], at least 0, at most T) of the T tokens
    of each sequence i that `kda_verify` had; with none accepted that is the state of src.

    raw [layers, B T, 4hd + h]; weights: of each layer; src, dst [B, groups] int64: state pages.
    """
    for i, w in enumerate(weights):
        (S, conv), group, hd = pool.state(i), pool.group(i), len(w.dt_bias)
        x = [t.unflatten(0, (-1, T)) for t in raw[i].split([3 * hd, hd, len(w.A_log)], dim=-1)]
        state = read_state(S, conv, src[:, group], past)
        for t in range(T):
            _, *new = kda_mix(*(y[:, t : t + 1] for y in x), w, *state)
            took = accepted > t
            state = [torch.where(took.view(-1, *[1] * (n.ndim - 1)), n, old) for n, old in zip(new, state)]
        write_state(S, conv, dst[:, group], *state)


class KDA(nn.Module):
    """One KDA layer. `index` counts KDA layers only: it finds the layer's state in the page pool."""

    def __init__(self, cfg, index):
        super().__init__()
        self.index, self.heads, self.dim = index, cfg.kda_heads, cfg.kda_head_dim
        self.lower_bound, self.full_rank_gate = cfg.gate_lower_bound, cfg.use_full_rank_gate
        inner = self.heads * self.dim
        gate = inner if self.full_rank_gate else self.dim
        self.sizes = [3 * inner, gate, self.dim, self.heads]  # q|k|v, gate, f_a, b
        self.in_proj = Linear(cfg.hidden_size, sum(self.sizes))
        self.conv_weight = nn.Parameter(torch.empty(3 * inner, cfg.conv_kernel, dtype=wide_dtype()).uniform_(-0.5, 0.5))
        self.f_b_proj = Linear(self.dim, inner)
        if not self.full_rank_gate:
            self.g_b_proj = Linear(self.dim, inner)
        self.A_log = nn.Parameter(torch.zeros(cfg.A_log_size, dtype=wide_dtype()))  # padded: the first `heads` count
        self.dt_bias = nn.Parameter(torch.empty(inner, dtype=wide_dtype()).uniform_(-7, -1))
        self.o_norm = RMSNorm(self.dim, cfg.rms_norm_eps, dtype=wide_dtype())
        self.o_proj = Linear(inner, cfg.hidden_size)

    def forward(self, x, batch):
        """x [N, H], the rows of all sequences in `batch` -> [N, H]. Reads and writes their state pages."""
        qkv, gate, f_a, b = self.in_proj(x).split(self.sizes, dim=-1)
        gate = gate if self.full_rank_gate else self.g_b_proj(gate)
        r, w = self.f_b_proj(f_a), self.weights()
        if batch.pool is None:
            kernels.refuse("model(ids) has no pages; choose kda_recurrence", "kda_prefill", "kda_decode")
            rows = (t.unflatten(0, (batch.B, batch.T)) for t in (qkv, r, b))
            o, _, _ = kda_mix(*rows, w, *self.zero_state(batch.B, qkv))
            return self.o_proj(gated_norm(o.flatten(0, 1), gate, w).to(x.dtype))
        out = []
        for part in batch.parts:
            S, conv, src, dst = batch.state(self.index, part)
            rows = (t[part.rows] for t in (qkv, gate, r, b))
            if part.decode:
                out.append(kda_decode(*rows, w, S, conv, src, dst, part.past))
            elif part.drafts:
                out.append(kda_verify(*rows, w, S, conv, src, part.past, part.drafts + 1, part.raw[self.index]))
            else:
                out.append(kda_prefill(*rows, w, S, conv, src, dst, part))
        return self.o_proj(join(out))

    def weights(self):
        A_log = self.A_log[: self.heads]
        return Weights(self.conv_weight, A_log, self.dt_bias, *self.o_norm.weights(), self.lower_bound)

    def zero_state(self, B, like):
        """What a sequence starts from: conv inputs [B, K-1, 3*h*d] and recurrent state [B, h, d, d], all zero."""
        past = like.new_zeros(B, self.conv_weight.shape[1] - 1, self.conv_weight.shape[0])
        return past, like.new_zeros(B, self.heads, self.dim, self.dim, dtype=wide(like[:0]).dtype)

    def published(self):
        """Published tensor name -> the view of our fused weights that holds it."""
        inner = self.heads * self.dim
        q, k, v, gate, f_a, b = self.in_proj.weight.split([inner] * 3 + self.sizes[1:])
        conv = self.conv_weight.unsqueeze(1).split(inner)
        names = {"q_proj": q, "k_proj": k, "v_proj": v, "f_a_proj": f_a, "b_proj": b, "f_b_proj": self.f_b_proj.weight}
        names |= {"q_conv1d": conv[0], "k_conv1d": conv[1], "v_conv1d": conv[2]}
        names |= {"g_proj": gate} if self.full_rank_gate else {"g_a_proj": gate, "g_b_proj": self.g_b_proj.weight}
        names |= {"o_norm": self.o_norm.weight, "o_proj": self.o_proj.weight}
        return {f"{name}.weight": w for name, w in names.items()} | {"A_log": self.A_log, "dt_bias": self.dt_bias}
