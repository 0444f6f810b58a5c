"""Shared by all tests: the reference cases, tiny random models, and a bit-level MXFP4 decoder."""

import functools
from pathlib import Path

import torch
from safetensors.torch import load_file

from checkpoint import Views
from model import K3, K3Config

torch.set_num_threads(1)  # tiny products: a second thread only gets in the way
DATA = Path(__file__).parent / "data"
CASES = ("micro", "micro-mtp", "micro-mxfp4", "kimi-linear-micro")


def rel(a, b):
    """Norm of the difference over norm of b, in float64."""
    a, b = a.detach().double(), b.detach().double()
    assert a.shape == b.shape, f"{tuple(a.shape)} against {tuple(b.shape)}"
    return float((a - b).norm() / b.norm())


@functools.cache
def case(name):
    """The float32 model and the reference tensors of tests/data/NAME. Both are shared: do not change them."""
    model = K3.from_pretrained(DATA / name, dtype=torch.float32, progress=False)
    return model, load_file(DATA / name / "reference.safetensors")


def tiny_config(linear=None, **changes):
    """A K3 of 5 layers (K K K M M) with sizes that are not powers of two; `linear` changes linear_attn_config."""
    values = dict(vocab_size=61, hidden_size=48, intermediate_size=40, num_hidden_layers=5, num_attention_heads=3)
    values |= dict(q_lora_rank=20, kv_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12)
    values |= dict(num_experts=6, num_experts_per_token=2, moe_intermediate_size=32, routed_expert_hidden_size=32)
    values |= dict(attn_res_block_size=2, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    attn = dict(num_heads=3, head_dim=20, short_conv_kernel_size=4, use_full_rank_gate=True, gate_lower_bound=-5.0)
    attn |= dict(kda_layers=[1, 2, 3], full_attn_layers=[4, 5])
    return K3Config(**(values | changes), linear_attn_config=attn | (linear or {}))


def perturb(module, seed=0, scale=0.1):
    """Adds noise to every parameter, so that none is zero or one, and returns the module."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(scale * torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype))
    return module


def tiny_model(dtype=torch.float32, **changes):
    """A random model of `tiny_config(**changes)`."""
    torch.manual_seed(0)
    return perturb(K3(tiny_config(**changes))).to(dtype).eval()


def published64(module):
    """Published tensor name -> its value in float64: what a formula of the spec is computed from."""
    return {name: view.detach().double() for name, view in Views(module.published()).items()}


def norm64(x, weight, eps):
    """RMSNorm of the spec."""
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def fp4_value(code):
    """The number of a 4-bit code: sign, 2-bit exponent, 1-bit mantissa."""
    exponent, mantissa = code >> 1 & 3, code & 1
    magnitude = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -magnitude if code >> 3 else magnitude


def mxfp4_decode(packed, scale):
    """packed uint8 [out, in/2], scale uint8 [out, in/32] -> float64 [out, in], nibble by nibble."""
    rows = []
    for row, scales in zip(packed.tolist(), scale.tolist()):
        codes = [code for byte in row for code in (byte & 15, byte >> 4)]
        rows.append([fp4_value(code) * 2.0 ** (scales[i // 32] - 127) for i, code in enumerate(codes)])
    return torch.tensor(rows, dtype=torch.float64)
