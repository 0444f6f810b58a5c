"""Choosing tokens: the Triton kernels against their PyTorch path, which makes the same choices to the last one."""

import pytest
import torch
from kernel_helpers import DEVICE, compile_for_all, compiles, interpreted, on_gpu

import kernels
from sampling import gumbel_max, kept

here = pytest.mark.gpu if DEVICE == "cuda" else interpreted


def check(R, V, seed=0, cut=False, temperatures=(0.0, 0.7, 1.0, 3.0), spoil=()):
    torch.manual_seed(seed)
    logits = (3 * torch.randn(R, V + 7)).to(DEVICE)[:, 3 : V + 3]
    for row, column, value in spoil:
        logits[row, column] = value
    filters = torch.tensor([temperatures, [0, 5, 0, 9], [1, 0.9, 1, 0.6], [0, 0.01, 0.2, 0]], dtype=torch.float64)
    filters = filters[:, torch.arange(R) % 4].to(DEVICE)
    draws = torch.stack([torch.randint(-(1 << 62), 1 << 62, (R,)), torch.arange(R)]).to(DEVICE)
    filters, draws = (torch.stack([x, x + 1], dim=-1)[..., 0] for x in (filters, draws))  # as those of a draft
    out = ~kept(logits.nan_to_num(), *filters[:3]) if cut else None
    for args in ((logits, filters, draws, out), (logits, None, None, None)):
        before = kernels.counts["gumbel_max", "triton"]
        with kernels.use(gumbel_max="triton"):
            ids, finite = gumbel_max(*args)
        assert kernels.counts["gumbel_max", "triton"] == before + 1
        want, sound = gumbel_max.torch_path(*args)
        assert torch.equal(finite, sound)
        assert torch.equal(ids[sound], want[sound]) and ((ids >= 0) & (ids < V)).all()


@here
@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("V", [5, 2048, 4353])
def test_the_same_choices(V, cut):
    check(9, V, cut=cut)


@here
def test_rows_that_are_not_finite():
    nan, inf = float("nan"), float("inf")
    check(8, 2500, spoil=[(1, 0, nan), (2, 2499, inf), (4, 7, -inf), (6, 2400, nan)])


@here
def test_of_equals_the_first():
    logits = torch.zeros(2, 5000, device=DEVICE)
    logits[1, 2047:2051] = 1
    with kernels.use(gumbel_max="triton"):
        assert gumbel_max(logits, None, None, None)[0].tolist() == [0, 2047]


@compiles
def test_compiles():
    from kernels import sample

    wide, whole, many = "*fp64", "*i32", dict(row_stride="i32", V="i32", NB="i32")
    types = dict(logits="*fp32", tops=wide, ats=whole, bad=whole) | many
    compile_for_all(sample._tops, types, dict(BLOCK=2048))
    types = dict(logits="*fp32", filters=wide, draws="*i64", tops=wide, scores=wide, ats=whole) | many
    types |= dict.fromkeys(("filter_stride", "filter_row", "draw_stride", "draw_row"), "i32")
    compile_for_all(sample._scores, types, dict(BLOCK=2048, BLOCKS=128, cut=None))
    compile_for_all(sample._scores, types | dict(cut="*i1"), dict(BLOCK=2048, BLOCKS=128))
    types = dict(scores=wide, ats=whole, bad=whole, ids="*i64", finite="*i1", NB="i32")
    compile_for_all(sample._pick, types, dict(BLOCKS=128), num_warps=1)


class TestOnGPU:
    pytestmark = on_gpu

    @pytest.mark.parametrize("cut", [False, True])
    def test_at_the_size_of_k3(self, cut):
        for seed in range(5):
            check(64, 163_840, seed, cut)

    def test_fifty_times_the_same(self):
        logits = torch.randn(16, 163_840, device=DEVICE)
        filters = torch.tensor([[1.0, 0, 1, 0]] * 16, dtype=torch.float64, device=DEVICE).T.contiguous()
        draws = torch.arange(32, device=DEVICE).view(2, 16)
        got = [gumbel_max(logits, filters, draws, None)[0] for _ in range(50)]
        assert all(torch.equal(got[0], other) for other in got) and got[0].unique().numel() > 8
