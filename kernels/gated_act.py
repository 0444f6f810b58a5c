"""The gated activations SiTU and SwiGLU, in float32: as a function of other kernels, `gated`, and as a kernel."""

import torch
import triton
import triton.language as tl

import kernels


@triton.jit
def _tanh(x):
    """By exp, and near zero, where that cancels, by its series: a relative error of a few 1e-7 everywhere."""
    square = x * x
    series = x * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    e = tl.exp(-2 * tl.abs(x))
    far = (1 - e) / (1 + e)
    return tl.where(tl.abs(x) < 0.25, series, tl.where(x < 0, -far, far))


@triton.jit
def gated(a, u, beta, linear, SITU: tl.constexpr):
    gate = 1 / (1 + tl.exp(-a))
    return beta * _tanh(a / beta) * gate * linear * _tanh(u / linear) if SITU else a * gate * u


@triton.jit
def _act_kernel(x, out, inner, x_row, beta, linear, SITU: tl.constexpr, BLOCK: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + row * x_row + i, mask=i < inner, other=0).to(tl.float32)
    u = tl.load(x + row * x_row + inner + i, mask=i < inner, other=0).to(tl.float32)
    tl.store(out + row * inner + i, gated(a, u, beta, linear, SITU), mask=i < inner)


def _act_why_not(x, cfg):
    if x.dtype not in (torch.float32, torch.bfloat16):
        return f"{x.dtype}"
    return None if x.stride(1) == 1 else "strided columns"


@kernels.implement("gated_act", "triton", _act_why_not)
def gated_act(x, cfg, block=1024):
    """x [N, 2 I], gate | up, rows at any stride -> SiTU or SwiGLU [N, I]; float32 inside."""
    N, inner = x.shape[0], x.shape[1] // 2
    out = x.new_empty(N, inner)
    _act_kernel[N, triton.cdiv(inner, block)](
        x, out, inner, x.stride(0), cfg.activation_situ_beta, cfg.activation_situ_linear_beta,
        SITU=cfg.hidden_act == "situ", BLOCK=block,
    )  # fmt: skip
    return out
