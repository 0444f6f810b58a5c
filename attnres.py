"""Block Attention Residuals (AttnRes), the residual stream of Kimi K3.

A plain transformer feeds each sub-layer the running sum of all earlier outputs. AttnRes feeds it a learned mixture
instead: every `b` layers the running sum s is put aside as a snapshot and a new sum starts, and each sub-layer chooses,
per token, how much of each snapshot and of the current sum it wants to read:

    x = sum_j  softmax_j( RMSNorm(C_j) . (n * p) )  C_j          C = snapshots + [s],  n: norm weight,  p: proj weight

The scores and the mixture are float32, whatever the model's dtype: they feed the whole stream. One op does all that
stands between two sub-layers: it adds the output of the last one to s, mixes, and normalizes for the next. Nothing is
updated in place, so a snapshot is the tensor s itself, put aside.
"""

import torch
from torch import nn

import kernels
from layers import inverse_norm, no_autocast, rms_norm, wide


class AttnRes(nn.Module):
    """The weights of one mixture of the block snapshots and the running sum."""

    def __init__(self, cfg):
        super().__init__()
        self.eps = cfg.rms_norm_eps
        self.norm_weight = nn.Parameter(torch.ones(cfg.hidden_size))
        self.proj_weight = nn.Parameter(torch.zeros(1, cfg.hidden_size))  # zero: training starts from the plain average

    def weights(self):
        return self.norm_weight, self.proj_weight, self.eps


def attnres_mix(candidates, norm, proj, eps):
    """candidates: list of J tensors [N, H]; norm [H]; proj [1, H] -> mixture [N, H] in float32."""
    with no_autocast(norm):
        c = wide(torch.stack(candidates))  # [J, N, H]
        query = wide(norm) * wide(proj)
        scores = (c * query).sum(-1, keepdim=True) * inverse_norm(c, eps, 1 / c.shape[-1])  # RMSNorm(c) . query
        return (scores.softmax(0) * c).sum(0)


@kernels.op("attnres")
def attnres_norm(terms, blocks, mix, norm):
    """The step from one sub-layer to the next: add, mix, normalize.

    terms (s, y), each [N, H], one may be None: the running sum, and the last sub-layer's output, to be added to it;
    blocks: list of snapshots [N, H]; mix (norm [H], proj [1, H], eps), not read without snapshots; norm (weight [H],
    eps) or None -> s + y, which may be one of the terms; what the next sub-layer reads, [N, H]: the mixture of blocks
    and s + y, or s + y without snapshots, normalized to the dtype of norm. Without norm the mixture itself, float32.
    """
    s, y = terms
    s = y if s is None else s if y is None else s + y
    x = attnres_mix([*blocks, s], *mix) if blocks else s
    return s, x if norm is None else rms_norm(x, *norm)


def residual(s, y, blocks, mix, norm):
    """`attnres_norm` of modules: AttnRes or None, without which models have no snapshots; RMSNorm or None."""
    return attnres_norm((s, y), blocks, mix and mix.weights(), norm and norm.weights())
