"""The Triton kernels of moe.py but the products of many tokens: router, input projection, activation, experts' GEMV."""

import copy

import pytest
import torch
from helpers import mxfp4_decode, tiny_config
from kernel_helpers import DEVICE, INTERPRETED, compile_for_all, compiles, interpreted, on_gpu, rel

import kernels
import kernels.moe as K
import moe
from kernels import gated_act, moe_gemv

GPU = not INTERPRETED and DEVICE == "cuda"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy, in the interpreter, when values saturate


def here(test):
    """Marks a test that runs in the interpreter, and again on a GPU."""
    return interpreted(test) if not GPU else pytest.mark.gpu(test)


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """The interpreter takes as long for a small tile as for a large one."""
    if INTERPRETED:
        monkeypatch.setattr(moe_gemv, "W13_TILE", dict(BLOCK_R=64, BLOCK_G=2))
        monkeypatch.setattr(moe_gemv, "W2_TILE", dict(BLOCK_R=64, BLOCK_G=2))


def ran(op, function, backend="triton"):
    """function's result with this backend of `op`, which must have run."""
    before = kernels.counts[op, backend]
    with kernels.use(**{op: backend}), torch.no_grad():
        out = function()
    assert kernels.counts[op, backend] == before + 1
    return out


# ---------------------------------------------------------------- router

ROUTERS = {
    "three of 7": dict(num_experts=7, num_experts_per_token=3),
    "all of 16": dict(num_experts=16, num_experts_per_token=16, routed_scaling_factor=2.446),
    "one of 33": dict(num_experts=33, num_experts_per_token=1, moe_renormalize=False),
    "K3": dict(num_experts=896, num_experts_per_token=16),
    "2 of 4 groups": dict(num_experts=12, num_experts_per_token=4, num_expert_group=4, topk_group=2),
    "groups of one": dict(num_experts=12, num_experts_per_token=3, num_expert_group=12, topk_group=5),
    "3 groups of 7": dict(num_experts=21, num_experts_per_token=7, num_expert_group=3, topk_group=1),
    "groups off": dict(num_experts=12, num_experts_per_token=8, num_expert_group=4, use_grouped_topk=False),
}


@here
@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
@pytest.mark.parametrize("name", ROUTERS)
def test_router(name, score):
    cfg = tiny_config(moe_router_activation_func=score, **ROUTERS[name])
    torch.manual_seed(0)
    logits = (3 * torch.randn(5, cfg.num_experts + 3)).to(DEVICE)[:, 2:-1]  # rows of a wider tensor
    bias = (0.3 * torch.randn(cfg.num_experts)).to(DEVICE)
    ids, weights = ran("router", lambda: moe.route(logits, bias, cfg))
    want_ids, want = moe.route.torch_path(logits.double(), bias.double(), cfg)
    assert ids.dtype == torch.int64 and weights.dtype == torch.float32
    assert torch.equal(ids, want_ids)
    assert rel(weights, want) < 5e-7


@here
@pytest.mark.parametrize("name", ["three of 7", "K3", "2 of 4 groups", "groups of one"])
def test_ties_go_to_the_lower_id(name):
    cfg = tiny_config(**ROUTERS[name])
    torch.manual_seed(0)
    logits = torch.randn(6, cfg.num_experts).round().clamp(-1, 1).to(DEVICE)  # three values: ties everywhere
    logits[0] = 0.3
    ids, _ = ran("router", lambda: moe.route(logits, torch.zeros_like(logits[0]), cfg))
    assert torch.equal(ids, moe.route.torch_path(logits, torch.zeros_like(logits[0]), cfg)[0])


@here
@pytest.mark.parametrize("fault", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_a_fault_stays_in_its_row_and_in_range(fault):
    cfg = tiny_config(num_experts=12, num_experts_per_token=4, num_expert_group=4, topk_group=2)
    torch.manual_seed(0)
    logits, bias = torch.randn(3, 12).to(DEVICE), torch.zeros(12).to(DEVICE)
    want = moe.route.torch_path(logits, bias, cfg)
    logits[1] = fault
    ids, weights = ran("router", lambda: moe.route(logits, bias, cfg))
    assert ((ids >= 0) & (ids < 12)).all() and len(set(ids[1].tolist())) == 4
    assert torch.equal(ids[::2], want[0][::2]) and rel(weights[::2], want[1][::2]) < 5e-7


# ---------------------------------------------------------------- activation and input projection


@here
@pytest.mark.parametrize("dtype, limit", [(torch.float32, 5e-7), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize("act", ["situ", "silu"])
def test_gated_act(act, dtype, limit):
    cfg = tiny_config(hidden_act=act)
    torch.manual_seed(0)
    for N, width, spread in ((1, 1, 5), (3, 33, 1e-3), (2, 200, 30)):
        x = (spread * torch.randn(N, 2 * width + 5)).to(DEVICE, dtype)[:, 3 : 2 * width + 3]
        got = ran("gated_act", lambda x=x: moe.gated_act(x, cfg))
        assert got.dtype == dtype and got.is_contiguous()
        assert rel(got, moe.gated_act.torch_path(x.double(), cfg)) < limit


@here
def test_the_activation_saturates():
    x = torch.tensor([[torch.inf, -torch.inf, 1e30, torch.inf, -torch.inf, -1e30]], device=DEVICE)
    assert ran("gated_act", lambda: moe.gated_act(x, tiny_config())).tolist() == [[100, 0, -100]]


@here
@pytest.mark.parametrize("N", [1, 3, 17])
def test_in_projection(N):
    torch.manual_seed(0)
    dtype = torch.bfloat16 if GPU else torch.float32  # the interpreter has no products of bfloat16
    x, w = torch.randn(N, 152).to(DEVICE, dtype)[:, 4:148], torch.randn(150, 144).to(DEVICE, dtype)
    logits, features = K.in_projection(x, w, 7)
    assert (logits.dtype, features.dtype) == (torch.float32, dtype)
    assert rel(logits, x.double() @ w[:7].double().T) < 1e-6
    assert rel(features, x.double() @ w[7:].double().T) < (3e-3 if GPU else 1e-6)


# ---------------------------------------------------------------- experts


def packed_experts(E, L, inner, low=118, high=125):
    """Experts of random bytes, and their values decoded bit by bit: w13 [E, 2 I, L], w2 [E, L, I] float64."""
    experts = moe.Experts(1, 32, 32)
    experts.inner, values = inner, {}
    for name, out, width in (("w13", 2 * inner, L), ("w2", L, inner)):
        packed = torch.randint(256, (E, out, width // 2), dtype=torch.uint8)
        scale = torch.randint(low, high, (E, out, width // 32), dtype=torch.uint8)
        values[name] = torch.stack([mxfp4_decode(*pair) for pair in zip(packed, scale)])
        experts.set_packed(name, packed, scale)
    return experts.to(DEVICE), values


def by_token(z, ids, weights, w13, w2, cfg):
    """sum_e weight_e (act(z W1_e, z W3_e) W2_e), one token and expert at a time in float64."""
    z, weights, out = z.double().cpu(), weights.double().cpu(), torch.zeros(z.shape, dtype=torch.float64)
    for t, chosen in enumerate(ids.tolist()):
        for e, weight in zip(chosen, weights[t]):
            out[t] += weight * (w2[e] @ moe.activation(*(w13[e] @ z[t]).chunk(2), cfg))
    return out


@here
@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize("act", ["situ", "silu"])
@pytest.mark.parametrize("L, inner, N, k", [(32, 32, 1, 1), (64, 96, 3, 2), (96, 64, 2, 3)])
def test_experts(L, inner, N, k, act, dtype, limit):
    cfg = tiny_config(num_experts=5, hidden_act=act)
    torch.manual_seed(N)
    experts, values = packed_experts(5, L, inner)
    ids = torch.stack([torch.randperm(5)[:k] for _ in range(N)]).to(DEVICE)
    z, weights = torch.randn(N, L + 8).to(DEVICE, dtype)[:, 4:-4], torch.rand(N, k).to(DEVICE)
    got = ran("experts", lambda: moe.routed_experts(z, ids, weights, experts, cfg), "triton_gemv")
    assert got.dtype == dtype and got.is_contiguous()
    assert rel(got, by_token(z, ids, weights, **values, cfg=cfg)) < limit


@here
def test_experts_that_all_tokens_share_and_experts_that_none_chose():
    """Tokens choose the same experts, one of them twice; NaN in a token, and in experts not chosen, stays there."""
    cfg = tiny_config(num_experts=4)
    torch.manual_seed(0)
    experts, values = packed_experts(4, 64, 32)
    for scale in (experts.w13_scale, experts.w2_scale):
        scale[[0, 2]] = 255
    z, ids, weights = torch.randn(3, 64), torch.tensor([[1, 3, 3], [3, 1, 3], [3, 3, 1]]), torch.rand(3, 3)
    want = by_token(z, ids, weights, **values, cfg=cfg)
    z[1] = torch.nan
    got = ran(
        "experts", lambda: moe.routed_experts(*(t.to(DEVICE) for t in (z, ids, weights)), experts, cfg), "triton_gemv"
    )
    assert got[1].isnan().all() and rel(got[::2], want[::2]) < 1e-6


@here
@pytest.mark.parametrize("low, high", [(1, 255), (1, 60), (230, 248)])
def test_every_scale(low, high):
    """Scales of the gate and up projections anywhere; of the down projection where float32 holds the result."""
    cfg = tiny_config(num_experts=2)
    torch.manual_seed(0)
    experts, values = packed_experts(2, 64, 64, low, high)
    z, ids, weights = torch.randn(2, 64), torch.tensor([[0, 1], [1, 0]]), torch.rand(2, 2)
    got = ran(
        "experts", lambda: moe.routed_experts(*(t.to(DEVICE) for t in (z, ids, weights)), experts, cfg), "triton_gemv"
    ).cpu()
    want = by_token(z, ids, weights, **values, cfg=cfg)
    fits = (want.abs() < 1e38).double()
    if low == 1 and high == 60:  # products of two tiny matrices are below the smallest float32
        assert (got == 0).all() and want.abs().max() < 2.0**-149
    else:
        assert not got.isnan().any() and rel(got.double().nan_to_num() * fits, want * fits) < 1e-6


@here
def test_float_experts_are_not_for_the_kernel():
    experts, z = moe.Experts(2, 32, 32).to(DEVICE), torch.randn(1, 32, device=DEVICE)
    ids, weights = torch.zeros(1, 1, dtype=torch.int64, device=DEVICE), torch.ones(1, 1, device=DEVICE)
    with pytest.raises(ValueError, match="not packed"), kernels.use(experts="triton"), torch.no_grad():
        moe.routed_experts(z, ids, weights, experts, tiny_config())


@here
def test_the_layer():
    """The whole MoE layer with its kernels against itself in float64."""
    cfg = tiny_config()
    torch.manual_seed(0)
    layer, x = moe.MoE(cfg), torch.randn(2, 48)
    for name in ("w13", "w2"):
        layer.experts.set_packed(name, *moe.mxfp4_pack(getattr(layer.experts, name).detach()))
    wide = copy.deepcopy(layer).double()
    with torch.no_grad(), kernels.use(router="triton", experts="triton", gated_act="triton"):
        got = layer.to(DEVICE)(x.to(DEVICE))
    with torch.no_grad(), kernels.use("torch"):
        assert rel(got, wide(x.double())) < 2e-6


# ---------------------------------------------------------------- compiled for both vendors, without a GPU


@compiles
@pytest.mark.skipif(GPU, reason="compiled by running")
def test_compiles():
    router = dict(E=896, K=16, GROUPS=1, KEPT=1, SOFTMAX=False, NORMALIZE=True, BLOCK_G=1, BLOCK_S=1024, BLOCK_K=16)
    signature = dict(logits="*fp32", bias="*fp32", ids="*i64", weights="*fp32", row_stride="i32", scaling="fp32")
    compile_for_all(K._router_kernel, signature, router, num_warps=1)
    compile_for_all(K._router_kernel, signature, router | dict(GROUPS=8, KEPT=4, BLOCK_G=8, BLOCK_S=128), num_warps=1)
    signature = dict(x="*bf16", out="*bf16", inner="i32", x_row="i32", beta="fp32", linear="fp32")
    compile_for_all(gated_act._act_kernel, signature, dict(SITU=True, BLOCK=1024))
    signature = dict(x="*bf16", w="*bf16", logits="*fp32", features="*bf16", N="i32", outs="i32", x_row="i32")
    tile = {n: v for n, v in K.in_tile(1).items() if n.startswith("BLOCK")}
    built = compile_for_all(K._in_kernel, signature, dict(H=7168, E=896) | tile, num_warps=4)
    assert "wgmma" in built["sm_90"].asm["ptx"]
    masks = dict(signs="i32", floats="i32")
    signature = dict(z="*fp32", ids="*i64", packed="*i32", scale="*u8", act="*fp32", inner="i32", K="i32") | masks
    tile = {n: v for n, v in moe_gemv.W13_TILE.items() if n.startswith("BLOCK")}
    compile_for_all(moe_gemv._w13_kernel, signature | dict(beta="fp32", linear="fp32"), dict(L=3584, SITU=True) | tile)
    signature = dict(act="*fp32", ids="*i64", weights="*fp32", packed="*i32", scale="*u8", y="*fp32", L="i32") | masks
    tile = {n: v for n, v in moe_gemv.W2_TILE.items() if n.startswith("BLOCK")}
    compile_for_all(moe_gemv._w2_kernel, signature, dict(INNER=3072) | tile, num_warps=1)


# ---------------------------------------------------------------- on a GPU, at real sizes


class TestRealSizes:
    pytestmark = on_gpu

    @pytest.mark.parametrize("N", [1, 64, 1000])
    def test_router(self, N):
        cfg = tiny_config(num_experts=896, num_experts_per_token=16)
        logits, bias = torch.randn(N, 896, device="cuda"), torch.randn(896, device="cuda") / 10
        got = [ran("router", lambda: moe.route(logits, bias, cfg)) for _ in range(50)]
        assert all(torch.equal(a, b) for other in got for a, b in zip(other, got[0]))
        ids, weights = moe.route.torch_path(logits, bias, cfg)
        same = (ids == got[0][0]).all(1)
        assert same.float().mean() > 0.99 and rel(got[0][1][same], weights[same]) < 1e-6

    @pytest.mark.large
    @pytest.mark.parametrize("N", [1, 2, 3, 17])
    def test_experts(self, N):
        cfg = tiny_config(num_experts=24, num_experts_per_token=16)
        torch.manual_seed(N)
        experts = moe.Experts(24, 3584, 3072)
        for name in ("w13", "w2"):
            experts.set_packed(name, *moe.mxfp4_pack(getattr(experts, name).detach().cuda()))
        z = torch.randn(N, 3584, device="cuda")
        ids, weights = torch.rand(N, 24, device="cuda").argsort(-1)[:, :16], torch.rand(N, 16, device="cuda")
        got = [
            ran("experts", lambda: moe.routed_experts(z, ids, weights, experts, cfg), "triton_gemv") for _ in range(50)
        ]
        assert all(torch.equal(other, got[0]) for other in got)
        assert rel(got[0], moe.routed_experts.torch_path(z.double(), ids, weights.double(), experts, cfg)) < 1e-5

    @pytest.mark.large
    @pytest.mark.parametrize("N", [1, 16, 64, 65, 300])
    def test_in_projection(self, N):
        x, w = torch.randn(N, 7168, device="cuda").bfloat16(), torch.randn(16768, 7168, device="cuda").bfloat16() / 85
        with torch.no_grad():
            got = [moe.in_projection(x, w, 896) for _ in range(20)]
        assert all(torch.equal(a, b) for other in got for a, b in zip(other, got[0]))
        assert kernels.counts["moe_in", "splitk" if N <= K.FEW else "cublas"]
        want = x.double() @ w.double().T
        assert rel(got[0][0], want[:, :896]) < 1e-5 and rel(got[0][1], want[:, 896:]) < 3e-3
