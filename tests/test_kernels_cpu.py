"""The C kernels of a few rows on a CPU against the PyTorch path in float64; where they run, and where not."""

import copy

import pytest
import torch
from helpers import case, tiny_config
from kernel_helpers import rel

import kernels
from attnres import attnres_norm
from cache import Part
from kda import Weights, kda_decode
from kernels import cpu
from layers import rms_norm, rms_norm_op
from mla import attend_rows, latent_write, mla_decode
from moe import UNPACKED, Experts, gated_act, in_projection, mxfp4_pack, mxfp4_unpack, route, routed_experts

LIMIT = 2e-6
needs_compiler = pytest.mark.skipif(isinstance(cpu.library(), str), reason=f"no C here: {cpu.library()}")
pytestmark = needs_compiler
rand = lambda *shape: torch.randn(*shape)
double = lambda x: x.double() if torch.is_tensor(x) and x.is_floating_point() else x


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def run(op, *args):
    """The op as auto runs it, which must be in C."""
    name = {"route": "router", "in_projection": "moe_in", "routed_experts": "experts", "attnres_norm": "attnres"}
    name = name.get(op.__name__, op.__name__)
    before = kernels.counts[name, "c"]
    out = op(*args)
    assert kernels.counts[name, "c"] == before + 1, "another backend ran"
    return out


@pytest.mark.parametrize("N, H", [(1, 192), (3, 7), (16, 40)])
@pytest.mark.parametrize("J", [1, 2, 6])
@pytest.mark.parametrize("terms", ["both", "s", "y"])
@pytest.mark.parametrize("normalized", [True, False])
def test_attnres(N, H, J, terms, normalized):
    s, y, *blocks = (2.0**j * rand(N, H) for j in range(J + 1))
    terms = (s if terms != "y" else None, y if terms != "s" else None)
    mix, norm = (1 + 0.3 * rand(H), rand(1, H), 1e-2), (1 + 0.3 * rand(H), 1e-5) if normalized else None
    total, x = run(attnres_norm, terms, blocks, mix, norm)
    exact = [tuple(map(double, t)) if t else t for t in (terms, blocks, mix, norm)]
    want_total, want = attnres_norm.torch_path(exact[0], list(exact[1]), *exact[2:])
    assert rel(total, want_total) < LIMIT and rel(x, want) < LIMIT


@pytest.mark.parametrize("N, D", [(1, 96), (5, 33)])
def test_rms_norm(N, D):
    x, weight = rand(N, 2 * D)[:, D:], rand(D)
    assert rel(run(rms_norm_op, x, weight, 1e-3), rms_norm(x.double(), weight.double(), 1e-3)) < LIMIT


@pytest.mark.parametrize("act", ["situ", "silu"])
@pytest.mark.parametrize("size", [1e-3, 1, 30])
def test_gated_act(act, size):
    cfg, x = tiny_config(hidden_act=act), size * rand(3, 100)[:, 10:90]
    assert rel(run(gated_act, x, cfg), gated_act.torch_path(x.double(), cfg)) < LIMIT


@pytest.mark.parametrize("N", [1, 16])
def test_moe_in(N):
    x, weight = rand(N, 48), rand(19 + 30, 48)
    logits, rest = run(in_projection, x, weight, 19)
    want, want_rest = in_projection.torch_path(x.double(), weight.double(), 19)
    assert rel(logits, want) < 1e-7 and rel(rest, want_rest) < LIMIT


@pytest.mark.parametrize("changes", [{}, {"moe_router_activation_func": "softmax"}, {"moe_renormalize": False}])
@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_router(changes, scale):
    """Ties, in runs and across the chosen, go to the lower id; a row of NaN has NaN weights, and no other has."""
    cfg = tiny_config(num_experts=19, num_experts_per_token=5, routed_scaling_factor=scale, **changes)
    logits, bias = rand(7, 19), 0.1 * rand(19)
    logits[1], logits[2] = logits[1].round(), 0
    bias[:] = torch.where(torch.arange(19) % 2 == 0, 0.0, bias)
    logits[4, 3] = torch.nan
    ids, weights = run(route, logits, bias, cfg)
    want_ids, want = route.torch_path(logits, bias, cfg)
    assert torch.equal(ids, want_ids) and torch.equal(weights.isnan(), want.isnan()) and weights[4].isnan().any()
    rows = torch.arange(7) != 4
    assert rel(weights[rows], want[rows]) < 1e-6


def packed(*shape):
    with torch.inference_mode(False):  # whose tensors have no versions: nothing of them is kept
        experts = Experts(*shape, keep=1 << 20)
        for name in ("w13", "w2"):
            experts.set_packed(name, *mxfp4_pack(getattr(experts, name).detach()))
    return experts


@pytest.mark.parametrize("N", [1, 2, 16])
@pytest.mark.parametrize("act", ["situ", "silu"])
def test_experts(N, act):
    cfg = tiny_config(num_experts=9, num_experts_per_token=3, hidden_act=act)
    z, ids, weights = rand(N, 100)[:, 4:68], torch.rand(N, 9).argsort(-1)[:, :3].contiguous(), torch.rand(N, 3)
    for experts in (packed(9, 64, 32), Experts(9, 64, 32)):
        got = run(routed_experts, z, ids, weights, experts, cfg)
        want = routed_experts.torch_path(z.double(), ids, weights.double(), copy.deepcopy(experts).double(), cfg)
        assert rel(got, want) < LIMIT
    ids[0] = ids[0, 0]  # three times the same
    got = run(routed_experts, z, ids, weights, experts, cfg)
    assert rel(got, routed_experts.torch_path(z, ids, weights, experts, cfg)) < LIMIT


@pytest.mark.parametrize("bound", [-5.0, None])
@pytest.mark.parametrize("taps, h, d", [(4, 2, 32), (2, 3, 20)])
def test_kda_decode(bound, taps, h, d):
    """Fresh texts, states in place and moved, padding; pages of others and of nobody hold NaN, and are left alone."""
    B, hd = 6, h * d
    w = Weights(rand(3 * hd, taps), rand(h) / 2, rand(hd), rand(d), 1e-5, bound)
    rows = rand(B, 5 * hd + h + 3).split_with_sizes([3 * hd, hd, hd, h, 3], dim=1)[:4]
    pages = torch.full((12, h * d * d + (taps - 1) * 3 * hd + 8), torch.nan)
    S, conv = pages[:, : h * d * d].unflatten(1, (h, d, d)), pages[:, h * d * d : -8].unflatten(1, (taps - 1, 3 * hd))
    past = torch.tensor([4, 0, 7, 9, 0, 2], dtype=torch.int32)
    src, dst = torch.tensor([[3, 5], [-1, -1], [6, 6], [1, 1], [0, 2], [-1, 4]]).T
    src, dst = src.clone(), dst.clone()
    dst[4] = -1
    for i in (3, 6, 1):
        S[i], conv[i] = rand(h, d, d), rand(taps - 1, 3 * hd)
    before, exact = pages.clone(), (S.double(), conv.double())
    got = run(kda_decode, *rows, w, S, conv, src, dst, past)
    want = kda_decode.torch_path(*map(double, rows), Weights(*map(double, w)), *exact, src, dst, past)
    real = dst >= 0
    assert rel(got[real], want[real]) < LIMIT
    for page in dst[real].tolist():
        assert rel(S[page], exact[0][page]) < LIMIT and torch.equal(conv[page], exact[1][page].float())
    others = [i for i in range(12) if i not in dst.tolist()]
    assert torch.equal(pages[others].nan_to_num(7), before[others].nan_to_num(7))


def test_latent_write():
    kv, norm, stored = rand(4, 60)[:, 5:53], rand(32), torch.full((9, 48), torch.nan)
    slots, want = torch.tensor([7, -1, 0, 3]), stored.double()
    run(latent_write, kv, norm, 1e-6, stored, slots, None)
    latent_write.torch_path(kv.double(), norm.double(), 1e-6, want, slots, None)
    assert rel(stored[[7, 0, 3]], want[[7, 0, 3]]) < LIMIT and stored[[1, 2, 4, 5, 6, 8]].isnan().all()


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("T", [1, 3])
def test_mla_decode(T, first):
    """Histories of several pages in any order; rows that are nobody's, or below the first, hold NaN."""
    P, past, rank, pe, h = 128, torch.tensor([first, 140, 300], dtype=torch.int32), 32, 16, 3
    order = torch.randperm(9).int()
    table, stored = order.view(3, 3), torch.full((9 * P, rank + pe), torch.nan)
    at = [(row[:, None].long() * P + torch.arange(P)).flatten()[first : n + T] for row, n in zip(table, past.tolist())]
    for rows in at:
        stored[rows] = rand(len(rows), rank + pe)
    part = Part(slice(0, 3 * T), [T] * 3, past.tolist(), [False] * 3, 300 + T, P, past, table, None, None, first)
    q = rand(3, T, h, rank + pe)
    o, lse = run(mla_decode, q, stored, rank, part, 0.1, None)
    for b, rows in enumerate(at):
        seen = first + torch.arange(len(rows)) <= past[b] + torch.arange(T)[:, None]
        want = attend_rows(q[b : b + 1].double(), stored[rows][None].double(), seen[None], rank, 0.1)
        assert rel(o[b : b + 1], want[0]) < LIMIT and rel(lse[b : b + 1], want[1]) < LIMIT


# ---------------------------------------------------------------- where it runs


def backend_of(x, weight):
    before = kernels.counts.copy()
    rms_norm_op(x, weight, 1e-5)
    return next(backend for (op, backend), n in (kernels.counts - before).items())


def test_auto_takes_it_for_a_few_rows_of_float32_without_gradients():
    x, weight = rand(cpu.ROWS, 32), rand(32)
    assert backend_of(x, weight) == "c"
    assert backend_of(rand(cpu.ROWS + 1, 32), weight) == "torch"
    assert backend_of(x.bfloat16(), weight.bfloat16()) == backend_of(x.T.contiguous().T, weight) == "torch"
    with torch.inference_mode(False), torch.enable_grad():
        assert backend_of(torch.randn(2, 32), torch.randn(32, requires_grad=True)) == "torch"
    with kernels.use("c"):
        assert backend_of(rand(cpu.ROWS + 1, 32), weight) == "c"
        with pytest.raises(ValueError, match="rms_norm=c cannot run here: torch.bfloat16, not float32"):
            rms_norm_op(x.bfloat16(), weight.bfloat16(), 1e-5)
    with kernels.use("torch"):
        assert backend_of(x, weight) == "torch"


@pytest.mark.parametrize("compiler, says", [("no-such-compiler", "no-such-compiler"), ("false", "false")])
def test_without_a_compiler_auto_is_pytorch(compiler, says, monkeypatch, tmp_path):
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpu.library.cache_clear()
    try:
        assert backend_of(rand(1, 32), rand(32)) == "torch"
        with kernels.use("c"), pytest.raises(ValueError, match=f"cpu.c cannot be built: .*{says}"):
            rms_norm_op(rand(1, 32), rand(32), 1e-5)
        assert not list((tmp_path / "k3-engine").iterdir())
    finally:
        cpu.library.cache_clear()


def test_experts_are_unpacked_once_and_follow_their_packed_weights():
    with torch.inference_mode(False), torch.no_grad():
        experts = packed(4, 64, 32)
        held = lambda: mxfp4_unpack(experts.w13_packed, experts.w13_scale, torch.float32)
        first = experts.whole("w13")
        assert torch.equal(first.float(), held()) and experts.whole("w13") is first
        experts.w13_packed[2] ^= 5
        assert torch.equal(experts.whole("w13").float(), held())
        with torch.inference_mode():
            experts.w13_scale.view(-1)[3] += 1  # in a view
        assert torch.equal(experts.whole("w13").float(), held())
        experts.set_packed("w13", *mxfp4_pack(rand(4, 64, 64)))
        assert torch.equal(experts.whole("w13").float(), held())
        assert not copy.deepcopy(experts).unpacked and not experts.to("meta").unpacked
    experts = packed(4, 64, 32)
    experts.keep = sum(experts.whole(name).nbytes for name in ("w13", "w2")) - 1
    assert experts.whole("w13") is experts.whole("w2") is None
    with torch.enable_grad():
        assert packed(4, 64, 32).whole("w13") is None, "only for inference"


def test_a_model_keeps_no_more_than_it_may():
    stacks = [experts for _, experts in case("micro")[0].expert_stacks()]
    assert stacks and sum(experts.keep for experts in stacks) <= UNPACKED
