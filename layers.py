"""What all layers share: Linear, RMSNorm, and what keeps precision where it must be and small steps on a CPU short."""

import contextlib
import functools

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


def cast(x, dtype):
    """x.to(dtype), which takes the time of an operation even where nothing is to be done."""
    return x if x.dtype == dtype else x.to(dtype)


def join(parts):
    """The rows of a batch from those of its parts; a lone part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def no_autocast(x):
    """A context in which matrix products keep the dtype of their inputs (training runs under bf16 autocast)."""
    device = x.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else contextlib.nullcontext()


def lean(x):
    """Whether x is on a CPU and nothing records gradients: a few rows cost there what their operations are many."""
    return x.is_cpu and not torch.is_grad_enabled()


def number(value, x):
    """value, for arithmetic with x: where that is lean, a tensor, for a Python number is converted every time anew."""
    return _number(value, x.dtype) if lean(x) else value


@functools.cache
def _number(value, dtype):
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=dtype, device="cpu")


def inverse_norm(x, eps, scale=1.0):
    """x [..., D] float32 or wider -> 1 / sqrt(scale * sum(x^2) + eps), [..., 1]."""
    if lean(x):
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return torch.addcmul(number(eps, x), norm, norm, value=scale).rsqrt()
    return torch.rsqrt(x.square().sum(-1, keepdim=True) * scale + eps)


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
    if lean(x):  # F.rms_norm is 24 operations there
        return cast(x * inverse_norm(x, eps, 1 / x.shape[-1]) * wide(weight), weight.dtype)
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
