"""The routed experts in FP8 products with split activations, against float64 and an independent MXFP4 decoder."""

import pytest
import torch
from helpers import mxfp4_decode, tiny_config
from kernel_helpers import DEVICE, compile_for_all, compiles, interpreted, on_gpu, rel
from test_kernels_moe_grouped import CASES, check_in_a_graph, choose, gpu_reference, inputs, random_experts, reference

import kernels
from moe import Experts, routed_experts

kernels.load()
split = pytest.importorskip("kernels.moe_split")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

MEANS = 1, 8, 20  # rows per expert: one for each of the configs
BF16 = torch.bfloat16


@interpreted
@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("N, E, k, L, inner, how, act", [*CASES, (27, 3, 2, 256, 128, "one", "situ")])
def test_as_exact_as_bfloat16(N, E, k, L, inner, how, act, mean):
    """The experts' outputs are rounded to bf16, as PyTorch rounds them; the products add nothing to see."""
    torch.manual_seed(N)
    cfg = tiny_config(num_experts=E, num_experts_per_token=k, hidden_act=act)
    experts, args = random_experts(E, L, inner), inputs(N, E, k, L, how, BF16)
    want = reference(*args, experts, cfg)
    got = split.experts_split(*args, experts, cfg, split.config(mean))
    assert got.dtype == BF16 and got.shape == args[0].shape
    assert rel(got, want) < 1.1 * rel(routed_experts.torch_path(*args, experts, cfg), want) < 5e-3


@interpreted
def test_chosen_by_name():
    torch.manual_seed(0)
    cfg, experts = tiny_config(num_experts=5, num_experts_per_token=2), random_experts(5, 64, 32)
    args = inputs(3, 5, 2, 64, "random", BF16)
    want, ran = split.experts_split(*args, experts, cfg), kernels.counts.copy()
    for backend in ("triton_split", "triton"):
        with kernels.use(experts=backend):
            assert torch.equal(routed_experts(*args, experts, cfg), want)
        assert kernels.counts["experts", backend] == ran["experts", backend] + 1


@interpreted
@pytest.mark.parametrize("N, E, k, TT", [(1, 5, 1, 8), (3, 40, 3, 8), (99, 7, 2, 16), (65, 60, 8, 8), (33, 896, 16, 8)])
def test_rows_are_sorted_by_expert(N, E, k, TT):
    ids = choose(N, E, k, "one" if k == 2 else "random").to(DEVICE)
    order, start, tile, first = (t.tolist() for t in split.tiles_of_few(ids, E, TT))
    flat = ids.flatten().tolist()
    assert order == sorted(range(N * k), key=lambda i: (flat[i], i))
    assert start == [sum(e < bound for e in flat) for bound in range(E + 1)]
    counts = [b - a for a, b in zip(start, start[1:])]
    used = [e for e in range(E) for _ in range(-(-counts[e] // TT))]
    assert tile == used + [E] * (len(tile) - len(used))
    assert all(first[e] == used.index(e) for e in range(E) if counts[e])


@triton.jit
def unpack_kernel(w_ptr, out_ptr, DEEP: tl.constexpr):
    width: tl.constexpr = 64 if DEEP else 32
    row = tl.arange(0, 16)
    a = split._unpack(tl.load(w_ptr + row[:, None] * 4 + tl.arange(0, 4)), DEEP)
    tl.store(out_ptr + row[:, None] * width + tl.arange(0, width), a.to(tl.float32))


def check_unpacking():
    """Every byte, at every place of a group: even inputs, then odd, 2^-6 of their values."""
    packed = torch.arange(256, dtype=torch.uint8).view(16, 16)
    want = mxfp4_decode(packed, torch.full((16, 1), 121, dtype=torch.uint8)).view(16, 16, 2).mT.reshape(16, 32)
    for deep in (False, True):
        out = torch.empty(16, 64 if deep else 32, device=DEVICE)
        unpack_kernel[(1,)](packed.view(torch.int32).to(DEVICE), out, deep)
        assert torch.equal(out.cpu().double(), want.repeat(1, 1 + deep))


@interpreted
def test_unpacking_is_exact():
    check_unpacking()


def joined(x):
    """What the parts of x say, in float64."""
    parts, scale = split.split(x)
    groups = parts.double().sum(2) * scale.double()[:, None, None]
    return groups.unflatten(-1, (2, 16)).mT.reshape(x.shape)


def check_splitting():
    torch.manual_seed(0)
    x = (torch.rand(6, 96) + 0.5) * torch.tensor([1, 1e-30, 1e30, -1, 7, 0])[:, None]
    x = x.to(DEVICE, BF16)
    assert torch.equal(joined(x), x.double())
    x[:, ::3] *= 2.0**-7
    assert torch.equal(joined(x), x.double())
    x[:, ::3] *= 2.0**-7
    largest = x.double().abs().amax(1, keepdim=True)
    assert ((joined(x) - x.double()).abs() <= largest * 2.0**-17).all() and not torch.equal(joined(x), x.double())
    x[1, 5], x[3, 7] = torch.nan, torch.inf
    bad = ~joined(x).isfinite().all(1)
    assert bad.tolist() == [False, True, False, True, False, False]


@interpreted
def test_two_parts_are_the_input():
    check_splitting()


@interpreted
@pytest.mark.parametrize("mean", MEANS)
def test_tokens_do_not_depend_on_their_company(mean):
    """Nor on a NaN in it, or on what lies in experts that nobody chose."""
    torch.manual_seed(0)
    cfg, settings = tiny_config(num_experts=6, num_experts_per_token=2), split.config(mean)
    experts, (z, ids, weights) = random_experts(6, 64, 32), inputs(8, 6, 2, 64, "random", BF16)
    ids[ids == 5] = 0
    want = split.experts_split(z, ids, weights, experts, cfg, settings)
    for rows in (slice(0, 1), slice(3, 8)):
        assert torch.equal(split.experts_split(z[rows], ids[rows], weights[rows], experts, cfg, settings), want[rows])
    z = z.clone()
    z[0] = torch.nan
    experts.w13_scale[5] = experts.w2_scale[5] = 255
    got = split.experts_split(z, ids, weights, experts, cfg, settings)
    assert got[0].isnan().all() and torch.equal(got[1:], want[1:])


@interpreted
def test_scales_far_apart():
    """Rows of W2 from 2^-110 to 2^110: every output column to full accuracy. Rows of W13 differ by 2^20 inside."""
    torch.manual_seed(0)
    cfg = tiny_config(num_experts=5, num_experts_per_token=2)
    experts, args = random_experts(5, 64, 96, low=104, high=124), inputs(9, 5, 2, 64, "random", BF16)
    experts.w2_scale.copy_(torch.linspace(17, 237, 64).to(torch.uint8)[None, :, None].expand_as(experts.w2_scale))
    got, want = split.experts_split(*args, experts, cfg), reference(*args, experts, cfg)
    assert max(rel(g, w) for g, w in zip(got.T, want.T)) < 1e-2


@interpreted
def test_refuses_what_it_cannot_do():
    cfg, args = tiny_config(num_experts=5, num_experts_per_token=2), inputs(3, 5, 2, 64, "random", BF16)
    with kernels.use(experts="triton_split"), pytest.raises(ValueError, match="not packed"), torch.no_grad():
        routed_experts(*args, Experts(5, 64, 32).to(BF16), cfg)
    with kernels.use(experts="triton_split"), pytest.raises(ValueError, match="float32"):
        routed_experts(args[0].float(), *args[1:], random_experts(5, 64, 32), cfg)


@compiles
@pytest.mark.parametrize("act, mean", [(True, 1), (False, 1), (True, 8), (True, 20)])
def test_compiles(act, mean):
    """The sizes of K3; on Hopper the products are FP8 wgmma, and the weights go to them from registers."""
    settings = split.config(mean) | dict(STAGES=2)
    settings.pop("maxnreg", None)
    warps, K = settings.pop("num_warps"), 3584 if act else 3072
    signature = dict(x_ptr="*fp8e4nv", x_scale_ptr="*fp32", w_ptr="*i32", s_ptr="*u8", y_ptr="*bf16")
    signature |= dict(order_ptr="*i64", start_ptr="*i32", tile_ptr="*i32", first_ptr="*i32", beta="fp32", linear="fp32")
    signature |= {name: "i32" for name in ("NUM", "CHOICES", "ROWS", "stride")}
    built = compile_for_all(split._split_gemm, signature, dict(K=K, ACT=act, SITU=True) | settings, warps)
    ptx = built["sm_90"].asm["ptx"]
    assert "wgmma.mma_async" in ptx and "e4m3.e4m3" in ptx


# ---------------------------------------------------------------- on a GPU


class TestOnGPU:
    pytestmark = on_gpu

    @pytest.mark.parametrize("mean", MEANS)
    @pytest.mark.parametrize("N, E, k, L, inner, how, act", [*CASES, (300, 9, 4, 256, 192, "one", "situ")])
    def test_small(self, N, E, k, L, inner, how, act, mean):
        torch.manual_seed(N)
        cfg = tiny_config(num_experts=E, num_experts_per_token=k, hidden_act=act)
        experts, args = random_experts(E, L, inner), inputs(N, E, k, L, how, BF16)
        want = reference(*args, experts, cfg)
        got = split.experts_split(*args, experts, cfg, split.config(mean))
        assert rel(got, want) < 1.1 * rel(routed_experts.torch_path(*args, experts, cfg), want) < 5e-3

    @pytest.mark.large
    @pytest.mark.parametrize("N", [1, 15, 64, 300, 1500])
    def test_wide_and_the_same_bits_again(self, N):
        torch.manual_seed(N)
        cfg = tiny_config(num_experts=24, num_experts_per_token=4)
        experts, args = random_experts(24, 3584, 3072, 116, 120), inputs(N, 24, 4, 3584, "random", BF16)
        want, got = gpu_reference(*args, experts, cfg), split.experts_split(*args, experts, cfg)
        assert rel(got, want) < rel(routed_experts.torch_path(*args, experts, cfg), want) < 5e-3
        assert all(torch.equal(split.experts_split(*args, experts, cfg), got) for _ in range(50))

    def test_unpacking_and_splitting_are_exact(self):
        check_unpacking()
        check_splitting()

    @pytest.mark.large
    def test_in_a_graph(self):
        check_in_a_graph(split.experts_split)
