"""The residual stream of Kimi K3: RMSNorm and Block Attention Residuals (AttnRes).

A plain transformer feeds each sub-layer the running sum of all earlier outputs. AttnRes feeds it a learned mixture
instead: every `b` layers the running sum s is put aside as a snapshot and a new sum starts, and each sub-layer chooses,
per token, how much of each snapshot and of the current sum it wants to read:

    x = sum_j  softmax_j( RMSNorm(C_j) . (n * p) )  C_j          C = snapshots + [s],  n: norm weight,  p: proj weight

The scores and the mixture are float32, whatever the model's dtype: they feed the whole stream.
"""

import torch
import torch.nn.functional as F
from torch import nn

import kernels


def wide(x):
    """x in the precision of statistics and states: float32, or float64 if x already is."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def wide_dtype():
    """The dtype of parameters that stay wide in a narrow model: float32, or float64 in a float64 model."""
    return torch.promote_types(torch.get_default_dtype(), torch.float32)


def no_autocast(x):
    """A context in which matrix products keep the dtype of their inputs (training runs under bf16 autocast)."""
    return torch.autocast(x.device.type, enabled=False)


def rms_norm(x, weight, eps):
    """x [..., D], weight [D] -> x * rsqrt(mean(x^2) + eps) * weight in weight's dtype; statistics in float32."""
    x = wide(x)
    return F.rms_norm(x, x.shape[-1:], weight.to(x.dtype), eps).to(weight.dtype)


class RMSNorm(nn.Module):
    def __init__(self, dim, eps, dtype=None):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim, dtype=dtype))

    def forward(self, x):
        return rms_norm(x, self.weight, self.eps)


@kernels.op("attnres")
def attnres_mix(candidates, norm, proj, eps):
    """candidates: list of J tensors [N, H]; norm [H]; proj [1, H] -> mixture [N, H] in float32."""
    with no_autocast(norm):
        c = wide(torch.stack(candidates))  # [J, N, H]
        query = (wide(norm) * wide(proj)).flatten()
        scores = (c @ query) * torch.rsqrt(c.square().mean(-1) + eps)  # RMSNorm(c) . query, [J, N]
        return (scores.softmax(0)[..., None] * c).sum(0)


class AttnRes(nn.Module):
    """One mixture of the block snapshots and the running sum."""

    def __init__(self, cfg):
        super().__init__()
        self.eps = cfg.rms_norm_eps
        self.norm_weight = nn.Parameter(torch.ones(cfg.hidden_size))
        self.proj_weight = nn.Parameter(torch.zeros(1, cfg.hidden_size))  # zero: training starts from the plain average

    def forward(self, blocks, s):
        """blocks: list of snapshots [N, H], s: the running sum [N, H] -> what the next sub-layer reads, [N, H]."""
        return attnres_mix([*blocks, s], self.norm_weight, self.proj_weight, self.eps) if blocks else s
