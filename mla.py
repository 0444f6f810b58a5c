"""Gated Multi-head Latent Attention (MLA) without rotary embedding (NoPE).

All heads share one compressed row per token, [c | k_pe], and only that row is cached (DeepSeek-V2, arXiv 2405.04434,
section 2.1):

    q = RMSNorm(x W_qa) W_qb -> per head [q_nope | q_pe]            (without q_lora_rank: q = x W_q)
    [c | k_pe] = x W_kva;  c = RMSNorm(c)                           the latent row; k_pe is not rotated
    [k_nope | v] = c W_kvb -> per head                              W_kb = the k_nope rows of W_kvb, W_vb = its v rows
    out = ( softmax((q_nope . k_nope + q_pe . k_pe) / sqrt(d)) v  *  sigmoid(x W_g) ) W_o

Two equal forms. Expanded: build k and v of every head from the rows; least arithmetic for many queries. Absorbed: move
W_kb to the query and W_vb to the output, and attend over the rows themselves as one shared head; least memory traffic
for a few queries.
"""

import torch
import torch.nn.functional as F
from torch import nn

import kernels
from cache import FP8, FP8_MAX
from layers import Linear, RMSNorm, join, linear, rms_norm, wide

ABSORB = 16  # up to this many queries a sequence use the absorbed form
FP8_SCALES = ("latent_scale", "key_scale")
LATENT_EPS = 1e-6  # q_a_layernorm and kv_a_layernorm only; every other norm uses rms_norm_eps


@kernels.op("mla_expanded")
def mla_expanded(q, rows, W_kvb, mask, scale):
    """q [B, T, h, n+p], rows [B, L, r+p], W_kvb [h, n+v, r], mask [B, T, L] or None: causal -> [B, T, h, v]."""
    r = W_kvb.shape[-1]
    nope = q.shape[-1] - (rows.shape[-1] - r)
    c, k_pe = rows.split([r, rows.shape[-1] - r], dim=-1)
    kv = F.linear(c, W_kvb.flatten(0, 1)).unflatten(-1, W_kvb.shape[:2])
    k_nope, v = kv.split([nope, W_kvb.shape[1] - nope], dim=-1)
    k = torch.cat([k_nope, k_pe[:, :, None].expand(-1, -1, q.shape[2], -1)], dim=-1)
    mask = None if mask is None else mask[:, None]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scale).transpose(1, 2)


def absorb_query(q, W_kvb, p):
    """q [..., h, n+p], W_kvb [h, n+v, r] -> [..., h, r+p]: what the rows themselves are scored against."""
    nope = q.shape[-1] - p
    return torch.cat([_by_head(q[..., :nope], W_kvb[:, :nope]), q[..., nope:]], dim=-1)


def absorb_value(o, W_kvb, v):
    """o [..., h, r]: the attention over latents; W_kvb [h, n+v, r] -> [..., h, v]."""
    return _by_head(o, W_kvb[:, -v:].mT)


def _by_head(x, W):
    """x [..., h, i], W [h, i, o] -> [..., h, o]: a product for each head."""
    heads = torch.bmm(x.flatten(0, -3).transpose(0, 1), W)
    return heads.transpose(0, 1).unflatten(0, x.shape[:-2])


def gather_rows(stored, part, first, last, T, scale, dtype):
    """The rows that sequences first..last of a part attend to, as stored: [B, L, r+p]; and what each of their T new
    tokens sees, [B, T, L] bool. Beyond a sequence's end, and below part.first, stands its own first row that is seen:
    no other's row, and none that was not written, is ever read.
    """
    past, P, start = part.past[first:last], part.page_size, part.first
    position = torch.arange(part.longest, device=past.device)
    at = part.table[first:last].long()[:, position // P] * P + position % P
    there = (position >= start) & (position < past[:, None] + T)
    at = torch.where(there, at, at[:, start : start + 1])
    new = past[:, None] + torch.arange(T, device=past.device)
    return load_rows(stored, at, scale, dtype), (position >= start) & (position <= new[..., None])


def load_rows(stored, at, scale, dtype):
    """stored [slots, r+p] at any index; FP8 rows are multiplied by scale [r+p]."""
    if stored.dtype == FP8:
        return stored.view(torch.uint8)[at].view(FP8).to(dtype) * scale
    return stored[at]


def attend_rows(q, rows, mask, rank, scale):
    """q [B, T, h, r+p] absorbed, rows [B, L, r+p], mask [B, T, L] or None -> o [B, T, h, r], log-sum-exp [B, T, h]."""
    scores = torch.einsum("bthr,blr->bthl", wide(q), wide(rows)) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask[:, :, None], -torch.inf)
        if mask.shape[1] > 1:  # what a query does not see is 0, not 0 times a NaN; what it sees is in its scores
            rows = rows.nan_to_num(0.0, 0.0, 0.0)
    return torch.einsum("bthl,blr->bthr", scores.softmax(-1).to(q.dtype), rows[..., :rank]), scores.logsumexp(-1)


def mla_absorbed(q, rows, W_kvb, mask, scale):
    """Shapes as `mla_expanded`, but mask None means that every query sees every row."""
    rank = W_kvb.shape[-1]
    p = rows.shape[-1] - rank
    o, _ = attend_rows(absorb_query(q, W_kvb, p), rows, mask, rank, scale)
    return absorb_value(o, W_kvb, W_kvb.shape[1] - (q.shape[-1] - p))


@kernels.op("latent_write")
def latent_write(kv, norm, eps, stored, slots, scale):
    """kv [N, r+p], raw: norm [r] is applied to its first r values, and the row goes to stored[slots[i]].

    stored [slots, r+p]: one slab; slots [N] int64, below 0: of padding, not written; scale [r+p]: what a row is divided
    by in an FP8 slab, whose values saturate, else None.
    """
    c, k_pe = kv.split([len(norm), kv.shape[-1] - len(norm)], dim=-1)
    rows = torch.cat([rms_norm(c, norm, eps), k_pe], dim=-1)
    if stored.dtype == FP8:
        rows = (rows / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8).view(torch.uint8)
        stored = stored.view(torch.uint8)
    real = slots >= 0
    stored[slots[real]] = rows[real]


@kernels.op("mla_decode")
def mla_decode(q, stored, rank, part, scale, row_scale):
    """Absorbed attention of T new tokens (the last of their sequences) over the latent rows in the pool.

    q [B, T, h, r+p]: absorbed queries; stored [slots, r+p]: one slab; part: past, table, first; scale: of the scores;
    row_scale [r+p]: of FP8 rows, else None -> o [B, T, h, r], log-sum-exp of the scores [B, T, h] float32. In a
    sequence without pages (padding, table below 0) both are anything.
    """
    rows, mask = gather_rows(stored, part, 0, len(q), q.shape[1], row_scale, q.dtype)
    return attend_rows(q, rows, mask, rank, scale)


@kernels.op("mla_prefill", parts=("mla_expanded",))
def mla_prefill(q, W_kvb, stored, part, scale, row_scale):
    """Attention of chunks of any lengths, each over its sequence's rows in the pool, its own among them.

    q [N, h, n+p]; W_kvb [h, n+v, r]; the rest as in `mla_decode` -> [N, h, v].
    """
    p = stored.shape[-1] - W_kvb.shape[-1]
    v = W_kvb.shape[1] - (q.shape[-1] - p)
    out = q.new_empty(*q.shape[:2], v)
    for first, last, T, rows in part.runs:
        qs = q[rows].unflatten(0, (last - first, T))
        history, mask = gather_rows(stored, part, first, last, T, row_scale, q.dtype)
        if T > ABSORB:
            o = mla_expanded(qs, history, W_kvb, mask, scale)
        else:
            o = mla_absorbed(qs, history, W_kvb, mask, scale)
        out[rows] = o.flatten(0, 1)
    return out


class MLA(nn.Module):
    """One MLA layer. `index` counts MLA layers only: it is the layer's slab in the page pool."""

    def __init__(self, cfg, index):
        super().__init__()
        self.index, self.heads, self.q_rank = index, cfg.num_attention_heads, cfg.q_lora_rank
        self.gated = cfg.mla_use_output_gate
        self.rank, self.pe, self.v_dim = cfg.kv_lora_rank, cfg.qk_rope_head_dim, cfg.v_head_dim
        self.qk_dim = cfg.qk_nope_head_dim + cfg.qk_rope_head_dim
        q_out, inner = self.heads * self.qk_dim, self.heads * self.v_dim
        self.sizes = [self.q_rank or q_out, self.rank + self.pe, inner if self.gated else 0]  # q_a (or q), kv_a, gate
        self.in_proj = Linear(cfg.hidden_size, sum(self.sizes))
        if self.q_rank:
            self.q_a_layernorm = RMSNorm(self.q_rank, LATENT_EPS)
            self.q_b_proj = Linear(self.q_rank, q_out)
        self.kv_a_layernorm = RMSNorm(self.rank, LATENT_EPS)
        self.kv_b_proj = Linear(self.rank, self.heads * (cfg.qk_nope_head_dim + self.v_dim))
        self.o_proj = Linear(inner, cfg.hidden_size)
        self.latent_scale = self.key_scale = None  # [1] each, for rows stored in FP8, where the checkpoint ships them

    def forward(self, x, batch):
        """x [N, H], the rows of all sequences in `batch` -> [N, H]. Writes their latent rows, reads their history."""
        q, kv, gate = self.in_proj(x).split(self.sizes, dim=-1)
        if self.q_rank:
            q = self.q_b_proj(self.q_a_layernorm(q))
        q = q.unflatten(-1, (self.heads, self.qk_dim))
        W_kvb, scale = self.kv_b_proj.weight.unflatten(0, (self.heads, -1)), self.qk_dim**-0.5
        if batch.pool is None:
            why = "model(ids) has no pages; choose mla_expanded"
            kernels.refuse(why, "latent_write", "mla_decode", "mla_prefill")
            c, k_pe = kv.split([self.rank, self.pe], dim=-1)
            rows = torch.cat([self.kv_a_layernorm(c), k_pe], dim=-1)
            q, rows = (x.unflatten(0, (batch.B, batch.T)) for x in (q, rows))
            o = mla_expanded(q, rows, W_kvb, None, scale).flatten(0, 1)
        else:
            o = self.attend_paged(q, kv, W_kvb, scale, batch)
        o = o.flatten(1)
        return self.o_proj(o * gate.sigmoid() if self.gated else o)

    def attend_paged(self, q, kv, W_kvb, scale, batch):
        """q [N, h, n+p], kv [N, r+p] raw -> [N, h, v]; the new rows are stored first, and read as stored."""
        stored, row_scale = self.write_rows(kv, batch.pool, batch.slots)
        out = []
        for part in batch.parts:
            T = part.lengths[0]
            if T <= ABSORB and len(part.runs) == 1:  # each brings T tokens: one, or one and its drafts
                absorbed = absorb_query(q[part.rows].unflatten(0, (-1, T)), W_kvb, self.pe)
                o, _ = mla_decode(absorbed, stored, self.rank, part, scale, row_scale)
                out.append(absorb_value(o, W_kvb, self.v_dim).flatten(0, 1))
            else:
                out.append(mla_prefill(q[part.rows], W_kvb, stored, part, scale, row_scale))
        return join(out)

    def write_rows(self, kv, pool, slots):
        """Stores the rows kv [N, r+p], raw -> their slab, and the scale of its rows or None."""
        stored = pool.rows(self.index)
        row_scale = self.row_scale(kv) if stored.dtype == FP8 else None
        latent_write(kv, self.kv_a_layernorm.weight, LATENT_EPS, stored, slots, row_scale)
        return stored, row_scale

    def store(self, x, pool, slots):
        """The latent rows of x [N, H] alone, to slots [N]."""
        q, row, _ = self.sizes
        self.write_rows(linear(x, self.in_proj.weight[q : q + row]), pool, slots)

    def row_scale(self, rows):
        """What a row is divided by before it is stored in FP8, [r + p]: one number a part."""
        parts = ((self.latent_scale, self.rank), (self.key_scale, self.pe))
        return torch.cat([rows.new_ones(n) if s is None else s.to(rows).expand(n) for s, n in parts])

    def published(self):
        """Published tensor name -> the view of our fused weights that holds it."""
        q, kv_a, gate = self.in_proj.weight.split(self.sizes)
        names = {
            "kv_a_proj_with_mqa": kv_a,
            "kv_a_layernorm": self.kv_a_layernorm.weight,
            "kv_b_proj": self.kv_b_proj.weight,
        }
        if self.q_rank:
            names |= {"q_a_proj": q, "q_a_layernorm": self.q_a_layernorm.weight, "q_b_proj": self.q_b_proj.weight}
        else:
            names |= {"q_proj": q}
        names |= {"g_proj": gate} if self.gated else {}
        names |= {"o_proj": self.o_proj.weight}
        scales = {name: getattr(self, name) for name in FP8_SCALES if getattr(self, name) is not None}
        return {f"{name}.weight": w for name, w in names.items()} | scales
