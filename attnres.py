"""What all layers share: the residual stream of Kimi K3, Block Attention Residuals (AttnRes), RMSNorm, Linear.

A plain transformer feeds each sub-layer the running sum of all earlier outputs. AttnRes feeds it a learned mixture
instead: every `b` layers the running sum s is put aside as a snapshot and a new sum starts, and each sub-layer chooses,
per token, how much of each snapshot and of the current sum it wants to read:

    x = sum_j  softmax_j( RMSNorm(C_j) . (n * p) )  C_j          C = snapshots + [s],  n: norm weight,  p: proj weight

The scores and the mixture are float32, whatever the model's dtype: they feed the whole stream. One op does all that
stands between two sub-layers: it adds the output of the last one to s, mixes, and normalizes for the next. Nothing is
updated in place, so a snapshot is the tensor s itself, put aside.
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


def join(parts):
    """The rows of a batch from those of its parts; a lone part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def no_autocast(x):
    """A context in which matrix products keep the dtype of their inputs (training runs under bf16 autocast)."""
    return torch.autocast(x.device.type, enabled=False)


class Linear(nn.Linear):
    """A product with a weight [out, in], without a bias."""

    def __init__(self, inner, out):
        super().__init__(inner, out, bias=False)

    def forward(self, x):
        return linear(x, self.weight)


@kernels.op("linear")
def linear(x, weight):
    """x [..., in], weight [out, in] -> [..., out]."""
    return F.linear(x, weight)


def rms_norm(x, weight, eps):
    """x [..., D], weight [D] -> x * rsqrt(mean(x^2) + eps) * weight in weight's dtype; statistics in float32."""
    x = wide(x)
    return F.rms_norm(x, x.shape[-1:], weight.to(x.dtype), eps).to(weight.dtype)


rms_norm_op = kernels.op("rms_norm")(rms_norm)  # for modules; in the PyTorch paths of other ops it stays plain


class RMSNorm(nn.Module):
    def __init__(self, dim, eps, dtype=None):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim, dtype=dtype))

    def forward(self, x):
        return rms_norm_op(x, *self.weights())

    def weights(self):
        return self.weight, self.eps


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
        query = (wide(norm) * wide(proj)).flatten()
        scores = (c @ query) * torch.rsqrt(c.square().mean(-1) + eps)  # RMSNorm(c) . query, [J, N]
        return (scores.softmax(0)[..., None] * c).sum(0)


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
