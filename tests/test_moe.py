"""The router by brute force, the experts one token at a time in float64, and MXFP4 bit by bit."""

import math

import pytest
import torch
from helpers import fp4_value, mxfp4_decode, norm64, perturb, published64, rel, tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st

from moe import MLP, Experts, MoE, activation, mxfp4_pack, mxfp4_unpack, route, routed_experts

# ---------------------------------------------------------------- router


def brute_route(p, bias, cfg):
    """One token in plain Python: p, bias lists of numbers -> ids, weights."""
    E, n = len(p), cfg.num_expert_group if cfg.use_grouped_topk else 1
    biased = [a + b for a, b in zip(p, bias)]
    groups = [range(i * E // n, (i + 1) * E // n) for i in range(n)]
    best = [sum(sorted((biased[e] for e in group), reverse=True)[:2]) for group in groups]
    kept = sorted(range(n), key=lambda i: (-best[i], i))[: cfg.topk_group]
    allowed = [e for i in kept for e in groups[i]]
    ids = sorted(allowed, key=lambda e: (-biased[e], e))[: cfg.num_experts_per_token]
    total = sum(p[e] for e in ids) + 1e-20 if cfg.moe_renormalize else 1
    return ids, [p[e] / total * cfg.routed_scaling_factor for e in ids]


ROUTERS = [
    dict(num_experts=7, num_experts_per_token=3),
    dict(num_experts=16, num_experts_per_token=1, moe_renormalize=False),
    dict(num_experts=16, num_experts_per_token=16, routed_scaling_factor=2.446),
    dict(num_experts=12, num_experts_per_token=4, num_expert_group=4, topk_group=2),
    dict(num_experts=12, num_experts_per_token=2, num_expert_group=6, topk_group=1, moe_renormalize=False),
    dict(num_experts=12, num_experts_per_token=3, num_expert_group=12, topk_group=5),  # one expert in a group
    dict(num_experts=12, num_experts_per_token=4, num_expert_group=4, topk_group=2, use_grouped_topk=False),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
@pytest.mark.parametrize("ties", [True, False])
@pytest.mark.parametrize("changes", ROUTERS)
def test_route(dtype, score, ties, changes):
    cfg = tiny_config(moe_router_activation_func=score, **changes)
    torch.manual_seed(0)
    logits, bias = torch.randn(200, cfg.num_experts, dtype=dtype), torch.randn(cfg.num_experts, dtype=dtype)
    if ties:  # few distinct scores, biases that are sums of powers of two: equal scores everywhere
        logits, bias = logits.round().clamp(-1, 1), (bias * 2).round() / 8
        bias[::2] = 0
    # all row-independent, so that equal logits are equal scores: softmax of a row shares its denominator
    p = logits.sigmoid() if score == "sigmoid" else logits.softmax(-1)
    exact = 1 / (1 + (-logits.double()).exp()) if score == "sigmoid" else logits.double().exp()
    assert rel(p, exact if score == "sigmoid" else exact / exact.sum(-1, keepdim=True)) < 1e-6
    ids, weights = route(logits, bias, cfg)
    biased = p + bias  # in the dtype of the router, so that its roundings make the same ties
    tied = 0
    for i in range(len(logits)):
        shifted = dict(zip(p[i].tolist(), range(cfg.num_experts)))
        tied += len(shifted) < cfg.num_experts
        want_ids, _ = brute_route((biased[i]).double().tolist(), [0.0] * cfg.num_experts, cfg)
        assert ids[i].tolist() == want_ids
        chosen = p[i].double()[want_ids]
        chosen = chosen / (chosen.sum() + 1e-20) if cfg.moe_renormalize else chosen
        assert torch.allclose(weights[i].double(), chosen * cfg.routed_scaling_factor, rtol=1e-5, atol=0)
    assert tied == 200 if ties else tied < 10
