"""MLA: its two forms against plain attention in float64, and the whole module against the formulas of the spec."""

import numpy as np
import pytest
import torch
from helpers import norm64, perturb, published64, rel, tiny_config

from cache import Batch, Chunk, PagePool, Part
from mla import ABSORB, MLA, absorb_query, absorb_value, mla_absorbed, mla_decode, mla_expanded, mla_prefill

SIZES = dict(h=3, n=16, p=8, r=24, v=12)


def attend(q, rows, W_kvb, mask, scale):
    """Section 4, one query and head at a time, in float64. Shapes as `mla_expanded`; mask [B, T, L]."""
    q, rows, W_kvb = q.double(), rows.double(), W_kvb.double()
    r = W_kvb.shape[-1]
    n = q.shape[-1] - (rows.shape[-1] - r)
    out = torch.empty(*q.shape[:3], W_kvb.shape[1] - n, dtype=torch.float64)
    for b, t, h in torch.cartesian_prod(*(torch.arange(size) for size in q.shape[:3])).tolist():
        seen = rows[b, mask[b, t]]
        c, k_pe = seen[:, :r], seen[:, r:]
        k_nope, v = c @ W_kvb[h, :n].T, c @ W_kvb[h, n:].T
        weights = ((k_nope @ q[b, t, h, :n] + k_pe @ q[b, t, h, n:]) * scale).exp()
        out[b, t, h] = weights @ v / weights.sum()
    return out


def inputs(B, T, L, dtype, h, n, p, r, v, seed=0):
    torch.manual_seed(seed)
    shapes = (B, T, h, n + p), (B, L, r + p), (h, n + v, r)
    return [torch.randn(s, dtype=torch.float64).to(dtype) * k for s, k in zip(shapes, (1, 1, r**-0.5))]


def causal(B, T, L):
    """The last T of L tokens, each sees itself and what came before."""
    return (torch.arange(L) <= torch.arange(L - T, L)[:, None]).expand(B, T, L)


def ragged(B, T, L):
    """As in a batch of sequences of different lengths: sequence b has L - 2b tokens."""
    ends = L - T - 2 * torch.arange(B)[:, None, None] + torch.arange(T)[:, None]
    return torch.arange(L) <= ends


@pytest.mark.parametrize("form", [mla_expanded, mla_absorbed])
@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("mask_of", [causal, ragged])
@pytest.mark.parametrize("B, T, L", [(1, 1, 9), (2, 1, 30), (3, 7, 20), (2, 20, 25)])
def test_forms(form, dtype, limit, mask_of, B, T, L):
    args, mask = inputs(B, T, L, dtype, **SIZES), mask_of(B, T, L)
    want = attend(*args, mask, 0.2)
    assert rel(form(*args, mask, 0.2), want) < limit


@pytest.mark.parametrize("T", [1, 2, 33])
def test_no_mask(T):
    """Expanded: a whole sequence, causal. Absorbed: every query sees every row."""
    args = inputs(2, T, T, torch.float32, **SIZES)
    assert rel(mla_expanded(*args, None, 0.2), attend(*args, causal(2, T, T), 0.2)) < 1e-5
    assert rel(mla_absorbed(*args, None, 0.2), attend(*args, torch.ones(2, T, T, dtype=torch.bool), 0.2)) < 1e-5


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("sizes", [SIZES, dict(h=1, n=5, p=3, r=7, v=11), dict(h=4, n=128, p=64, r=100, v=128)])
def test_expanded_is_absorbed(dtype, limit, sizes):
    args, mask = inputs(2, 6, 40, dtype, **sizes), ragged(2, 6, 40)
    assert rel(mla_expanded(*args, mask, 0.1), mla_absorbed(*args, mask, 0.1)) < limit


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("T", [1, 4, ABSORB + 1])
def test_pages(T, first):
    """Histories in pages in any order; NaN stands beyond their ends and below the first position that is seen."""
    P, pasts = 8, [first, 2, 8, 30]
    q, rows, W = inputs(4, T, 48, torch.float64, **SIZES)
    past, position = torch.tensor(pasts), torch.arange(48)
    rows[(position < first) | (position >= past[:, None] + T)] = torch.nan
    table = torch.randperm(4 * 48 // P).view(4, -1)
    stored = rows.new_empty(table.numel(), P, rows.shape[-1])
    stored[table] = rows.unflatten(1, (-1, P))
    lengths, tensors = [T] * 4, (past, table, None, None)
    part = Part(slice(0, 4 * T), lengths, pasts, [False] * 4, 30 + T, P, *tensors, first=first)
    ends = past[:, None, None] + torch.arange(T)[:, None]
    want = attend(q, rows, W, (position >= first) & (position <= ends), 0.2)
    stored = stored.flatten(0, 1)
    got = mla_prefill(q.flatten(0, 1), W, stored, part, 0.2, None)
    assert rel(got, want.flatten(0, 1)) < 1e-12
    absorbed = absorb_query(q, W, SIZES["p"])
    o, _ = mla_decode(absorbed, stored, SIZES["r"], part, 0.2, None)
    assert rel(absorb_value(o, W, SIZES["v"]), want) < 1e-12


def formula(x, W, cfg, q_eps=1e-6, kv_eps=1e-6):
    """Section 4 of the spec for one sequence x [T, H]; W: published name -> float64."""
    h, n, r = cfg.num_attention_heads, cfg.qk_nope_head_dim, cfg.kv_lora_rank
    if cfg.q_lora_rank:
        q = norm64(x @ W["q_a_proj.weight"].T, W["q_a_layernorm.weight"], q_eps) @ W["q_b_proj.weight"].T
    else:
        q = x @ W["q_proj.weight"].T
    q = q.view(len(x), h, -1)
    kv = x @ W["kv_a_proj_with_mqa.weight"].T
    c, k_pe = norm64(kv[:, :r], W["kv_a_layernorm.weight"], kv_eps), kv[:, r:]
    k_nope, v = (c @ W["kv_b_proj.weight"].T).view(len(x), h, -1).split([n, cfg.v_head_dim], dim=-1)
    scores = torch.einsum("thn,lhn->htl", q[..., :n], k_nope) + torch.einsum("thp,lp->htl", q[..., n:], k_pe)
    scores = scores * q.shape[-1] ** -0.5 + torch.full((len(x), len(x)), -torch.inf).triu(1)
    o = torch.einsum("htl,lhv->thv", scores.softmax(-1), v).flatten(1)
    gate = (x @ W["g_proj.weight"].T).sigmoid() if cfg.mla_use_output_gate else 1
    return (o * gate) @ W["o_proj.weight"].T


def paged(cfg, dtype, B, T):
    """A batch of B prompts of T tokens in a pool full of NaN."""
    pool = PagePool(cfg, 8, dtype)
    pool.slabs.fill_(0xFF)
    state = np.zeros(pool.groups, dtype=np.int64)
    return Batch.paged(pool, [Chunk(T, 0, np.array([3 - b]), state, state) for b in range(B)])


@pytest.mark.parametrize("pool", [True, False])
@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("q_rank", [20, None])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("T", [1, 9, 40])
def test_module(pool, dtype, limit, q_rank, gated, T):
    cfg = tiny_config(q_lora_rank=q_rank, kv_lora_rank=25, mla_use_output_gate=gated, rms_norm_eps=1e-2)
    torch.manual_seed(0)
    module = perturb(MLA(cfg, 0)).to(dtype)
    assert any(name.startswith("q_a_") for name in module.published()) == bool(q_rank)
    assert ("g_proj.weight" in module.published()) == gated
    x = torch.randn(2, T, cfg.hidden_size, dtype=dtype)
    batch = paged(cfg, dtype, 2, T) if pool else Batch.whole(2, T)
    got = module(x.flatten(0, 1), batch).unflatten(0, (2, T))
    for row, row_in in zip(got, x.double()):
        assert rel(row, formula(row_in, published64(module), cfg)) < limit


@pytest.mark.parametrize("wrong", [dict(q_eps=1e-5), dict(kv_eps=1e-5)])
def test_latent_norms_use_1e_6(wrong):
    """With activations around 1e-3 the eps of q_a_layernorm and of kv_a_layernorm each decide the result."""
    cfg = tiny_config()
    torch.manual_seed(0)
    module = perturb(MLA(cfg, 0), scale=0.5)
    x = 1e-3 * torch.randn(8, cfg.hidden_size)
    got, W = module(x, Batch.whole(1, 8)), published64(module)
    assert rel(got, formula(x.double(), W, cfg)) < 1e-5
    assert rel(got, formula(x.double(), W, cfg, **wrong)) > 1e-2
