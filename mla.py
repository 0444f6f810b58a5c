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
from attnres import RMSNorm

ABSORB = 16  # up to this many queries a sequence use the absorbed form
FP8_SCALES = ("latent_scale", "key_scale")
LATENT_EPS = 1e-6  # q_a_layernorm and kv_a_layernorm only; every other norm uses rms_norm_eps


@kernels.op("mla_prefill")
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


@kernels.op("mla_decode")
def mla_absorbed(q, rows, W_kvb, mask, scale):
    """Shapes as `mla_expanded`, but mask None means that every query sees every row."""
    B, T, h, _ = q.shape
    r = W_kvb.shape[-1]
    nope = q.shape[-1] - (rows.shape[-1] - r)
    q = torch.cat([torch.einsum("bthn,hnr->bthr", q[..., :nope], W_kvb[:, :nope]), q[..., nope:]], dim=-1)
    mask = None if mask is None else mask.repeat_interleave(h, dim=1)[:, None]
    q, rows = q.reshape(B, 1, T * h, -1), rows[:, None]  # one key head, T*h queries
    o = F.scaled_dot_product_attention(q, rows, rows[..., :r], mask, scale=scale)
    return torch.einsum("bthr,hvr->bthv", o.reshape(B, T, h, r), W_kvb[:, nope:])


class MLA(nn.Module):
    """One MLA layer. `index` counts MLA layers only: it is the layer's slab in the page pool."""

    def __init__(self, cfg, index):
        super().__init__()
        self.index, self.heads, self.gated, self.q_rank = (
            index,
            cfg.num_attention_heads,
            cfg.mla_use_output_gate,
            cfg.q_lora_rank,
        )
        self.rank, self.pe, self.v_dim = cfg.kv_lora_rank, cfg.qk_rope_head_dim, cfg.v_head_dim
        self.qk_dim = cfg.qk_nope_head_dim + cfg.qk_rope_head_dim
        q_out, inner = self.heads * self.qk_dim, self.heads * self.v_dim
        self.sizes = [self.q_rank or q_out, self.rank + self.pe, inner if self.gated else 0]  # q_a (or q), kv_a, gate
        self.in_proj = nn.Linear(cfg.hidden_size, sum(self.sizes), bias=False)
        if self.q_rank:
            self.q_a_layernorm = RMSNorm(self.q_rank, LATENT_EPS)
            self.q_b_proj = nn.Linear(self.q_rank, q_out, bias=False)
        self.kv_a_layernorm = RMSNorm(self.rank, LATENT_EPS)
        self.kv_b_proj = nn.Linear(self.rank, self.heads * (cfg.qk_nope_head_dim + self.v_dim), bias=False)
        self.o_proj = nn.Linear(inner, cfg.hidden_size, bias=False)
        self.latent_scale = self.key_scale = None  # [1] each, for rows stored in FP8, where the checkpoint ships them

    def forward(self, x, batch):
        """x [N, H], the rows of all sequences in `batch` -> [N, H]. Writes their latent rows, reads their history."""
        q, kv, gate = self.in_proj(x).split(self.sizes, dim=-1)
        if self.q_rank:
            q = self.q_b_proj(self.q_a_layernorm(q))
        q = q.unflatten(-1, (self.heads, self.qk_dim))
        c, k_pe = kv.split([self.rank, self.pe], dim=-1)
        rows = torch.cat([self.kv_a_layernorm(c), k_pe], dim=-1)
        scale = self.row_scale(rows)
        batch.write_rows(self.index, rows, scale)

        W_kvb = self.kv_b_proj.weight.unflatten(0, (self.heads, -1))
        out = []
        for seg in batch.segments:
            history, mask = batch.read_rows(self.index, seg, rows, scale)
            # mask None: a whole sequence is causal, a lone last token sees everything
            form = mla_absorbed if seg.T <= ABSORB and not (mask is None and seg.T > 1) else mla_expanded
            out.append(form(seg.dense(q), history, W_kvb, mask, self.qk_dim**-0.5).flatten(0, 1))
        o = torch.cat(out).flatten(1)
        return self.o_proj(o * gate.sigmoid() if self.gated else o)

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
