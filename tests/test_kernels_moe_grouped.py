"""The grouped GEMMs of the routed experts against float64 and an independent MXFP4 decoder."""

import pytest
import torch
from helpers import mxfp4_decode, tiny_config
from kernel_helpers import DEVICE, INTERPRETED, compile_for_all, compiles, interpreted, on_gpu, rel, slow
from test_moe import by_token

import kernels
from moe import Experts, routed_experts

kernels.load()
grouped = pytest.importorskip("kernels.moe_grouped")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """The interpreter takes as long for a small tile as for a large one."""
    if INTERPRETED:
        settings = grouped._settings
        monkeypatch.setattr(grouped, "_settings", lambda TT, REST, OUT, *rest: settings(TT, REST, 4 * OUT, *rest))


def random_experts(E, L, inner, low=120, high=126, device=DEVICE):
    """Experts of random bytes with scale bytes from low to high."""
    experts = Experts(1, L, inner)
    for name, out, width in (("w13", 2 * inner, L), ("w2", L, inner)):
        packed = torch.randint(256, (E, out, width // 2), dtype=torch.uint8)
        scale = torch.randint(low, high + 1, (E, out, width // 32), dtype=torch.uint8)
        experts.set_packed(name, packed.to(device), scale.to(device))
    return experts


def values(experts):
    """What the experts' bytes mean, float64."""
    packed = {n: (getattr(experts, f"{n}_packed").cpu(), getattr(experts, f"{n}_scale").cpu()) for n in ("w13", "w2")}
    return {n: torch.stack([mxfp4_decode(*e) for e in zip(*pair)]) for n, pair in packed.items()}


def choose(N, E, k, how):
    """ids [N, k]. "one": everyone's first choice is expert E - 2, and some experts have no token."""
    if how == "random":
        return torch.rand(N, E).argsort(-1)[:, :k]
    return torch.cat([torch.full((N, 1), E - 2), torch.randint(E // 2, (N, k - 1))], dim=1)


def inputs(N, E, k, L, how, dtype):
    return torch.randn(N, L).to(DEVICE, dtype), choose(N, E, k, how).to(DEVICE), torch.rand(N, k).to(DEVICE)


def reference(z, ids, weights, experts, cfg):
    return by_token(z.cpu(), ids.cpu(), weights.cpu().double(), **values(experts), cfg=cfg)


CASES = [  # N, E, k, L, inner, routing, act
    (1, 5, 2, 64, 160, "random", "situ"),
    (3, 8, 3, 160, 32, "random", "silu"),
    (17, 6, 2, 64, 96, "one", "situ"),
    (40, 4, 2, 64, 32, "random", "situ"),
]


@interpreted
@pytest.mark.parametrize("dtype, limit", [(torch.float32, 2e-6), (torch.bfloat16, 1.5e-2)])
@pytest.mark.parametrize("N, E, k, L, inner, how, act", CASES)
def test_grouped(N, E, k, L, inner, how, act, dtype, limit):
    """float32: about 3e-7. bf16: about 9e-3 in the interpreter, which truncates where a GPU rounds."""
    torch.manual_seed(N)
    cfg = tiny_config(num_experts=E, num_experts_per_token=k, hidden_act=act)
    experts, args = random_experts(E, L, inner), inputs(N, E, k, L, how, dtype)
    before = kernels.counts["experts", "triton_grouped"]
    with kernels.use(experts="triton_grouped"):
        got = routed_experts(*args, experts, cfg)
    assert kernels.counts["experts", "triton_grouped"] == before + 1
    assert got.dtype == dtype and got.shape == args[0].shape
    assert rel(got, reference(*args, experts, cfg)) < limit
    assert rel(got, routed_experts.torch_path(*args, experts, cfg)) < limit


@interpreted
@pytest.mark.parametrize("tokens, out", [(16, 128), (20, 128), (34, 128), (50, 64)])
def test_products_that_share_weights(tokens, out):
    """Tiles of one and two products; whole blocks, where scales are read as words."""
    torch.manual_seed(tokens)
    cfg = tiny_config(num_experts=5, num_experts_per_token=2)
    experts, args = random_experts(5, 128, 128), inputs(tokens, 5, 2, 128, "one", torch.float32)
    settings = dict(TT=32, REST=16, OUT=out, BK=128, num_warps=4, num_stages=2)
    got = grouped.experts_grouped(*args, experts, cfg, settings)
    assert rel(got, reference(*args, experts, cfg)) < 2e-6


@interpreted
def test_unused_experts_may_hold_anything():
    torch.manual_seed(0)
    cfg = tiny_config(num_experts=6, num_experts_per_token=2)
    experts = random_experts(6, 64, 32)
    z, weights, ids = torch.randn(5, 64), torch.rand(5, 2), torch.tensor([[1, 4]] * 5)
    want = grouped.experts_grouped(z, ids, weights, experts, cfg)
    for scale in (experts.w13_scale, experts.w2_scale):
        scale[[0, 2, 3, 5]] = 255
    assert torch.equal(grouped.experts_grouped(z, ids, weights, experts, cfg), want)


@interpreted
def test_tokens_do_not_depend_on_their_company():
    torch.manual_seed(0)
    cfg = tiny_config(num_experts=6, num_experts_per_token=2)
    experts, (z, ids, weights) = random_experts(6, 64, 32), inputs(8, 6, 2, 64, "random", torch.float32)
    want = grouped.experts_grouped(z, ids, weights, experts, cfg)
    for rows in (slice(0, 1), slice(3, 8)):
        assert torch.equal(grouped.experts_grouped(z[rows], ids[rows], weights[rows], experts, cfg), want[rows])


@interpreted
def test_scales_far_apart():
    """Rows of W2 from 2^-110 to 2^110: every output column to full accuracy. Rows of W13 differ by 2^20 inside."""
    torch.manual_seed(0)
    cfg = tiny_config(num_experts=5, num_experts_per_token=2)
    experts, args = random_experts(5, 64, 96, low=104, high=124), inputs(9, 5, 2, 64, "random", torch.float32)
    experts.w2_scale.copy_(torch.linspace(17, 237, 64).to(torch.uint8)[None, :, None].expand_as(experts.w2_scale))
    got, want = grouped.experts_grouped(*args, experts, cfg), reference(*args, experts, cfg)
    assert max(rel(g, w) for g, w in zip(got.T, want.T)) < 1e-5


@triton.jit
def unpack_kernel(w_ptr, power_ptr, out_ptr, column_ptr, FP8: tl.constexpr, DTYPE: tl.constexpr):
    """A block of 16 words of 16 rows, unpacked; and the column of each position."""
    row, v, p = tl.arange(0, 16), tl.arange(0, 16), tl.arange(0, 128)
    word = v % 4 * 4 + v // 4
    a = grouped._unpack(tl.load(w_ptr + row[:, None] * 16 + word), tl.load(power_ptr + row[:, None] * 16 + word), DTYPE)
    tl.store(out_ptr + row[:, None] * 128 + p, a.to(tl.float32))
    tl.store(column_ptr + p, grouped._columns(p, 2 if FP8 else 4))


def unpack(packed, scale, dtype):
    """packed [16, 64], scale [16, 4] -> the kernels' values, float64 [16, 128], columns in order."""
    fp8 = dtype == tl.float8e4nv
    largest = scale.int().amax(1, keepdim=True)
    power = ((12 if fp8 else 254) + scale.int() - largest).repeat_interleave(4, 1).contiguous()
    out, column = torch.empty(16, 128, device=DEVICE), torch.empty(128, dtype=torch.int32, device=DEVICE)
    unpack_kernel[(1,)](packed.view(torch.int32).to(DEVICE), power.to(DEVICE), out, column, fp8, dtype)
    out, column = out.cpu().double(), column.cpu().long()
    assert column.sort()[0].tolist() == list(range(128))
    factor = torch.ldexp(torch.ones(16, 1, dtype=torch.float64), largest - (133 if fp8 else 128))
    return (torch.empty_like(out).index_copy_(1, column, out)) * factor


def check_unpacking(dtype, reach):
    """Every byte, under scales that are up to 2^reach below the largest of their row, is exact."""
    packed = torch.arange(256, dtype=torch.uint8).repeat(4).view(16, 64)
    for largest in (0, 1, 2, reach, 100, 127, 128, 129, 200, 253, 254):
        scale = torch.randint(max(0, largest - reach), largest + 1, (16, 4), dtype=torch.uint8)
        scale[:, 1] = largest
        assert torch.equal(unpack(packed, scale, dtype), mxfp4_decode(packed, scale))


@interpreted
def test_unpacking_is_exact():
    check_unpacking(tl.float32, 120)
    check_unpacking(tl.float8e4nv, 11)
    packed, scale = (
        torch.full((16, 64), 0x77, dtype=torch.uint8),
        torch.tensor([[120, 108, 90, 0]] * 16).to(torch.uint8),
    )
    assert not unpack(packed, scale, tl.float8e4nv)[:, 32:].any()  # FP8: farther below, nothing


def quantized(x):
    scale = x.abs().amax(-1, keepdim=True) / 448
    return (x / scale).to(torch.float8_e4m3fn).double() * scale


def emulated(z, ids, weights, experts, cfg):
    """W4A8 in float64, its roundings included."""
    from test_moe import act64

    matrices, out = values(experts), torch.zeros(z.shape, dtype=torch.float64)
    for t, (es, ws) in enumerate(zip(ids.tolist(), weights.tolist())):
        for e, weight in zip(es, ws):
            w1, w3 = matrices["w13"][e].chunk(2)
            row = quantized(z[t].cpu().double())
            act = act64(w1 @ row, w3 @ row, cfg).to(z.dtype).double()
            out[t] += weight * (matrices["w2"][e] @ quantized(act))
    return out


@interpreted
@pytest.mark.parametrize("N, how", [(3, "random"), (17, "one")])
def test_w4a8(N, how):
    """Rounding activations to e4m3 costs about 4e-2; the interpreter's own rounding to e4m3 is wrong now and then."""
    torch.manual_seed(N)
    cfg = tiny_config(num_experts=5, num_experts_per_token=2)
    experts, args = random_experts(5, 64, 96), inputs(N, 5, 2, 64, how, torch.float32)
    with kernels.use(experts="triton_w4a8"):
        got = routed_experts(*args, experts, cfg)
    assert rel(emulated(*args, experts, cfg), reference(*args, experts, cfg)) < 6e-2
    assert rel(got, reference(*args, experts, cfg)) < 0.15


@interpreted
def test_refuses_what_it_cannot_do():
    cfg = tiny_config(num_experts=5, num_experts_per_token=2)
    args = inputs(3, 5, 2, 64, "random", torch.float32)
    with kernels.use(experts="triton_grouped"), pytest.raises(ValueError, match="not packed"), torch.no_grad():
        routed_experts(*args, Experts(5, 64, 32), cfg)
    with kernels.use(experts="triton_grouped"), pytest.raises(ValueError, match="float64"):
        routed_experts(args[0].double(), *args[1:], random_experts(5, 64, 32), cfg)


@compiles
@pytest.mark.parametrize("act, fp8, rows", [(1, 0, 1024), (0, 1, 1024), (1, 1, 65536), slow(1, 1, 131072)])
def test_compiles(act, fp8, rows):
    """The sizes of K3; on Hopper the products are wgmma with weights from registers."""
    act, fp8, settings = bool(act), bool(fp8), grouped.config(rows, 896, fp8)
    warps, stages, K = settings.pop("num_warps"), settings.pop("num_stages"), 3584 if act else 3072
    signature = dict(
        x_ptr="*fp8e4nv" if fp8 else "*bf16", x_scale_ptr="*fp32", w_ptr="*i32", s_ptr="*u8", y_ptr="*bf16"
    )
    signature |= dict(order_ptr="*i64", start_ptr="*i32", tile_ptr="*i32", first_ptr="*i32", beta="fp32", linear="fp32")
    signature |= {name: "i32" for name in ("NUM", "CHOICES", "ROWS", "stride")}
    constants = dict(K=K, PADDED=K, ACT=act, SITU=True, FP8=fp8, NEXT=2 if fp8 else 4) | settings
    built = compile_for_all(grouped._grouped_kernel, signature, constants, warps, min(stages, 2))
    ptx = built["sm_90"].asm["ptx"]
    assert "wgmma.mma_async" in ptx and ("e4m3.e4m3" in ptx) == fp8


# ---------------------------------------------------------------- on a GPU


def gpu_reference(z, ids, weights, experts, cfg):
    """The PyTorch path in float64: its decoder is tested bit by bit in test_moe."""
    return routed_experts.torch_path(z.double(), ids, weights.double(), experts, cfg)


def check_in_a_graph(run):
    torch.manual_seed(0)
    cfg = tiny_config(num_experts=24, num_experts_per_token=4)
    experts, args = random_experts(24, 256, 256), inputs(40, 24, 4, 256, "random", torch.bfloat16)
    run(*args, experts, cfg)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(*args, experts, cfg)
    args[1].copy_(choose(40, 24, 4, "one").to(DEVICE))  # other experts than those captured
    graph.replay()
    assert torch.equal(got, run(*args, experts, cfg))


class TestOnGPU:
    pytestmark = on_gpu

    @pytest.mark.parametrize("dtype, limit", [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
    @pytest.mark.parametrize("N, E, k, L, inner, how, act", [*CASES, (300, 9, 4, 256, 192, "one", "situ")])
    def test_small(self, N, E, k, L, inner, how, act, dtype, limit):
        torch.manual_seed(N)
        cfg = tiny_config(num_experts=E, num_experts_per_token=k, hidden_act=act)
        experts, args = random_experts(E, L, inner), inputs(N, E, k, L, how, dtype)
        assert rel(grouped.experts_grouped(*args, experts, cfg), reference(*args, experts, cfg)) < limit

    @pytest.mark.large
    @pytest.mark.parametrize("N", [1, 15, 64, 300, 1500])
    @pytest.mark.parametrize("fp8, limit", [(False, 1e-2), (True, 6e-2)])
    def test_wide_and_the_same_bits_again(self, N, fp8, limit):
        torch.manual_seed(N)
        cfg = tiny_config(num_experts=24, num_experts_per_token=4)
        experts, args = random_experts(24, 3584, 3072, 116, 120), inputs(N, 24, 4, 3584, "random", torch.bfloat16)
        run = grouped.experts_grouped_fp8 if fp8 else grouped.experts_grouped
        got = run(*args, experts, cfg)
        assert rel(got, gpu_reference(*args, experts, cfg)) < limit
        assert all(torch.equal(run(*args, experts, cfg), got) for _ in range(50))

    def test_unpacking_is_exact(self):
        check_unpacking(tl.bfloat16, 120)
        check_unpacking(tl.float32, 120)
        check_unpacking(tl.float8e4nv, 11)

    def test_w4a8_is_its_emulation(self):
        torch.manual_seed(0)
        cfg = tiny_config(num_experts=5, num_experts_per_token=2)
        experts, args = random_experts(5, 64, 96), inputs(40, 5, 2, 64, "one", torch.float32)
        assert rel(grouped.experts_grouped_fp8(*args, experts, cfg), emulated(*args, experts, cfg)) < 1e-2

    @pytest.mark.large
    def test_in_a_graph(self):
        check_in_a_graph(grouped.experts_grouped)
