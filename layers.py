"""What all layers share: Linear, RMSNorm, and the precision of what is kept wide in a narrow model."""

import contextlib

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


def randn(*shape, scale=1.0):
    """Normal numbers times scale. On the meta device, where a model is only built to be loaded, nothing is drawn: that
    would import PyTorch's compiler."""
    w = torch.empty(shape)
    return w if w.is_meta else w.normal_() * scale


def no_autocast(x):
    """A context in which matrix products keep the dtype of their inputs (training runs under bf16 autocast)."""
    device = x.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else contextlib.nullcontext()


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
