"""The Triton kernels of products with few rows against float64."""

import pytest
import torch
from kernel_helpers import DEVICE, compile_for_all, compiles, interpreted, on_gpu, rel, slow

import kernels
from layers import linear

LIMIT = {torch.float32: 5e-6, torch.bfloat16: 2.5e-3}  # sums of 7168 float32 products; rounding to bf16 costs 1.7e-3
FLOATS = [torch.float32, torch.bfloat16]
ROWS = [1, 2, 15, 16, 17, 63, 64]


def product(rows, out, inner, dtype, device=DEVICE):
    generator = torch.Generator().manual_seed(rows + out + inner)
    x, w = (torch.randn(n, inner, generator=generator).to(device, dtype) for n in (rows, out))
    return x, w


def check(x, w, **options):
    """By name, so whatever the shape; with options: the function itself."""
    before = kernels.counts["linear", "splitk"]
    with kernels.use(linear="splitk"):
        y = linear(x, w)
    assert kernels.counts["linear", "splitk"] == before + 1
    if options:
        from kernels import dense

        y = dense.linear(x, w, **options)
    assert y.shape == (*x.shape[:-1], len(w)) and y.dtype == x.dtype
    want = x.double() @ w.double().T
    assert rel(y, want) < LIMIT[x.dtype]
    return y


@interpreted
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rows", ROWS)
def test_rows(rows, dtype):
    check(*product(rows, 70 if rows > 1 else 7, 150, dtype))


@interpreted
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("out, inner", [(1, 1), (1, 64), (3, 17), (64, 16), (33, 129), (2, 2300)])
def test_shapes(out, inner, rows):
    check(*product(rows, out, inner, torch.float32))


@interpreted
@pytest.mark.parametrize("split", [2, 3, 7])
@pytest.mark.parametrize("rows", [1, 2, 17])
def test_split(rows, split):
    """Also into more parts than there are blocks: an empty one adds zero."""
    for inner, dtype in ((150, torch.float32), (150, torch.bfloat16), (128, torch.float32)):
        check(*product(rows, 10, inner, dtype), SPLIT=split, BLOCK_IN=32)


@interpreted
def test_inputs_of_any_layout():
    """A slice of wider rows, more dimensions, one row without a batch: nothing beside them is read."""
    x, w = product(6, 9, 50, torch.float32)
    wide = torch.full((6, 70), torch.nan)
    wide[:, 10:60] = x
    assert torch.equal(check(wide[:, 10:60], w), check(x, w))
    assert torch.equal(check(wide[2:3, 10:60], w)[0], check(x[2], w))
    check(x.view(2, 3, 50), w)
    check(x.view(2, 3, 50).transpose(0, 1), w)
    around = torch.full((13, 50), torch.nan)
    around[2:11] = w
    for rows in (1, 6):
        assert torch.equal(check(x[:rows], around[2:11]), check(x[:rows], w))


@interpreted
def test_a_nan_stays_in_its_row():
    x, w = product(5, 9, 50, torch.float32)
    clean = check(x, w)
    x[3, 20] = torch.nan
    with kernels.use(linear="splitk"):
        y = linear(x, w)
    assert y[3].isnan().all() and torch.equal(y[[0, 1, 2, 4]], clean[[0, 1, 2, 4]])
    assert torch.equal(check(x[[4, 0]], w), clean[[4, 0]]), "a row does not depend on its neighbours"


@interpreted
def test_what_it_refuses():
    x, w = product(65, 20, 30, torch.float32)
    calls = [(x, w, "65 rows"), (x[:0], w, "0 rows"), (x[:2].double(), w.double(), "float64")]
    calls += [(x[:2].bfloat16(), w, "bfloat16 and the weight"), (x[:2, :20], w[:, :20], "not contiguous")]
    with kernels.use(linear="splitk"):
        for *args, says in calls:
            with pytest.raises(ValueError, match=says):
                linear(*args)
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="autocast"):
            linear(x[:2], w)
        with pytest.raises(ValueError, match="autograd"):
            linear(x[:2], w.requires_grad_())


VECTOR = dict(BLOCK_OUT=4, BLOCK_IN=1024, STAGES=1)
MATRIX = dict(BLOCK_OUT=64, BLOCK_IN=128, STAGES=4)


@compiles
@pytest.mark.parametrize("dtype, even", [("bf16", True), ("fp32", False), slow("bf16", False), slow("fp32", True)])
def test_compiles(dtype, even):
    from kernels.dense import _matrix_kernel, _sum_kernel, _vector_kernel

    signature = dict(
        x=f"*{dtype}", w=f"*{dtype}", y=f"*{dtype}", x_stride="i32", rows="i32", out="i32", inner="i32", blocks="i32"
    )
    compile_for_all(_vector_kernel, without(signature, "x_stride", "rows"), VECTOR | {"EVEN": even})
    options = MATRIX | {"EVEN": even, "ROWS": 16} | ({"BLOCK_IN": 64} if dtype == "fp32" else {})
    built = compile_for_all(_matrix_kernel, signature | {"y": "*fp32"}, options)
    assert dtype == "fp32" or "wgmma.mma_async" in built["sm_90"].asm["ptx"] or not even
    sums = {"parts": "*fp32", "y": f"*{dtype}", "size": "i32"}
    compile_for_all(_sum_kernel, sums, {"SPLIT": 2, "BLOCK": 1024})


def without(signature, *names):
    return {name: kind for name, kind in signature.items() if name not in names}


# ---------------------------------------------------------------- on a GPU


def marked(test):
    for mark in on_gpu:
        test = mark(test)
    return test


@marked
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("out, inner", [(6172, 7168), (7168, 1536), (2304, 1536), (12288, 128), (1000, 999)])
@pytest.mark.parametrize("rows", ROWS)
def test_on_a_gpu(rows, out, inner, dtype):
    x, w = product(rows, out, inner, dtype)
    first = check(x, w)
    with kernels.use(linear="splitk"):
        assert all(torch.equal(first, linear(x, w)) for _ in range(50))


@marked
def test_a_weight_past_2_31_elements():
    x = torch.randn(4, 7168, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(2**31 // 7168 + 9, 7168, device="cuda", dtype=torch.bfloat16)
    with kernels.use(linear="splitk"):
        for rows in (1, 4):
            y = linear(x[:rows], w)
            assert rel(y[:, -9:], x[:rows].double() @ w[-9:].double().T) < LIMIT[x.dtype]
