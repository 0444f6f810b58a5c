"""AttnRes against its formula in float64, and the residual flow of the model against the pseudo-code of the spec."""

import pytest
import torch
from helpers import norm64, rel, tiny_model
from torch import nn

from attnres import attnres_mix, attnres_norm
from cache import Batch
from layers import Linear, rms_norm


def mix64(C, n, p, eps):
    """mix(C; n, p) of section 2 in float64, one token at a time."""
    C = [c.double() for c in C]
    out = []
    for t in range(len(C[0])):
        rows = torch.stack([c[t] for c in C])
        score = norm64(rows, 1.0, eps) @ (n.double() * p.double()[0])
        out.append((score.exp() / score.exp().sum()) @ rows)
    return torch.stack(out)


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-6), (torch.bfloat16, 1e-6), (torch.float64, 1e-14)])
@pytest.mark.parametrize("J", range(1, 10))
def test_mix(dtype, limit, J):
    """bf16 inputs are widened before anything is computed: the result is float32 and as exact."""
    torch.manual_seed(J)
    C = [(torch.randn(11, 48, dtype=torch.float64) * 2.0 ** (j - 4)).to(dtype) for j in range(J)]
    n, p = (torch.randn(shape, dtype=torch.float64).to(dtype) for shape in (48, (1, 48)))
    got = attnres_mix(C, n, p, 1e-2)
    assert got.dtype == torch.promote_types(dtype, torch.float32)
    assert rel(got, mix64(C, n, p, 1e-2)) < limit


def test_mix_sees_the_eps():
    C = [1e-3 * torch.randn(5, 16), torch.randn(5, 16)]
    n, p = torch.randn(16), torch.randn(1, 16)
    assert rel(attnres_mix(C, n, p, 1e-5), mix64(C, n, p, 1e-5)) < 1e-6
    assert rel(attnres_mix(C, n, p, 1e-5), mix64(C, n, p, 1e-6)) > 1e-3


def test_without_snapshots_x_is_s():
    s, w = torch.randn(3, 48), torch.randn(48)
    mix, norm = (torch.randn(48), torch.randn(1, 48), 1e-5), (w, 1e-5)
    for weights in (mix, None):
        total, x = attnres_norm((s, None), [], weights, norm)
        assert total is s and torch.equal(x, rms_norm(s, w, 1e-5))
        assert attnres_norm((s, None), [], weights, None)[1] is s


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("snapshots", [0, 1, 4])
def test_one_step_is_add_mix_norm(dtype, snapshots):
    """The sum is rounded to the stream's dtype before it is mixed; the mixture reaches the norm unrounded."""
    torch.manual_seed(snapshots)
    s, y, *blocks = (torch.randn(7, 48).to(dtype) for _ in range(2 + snapshots))
    n, p, w = (torch.randn(shape).to(dtype) for shape in (48, (1, 48), 48))
    for terms, total in (((s, y), s + y), ((s, None), s), ((None, y), y)):
        before = [t.clone() for t in (s, y, *blocks)]
        got, x = attnres_norm(terms, blocks, (n, p, 1e-2), (w, 1e-5))
        want = attnres_mix([*blocks, total], n, p, 1e-2) if blocks else total
        assert torch.equal(got, total) and got.dtype == x.dtype == dtype
        assert torch.equal(x, rms_norm(want, w, 1e-5))
        assert torch.equal(attnres_norm(terms, blocks, (n, p, 1e-2), None)[1], want)
        assert all(torch.equal(*pair) for pair in zip(before, (s, y, *blocks)))


def test_linear():
    layer, x = Linear(48, 13), torch.randn(2, 5, 48)
    assert layer.bias is None and torch.equal(layer(x), x @ layer.weight.T)


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_rms_norm(dtype, limit):
    x, w = 1e-2 * torch.randn(7, 33, dtype=dtype), torch.randn(33, dtype=dtype)
    assert rel(rms_norm(x, w, 1e-3), norm64(x.double(), w.double(), 1e-3)) < limit


def test_rms_norm_statistics_are_float32():
    x, w = (torch.randn(9, 500) + 3).bfloat16(), torch.randn(500).bfloat16()
    got = rms_norm(x, w, 1e-5)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, norm64(x.double(), w.double(), 1e-5).float().bfloat16())


class Stub(nn.Module):
    """Stands in for attention or feed-forward: any function of its input will do."""

    def __init__(self, seed, width):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.register_buffer("W", torch.randn(width, width, generator=generator, dtype=torch.float64) * width**-0.5)

    def forward(self, x, batch=None):
        return torch.tanh(x @ self.W.to(x.dtype))


def stubbed(**changes):
    model = tiny_model(torch.float64, **changes)
    for i, layer in enumerate(model.layers):
        layer.self_attn, layer.ffn = Stub(2 * i, 48), Stub(2 * i + 1, 48)
    return model


def pseudo_code(model, ids):
    """Section 2 of the spec, line by line, with the model's stubs and weights -> h, s after each layer."""
    b, eps = model.cfg.attn_res_block_size, model.cfg.rms_norm_eps

    def mix(C, at):
        return mix64(C, at.norm_weight, at.proj_weight, eps)

    s, B, trace = model.embed_tokens.weight[ids], [], []
    for l, layer in enumerate(model.layers):  # noqa: E741
        x = s if l == 0 else mix(B + [s], layer.self_attention_res)
        if l % b == 0:
            B.append(s)
            s = None
        y = layer.self_attn(norm64(x, layer.input_layernorm.weight, eps))
        s = y if s is None else s + y
        x = mix(B + [s], layer.mlp_res)
        s = s + layer.ffn(norm64(x, layer.post_attention_layernorm.weight, eps))
        trace.append(s)
    return mix(B + [s], model.output_attn_res), trace


@pytest.mark.parametrize("block", [1, 2, 3, 4, 12])
def test_residual_flow(block):
    layers = dict(kda_layers=[1, 2, 3, 5, 6, 7], full_attn_layers=[4, 8, 9])
    model = stubbed(attn_res_block_size=block, num_hidden_layers=9, rms_norm_eps=1e-2, linear=layers)
    ids, got = torch.arange(13), []
    for layer in model.layers:
        layer.register_forward_hook(lambda layer, args, out: got.append(sum(out)))
    h = model.hidden(ids, Batch.whole(1, 13))
    want, trace = pseudo_code(model, ids)
    assert rel(h, want) < 1e-12
    assert max(rel(*pair) for pair in zip(got, trace)) < 1e-12 and len(got) == 9
    logits = norm64(want, model.norm.weight, 1e-2) @ model.lm_head.weight.T
    assert rel(model(ids[None])[0], logits) < 1e-12


def test_plain_residuals():
    model = stubbed(attn_res_block_size=None, rms_norm_eps=1e-2)
    ids = torch.arange(13)
    s = model.embed_tokens.weight[ids]
    for layer in model.layers:
        s = s + layer.self_attn(norm64(s, layer.input_layernorm.weight, 1e-2))
        s = s + layer.ffn(norm64(s, layer.post_attention_layernorm.weight, 1e-2))
    assert rel(model.hidden(ids, Batch.whole(1, 13)), s) < 1e-12
