"""The Triton kernels of kernels/kda.py against the PyTorch path in float64: outputs, state pages, conv windows."""

import pytest
import torch
from kernel_helpers import DEVICE, compile_for_all, compiles, interpreted, on_gpu, rel

import kernels
from cache import Part
from kda import Weights, kda_prefill

triton = pytest.importorskip("triton")
from kernels import kda as triton_kda  # noqa: E402

LIMIT = {torch.float32: 2e-6, torch.bfloat16: 7e-3}
RAGGED = (1, 2, 15, 16, 17, 63, 64, 65)


def problem(
    lengths, follows=(), past=None, h=2, d=32, dtype=torch.float32, bound=-5.0, gate="random", alike=False,
    pages=None, seed=0,
):  # fmt: skip
    """Arguments of kda_prefill: projections as slices of a wider row, state pages in any order of a poisoned pool."""
    g = torch.Generator().manual_seed(seed)
    random = lambda *shape: torch.randn(*shape, generator=g)
    B, N, hd = len(lengths), sum(lengths), h * d
    follows = [i in follows for i in range(B)]
    past = list(past or [5 * (i % 2) for i in range(B)])
    order = torch.randperm(pages or 2 * B + 3, generator=g)
    src, dst = order[:B].clone(), order[B : 2 * B].clone()
    for i in range(B):
        if follows[i]:
            src[i], past[i] = dst[i - 1], past[i - 1] + lengths[i - 1]
        elif i % 4 == 1:
            dst[i] = src[i]  # in place
    rows = torch.cat([random(N, 4 * hd), torch.full((N, d), torch.nan), random(N, h)], dim=1)
    if alike:
        rows[:, hd : 2 * hd] = random(1, hd) + 1e-3 * rows[:, hd : 2 * hd]
    r = {
        "random": 1.5 * random(N, hd) - 1,
        "saturated": torch.full((N, hd), 60.0),
        "none": torch.full((N, hd), -20.0),
        "mixed": torch.tensor([60.0, 2, -3, -20])[torch.randint(4, (N, hd), generator=g)],
        "wild": 3 + 3 * random(N, hd),
        "edges": torch.where(torch.arange(N) % 16 == 0, -60.0, 60.0)[:, None].expand(N, hd).clone(),
        "jumps": torch.where((torch.arange(N) % 64 < 32)[:, None], 20.0, -9.0).expand(N, hd).clone(),
    }[gate]
    bias = random(hd) - 1 if gate == "random" else torch.zeros(hd)
    w = Weights(random(3 * hd, 4) / 2, random(h) / 2, bias, random(d).abs() + 0.5, 1e-5, bound)
    w = Weights(*(x.to(DEVICE) if torch.is_tensor(x) else x for x in w))
    width = h * d * d * 4 // dtype.itemsize
    pool = torch.full((len(order), width + 16 * hd), torch.nan, dtype=dtype, device=DEVICE)
    S = pool.view(torch.float32)[:, : h * d * d].unflatten(1, (h, d, d))
    conv = pool[:, width : width + 9 * hd].unflatten(1, (3, 3 * hd))
    for i in range(B):
        if past[i] and not follows[i]:
            S[src[i]], conv[src[i]] = 0.3 * random(h, d, d).to(DEVICE), random(3, 3 * hd).to(DEVICE, dtype)
    src, dst = (torch.stack([x, x], dim=1).to(DEVICE) for x in (src, dst))  # two groups of layers, as Batch gives them
    past = torch.tensor(past, dtype=torch.int32, device=DEVICE)
    part = Part(slice(0, N), list(lengths), past.tolist(), follows, N, 128, past, None, src, dst)
    qkv, gates, _, b = rows.to(DEVICE, dtype).split([3 * hd, hd, d, h], dim=1)
    return qkv, gates, r.to(DEVICE, dtype), b, w, S, conv, src[:, 0], dst[:, 1], part


def truth(args):
    """-> o, S, conv in float64."""
    *rows, w, S, conv, src, dst, part = args
    w = Weights(*(x.double() if torch.is_tensor(x) else x for x in w))
    S, conv = S.double(), conv.double()
    return kda_prefill.torch_path(*(x.double() for x in rows), w, S, conv, src, dst, part), S, conv


def run(args):
    before = kernels.counts["kda_prefill", "triton"]
    with kernels.use(kda_prefill="triton"), torch.no_grad():
        o = kda_prefill(*args)
    assert kernels.counts["kda_prefill", "triton"] == before + 1
    return o


def check(*args, limit=None, **kwargs):
    args = problem(*args, **kwargs)
    (qkv, *_, S, conv, _, dst, _), (want, want_S, want_conv) = args, truth(args)
    untouched = torch.ones(len(S), dtype=torch.bool, device=S.device).index_fill(0, dst, False)
    before = S[untouched].clone(), conv[untouched].clone()
    o, limit = run(args), limit or LIMIT[qkv.dtype]
    assert o.dtype == qkv.dtype and o.isfinite().all()
    assert rel(o, want) < limit and rel(S[dst], want_S[dst]) < limit
    assert ((o.double() - want).norm(dim=1) < 10 * limit * want.norm(dim=1) + 3 * limit).all()
    assert torch.equal(conv[dst].double(), want_conv[dst]), "conv windows are copies"
    assert all(torch.equal(x.nan_to_num(7), y[untouched].nan_to_num(7)) for x, y in zip(before, (S, conv)))


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ragged(dtype):
    check(RAGGED if dtype == torch.float32 else (15, 16, 1, 65), h=1, dtype=dtype)


@interpreted
@pytest.mark.parametrize("bound", [-5.0, -7.0, None])
@pytest.mark.parametrize("gate", ["saturated", "none", "mixed", "jumps", "edges", "wild"])
def test_gates(gate, bound):
    if bound == -5:
        check([80], h=1, gate=gate, dtype=torch.bfloat16)  # the split exponents; float32 takes differences
    check([80], h=1, gate=gate, bound=bound, limit=2e-5)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_alike(dtype):
    check([130], h=1, gate="none", alike=True, dtype=dtype)


@interpreted
@pytest.mark.parametrize("past, lengths", [(4, [1, 1, 1, 2, 70, 3, 66, 5]), (0, [1, 2, 1, 65, 2])])
def test_pieces_that_follow(past, lengths):
    check(lengths, follows={1, 2, 3, 4, 6}, past=[past] * 8, h=1)


@interpreted
@pytest.mark.parametrize("tile", [128, 16])
def test_groups_of_chunks(monkeypatch, tile):
    """Two passes, and several programs of the scan per head."""
    monkeypatch.setattr(triton_kda, "groups_of", lambda texts, heads, chunks: (2, -(-chunks // 2)))
    monkeypatch.setitem(triton_kda.SCAN_WIDE, "TILE", tile)
    check([130, 1, 70, 20] if tile == 128 else [130, 1, 20], follows={1, 3}, h=1)


@interpreted
def test_head_dim_64():
    check([20], h=3, d=64)


@interpreted
def test_a_fault_stays_home():
    """A sequence of NaN between two others, and rows of NaN in the columns beside the inputs."""
    args, clean = problem([70, 20, 3], h=1), problem([70, 20, 3], h=1)
    args[0][70:90], args[1][70:90] = torch.nan, torch.nan
    o, want = run(args), run(clean)
    keep = torch.arange(93, device=o.device)
    keep = (keep < 70) | (keep >= 90)
    assert torch.equal(o[keep], want[keep]) and o[~keep].isnan().all()


def check_fault(lengths, at, name, **kind):
    """NaN in one number of a token of the first sequence: it comes out there, that of a value or a gate in all that
    follows too. No chunk before has it, and of the other sequences no bit changes. (The rows before it in its own chunk
    may have it: products with zeros stand for what they do not see.)
    """
    args, clean = problem(lengths, **kind), problem(lengths, **kind)
    column = {"q": 5, "k": args[1].shape[1] + 5, "v": 2 * args[1].shape[1] + 5}
    tensor = args[{"gate": 1, "r": 2, "b": 3}.get(name, 0)]
    tensor[at, column.get(name, 1)] = torch.nan
    (o, want), end, pages = (run(args), run(clean)), lengths[0], args[8][1:]
    assert o[at].isnan().any() and o[: at // 64 * 64].isfinite().all()
    assert name not in ("v", "r") or o[at:end].isnan().any(1).all()
    assert torch.equal(o[end:], want[end:]) and o[end:].isfinite().all()
    for x, y in zip(args[5:7], clean[5:7]):
        assert torch.equal(x[pages], y[pages]) and x[pages].isfinite().all()


@interpreted
@pytest.mark.parametrize("name", ["v", "r"])
def test_a_fault_in_a_token_reaches_no_other_sequence(name):
    check_fault([80, 3], 70, name, h=1, d=32)


def test_groups_fill_the_card():
    for texts, heads, chunks in [(1, 12, 128), (1, 96, 128), (8, 12, 16), (1, 1, 3), (3, 5, 1000), (1, 1, 5000)]:
        length, groups = triton_kda.groups_of(texts, heads, chunks)
        assert length * (groups - 1) < chunks <= length * groups
        assert groups == 1 or texts * heads * groups <= triton_kda.SMS


@pytest.mark.parametrize("change", ["dtype", "taps", "dim", "state"])
def test_why_not(change):
    args = problem([3], d=48 if change == "dim" else 32, dtype=torch.float32)
    qkv, gate, r, b, w, S, conv, src, dst, part = args
    if change == "dtype":
        qkv = qkv.double()
    if change == "taps":
        w = w._replace(conv=w.conv[:, :3])
    if change == "state":
        S = S.double()
    assert triton_kda.why_not(qkv, gate, r, b, w, S, conv, src, dst, part)
    assert (triton_kda.why_not(*args) is None) == (change != "dim")


SIGNATURE = dict(
    A_log="*fp32", dt_bias="*fp32", taps="*fp32", src="*i64", dst="*i64", past="*i32", table="*i32",
    chains="*i32", pairs="*fp32", decay="*fp32", o_norm="*fp32", S="*fp32", states="*fp32",
    n_chains="i32", lower_bound="fp32", groups="i32", length="i32", eps="fp32", N="i32",
)  # fmt: skip


def compile_kernel(kernel, dtype, launch, **constants):
    signature = {name: SIGNATURE.get(name, f"*{dtype}") for name in kernel.arg_names}
    sizes = dict(ROW=49376, R_ROW=12288, B_ROW=49376, GATE_ROW=49376, SRC=3, DST=3, PAGE=2**20, CONV=2**21, TAP=36864)
    constants = sizes | dict(HEADS=96, D=128, ROWS=32) | constants
    constants = {k: v for k, v in constants.items() if k in kernel.arg_names}
    signature = {k: v for k, v in signature.items() if k not in constants}
    options = {k: v for k, v in launch.items() if k not in ("STAGES", "TILE", "maxnreg")}  # gfx950 has no maxnreg
    constants |= {k: v for k, v in launch.items() if k in ("STAGES", "TILE")}
    return compile_for_all(kernel, signature, constants, **options)


@compiles
def test_compiles_for_bfloat16():
    built = compile_kernel(triton_kda._prepare_kernel, "bf16", triton_kda.PREPARE, GATE="bounded", PRECISION="ieee")
    assert "wgmma" in built["sm_90"].asm["ptx"]
    compile_kernel(triton_kda._values_kernel, "bf16", triton_kda.VALUES)
    compile_kernel(triton_kda._inverse_kernel, "bf16", triton_kda.INVERSE, PRECISION=triton_kda.SOLVE_PRECISION)
    built = compile_kernel(triton_kda._scan_kernel, "bf16", triton_kda.SCAN, MODE="pages", PRECISION="ieee")
    assert "wgmma" in built["sm_90"].asm["ptx"] and built["sm_90"].metadata.shared <= 227 * 1024
    compile_kernel(triton_kda._scan_kernel, "bf16", triton_kda.SCAN_GROUPS, MODE="maps", PRECISION="ieee")


@compiles
def test_compiles_for_float32():
    compile_kernel(
        triton_kda._prepare_kernel, "fp32", triton_kda.PREPARE_WIDE, GATE="free", PRECISION="bf16x6", D=32, HEADS=4
    )
    compile_kernel(triton_kda._carry_kernel, "fp32", triton_kda.CARRY, TILE=32, PRECISION="bf16x6")
    compile_kernel(triton_kda._norm_kernel, "fp32", dict(num_warps=4))


# ---------------------------------------------------------------- on a GPU


@pytest.mark.parametrize("dtype", [pytest.param(t, marks=on_gpu) for t in (torch.float32, torch.bfloat16)])
@pytest.mark.parametrize("bound", [-5.0, None])
@pytest.mark.parametrize("h, d", [(3, 128), (5, 64), (2, 32)])
def test_gpu_ragged(dtype, bound, h, d):
    limit = 1e-2 if dtype == torch.bfloat16 else 1e-5
    check([*RAGGED, 300, 1000, 40], follows={6, 9}, h=h, d=d, dtype=dtype, bound=bound, limit=limit)


@pytest.mark.parametrize("dtype", [pytest.param(t, marks=on_gpu) for t in (torch.float32, torch.bfloat16)])
@pytest.mark.parametrize("gate", ["saturated", "mixed", "jumps", "edges", "wild", "none, alike"])
def test_gpu_gates(dtype, gate):
    gate, _, alike = gate.partition(", ")
    limit = 1e-2 if dtype == torch.bfloat16 else 2e-5
    check([500], h=2, d=128, dtype=dtype, gate=gate, alike=bool(alike), limit=limit)


@pytest.mark.parametrize("dtype", [pytest.param(t, marks=on_gpu) for t in (torch.float32, torch.bfloat16)])
@pytest.mark.parametrize("name", ["q", "k", "v", "r", "b", "gate"])
def test_gpu_a_fault_is_seen(name, dtype):
    """It comes out, and is not clamped to a number: minima and maxima of GPUs prefer those."""
    check_fault([140, 20, 64], 74, name, h=2, d=128, dtype=dtype)
    check_fault([5192, 3000], 1000, name, h=12, d=128, dtype=dtype)  # cut into groups


@pytest.mark.parametrize("dtype", [pytest.param(t, marks=on_gpu) for t in (torch.float32, torch.bfloat16)])
def test_gpu_two_passes(dtype):
    assert triton_kda.groups_of(1, 12, 128)[1] > 1
    check([3000, 5192], follows={1}, h=12, d=128, dtype=dtype, limit=1e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("dtype", [pytest.param(t, marks=on_gpu) for t in (torch.float32, torch.bfloat16)])
@pytest.mark.parametrize("lengths, h", [([300, 65, 1], 4), ([8192], 12)])
def test_gpu_same_bits_each_time(dtype, lengths, h):
    first = None
    for _ in range(50):
        args = problem(lengths, h=h, d=128, dtype=dtype)
        got = [run(args), args[5][args[8]], args[6][args[8]]]
        first = first or got
        assert all(torch.equal(x, y) for x, y in zip(first, got))


@pytest.mark.large
@pytest.mark.parametrize("pages", [pytest.param(9000, marks=on_gpu)])
def test_gpu_pool_beyond_32_bits(pages):
    """9,000 pages of 300 KiB of values: the last begin beyond 2^31."""
    check([70, 3], h=12, d=128, dtype=torch.bfloat16, pages=pages, past=[5, 5], limit=1e-2)
