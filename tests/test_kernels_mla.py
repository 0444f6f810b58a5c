"""The Triton kernels of kernels/mla.py against PyTorch: decode over paged history in float64, and the write of rows."""

from types import SimpleNamespace

import pytest
import torch
from kernel_helpers import DEVICE, compile_for_all, compiles, interpreted, on_gpu, rel, slow

import kernels
from cache import FP8
from mla import attend_rows, latent_write, mla_decode

triton = pytest.importorskip("triton")

from kernels import mla as triton_mla  # noqa: E402
from kernels import mla_hopper, mla_shares  # noqa: E402

P = 128
LIMIT = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 6e-3}
DECODE = {"triton": triton_mla.mla_decode, "gluon": mla_hopper.mla_decode}


def history(past, T, width, dtype, P=P, pages=None, first=0, seed=0):
    """A slab with one sequence of past[b] + T rows for each b (None: padding), its pages in any order, everything else
    and what lies below first NaN -> slab, part, the rows of each sequence.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = [0 if n is None else n + T for n in past]
    W = max(1, max(-(-n // P) for n in lengths))
    table = torch.full((len(past), W), -1, dtype=torch.int32)
    order = torch.randperm(pages or sum(-(-n // P) for n in lengths) + 3, generator=generator).to(torch.int32)
    for row, n in zip(table, lengths):
        used = -(-n // P)
        row[:used], order = order[:used], order[used:]
        row[used:] = 0 if n else -1  # behind a sequence's pages stands anything
    slots = (len(order) + int((table >= 0).sum())) * P if pages is None else pages * P
    slab = torch.full((slots, width), torch.nan, device=DEVICE).to(dtype)
    rows = []
    for pages_of, n in zip(table.long(), lengths):
        at = torch.arange(n)
        x = torch.randn(n, width, generator=generator)
        x[:first] = torch.nan
        x = x.to(dtype).to(DEVICE)
        bytes_of(slab)[(pages_of[at // P] * P + at % P).to(DEVICE)] = bytes_of(x)
        rows.append(x)
    given = [77 if n is None else n for n in past]
    part = SimpleNamespace(
        past=torch.tensor(given, dtype=torch.int32, device=DEVICE),
        table=table.to(DEVICE),
        longest=max(max(lengths), 1),
        page_size=P,
        first=first,
    )
    return slab, part, rows


def bytes_of(x):
    """FP8 tensors can be indexed as bytes only."""
    return x.view(torch.uint8) if x.dtype == FP8 else x


def check(past, T, heads, rank, pe, dtype, latents=None, backend="triton", **how):
    """Runs the kernel and compares each real sequence with float64. -> o, lse."""
    kernel_config = {k: how.pop(k) for k in ("config", "splits") if k in how}
    slab, part, rows = history(past, T, rank + pe, latents or dtype, **how)
    torch.manual_seed(1)
    q = torch.randn(len(past), T, heads, rank + pe).to(dtype).to(DEVICE)
    row_scale = None
    if latents == FP8:
        row_scale = torch.cat([torch.full([n], s) for n, s in ((rank, 0.25), (pe, 2.0))]).to(dtype).to(DEVICE)
    scale = 1.5 * (rank + pe) ** -0.5
    if kernel_config:
        o, lse = triton_mla.mla_decode(q, slab, rank, part, scale, row_scale, **kernel_config)
    else:
        before = kernels.counts["mla_decode", backend]
        with kernels.use(mla_decode=backend), torch.no_grad():
            o, lse = mla_decode(q, slab, rank, part, scale, row_scale)
        assert kernels.counts["mla_decode", backend] == before + 1
    assert o.shape == (len(past), T, heads, rank) and lse.shape == o.shape[:3] and o.dtype == dtype
    assert o.permute(2, 0, 1, 3).is_contiguous()
    assert o.isfinite().all()
    for b, n in enumerate(past):
        if n is None:
            assert (o[b] == 0).all() and (lse[b] == -torch.inf).all()
            continue
        position = torch.arange(part.first, n + T, device=DEVICE)
        seen = position <= n + torch.arange(T, device=DEVICE)[:, None]
        wide = rows[b][part.first :].double() * (1 if row_scale is None else row_scale.double())
        want, want_lse = attend_rows(q[b : b + 1].double(), wide[None], seen[None], rank, scale)
        assert rel(o[b : b + 1], want) < LIMIT[dtype], (b, n)
        assert (lse[b : b + 1] - want_lse).abs().max() < (1e-5 if dtype == torch.float32 else 2e-2), (b, n)
    return o, lse


@interpreted
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("past", [[0, 14, 15, 16, None], [62, 63, 64, None, 126, 127, 128]])
def test_decode(past, heads):
    check(past, 1, heads, 32, 16, torch.float32)


@interpreted
def test_long_history_in_many_shares():
    check([299], 1, 12, 32, 16, torch.float32)
    for splits in (1, 3, 40):  # 40: some shares are empty
        check([299, 2, None], 1, 3, 16, 16, torch.float32, config=(16, 16, 4, 1, False), splits=splits)


@interpreted
@pytest.mark.parametrize("T, past", [(2, [0, 15, 16, 127, None]), (4, [0, 15, None, 60]), (16, [0, 127, None])])
def test_several_new_tokens(T, past):
    """Token t of the T new ones sees the t before it; here a tile of rows may lie wholly behind what a token sees."""
    check(past, T, 3, 16, 16, torch.float32, config=(16, 16, 4, 1, False), splits=5)


@interpreted
@pytest.mark.parametrize("rank, pe", [(24, 8), (48, 16), (25, 7)])
def test_sizes_that_are_no_power_of_two(rank, pe):
    check([40, 0], 1, 3, rank, pe, torch.float32)


@interpreted
@pytest.mark.parametrize("latents", [None, FP8])
def test_bfloat16_and_fp8(latents):
    check([17, None, 130], 1, 3, 32, 16, torch.bfloat16, latents)
    check([63], 2, 2, 32, 16, torch.bfloat16, latents, config=(16, 16, 4, 1, False), splits=3)


@interpreted
@pytest.mark.parametrize("latents", [None, FP8])
def test_tile_of_the_gpu(latents):
    check([100, None, 63, 190], 2, 33, 32, 16, torch.bfloat16, latents, config=(64, 64, 8, 2, True), splits=2)


@interpreted
def test_fp8_under_float32_queries():
    check([17, 130], 1, 2, 32, 16, torch.float32, FP8)


@interpreted
@pytest.mark.parametrize("T", [1, 4])
def test_a_row_below_the_first_is_not_seen(T):
    """It holds NaN. In one share and in more than there are tiles, in each plan there is."""
    past = [1, 2, None, P, 200]
    for splits in (1, 20):
        check(past, T, 3, 16, 16, torch.float32, config=(16, 16, 4, 1, False), splits=splits, first=1)
    for latents in (None, FP8):
        check(past, T, 3, 16, 16, torch.bfloat16, latents, config=(64, 64, 8, 2, True), splits=3, first=1)


@interpreted
def test_a_sequence_does_not_see_its_neighbours():
    """With one plan the result of a sequence is the same bits alone and beside others."""
    how = dict(config=(16, 16, 4, 1, False), splits=2)
    slab, part, _ = history([40, 100, 7], 1, 32, torch.float32)
    q = torch.randn(3, 1, 2, 32, device=DEVICE)
    both = triton_mla.mla_decode(q, slab, 16, part, 0.2, None, **how)
    for b in range(3):
        alone = SimpleNamespace(**vars(part) | dict(past=part.past[b : b + 1], table=part.table[b : b + 1]))
        o, lse = triton_mla.mla_decode(q[b : b + 1], slab, 16, alone, 0.2, None, **how)
        assert torch.equal(o[0], both[0][b]) and torch.equal(lse[0], both[1][b])


def test_what_it_leaves_to_pytorch():
    why = triton_mla._decode_why_not
    q, stored, part = torch.zeros(1, 1, 2, 600), torch.zeros(8, 600), SimpleNamespace(page_size=128)
    assert "at most 512 + 64" in why(q, stored, 536, part, 1.0, None)
    assert "page" in why(q[..., :576], stored, 512, SimpleNamespace(page_size=100), 1.0, None)
    assert "float64" in why(q[..., :576].double(), stored, 512, part, 1.0, None)
    assert why(q[..., :576], stored, 512, part, 1.0, None) is None
    assert mla_hopper.why_not(q[..., :576], stored, 512, part, 1.0, None) == "no Hopper GPU"
    assert mla_hopper.slower(torch.zeros(8, 1, 12, 576)) and not mla_hopper.slower(torch.zeros(1, 4, 12, 576))


@pytest.mark.parametrize("programs, tiles, want", [(1, 1, 1), (2, 2048, 64), (32, 256, 4), (132, 256, 1)])
def test_shares(programs, tiles, want):
    """As many as fill 132 processors once, and no more than that."""
    assert mla_shares.decode_splits(programs, tiles, 132) == want


# ---------------------------------------------------------------- the write


def write(kv, norm, stored, slots, scale):
    """Both backends into copies of `stored`, -> PyTorch's, Triton's."""
    slabs = [stored.clone() for _ in range(2)]
    for slab, backend in zip(slabs, ("torch", "triton")):
        before = kernels.counts["latent_write", backend]
        with kernels.use(latent_write=backend), torch.no_grad():
            latent_write(kv, norm, 1e-6, slab, slots, scale)
        assert kernels.counts["latent_write", backend] == before + 1
    return slabs


@interpreted
@pytest.mark.parametrize("rank, pe", [(32, 16), (25, 7)])
@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-6), (torch.bfloat16, 1e-3)])
def test_write(rank, pe, dtype, limit):
    """Rows as a slice of a wider projection; a row of padding and every other slot stay as they are."""
    torch.manual_seed(0)
    kv = torch.randn(5, rank + pe + 16, dtype=dtype, device=DEVICE)[:, 8 : 8 + rank + pe]
    kv[1] *= 1e-4  # here eps counts
    norm = torch.randn(rank, dtype=dtype, device=DEVICE)
    slots = torch.tensor([4, 0, -1, 9, 2], device=DEVICE)
    want, got = write(kv, norm, torch.full((10, rank + pe), 7.0, dtype=dtype, device=DEVICE), slots, None)
    assert rel(got, want) < limit
    assert torch.equal(got[:, rank:], want[:, rank:])
    assert (got[[1, 3, 5, 6, 7, 8]] == 7).all()


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_conversion_is_pytorchs(dtype):
    """The key part holds every bfloat16 there is, NaN and infinities too; the latent part follows the norm."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16).to(dtype)
    kv = torch.cat([torch.randn(256, 64), every.view(256, 256)], dim=1).to(dtype).to(DEVICE)
    norm = torch.rand(64).to(dtype).to(DEVICE) * 200
    scale = torch.cat([torch.full([64], 0.75), torch.full([256], 0.3)]).to(dtype).to(DEVICE)
    slots = torch.randperm(256, device=DEVICE)
    stored = torch.zeros(256, 320, device=DEVICE).to(FP8)
    want, got = write(kv, norm, stored, slots, scale)
    nan = want.float().isnan()
    assert torch.equal(got.float().isnan(), nan) and nan.any()
    same = (got.float() == want.float()) | nan
    assert same[:, 64:].all()
    assert same[:, :64].float().mean() > 0.995 and rel(got[:, :64].float(), want[:, :64].float()) < 5e-3


# ---------------------------------------------------------------- on a GPU


hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
EACH = [("triton", torch.bfloat16), ("triton", FP8)]
EACH += [pytest.param("gluon", torch.bfloat16, marks=pytest.mark.skipif(not hopper, reason="no Hopper GPU here"))]


class TestGPU:
    pytestmark = on_gpu

    @pytest.mark.parametrize("heads", [1, 3, 12, 96])
    @pytest.mark.parametrize("T", [1, 4, 16])
    @pytest.mark.parametrize("dtype, latents", [(torch.bfloat16, None), (torch.bfloat16, FP8), (torch.float32, None)])
    def test_decode(self, heads, T, dtype, latents):
        check([0, 14, 15, 16, None, 62, 63, 64, 126, 127, 128, 299, 2000], T, heads, 512, 64, dtype, latents)

    @pytest.mark.skipif(not hopper, reason="no Hopper GPU here")
    @pytest.mark.parametrize("heads", [1, 12, 96])
    @pytest.mark.parametrize("T", [1, 4, 16])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_decode_on_hopper(self, heads, T, dtype):
        past = [0, 14, 15, 16, None, 62, 63, 64, 126, 127, 128, 191, 192, 299, 2000]
        check(past, T, heads, 512, 64, dtype, backend="gluon")

    @pytest.mark.parametrize("heads", [12, 96])
    @pytest.mark.parametrize("backend, latents", EACH)
    def test_a_long_history(self, heads, backend, latents):
        check([131_071, 5], 1, heads, 512, 64, torch.bfloat16, latents, backend, P=1536)

    @pytest.mark.parametrize("heads", [3, 96])
    @pytest.mark.parametrize("T", [1, 4, 8])
    @pytest.mark.parametrize("backend, latents", [*EACH, ("triton", torch.float32)])
    def test_a_row_below_the_first_is_not_seen(self, T, heads, backend, latents):
        dtype = torch.bfloat16 if latents == FP8 else latents
        past = [1, 2, None, 15, 16, 62, 63, 64, 127, 128, 300, 20_000]
        check(past, T, heads, 512, 64, dtype, latents, backend, first=1)

    @pytest.mark.large
    @pytest.mark.parametrize("backend, latents", EACH)
    def test_a_slab_past_int32(self, backend, latents):
        """Pages of which some begin past 2^31 elements."""
        pages = 2**31 // (128 * 576) + 2000
        check([70_000, 100, None], 1, 12, 512, 64, torch.bfloat16, latents, backend, pages=pages)

    @pytest.mark.parametrize("heads", [12, 96])
    @pytest.mark.parametrize("backend, latents", EACH)
    def test_the_same_bits_again(self, heads, backend, latents):
        slab, part, _ = history([9000, 16_383, 64, None], 2, 576, latents)
        q = torch.randn(4, 2, heads, 576, dtype=torch.bfloat16, device=DEVICE)
        row_scale = torch.full([576], 0.5, dtype=torch.bfloat16, device=DEVICE) if latents == FP8 else None
        first = DECODE[backend](q, slab, 512, part, 0.07, row_scale)
        for _ in range(50):
            again = DECODE[backend](q, slab, 512, part, 0.07, row_scale)
            assert all(torch.equal(x, y) for x, y in zip(first, again))

    @pytest.mark.parametrize("backend, latents", EACH[::2])
    def test_a_graph_follows_what_its_tensors_say(self, backend, latents):
        slab, part, _ = history([5000, 300, 4000], 1, 576, latents)
        part.past, part.table = part.past.long(), part.table.long()  # as the engine's graphs have them
        q = torch.randn(3, 1, 96, 576, dtype=torch.bfloat16, device=DEVICE)
        run = lambda: DECODE[backend](q, slab, 512, part, 0.07, None)
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = run()
        for past in ([17, 299, 4000], [5000, 0, 64]):
            part.past.copy_(torch.tensor(past))
            graph.replay()
            assert all(torch.equal(x, y) for x, y in zip(got, run()))

    @pytest.mark.skipif(not hopper, reason="no Hopper GPU here")
    @pytest.mark.parametrize("heads, backend", [(12, "triton"), (96, "gluon")])
    def test_what_auto_takes_on_hopper(self, heads, backend):
        slab, part, _ = history([300], 1, 576, torch.bfloat16)
        before = kernels.counts["mla_decode", backend]
        with torch.no_grad():
            mla_decode(torch.randn(1, 1, heads, 576, dtype=torch.bfloat16, device=DEVICE), slab, 512, part, 0.07, None)
        assert kernels.counts["mla_decode", backend] == before + 1

    @pytest.mark.skipif(not hopper, reason="no Hopper GPU here")
    def test_a_sequence_does_not_see_its_neighbours_on_hopper(self):
        """With one plan the result of a sequence is the same bits alone and beside others."""
        slab, part, _ = history([9000, 300, 4000], 1, 576, torch.bfloat16)
        q = torch.randn(3, 1, 96, 576, dtype=torch.bfloat16, device=DEVICE)
        both = mla_hopper.mla_decode(q, slab, 512, part, 0.07, None, splits=5)
        for b in range(3):
            alone = SimpleNamespace(**vars(part) | dict(past=part.past[b : b + 1], table=part.table[b : b + 1]))
            o, lse = mla_hopper.mla_decode(q[b : b + 1], slab, 512, alone, 0.07, None, splits=5)
            assert torch.equal(o[0], both[0][b]) and torch.equal(lse[0], both[1][b])

    def test_alone_and_in_a_batch(self):
        """The plan depends on the batch's size, so here they differ in the last bits."""
        slab, part, _ = history([9000, 300, 4000], 1, 576, torch.bfloat16)
        q = torch.randn(3, 1, 96, 576, dtype=torch.bfloat16, device=DEVICE)
        both = triton_mla.mla_decode(q, slab, 512, part, 0.07, None)
        for b in range(3):
            alone = SimpleNamespace(**vars(part) | dict(past=part.past[b : b + 1], table=part.table[b : b + 1]))
            o, lse = triton_mla.mla_decode(q[b : b + 1], slab, 512, alone, 0.07, None)
            assert rel(o[0], both[0][b]) < 4e-3 and rel(lse[0], both[1][b]) < 1e-5

    @pytest.mark.large
    @pytest.mark.parametrize("slab", [torch.bfloat16, FP8])
    def test_write_past_int32(self, slab):
        kv = torch.randn(64, 700, dtype=torch.bfloat16, device=DEVICE)[:, 60:636]
        norm = torch.rand(512, dtype=torch.bfloat16, device=DEVICE)
        stored = torch.zeros(2**31 // 576 + 200, 576, dtype=slab, device=DEVICE)
        slots = torch.arange(len(stored) - 64, len(stored), device=DEVICE)
        slots[::7] = -1
        scale = torch.full([576], 0.7, dtype=torch.bfloat16, device=DEVICE) if slab == FP8 else None
        want, got = write(kv, norm, stored, slots, scale)
        assert rel(got[-100:].float(), want[-100:].float()) < (5e-3 if slab == FP8 else 1e-3)
        assert torch.equal(bytes_of(got[-100:, 512:]), bytes_of(want[-100:, 512:]))
        assert not bytes_of(got[:-64]).any()


# ---------------------------------------------------------------- where they run


def compile_for(target, kernel, signature, constants, num_warps, num_stages):
    from triton.backends.compiler import GPUTarget

    gpu = GPUTarget("cuda", 90, 32) if target == "sm_90" else GPUTarget("hip", "gfx950", 64)
    full = {arg: signature.get(arg, "constexpr") for arg in kernel.arg_names}
    source = triton.compiler.ASTSource(fn=kernel, signature=full, constexprs=constants)
    return triton.compile(source, target=gpu, options={"num_warps": num_warps, "num_stages": num_stages})


@compiles
@pytest.mark.parametrize("target, memory", [("sm_90", 232448), ("gfx950", 160 * 1024)])
@pytest.mark.parametrize(
    "rows, latents, first",
    [(96, "bf16", 0), (96, "fp8e4nv", 1), (12, "bf16", 1), (12, "fp32", 0)]
    + [slow(96, "bf16", 1), slow(96, "fp8e4nv", 0), slow(12, "bf16", 0), slow(12, "fp32", 1)],
)
def test_decode_compiles(rows, latents, first, target, memory, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None if target == "sm_90" else "7")
    wide, dtype = ("*fp32", torch.float32) if latents == "fp32" else ("*bf16", torch.bfloat16)
    fp8 = latents == "fp8e4nv"
    block_h, block_n, num_warps, num_stages, forked = triton_mla.decode_config(rows, dtype, fp8)
    signature = dict(q=wide, stored=f"*{latents}", table="*i32", past="*i32", o="*fp32", lse="*fp32", scale="fp32")
    signature |= dict(T="i32", heads="i32", W="i32", page_size="i32")
    signature |= dict(row_scale=wide) if fp8 else {}
    constants = dict(RANK=512, PE=64, R=512, E=64, FIRST=first, FP8=fp8, BLOCK_H=block_h, BLOCK_N=block_n)
    constants |= dict(STAGES=num_stages, FORKED=forked) | ({} if fp8 else dict(row_scale=None))
    built = compile_for(target, triton_mla._decode_kernel, signature, constants, num_warps, num_stages)
    assert built.metadata.shared <= memory
    if target == "sm_90" and rows > 16:
        assert "wgmma" in built.asm["ptx"]


@compiles
@pytest.mark.parametrize("ids, first", [("*i64", 0), ("*i64", 1), slow("*i32", 0)])  # in graphs; eagerly
def test_decode_on_hopper_compiles(ids, first):
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    signature = {}
    for name, width in (("q_c_desc", 512), ("q_e_desc", 64), ("c_desc", 512), ("e_desc", 64)):
        layout = gl.NVMMASharedLayout.get_default_for([64, width], gl.bfloat16)
        signature[name] = f"tensordesc<bf16[64, {width}],{layout!r}>"
    signature |= dict(table=ids, past=ids, o="*fp32", lse="*fp32", scale="fp32", T="i32", heads="i32", W="i32")
    constants = dict(PAGE=1536, FIRST=first)
    signature |= dict.fromkeys(constants, "constexpr")
    source = GluonASTSource(fn=mla_hopper._decode_kernel, signature=signature, constexprs=constants)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=8, maxnreg=168))
    assert built.metadata.shared <= 232448
    assert "wgmma" in built.asm["ptx"] and "cp.async.bulk.tensor" in built.asm["ptx"]


@compiles
def test_the_others_compile():
    merge = dict(parts="*fp32", parts_lse="*fp32", o="*bf16", lse="*fp32", splits="i32")
    compile_for_all(mla_shares._merge_kernel, merge, dict(RANK=512, SPLITS=64, BLOCK_R=32), num_warps=1)
    write = dict(kv="*bf16", norm="*bf16", stored="*fp8e4nv", slots="*i64", scale="*bf16", eps="fp32", kv_stride="i32")
    compile_for_all(triton_mla._write_kernel, write, dict(RANK=512, PE=64, R=512, E=64, FP8=True))
