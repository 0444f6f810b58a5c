"""The Triton kernels of the residual stream against the PyTorch path, evaluated in float64 on the same inputs."""

import pytest
import torch
from helpers import case
from kernel_helpers import DEVICE, compile_for_all, compile_overlapped, compiles, interpreted, on_gpu, rel

import kernels
from attnres import attnres_norm
from layers import rms_norm, rms_norm_op

LIMIT = {torch.float32: 1e-6, torch.bfloat16: 2.5e-3}  # of bf16: rounding the result, 1.7e-3 in norm
FLOATS = [torch.float32, torch.bfloat16]


def random_step(J, N, H, dtype, seed=0, device=DEVICE):
    """terms, blocks, mix, norm with J candidates of very different size, on average."""
    generator = torch.Generator().manual_seed(1000 * J + N + H + seed)
    rand = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    s, y, *blocks = (2.0 ** (j - 3) * rand(N, H) for j in range(J + 1))
    mix, norm = (1 + 0.3 * rand(H), rand(1, H) * H**-0.5), 1 + 0.3 * rand(H)
    to = lambda t: t.to(device, dtype)
    return (to(s), to(y)), [to(b) for b in blocks], (*map(to, mix), 1e-2), (to(norm), 1e-3)


def widened(args):
    wide = lambda t: t.double() if isinstance(t, torch.Tensor) else t
    return [None if a is None else type(a)(map(wide, a)) for a in args]


def step(*args):
    before = kernels.counts["attnres", "triton"]
    with kernels.use(attnres="triton"):
        out = attnres_norm(*args)
    assert kernels.counts["attnres", "triton"] == before + 1
    return out


def check_step(terms, blocks, mix, norm):
    """The sum bit by bit, what is read within the limit, the inputs untouched."""
    held = [t for t in (*terms, *blocks) if t is not None]
    before = [t.clone() for t in held]
    total, x = step(terms, blocks, mix, norm)
    want, same = attnres_norm.torch_path(terms, blocks, mix, norm)
    exact_terms = (want.double(), None)  # the mixture is of the rounded sum
    exact = attnres_norm.torch_path(exact_terms, *widened((blocks, mix, norm)))[1]
    assert torch.equal(total, want) and total.dtype == want.dtype
    assert x.dtype == same.dtype and x.shape == same.shape
    assert rel(x, exact) < LIMIT[x.dtype] and rel(x, same) < LIMIT[x.dtype]
    assert all(torch.equal(*pair) for pair in zip(before, held))


@pytest.fixture(params=[0, 16], ids=["whole", "sliced"])
def tokens_cut(request, monkeypatch):
    """Up to how many tokens are cut into slices: none, or all that these tests have."""
    from kernels import attnres

    monkeypatch.setattr(attnres, "SLICED", request.param)


@interpreted
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("J", range(1, 10))
def test_candidates(J, dtype, tokens_cut):
    terms, blocks, mix, (weight, eps) = random_step(J, 2, 100, dtype)
    check_step(terms, blocks, mix, (weight, eps))
    check_step(terms, blocks, mix, (weight.float(), eps))  # a wide result shows that nothing was rounded before


@interpreted
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("snapshots", [0, 2])
def test_variants(snapshots, dtype, tokens_cut):
    """Nothing pending, a new sum, no norm: the output mixture, which stays wide. No snapshots: mix may be None."""
    (s, y), blocks, mix, norm = random_step(snapshots + 1, 2, 48, dtype)
    for terms in ((s, y), (s, None), (None, y)):
        for last in (norm, None):
            check_step(terms, blocks, mix if blocks else None, last)
    total, x = step((s, y), blocks, mix, None)
    assert x.dtype == (torch.float32 if blocks else dtype)
    assert step((s, None), blocks, mix, norm)[0] is s, "a snapshot is put aside, not copied"


@interpreted
@pytest.mark.parametrize("N, H", [(1, 1), (2, 31), (1, 33), (2, 600), (5, 192), (0, 48)])
def test_shapes(N, H, tokens_cut):
    terms, blocks, mix, norm = random_step(3, N, H, torch.float32)
    if N:
        return check_step(terms, blocks, mix, norm)
    assert [t.shape for t in step(terms, blocks, mix, norm)] == [(0, H)] * 2


@interpreted
def test_what_it_refuses():
    """Residuals of two dtypes, as autocast makes them, and float64 are left to PyTorch."""
    terms, blocks, mix, (weight, eps) = random_step(3, 2, 48, torch.bfloat16)
    with pytest.raises(ValueError, match="differ in dtype"):
        step((terms[0].float(), terms[1]), blocks, mix, (weight, eps))
    with pytest.raises(ValueError, match="float64"):
        step((terms[0].double(), None), [], None, (weight, eps))


@interpreted
def test_a_nan_stays_in_its_token(tokens_cut):
    _, clean = step(*random_step(3, 3, 48, torch.float32))
    for at in ("s", "y", 0, 1):
        (s, y), blocks, mix, norm = random_step(3, 3, 48, torch.float32)
        {"s": s, "y": y, 0: blocks[0], 1: blocks[1]}[at][1, 7] = torch.nan
        _, x = step((s, y), blocks, mix, norm)
        assert x[1].isnan().all() and torch.equal(x[::2], clean[::2])


@interpreted
def test_large_scores(tokens_cut):
    """Softmax weights of exactly 0 and 1: scores of +-1000 overflow nothing."""
    terms, blocks, (n, p, eps), norm = random_step(5, 3, 48, torch.float32)
    check_step(terms, blocks, (n, 300 * p, eps), norm)


@interpreted
def test_no_row_beyond_the_end_is_read(tokens_cut):
    """Rows of wider memory: what lies around the tensors is NaN."""
    terms, blocks, mix, norm = random_step(3, 3, 40, torch.float32)
    surround = lambda t: torch.cat([torch.full_like(t, torch.nan), t, torch.full_like(t, torch.nan)])[3:6]
    check_step([surround(t) for t in terms], [surround(b) for b in blocks], mix, norm)


def check_rms_norm(x, weight, eps=1e-3):
    before = kernels.counts["rms_norm", "triton"]
    with kernels.use(rms_norm="triton"):
        got = rms_norm_op(x, weight, eps)
    assert kernels.counts["rms_norm", "triton"] == before + 1
    assert got.dtype == weight.dtype and got.shape == x.shape
    assert rel(got, rms_norm(x.double(), weight.double(), eps)) < LIMIT[weight.dtype]


@interpreted
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("D", [1, 20, 48, 129])
def test_rms_norm(D, dtype):
    torch.manual_seed(D)
    wide, weight = torch.randn(4, D + 9).to(dtype), torch.randn(D).to(dtype)
    wide[:, :5] = wide[:, 5 + D :] = torch.nan
    check_rms_norm(wide[:, 5 : 5 + D], weight)  # a slice of wider rows
    check_rms_norm(wide[1, 5 : 5 + D], weight)  # one row
    check_rms_norm(torch.randn(2, 3, D).to(dtype).transpose(0, 1), weight)
    check_rms_norm(torch.randn(3, D), weight)  # a wide input, as routed experts and the output mixture give


@interpreted
@pytest.mark.parametrize("name, linear", [("micro-mtp", "torch"), ("kimi-linear-micro", "splitk")])
def test_the_whole_model(name, linear):
    """With snapshots at every third layer, and without any."""
    model, reference = case(name)
    ids, backends = reference["input_ids"][None, :2], dict(attnres="triton", rms_norm="triton", linear=linear)
    before = [kernels.counts[chosen] for chosen in backends.items()]
    with torch.no_grad(), kernels.use(**backends):
        logits, hidden = model(ids, return_hidden=True)
    after = [kernels.counts[chosen] for chosen in backends.items()]
    assert all(a > b for a, b in zip(after, before))
    assert rel(hidden[0], reference["hidden_before_final_norm"][:2]) < 1e-5
    assert rel(logits[0], reference["logits"][:2]) < 1e-5


SIGNATURE = {name: "*bf16" for name in ("s", "y", "mix_norm", "mix_proj", "norm", "s_out", "x_out")}
SIGNATURE |= {"s_stride": "i32", "H": "i32", "mix_eps": "fp32", "norm_eps": "fp32"}


@compiles
@pytest.mark.parametrize("missing", [(), ("y",), ("norm",), ("blocks", "mix_norm", "mix_proj", "mix_eps")], ids=str)
def test_compiles(missing):
    from kernels.attnres import _residual_kernel

    signature = {name: kind for name, kind in SIGNATURE.items() if name not in missing}
    signature["blocks"] = () if "blocks" in missing else ("*bf16",) * 8
    constants = dict.fromkeys(missing) | {"BLOCK": 8192, "GROUP": 4, "STAGES": 3, "EARLY": True}
    constants.pop("blocks", None)
    compile_for_all(_residual_kernel, signature, constants, num_warps=8)


@compiles
@pytest.mark.parametrize("name", ["_sums_kernel", "_mix_kernel", "_norm_kernel"])
def test_slices_compile(name):
    from kernels import attnres

    kernel = getattr(attnres, name)
    types = SIGNATURE | dict.fromkeys(("sums", "mixture", "lengths"), "*fp32") | {"blocks": ("*bf16",) * 8, "P": "i32"}
    constants = {"C": 256, "ROWS": 8, "PARTS": 32, "LAST": False, "OVERLAP": False}
    pick = lambda d: {arg: d[arg] for arg in kernel.arg_names if arg in d}
    compile_for_all(kernel, pick(types), pick(constants), num_warps=2)
    if name == "_sums_kernel":  # the first of the three waits for nothing
        return
    before, after = compile_overlapped(kernel, pick(types), pick(constants), num_warps=2)
    assert "st.global" not in before and "ld.global" in before
    assert after.count("ld.global") >= {"_mix_kernel": 5, "_norm_kernel": 2}[name], "what the kernel ahead wrote"


# ---------------------------------------------------------------- on a GPU


def marked(test):
    for mark in on_gpu:
        test = mark(test)
    return test


@marked
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("N", [1, 2, 16, 17, 300])
@pytest.mark.parametrize("J", [1, 2, 9])
def test_on_a_gpu(J, N, dtype):
    terms, blocks, mix, norm = random_step(J, N, 7168, dtype)
    check_step(terms, blocks, mix, norm)
    first = step(terms, blocks, mix, norm)
    for _ in range(50):
        assert all(torch.equal(*pair) for pair in zip(first, step(terms, blocks, mix, norm)))
    wide = torch.randn(N, 14400, device="cuda").to(dtype)
    check_rms_norm(wide[:, :1536], norm[0][:1536])


@marked
def test_rows_past_2_31_elements():
    N = 2**31 // 7168 + 9
    s, w = torch.randn(N, 7168, device="cuda", dtype=torch.bfloat16), torch.randn(7168, device="cuda").bfloat16()
    _, x = step((s, None), [s], (w, w[None] * 1e-2, 1e-5), (w, 1e-5))
    assert (
        rel(x[-9:], rms_norm(s[-9:].double(), w.double(), 1e-5)) < LIMIT[x.dtype]
    )  # a mixture of equals is one of them
