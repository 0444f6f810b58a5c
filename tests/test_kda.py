"""KDA against a plain float64 recurrence, and the whole module against the formulas of the spec."""

import pytest
import torch
from helpers import norm64, perturb, published64, rel, tiny_config

from cache import Batch
from kda import KDA, kda, kda_chunked, kda_recurrent, log_decay, short_conv

LENGTHS = (1, 2, 15, 16, 17, 31, 63, 64, 65, 100, 127, 128, 129, 200, 300)
FORMS = pytest.mark.parametrize("form", [kda_recurrent, kda_chunked, kda])


def oracle(q, k, v, g, beta, state):
    """The recurrence of the spec in float64 -> o [B, T, h, d], the states after 0..T tokens [T+1, B, h, d, d]."""
    q, k, v, g, beta, S = (x.double() for x in (q, k, v, g, beta, state))
    out, states = [], [S]
    for t in range(q.shape[1]):
        S = torch.diag_embed(g[:, t].exp()) @ S
        error = v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t])
        S = S + torch.einsum("bh,bhk,bhv->bhkv", beta[:, t], k[:, t], error)
        out.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
        states.append(S)
    return torch.stack(out, dim=1), torch.stack(states)


GATES = {
    "bounded": lambda shape: -5 * torch.sigmoid(2 * torch.randn(shape)),
    "saturated": lambda shape: torch.full(shape, -5.0),
    "-20": lambda shape: torch.full(shape, -20.0),
    "none": lambda shape: -1e-6 * torch.rand(shape),
    "mixed": lambda shape: torch.tensor([-20.0, -5.0, -0.1, -1e-4])[torch.randint(4, shape)],
    "channels": lambda shape: -torch.logspace(-5, 1.3, shape[-1]).expand(shape),
    "jumps": lambda shape: (torch.arange(shape[1]) % 64 < 32)[:, None, None] * -20 * torch.rand(shape) - 1e-3,
}


def inputs(T, gate="bounded", B=2, h=3, d=32, similar=False, seed=0):
    """q, k, v, g, beta, state as the layer makes them; similar: all keys nearly equal."""
    torch.manual_seed(seed)
    q, k, v = torch.randn(3, B, T, h, d)
    k = torch.randn(B, 1, h, d) + 1e-3 * k if similar else k
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    return q * d**-0.5, k, v, GATES[gate]((B, T, h, d)), torch.randn(B, T, h).sigmoid(), torch.randn(B, h, d, d)


def check(form, args, limit=1e-4):
    o, S = form(*args)
    want, states = oracle(*args)
    assert o.dtype == S.dtype == torch.float32
    assert rel(o, want) < limit and rel(S, states[-1]) < limit
    # A token whose output is small must be right too: the norm that follows makes it large.
    assert ((o - want).norm(dim=-1) < 10 * limit * want.norm(dim=-1) + 1e-6).all()


@FORMS
@pytest.mark.parametrize("gate", GATES)
def test_every_length(form, gate):
    args = inputs(300, gate)
    want, states = oracle(*args)
    for T in LENGTHS:
        o, S = form(*(x[:, :T] for x in args[:-1]), args[-1])
        assert rel(o, want[:, :T]) < 1e-4 and rel(S, states[T]) < 1e-4, T


@pytest.mark.slow
@pytest.mark.parametrize("form", [kda_recurrent, kda_chunked])
@pytest.mark.parametrize("gate", ["bounded", "mixed"])
def test_all_lengths(form, gate):
    args = inputs(300, gate, B=1, h=1)
    want, states = oracle(*args)
    for T in range(1, 301):
        o, S = form(*(x[:, :T] for x in args[:-1]), args[-1])
        assert rel(o, want[:, :T]) < 1e-4 and rel(S, states[T]) < 1e-4, T


@FORMS
@pytest.mark.parametrize("B, h, d", [(1, 1, 32), (3, 5, 48), (2, 3, 64), (1, 7, 128)])
def test_sizes(form, B, h, d):
    check(form, inputs(70, B=B, h=h, d=d))


@FORMS
@pytest.mark.parametrize("gate", ["saturated", "-20"])
def test_512_tokens_of_strongest_decay(form, gate):
    check(form, inputs(512, gate, h=1))


@FORMS
@pytest.mark.parametrize("gate", ["none", "bounded", "saturated"])
def test_nearly_equal_keys(form, gate):
    check(form, inputs(512, gate, h=1, similar=True))


@FORMS
def test_equal_keys_corrected_in_full(form):
    q, k, v, g, beta, state = inputs(200, "none")
    check(form, (q, k[:, :1].expand_as(k), v, g, torch.ones_like(beta), state))


@pytest.mark.parametrize("gate", ["bounded", "mixed", "none"])
def test_split_anywhere_is_one_shot(gate):
    args = inputs(150, gate, h=1)
    want, end = kda_chunked(*args)
    for cut in range(1, 150):
        first, state = kda_chunked(*(x[:, :cut] for x in args[:-1]), args[-1])
        second, state = kda_chunked(*(x[:, cut:] for x in args[:-1]), state)
        assert rel(torch.cat([first, second], dim=1), want) < 2e-5 and rel(state, end) < 2e-5, cut


@pytest.mark.parametrize("form", [kda_recurrent, kda_chunked])
@pytest.mark.parametrize("gate", GATES)
def test_gradients(form, gate):
    args = [x.double().requires_grad_() for x in inputs(70, gate, B=1, h=2, d=6)]
    weights = torch.randn(70, 2, 6, dtype=torch.float64), torch.randn(2, 6, 6, dtype=torch.float64)
    grads = []
    for o, S in (form(*args), oracle(*args)):
        S = S[-1] if S.ndim == 5 else S
        grads.append(torch.autograd.grad((o * weights[0]).sum() + (S * weights[1]).sum(), args))
    for got, want in zip(*grads):
        assert got.isfinite().all() and (got - want).norm() < 1e-9 * want.norm() + 1e-13


@pytest.mark.parametrize("K", [2, 4, 5])
@pytest.mark.parametrize("T", [1, 2, 3, 9])
def test_short_conv(K, T):
    torch.manual_seed(0)
    x, past, weight = torch.randn(2, T, 6), torch.randn(2, K - 1, 6), torch.randn(6, K)
    want = torch.zeros(2, T, 6)
    for t in range(T):
        for i in range(K):
            at = t - (K - 1) + i  # the last tap is the current token
            want[:, t] += weight[:, i] * (x[:, at] if at >= 0 else past[:, at])
    y, new = short_conv(x, past, weight)
    assert rel(y, want) < 1e-6
    assert torch.equal(new, torch.cat([past, x], dim=1)[:, -(K - 1) :])


def test_log_decay():
    r, A_log = torch.tensor([[[-3.0, 0.0, 80.0], [1.0, 2.0, -80.0]]]), torch.tensor([0.7, -0.4])
    rate = A_log.double().exp()[:, None]
    bounded, free = log_decay(r, A_log, -5.0), log_decay(r, A_log, None)
    assert rel(bounded, -5 / (1 + (-rate * r.double()).exp())) < 1e-6
    assert rel(free, -rate * (1 + r.double().exp()).log()) < 1e-6
    assert bounded.dtype == free.dtype == torch.float32
    assert log_decay(r.bfloat16(), A_log.bfloat16(), -5.0).dtype == torch.float32


def formula(x, W, cfg, A_log):
    """Section 3 of the spec for one sequence x [T, H]; W: published name -> float64."""
    T, h, d, K = len(x), cfg.kda_heads, cfg.kda_head_dim, cfg.conv_kernel

    def projected(name):
        z, w = x @ W[f"{name}_proj.weight"].T, W[f"{name}_conv1d.weight"]
        y = torch.stack([sum(w[:, 0, i] * z[t - K + 1 + i] for i in range(K) if t - K + 1 + i >= 0) for t in range(T)])
        return (y / (1 + (-y).exp())).view(T, h, d)

    q, k, v = (projected(name) for name in "qkv")
    q, k = (z / (z.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for z in (q, k))
    beta = (x @ W["b_proj.weight"].T).sigmoid()
    r = (x @ W["f_a_proj.weight"].T @ W["f_b_proj.weight"].T + W["dt_bias"]).view(T, h, d)
    rate, bound = A_log.exp().view(h, 1), cfg.linear_attn_config["gate_lower_bound"]
    g = bound * (rate * r).sigmoid() if bound else -rate * (1 + r.exp()).log()
    o = oracle(q[None] * d**-0.5, k[None], v[None], g[None], beta[None], x.new_zeros(1, h, d, d))[0][0]
    full = "g_proj.weight" in W
    gate = x @ W["g_proj.weight"].T if full else x @ W["g_a_proj.weight"].T @ W["g_b_proj.weight"].T
    o = norm64(o, W["o_norm.weight"], cfg.rms_norm_eps).view(T, h * d) * gate.sigmoid()
    return o @ W["o_proj.weight"].T


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("full_rank", [True, False])
@pytest.mark.parametrize("bound", [-5.0, None])
@pytest.mark.parametrize("heads, dim", [(3, 20), (5, 4)])  # A_log padded to head_dim, and more heads than channels
@pytest.mark.parametrize("T", [5, 70])
def test_module(dtype, limit, full_rank, bound, heads, dim, T):
    linear = dict(num_heads=heads, head_dim=dim, use_full_rank_gate=full_rank, gate_lower_bound=bound)
    cfg = tiny_config(linear=linear, rms_norm_eps=1e-3)
    torch.manual_seed(0)
    module = perturb(KDA(cfg, 0)).to(dtype)
    x = torch.randn(2, T, cfg.hidden_size, dtype=dtype)
    got = module(x.flatten(0, 1), Batch.whole(2, T)).unflatten(0, (2, T))
    W = published64(module)
    for row, want in zip(got, x.double()):
        assert rel(row, formula(want, W, cfg, W["A_log"].flatten()[:heads])) < limit


def test_tiny_outputs_see_the_eps():
    """o has an rms down to 2e-4: with rms_norm_eps 1e-5 the norm does not bring it to one."""
    cfg = tiny_config()
    torch.manual_seed(0)
    module = KDA(cfg, 0)
    x = 0.02 * torch.randn(40, cfg.hidden_size)
    W = published64(module)
    assert rel(module(x, Batch.whole(1, 40)), formula(x.double(), W, cfg, W["A_log"][:3])) < 1e-5
    assert (
        rel(module(x, Batch.whole(1, 40)), formula(x.double(), W, tiny_config(rms_norm_eps=1e-6), W["A_log"][:3])) > 0.1
    )


def test_padding_of_A_log_does_not_matter():
    cfg = tiny_config()
    module, x = perturb(KDA(cfg, 0)), torch.randn(30, cfg.hidden_size)
    want = module(x, Batch.whole(1, 30))
    assert module.A_log.numel() == cfg.kda_head_dim > cfg.kda_heads
    with torch.no_grad():
        module.A_log[cfg.kda_heads :] = 1e9
    assert torch.equal(module(x, Batch.whole(1, 30)), want)


def test_bf16_keeps_the_recurrence_in_float32():
    module = KDA(tiny_config(), 0).bfloat16()
    past, state = module.zero_state(2, torch.zeros(1, dtype=torch.bfloat16))
    assert (past.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    args = inputs(70)
    o, S = kda(*(x.bfloat16() for x in args[:3]), *args[3:])
    want, states = oracle(*(x.bfloat16() for x in args[:3]), *args[3:])
    assert rel(o, want) < 1e-5 and rel(S, states[-1]) < 1e-5
