"""MLA prefill's kernels against the PyTorch path in float64: in the interpreter, compiled only, and on a GPU."""

import pytest
import torch
from kernel_helpers import DEVICE, compile_for_all, compiles, interpreted, on_gpu, rel

import kernels
from cache import FP8, Part
from mla import mla_prefill

triton = pytest.importorskip("triton")

from kernels import mla_prefill as file  # noqa: E402

LIMIT = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
TINY = dict(h=3, n=16, p=8, v=12, r=24)
REAL = dict(h=4, n=128, p=64, v=128, r=512)
P = 8


def case(
    lengths, pasts, dtype=torch.float32, h=3, n=16, p=8, v=12, r=24, page=P, follows=None, fp8=False, seed=0, first=0
):
    """-> arguments of mla_prefill; pages are permuted, and what no sequence owns or lies below first is NaN."""
    g = torch.Generator().manual_seed(seed)
    follows = follows or [False] * len(lengths)
    ends = [a + b for a, b in zip(lengths, pasts)]
    counts = [0 if (*follows, False)[i + 1] else -(-end // page) for i, end in enumerate(ends)]
    ids = (torch.randperm(sum(counts) + 3, generator=g) if sum(counts) < 10**6 else torch.arange(sum(counts) + 3)).int()
    table = torch.full((len(lengths), max(counts)), int(ids[-1]), dtype=torch.int32)
    stored = torch.full((len(ids), page, r + p), torch.nan)
    at = 0
    for i in reversed(range(len(lengths))):
        if counts[i]:
            own, at = ids[at : at + counts[i]], at + counts[i]
            rows = torch.full((counts[i] * page, r + p), torch.nan)
            rows[: ends[i]] = torch.randn(ends[i], r + p, generator=g)
            rows[:first] = torch.nan
            stored[own.long()] = rows.unflatten(0, (-1, page))
        table[i, : len(own)] = own  # a piece with another behind it is of the same text
    stored = stored.flatten(0, 1).to(FP8 if fp8 else dtype).to(DEVICE)
    row_scale = (torch.rand(r + p, generator=g) + 0.5).to(DEVICE, dtype) if fp8 else None
    q = torch.randn(sum(lengths), h, n + p, generator=g).to(DEVICE, dtype)
    W = (torch.randn(h, n + v, r, generator=g) * r**-0.5).to(DEVICE, dtype)
    past = torch.tensor(pasts, dtype=torch.int32, device=DEVICE)
    nowhere = torch.zeros(len(lengths), 1, dtype=torch.int64)
    rows = slice(0, sum(lengths))
    part = Part(rows, lengths, pasts, follows, max(ends), page, past, table.to(DEVICE), nowhere, nowhere, first)
    return q, W, stored, part, (n + p) ** -0.5, row_scale


def float64(q, W, stored, part, scale, row_scale):
    """The PyTorch path; in FP8, of the rows as stored."""
    stored = stored.float().double() if row_scale is None else stored.float().double() * row_scale.double()
    return mla_prefill.torch_path(q.double(), W.double(), stored, part, scale, None)


def run(*args, backend="triton"):
    before = kernels.counts["mla_prefill", backend]
    with torch.no_grad(), kernels.use(mla_prefill=backend):
        out = mla_prefill(*args)
    assert kernels.counts["mla_prefill", backend] == before + 1
    return out


def check(*args, backend="triton"):
    out = run(*args, backend=backend)
    assert out.dtype == args[0].dtype and out.shape[:2] == args[0].shape[:2]
    error = rel(out, float64(*args))
    print(f"mla_prefill {backend} {args[0].dtype} {args[3].lengths} after {args[3].pasts}: {error:.1e}")
    # The FMAs of a float32 product add up a history key by key, which is off by about the root of as many roundings.
    assert error < max(LIMIT[args[0].dtype], 2**-24 * args[3].longest ** 0.5)
    return out


@pytest.fixture
def small(monkeypatch):
    """Texts are cut often: every pass holds 32 rows."""

    def config(dtype, widest):
        return dict(BLOCK_M=16, BLOCK_N=16, num_warps=4, num_stages=1)

    for name, value in dict(PASS_ROWS=32, CUT=16, config=config).items():
        monkeypatch.setattr(file, name, value)


@interpreted
@pytest.mark.parametrize(
    "lengths, past",
    [(x, past) for x in ([1], [2, 15, 16, 17]) for past in (0, 1, P - 1, P)] + [([63, 1], 45), ([65], 1), ([64], 0)],
)
def test_ragged(small, lengths, past):
    check(*case(lengths, [past + i for i in range(len(lengths))]))


@interpreted
@pytest.mark.parametrize("sizes", [dict(h=1, n=5, p=3, v=11, r=7), dict(h=2, n=32, p=16, v=20, r=40)])
@pytest.mark.parametrize("past", [0, 70])
def test_blocks_as_on_a_gpu(sizes, past):
    check(*case([33, 90], [past, 3], **sizes))


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(small, dtype):
    check(*case([17, 5], [40, 0], dtype))


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_rows(small, dtype):
    check(*case([17, 5], [40, 9], dtype, fp8=True))


@interpreted
@pytest.mark.parametrize("fp8", [False, True])
def test_a_row_below_the_first_is_not_seen(small, fp8):
    """It holds NaN."""
    check(*case([2, 15, 17, 1], [1, 2, P, 70], fp8=fp8, first=1))


@interpreted
@pytest.mark.parametrize("first", [0, 1])
def test_pieces_of_one_text(small, first):
    """Sequences that follow one another give what the whole text gives, to the bit."""
    pieces = case([10, 23, 4, 7], [5, 15, 38, first], follows=[False, True, True, False], first=first)
    whole = case([37, 7], [5, first], first=first)
    assert torch.equal(check(*pieces), run(*whole))
    (_, tiles), *_ = vars(pieces[3])["mla_prefill_plans"][16, 32][0]
    assert tiles[:, 1].max() == 16


@interpreted
def test_a_row_depends_on_no_batch_mate(small):
    """Bit for bit, wherever passes cut the text. The expansion is made exact, as the product is not ours."""
    q, W, stored, part, scale, _ = case([19, 30], [40, 9], h=2)
    W, stored = (W * 8).round() / 8, (stored * 8).round() / 8
    got = run(q, W, stored, part, scale, None)
    for i, rows in enumerate(got.split(part.lengths)):
        first = sum(part.lengths[:i])
        alone = dict(lengths=[part.lengths[i]], pasts=[part.pasts[i]], follows=[False])
        tensors = dict(past=part.past[i : i + 1], table=part.table[i : i + 1])
        alone = Part(slice(0, len(rows)), longest=99, page_size=P, src=None, dst=None, **alone, **tensors)
        assert torch.equal(run(q[first : first + len(rows)], W, stored, alone, scale, None), rows)


@interpreted
def test_extreme_scores(small):
    """Scores far from zero, and a query in a strided layout as `q` without q_lora_rank has."""
    q, *rest = case([20, 3], [30, 0])
    wide = torch.zeros(len(q), q[0].numel() + 40)
    wide[:, : q[0].numel()] = 100 * q.flatten(1)
    check(wide[:, : q[0].numel()].unflatten(1, q.shape[1:]), *rest)


def test_refusals():
    q, W, *rest = case([4], [0])
    assert file.why_not(q, W, *rest) is None
    assert "float64" in file.why_not(q.double(), W, *rest)
    assert "dtype" in file.why_not(q, W.bfloat16(), *rest)
    assert "cuDNN" in file.cudnn_why_not(q, W, *rest)


@compiles
@pytest.mark.parametrize("dtype, sizes", [("bf16", REAL), ("fp32", TINY)])
def test_compiles(dtype, sizes):
    N, P, V = (max(16, triton.next_power_of_2(sizes[x])) for x in "npv")
    options = file.config(dict(bf16=torch.bfloat16, fp32=torch.float32)[dtype], max(N, P, V))
    warps, stages = options.pop("num_warps"), options.pop("num_stages")
    pointers = dict.fromkeys(("q", "kv", "rows", "out"), f"*{dtype}") | dict(state="*fp32", sums="*fp32", tiles="*i32")
    strides = dict.fromkeys(("q_stride", "q_head_stride", "kv_stride", "rows_stride", "sums_stride"), "i32")
    constants = sizes | dict(N=N, P=P, V=V, SPLIT=True) | options
    signature = pointers | strides | dict(scale_log2="fp32")
    built = compile_for_all(file._prefill_kernel, signature, constants, warps, stages)
    assert ("wgmma" in built["sm_90"].asm["ptx"]) == (dtype == "bf16")


# ---------------------------------------------------------------- on a GPU


class TestOnGPU:
    pytestmark = on_gpu

    @pytest.mark.parametrize("backend", ["triton", "cudnn"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("past", [0, 1, 127, 128, 300, 20000])
    def test_ragged(self, backend, dtype, past):
        if backend == "cudnn" and dtype == torch.float32:
            pytest.skip("cuDNN attends in half precision")
        lengths = [1, 2, 15, 16, 17, 63, 64, 65, 300] if past < 1000 else [65, 300]
        check(*case(lengths, [past] * len(lengths), dtype, page=128, **REAL), backend=backend)

    @pytest.mark.parametrize("backend", ["triton", "cudnn"])
    @pytest.mark.parametrize("fp8", [False, True])
    def test_a_row_below_the_first_is_not_seen(self, backend, fp8):
        lengths, pasts = [1, 4, 17, 64, 65, 300, 200], [1, 2, 1, 128, 127, 1, 20000]
        check(*case(lengths, pasts, torch.bfloat16, page=128, fp8=fp8, first=1, **REAL), backend=backend)

    @pytest.mark.parametrize("fp8", [False, True])
    def test_repeats_bit_equal(self, fp8):
        args = case([700, 300, 64, 1, 129], [9000, 0, 20, 300, 128], torch.bfloat16, page=128, fp8=fp8, **REAL)
        want = check(*args)
        assert all(torch.equal(run(*args), want) for _ in range(50))

    @pytest.mark.parametrize("sizes", [TINY, dict(h=1, n=5, p=3, v=11, r=7), dict(h=2, n=16, p=16, v=16, r=28)])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_odd_heads(self, sizes, dtype):
        check(*case([300, 17], [9, 0], dtype, **sizes))

    @pytest.mark.large
    def test_large_pool_and_long_past(self):
        """Pages beyond 2^31 elements, and 128k tokens before the chunk."""
        q, W, stored, part, scale, _ = case([130], [131072], torch.bfloat16, page=128, **(REAL | dict(h=2)))
        pool = torch.empty(2**31 // 576 + len(stored) + 128, 576, dtype=torch.bfloat16, device=DEVICE)
        away = (len(pool) - len(stored)) // 128
        pool[away * 128 : away * 128 + len(stored)] = stored
        want = run(q, W, stored, part, scale, None)
        assert rel(want[-4:], float64(*tail(q, W, stored, part, 4), scale, None)) < LIMIT[torch.bfloat16]
        moved = tail(q, W, stored, part, len(q))[-1]
        moved.table = part.table + away
        assert torch.equal(run(q, W, pool, moved, scale, None), want)


def tail(q, W, stored, part, count):
    """Arguments for the last rows of a part with one sequence, without the last two."""
    end = part.lengths[0] + part.pasts[0]
    past = torch.tensor([end - count], dtype=torch.int32, device=q.device)
    part = Part(slice(0, count), [count], [end - count], [False], end, part.page_size, past, part.table, None, None)
    return q[-count:], W, stored, part
