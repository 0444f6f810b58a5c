"""The router by brute force, the experts one token at a time in float64, and MXFP4 bit by bit."""

import pytest
import torch
from helpers import fp4_value, mxfp4_decode, norm64, perturb, published64, rel, tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st

from moe import MLP, Experts, MoE, activation, in_projection, mxfp4_pack, mxfp4_unpack, route, routed_experts

# ---------------------------------------------------------------- router


def brute_route(p, bias, cfg):
    """Section 5 for one token in plain Python: scores p and biases as lists -> ids, weights."""
    E, n = len(p), cfg.num_expert_group if cfg.use_grouped_topk else 1
    biased = [a + b for a, b in zip(p, bias)]
    groups = [range(i * E // n, (i + 1) * E // n) for i in range(n)]
    best = [sum(sorted((biased[e] for e in group), reverse=True)[:2]) for group in groups]
    kept = sorted(range(n), key=lambda i: (-best[i], i))[: cfg.topk_group if n > 1 else 1]
    ids = sorted((e for i in kept for e in groups[i]), key=lambda e: (-biased[e], e))[: cfg.num_experts_per_token]
    total = sum(p[e] for e in ids) + 1e-20 if cfg.moe_renormalize else 1
    return ids, [p[e] / total * cfg.routed_scaling_factor for e in ids]


ROUTERS = [
    dict(num_experts=7, num_experts_per_token=3),
    dict(num_experts=16, num_experts_per_token=1, moe_renormalize=False),
    dict(num_experts=16, num_experts_per_token=16, routed_scaling_factor=2.446),
    dict(num_experts=12, num_experts_per_token=4, num_expert_group=4, topk_group=2),
    dict(num_experts=12, num_experts_per_token=2, num_expert_group=6, topk_group=1, moe_renormalize=False),
    dict(num_experts=12, num_experts_per_token=3, num_expert_group=12, topk_group=5),  # one expert in a group
    dict(num_experts=12, num_experts_per_token=8, num_expert_group=4, topk_group=2, use_grouped_topk=False),
]


@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
@pytest.mark.parametrize("ties", [True, False])
@pytest.mark.parametrize("changes", ROUTERS)
def test_route(score, ties, changes):
    cfg = tiny_config(moe_router_activation_func=score, **changes)
    torch.manual_seed(0)
    logits, bias = torch.randn(200, cfg.num_experts).double(), torch.randn(cfg.num_experts).double()
    if ties:  # few distinct scores: equal ones everywhere
        logits, bias = logits.round().clamp(-1, 1), (bias / 2).round()
    p = logits.exp() / (1 + logits.exp() if score == "sigmoid" else logits.exp().sum(-1, keepdim=True))
    ids, weights = route(logits, bias, cfg)
    # The scores themselves are checked above; ties must be those of the router's own roundings.
    own = logits.sigmoid() if score == "sigmoid" else logits.softmax(-1)
    assert rel(own, p) < 1e-14
    for i, row in enumerate(own.tolist()):
        want_ids, want_weights = brute_route(row, bias.tolist(), cfg)
        assert ids[i].tolist() == want_ids
        assert weights[i].tolist() == pytest.approx(want_weights, rel=1e-12)


@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
@pytest.mark.parametrize("E", [8, 33, 896])
def test_equal_scores_go_to_the_lower_ids(score, E):
    cfg = tiny_config(num_experts=E, num_experts_per_token=6, moe_router_activation_func=score)
    ids, weights = route(torch.full((5, E), 0.3), torch.zeros(E), cfg)
    assert ids.tolist() == [[0, 1, 2, 3, 4, 5]] * 5
    assert torch.allclose(weights, torch.tensor(1 / 6))


def test_equal_groups_go_to_the_lower_group():
    cfg = tiny_config(num_experts=12, num_experts_per_token=3, num_expert_group=4, topk_group=2)
    logits = torch.tensor([[0, 2, 1, 2, 1, 0, 1, 0, 2, 0, 1, 2]]).float()  # groups: {0,2,1} {2,1,0} {1,0,2} {0,1,2}
    assert route(logits, torch.zeros(12), cfg)[0].tolist() == [[1, 3, 2]]  # all four sums are equal; 2 before 4


def test_bias_chooses_but_does_not_weigh():
    cfg = tiny_config(num_experts=6, num_experts_per_token=2)
    logits, bias = torch.tensor([[3.0, 2.0, 1.0, 0.0, -1.0, -2.0]]), torch.tensor([0.0, 0, 0, 0, 5, 7])
    ids, weights = route(logits, bias, cfg)
    p = logits[0].double().sigmoid()[[5, 4]]
    assert ids.tolist() == [[5, 4]]
    assert rel(weights[0], p / p.sum()) < 1e-6


def chosen(moe, x):
    """The expert ids and weights of rows x [N, H]."""
    return moe.gate(in_projection(x, moe.in_proj.weight, moe.cfg.num_experts)[0])


def test_router_of_a_bf16_model_is_float32():
    """Scores that bf16 cannot tell apart are told apart."""
    cfg = tiny_config(num_experts=4, num_experts_per_token=1)
    moe = MoE(cfg).bfloat16()
    weight = torch.zeros(4, cfg.hidden_size)
    weight[:, 0], weight[:, 1] = 1, torch.tensor([0, 1, 3, 2]) * 2.0**-12  # 1 + 2^-12 is 1 in bf16
    moe.in_proj.weight.data[:4] = weight.bfloat16()
    ids, weights = chosen(moe, torch.ones(1, cfg.hidden_size, dtype=torch.bfloat16))
    assert ids.tolist() == [[2]] and weights.dtype == torch.float32


# ---------------------------------------------------------------- experts


def act64(a, u, cfg):
    """SiTU or SwiGLU as the spec writes them."""
    sigmoid = 1 / (1 + (-a).exp())
    if cfg.hidden_act == "silu":
        return a * sigmoid * u
    beta, linear = cfg.activation_situ_beta, cfg.activation_situ_linear_beta
    return beta * (a / beta).tanh() * sigmoid * linear * (u / linear).tanh()


@pytest.mark.parametrize("act", ["situ", "silu"])
def test_activation(act):
    cfg = tiny_config(hidden_act=act, activation_situ_beta=3.0, activation_situ_linear_beta=7.0)
    torch.manual_seed(0)
    a, u = 20 * torch.randn(2, 1000)
    assert rel(activation(a, u, cfg), act64(a.double(), u.double(), cfg)) < 1e-6
    assert rel(activation(a.double(), u.double(), cfg), act64(a.double(), u.double(), cfg)) < 1e-14
    a, u = a.bfloat16(), u.bfloat16()
    got = activation(a, u, cfg)
    assert got.dtype == torch.bfloat16  # rounded once, at the end
    assert torch.equal(got, act64(a.double(), u.double(), cfg).float().bfloat16())


def test_situ_by_hand():
    cfg = tiny_config()
    a, u = torch.tensor([0.0, 1000.0, -1000.0, 2.0]), torch.tensor([5.0, 1000.0, 3.0, -1.0])
    want = [0, 4 * 25, 0, 4 * 0.46211715726 * 0.88079707798 * 25 * -0.03997868031]  # tanh(.5), sigmoid(2), tanh(-.04)
    assert activation(a, u, cfg).tolist() == pytest.approx(want, rel=1e-6)


def by_token(z, ids, weights, w13, w2, cfg):
    """sum_e weight_e (act(z W1_e, z W3_e) W2_e), one token and expert at a time in float64."""
    out = torch.zeros(z.shape, dtype=torch.float64)
    for t in range(len(z)):
        for e, weight in zip(ids[t].tolist(), weights[t].tolist()):
            w1, w3 = w13[e].chunk(2)
            row = z[t].double()
            out[t] += weight * (w2[e] @ act64(w1 @ row, w3 @ row, cfg))
    return out


def packed_experts(experts, names=("w13", "w2")):
    """The experts with the named matrices in MXFP4, and what these hold, decoded bit by bit."""
    values = {name: getattr(experts, name).detach().double() for name in ("w13", "w2")}
    for name in names:
        pair = mxfp4_pack(getattr(experts, name).detach())
        experts.set_packed(name, *pair)
        values[name] = torch.stack([mxfp4_decode(*expert) for expert in zip(*pair)])
    return experts, values


@pytest.mark.parametrize("act", ["situ", "silu"])
@pytest.mark.parametrize("packed", [(), ("w13", "w2"), ("w2",)])
@pytest.mark.parametrize("N", [1, 2, 7, 100])
@pytest.mark.parametrize("choice", ["random", "one expert", "skewed"])
def test_routed_experts(act, packed, N, choice):
    cfg = tiny_config(num_experts=19, num_experts_per_token=3, hidden_act=act)
    torch.manual_seed(N)
    experts, values = packed_experts(Experts(19, 64, 32), packed)
    if choice == "random":
        ids = torch.rand(N, 19).argsort(-1)[:, :3]
    else:  # all tokens to one expert first; skewed: the other choices are spread
        ids = torch.stack([torch.full((N,), 17), *torch.randint(17, (2, N))], dim=1)
        ids = ids if choice == "skewed" else ids[:, :1]
    z, weights = torch.randn(N, 64), torch.rand(ids.shape)
    got = routed_experts(z, ids, weights, experts, cfg)
    assert rel(got, by_token(z, ids, weights, **values, cfg=cfg)) < 1e-5
    got = routed_experts(z.double(), ids, weights.double(), experts.double(), cfg)
    assert got.dtype == torch.float64
    assert rel(got, by_token(z, ids, weights, **values, cfg=cfg)) < 1e-13


def test_other_experts_do_not_matter():
    """Weights of experts that no token chose may even be NaN."""
    cfg = tiny_config(num_experts=6)
    torch.manual_seed(0)
    experts = Experts(6, 32, 32)
    z, ids, weights = torch.randn(5, 32), torch.tensor([[1, 4]] * 5), torch.rand(5, 2)
    want = routed_experts(z, ids, weights, experts, cfg)
    with torch.no_grad():
        experts.w13[[0, 2, 3, 5]] = torch.nan
    assert torch.equal(routed_experts(z, ids, weights, experts, cfg), want)


def moe_formula(x, W, cfg):
    """Section 5 of the spec for rows x [N, H]; W: published name -> float64 (experts decoded)."""
    logits, bias = x @ W["gate.weight"].T, W["gate.e_score_correction_bias"].tolist()
    p = logits.sigmoid() if cfg.moe_router_activation_func == "sigmoid" else logits.softmax(-1)
    ids, weights = zip(*(brute_route(row, bias, cfg) for row in p.tolist()))
    w13, w2 = (
        torch.stack([torch.cat([W[f"experts.{e}.{n}.weight"] for n in names]) for e in range(cfg.num_experts)])
        for names in (("w1", "w3"), ("w2",))
    )
    z = x @ W["routed_expert_down_proj.weight"].T if cfg.routed_expert_hidden_size else x
    y = by_token(z, torch.tensor(ids), torch.tensor(weights, dtype=torch.float64), w13, w2, cfg)
    if cfg.latent_moe_use_norm:
        y = norm64(y, W["routed_expert_norm.weight"], cfg.rms_norm_eps)
    if cfg.routed_expert_hidden_size:
        y = y @ W["routed_expert_up_proj.weight"].T
    if cfg.num_shared_experts:
        a, u = (x @ W[f"shared_experts.{n}_proj.weight"].T for n in ("gate", "up"))
        y = y + act64(a, u, cfg) @ W["shared_experts.down_proj.weight"].T
    return y


MOES = [
    dict(),
    dict(routed_expert_hidden_size=None, latent_moe_use_norm=False, hidden_act="silu", routed_scaling_factor=2.446),
    dict(routed_expert_hidden_size=None, latent_moe_use_norm=True),
    dict(num_shared_experts=0, latent_moe_use_norm=False),
    dict(num_shared_experts=3, moe_router_activation_func="softmax", num_expert_group=3, topk_group=2),
]


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("changes", MOES)
@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_module(dtype, limit, changes):
    cfg = tiny_config(rms_norm_eps=1e-2, **changes)
    torch.manual_seed(0)
    module, x = perturb(MoE(cfg)).to(dtype), torch.randn(20, cfg.hidden_size, dtype=dtype)
    assert rel(module(x), moe_formula(x.double(), published64(module), cfg)) < limit


@pytest.mark.parametrize("act", ["situ", "silu"])
def test_dense_layer(act):
    cfg = tiny_config(hidden_act=act)
    torch.manual_seed(0)
    module, x = MLP(cfg, 40), torch.randn(9, cfg.hidden_size)
    W = published64(module)
    a, u = (x.double() @ W[f"{n}_proj.weight"].T for n in ("gate", "up"))
    assert rel(module(x), act64(a, u, cfg) @ W["down_proj.weight"].T) < 1e-6


# ---------------------------------------------------------------- MXFP4


@pytest.mark.parametrize("scale", [0, 1, 100, 126, 127, 128, 140, 253, 254])
def test_unpack_every_byte(scale):
    packed = torch.arange(256, dtype=torch.uint8).view(4, 64)
    scales = torch.full((4, 4), scale, dtype=torch.uint8)
    want = mxfp4_decode(packed, scales)
    assert torch.equal(mxfp4_unpack(packed, scales, torch.float64), want)
    for dtype in (torch.float32, torch.bfloat16):
        got = mxfp4_unpack(packed, scales, dtype)
        assert got.dtype == dtype
        assert torch.equal(got, want.to(dtype))
        assert torch.equal(got.double(), want) or scale > 252  # exact wherever dtype has the number


def test_unpack_order():
    """The low nibble is the even input; each 32 inputs have their scale; leading dimensions are kept."""
    packed = torch.zeros(2, 3, 32, dtype=torch.uint8)
    packed[1, 2, 16] = 0x5A  # inputs 32 and 33: -1 and 3
    scale = torch.tensor([127, 129], dtype=torch.uint8).expand(2, 3, 2)
    got = mxfp4_unpack(packed, scale, torch.float32)
    assert got.shape == (2, 3, 64)
    assert got[1, 2, 32:34].tolist() == [-4, 12] and got.count_nonzero() == 2


def test_scale_255_is_nan():
    got = mxfp4_unpack(torch.zeros(1, 16, dtype=torch.uint8), torch.tensor([[255]], dtype=torch.uint8), torch.float32)
    assert got.isnan().all()


CODES = st.lists(st.integers(0, 15), min_size=32, max_size=32)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(CODES, st.integers(0, 254)), min_size=1, max_size=4))
def test_representable_values_come_back(groups):
    w = torch.tensor([[fp4_value(c) * 2.0 ** (s - 127) for codes, s in groups for c in codes]], dtype=torch.float64)
    packed, scale = mxfp4_pack(w)
    back = mxfp4_decode(packed, scale)
    assert torch.equal(back, w) and torch.equal(back.signbit(), w.signbit())
    again = mxfp4_pack(mxfp4_unpack(packed, scale, torch.float64))
    assert torch.equal(again[0], packed) and torch.equal(again[1], scale)


def nearest(x):
    """The code nearest to x, ties to the code with mantissa bit 0; found among all 16."""
    sign = 8 * bool(torch.tensor(x).signbit())
    codes = range(sign, sign + 8)
    gap = min(abs(fp4_value(c) - x) for c in codes)
    best = [c for c in codes if abs(fp4_value(c) - x) == gap]
    return best[0] if len(best) == 1 else next(c for c in best if c % 2 == 0)


NUMBERS = st.floats(-6, 6, width=32) | st.sampled_from([x / 8 for x in range(-48, 49)] + [-0.0])


@settings(deadline=None, max_examples=100)
@given(st.lists(NUMBERS, min_size=31, max_size=31), st.floats(3.0, 6, width=32, exclude_min=True), st.integers(-60, 60))
def test_rounds_to_nearest(numbers, largest, exponent):
    """largest in (3, 6] makes 2^exponent the smallest scale under which it is at most 6."""
    numbers = [max(-largest, min(largest, x)) for x in numbers] + [largest]
    w = torch.tensor([numbers], dtype=torch.float64) * 2.0**exponent
    packed, scale = mxfp4_pack(w)
    assert scale.tolist() == [[exponent + 127]]
    codes = [code for byte in packed[0].tolist() for code in (byte & 15, byte >> 4)]
    assert codes == [nearest(x) for x in numbers]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pack_of_weights_is_the_best_rounding(dtype):
    torch.manual_seed(0)
    w = (torch.randn(3, 8, 64) * 0.05).to(dtype)
    packed, scale = mxfp4_pack(w)
    assert (packed.shape, scale.shape, packed.dtype, scale.dtype) == ((3, 8, 32), (3, 8, 2), torch.uint8, torch.uint8)
    back = torch.stack([mxfp4_decode(*pair) for pair in zip(packed, scale)]).unflatten(-1, (2, 32))
    unit = torch.pow(2.0, scale.double() - 127)[..., None]
    grid = torch.tensor([fp4_value(c) for c in range(16)]).double() * unit[..., None]  # [3, 8, 2, 1, 16]
    groups = w.double().unflatten(-1, (2, 32))
    assert torch.equal((back - groups).abs(), (grid - groups[..., None]).abs().amin(-1))
    largest = groups.abs().amax(-1, keepdim=True)
    assert (largest <= 6 * unit).all() and (largest > 3 * unit).all()


def test_zeros():
    w = torch.zeros(2, 64)
    w[0, 3] = w[1, 40] = -0.0
    w[0, 33] = 1.5
    packed, scale = mxfp4_pack(w)
    back = mxfp4_unpack(packed, scale, torch.float32)
    assert torch.equal(back, w) and torch.equal(back.signbit(), w.signbit()) and (scale < 255).all()


def test_numbers_at_the_ends_of_the_range():
    w = torch.zeros(3, 32, dtype=torch.float64)
    w[0, 0], w[1, 0], w[2, 0] = (
        2.0**-128,
        2.0**-140,
        6 * 2.0**127,
    )  # the smallest number, less than half of it, the largest
    assert mxfp4_decode(*mxfp4_pack(w))[:, 0].tolist() == [2.0**-128, 0, 6 * 2.0**127]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_pack_refuses_what_is_not_finite(bad):
    w = torch.zeros(2, 32)
    w[1, 5] = bad
    with pytest.raises(ValueError, match="finite"):
        mxfp4_pack(w)


@pytest.mark.parametrize("width", [1, 16, 31, 33, 48])
def test_pack_refuses_ragged_rows(width):
    with pytest.raises(ValueError, match="multiple of 32"):
        mxfp4_pack(torch.zeros(2, width))


@pytest.mark.parametrize("experts, hidden", [(6, 96), (12, 48), (34, 200)])
def test_equal_router_rows_tie_whatever_runs_with_them(experts, hidden):
    """Two experts with the same weights and bias: the lower id wins, for a token alone and in any company."""
    moe = MoE(tiny_config(num_experts=experts, hidden_size=hidden, num_experts_per_token=3))
    half = experts // 2
    with torch.no_grad():
        moe.in_proj.weight[half:experts] = moe.in_proj.weight[:half]
        x = torch.randn(77, hidden)
        ids = chosen(moe, x)[0]
        for n in (1, 2, 7, 16, 33):
            assert all(torch.equal(chosen(moe, part)[0], want) for part, want in zip(x.split(n), ids.split(n)))
    for row in ids.tolist():  # of each pair the lower comes first, and the higher only right behind it
        assert all(row[i - 1] == e - half for i, e in enumerate(row) if e >= half)


@pytest.mark.parametrize("activation_func", ["sigmoid", "softmax"])
def test_equal_logits_tie_wherever_they_stand(activation_func):
    """A float32 sigmoid gives its vectorized part and its tail results that differ in the last bit."""
    cfg = tiny_config(num_experts=12, num_experts_per_token=1, moe_router_activation_func=activation_func)
    for value in torch.linspace(-4, 4, 200).tolist():
        logits = torch.full((3, 12), -9.0)
        logits[:, 2] = logits[:, 8] = value
        assert route(logits, torch.zeros(12), cfg)[0].flatten().tolist() == [2, 2, 2]
