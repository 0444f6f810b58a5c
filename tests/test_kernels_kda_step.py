"""KDA decode, verification and commitment: the Triton kernel against float64, and the ops against each other."""

import pytest
import torch
from helpers import tiny_config
from kernel_helpers import DEVICE, compile_for_all, compile_overlapped, compiles, interpreted, on_gpu, rel

import kernels
from cache import PagePool
from kda import Weights, kda_commit, kda_decode, kda_verify

BACKENDS = ["torch", pytest.param("triton", marks=[] if DEVICE == "cuda" else interpreted)]
GATES = {"usual": lambda r: r, "saturated": lambda r: r.sign() * 200, "shut": lambda r: 0 * r - 90}


def pool(pages, h, d, dtype, spare=48):
    """S and conv as cache.PagePool has them: strided views of one slab of bytes; NaN where nothing was written."""
    wide = torch.promote_types(dtype, torch.float32)
    state, conv = h * d * d * wide.itemsize, 9 * h * d * dtype.itemsize
    slab = torch.full((pages, state + conv + spare * wide.itemsize), 255, dtype=torch.uint8, device=DEVICE)  # NaN
    start = state // dtype.itemsize
    S = slab.view(wide)[:, : h * d * d].unflatten(1, (h, d, d))
    return slab, S, slab.view(dtype)[:, start : start + 9 * h * d].unflatten(1, (3, 3 * h * d))


class Case:
    """B sequences of T tokens: raw projections (columns of one tensor), weights, a pool with their pages filled."""

    def __init__(self, B, T=1, h=2, d=32, dtype=torch.float32, bound=-5.0, gate="usual", pages=None, seed=0):
        torch.manual_seed(seed)
        inner = h * d
        fused = torch.randn(B * T, 4 * inner + h + 8, device=DEVICE).to(dtype)
        self.qkv, self.gate, _, self.b = fused.split([3 * inner, inner, 8, h], dim=1)
        r = GATES[gate](torch.randn(B * T, inner + 16, device=DEVICE) * 2).to(dtype)
        self.rows = self.qkv, self.gate, r[:, 16:], self.b
        conv, A_log, dt_bias = torch.randn(3 * inner, 4) / 2, torch.randn(2 * h) / 2, torch.rand(inner) * 6 - 5
        weights = conv, A_log[:h], dt_bias, 1 + torch.randn(d) / 10
        self.w = Weights(*(x.to(DEVICE) for x in weights), 1e-5, bound)
        pages = pages or 2 * B + 3
        self.slab, self.S, self.conv = pool(pages, h, d, dtype)
        order = torch.randperm(pages, device=DEVICE)
        table = torch.stack([order[:B], order[B : 2 * B], order[:B]], dim=1)  # a column of it has a stride
        self.src, self.dst = table[:, 0], table[:, 1]
        self.S[self.src] = torch.randn(B, h, d, d, device=DEVICE).to(self.S.dtype) / 8
        self.conv[self.src] = torch.randn(B, 3, 3 * inner, device=DEVICE).to(dtype)
        self.past = torch.arange(3, 3 + B, device=DEVICE, dtype=torch.int32)
        self.B, self.T = B, T

    def pages(self):
        """Copies of the pool's S and conv; the rest of a call's arguments after the rows."""
        slab = self.slab.clone()
        S, conv = (
            torch.as_strided(slab.view(x.dtype), x.shape, x.stride(), x.storage_offset()) for x in (self.S, self.conv)
        )
        return slab, S, conv

    def wide(self):
        """Rows, weights, S and conv in float64."""
        w = Weights(*(x.double() if isinstance(x, torch.Tensor) else x for x in self.w))
        return [x.double() for x in self.rows], w, self.S.double(), self.conv.double()

    def token(self, t):
        """The rows of token t of every sequence."""
        return [x.unflatten(0, (self.B, self.T))[:, t] for x in self.rows]


def ran(backend, op, function, *args):
    """function(*args) on a backend, and proof that it ran there."""
    before = kernels.counts[op, backend]
    with kernels.use(**{op: backend}):
        out = function(*args)
    assert kernels.counts[op, backend] == before + 1
    return out


class OneLayer:
    """What `kda_commit` asks of a page pool."""

    per_group = 1

    def __init__(self, S, conv):
        self.state, self.group, self.slab_strides = lambda i: (S, conv), lambda i: 0, lambda: (0, 0)


def commit(backend, raw, w, S, conv, src, dst, past, accepted, T):
    args = OneLayer(S, conv), src[:, None], dst[:, None], past, accepted, T
    ran(backend, "kda_commit", kda_commit, raw[None], [w], *args)


def decode(backend, rows, w, S, conv, src, dst, past):
    return ran(backend, "kda_decode", kda_decode, *rows, w, S, conv, src, dst, past)


def check_decode(backend, case, in_place=False, limits=None):
    """Against float64, also that no other page and no other byte of the page changes."""
    src, dst = case.src, case.src if in_place else case.dst
    rows, w, S64, conv64 = case.wide()
    want = kda_decode.torch_path(*rows, w, S64, conv64, src, dst, case.past)
    slab, S, conv = case.pages()
    got = decode(backend, case.rows, case.w, S, conv, src, dst, case.past)
    assert got.dtype == case.gate.dtype
    errors = rel(got, want), rel(S[dst], S64[dst])
    out, state = limits or {torch.float32: (2e-6, 1e-6), torch.bfloat16: (5e-3, 1e-6)}[got.dtype]
    assert errors[0] < out and errors[1] < state, errors
    assert torch.equal(conv[dst].double(), conv64[dst])
    S[dst], conv[dst] = case.S[dst], case.conv[dst]  # all that may have changed: put back, every byte is as before
    assert torch.equal(slab, case.slab)
    return errors


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bound", [-5.0, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_place", [True, False])
def test_decode(backend, dtype, bound, in_place):
    check_decode(backend, Case(3, dtype=dtype, bound=bound), in_place)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bound", [-5.0, None])
@pytest.mark.parametrize("gate", ["saturated", "shut"])
def test_extreme_gates(backend, gate, bound):
    check_decode(backend, Case(2, gate=gate, bound=bound))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("h, d", [(1, 128), (3, 64), (5, 32)])
def test_sizes(backend, h, d):
    check_decode(backend, Case(2, h=h, d=d))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_text_starts_from_zero_whatever_its_page_holds(backend):
    case = Case(3)
    case.past[1] = 0
    case.S[case.src[1]], case.conv[case.src[1]] = float("nan"), float("nan")
    check_decode(backend, case)
    check_decode(backend, case, in_place=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_reads_and_writes_nothing(backend):
    case, full = Case(4), Case(4)
    case.src[2:], case.dst[2:] = -1, -1  # page -1 is NaN: the last of the pool
    case.past[2:] = 0
    slab, S, conv = case.pages()
    got = decode(backend, case.rows, case.w, S, conv, case.src, case.dst, case.past)
    want = decode(backend, case.rows, case.w, *full.pages()[1:], full.src, full.dst, full.past)
    assert got.isfinite().all() and torch.equal(got[:2], want[:2])
    S[case.dst[:2]], conv[case.dst[:2]] = case.S[case.dst[:2]], case.conv[case.dst[:2]]
    assert torch.equal(slab, case.slab)


@pytest.mark.parametrize("backend", BACKENDS)
def test_permuted_slots_give_permuted_results(backend):
    case, order = Case(4), torch.tensor([2, 0, 3, 1], device=DEVICE)
    _, S, conv = case.pages()
    want = decode(backend, case.rows, case.w, S, conv, case.src, case.dst, case.past)
    _, S2, conv2 = case.pages()
    rows = [x[order] for x in case.rows]
    got = decode(backend, rows, case.w, S2, conv2, case.src[order], case.dst[order], case.past[order])
    assert torch.equal(got, want[order]) and torch.equal(S2[case.dst], S[case.dst])


def check_verify(backend, case, limit):
    """Verified rows are those of successive decodes; a commitment leaves the state that these leave."""
    slab, S, conv = case.pages()
    qkv, gate, r, b = case.rows
    raw = torch.full((len(qkv), qkv.shape[1] + r.shape[1] + b.shape[1]), float("nan"), dtype=qkv.dtype, device=DEVICE)
    got = ran(backend, "kda_verify", kda_verify, *case.rows, case.w, S, conv, case.src, case.past, case.T, raw)
    assert torch.equal(raw, torch.cat([qkv, r, b], dim=-1))
    assert torch.equal(slab, case.slab)  # not a byte
    got, src = got.unflatten(0, (case.B, case.T)), case.src
    states = [(case.S[src], case.conv[src])]
    states[0][0][case.past == 0], states[0][1][case.past == 0] = 0, 0
    for t in range(case.T):
        want = decode(backend, case.token(t), case.w, S, conv, src, case.dst, case.past + t)
        assert rel(got[:, t], want) < limit
        src = case.dst
        states.append((S[src], conv[src]))

    accepted = torch.arange(case.B, device=DEVICE, dtype=torch.int32) % (case.T + 3) - 1  # -1 and T + 1: out of range
    for dst in (case.dst, case.src):
        slab, S, conv = case.pages()
        args = case.w, S, conv, case.src, dst, case.past, accepted, case.T
        commit(backend, raw, *args)
        for i, n in enumerate(accepted.clamp(0, case.T).tolist()):
            assert rel(S[dst[i]], states[n][0][i]) < limit if n or case.past[i] else not S[dst[i]].any()
            assert torch.equal(conv[dst[i]], states[n][1][i])
        S[dst], conv[dst] = case.S[dst], case.conv[dst]
        assert torch.equal(slab, case.slab)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("T", [2, 4])
def test_verify_and_commit(backend, T, dtype):
    case = Case(T + 3, T, h=1, dtype=dtype)
    case.past[-2] = 0
    check_verify(backend, case, 1e-6 if dtype == torch.float32 else 5e-3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sixteen_drafted_tokens(backend):
    check_verify(backend, Case(2, 16, h=1, bound=None), 2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_commit_then_decode_is_plain_decode(backend):
    case = Case(4, 5, h=1)
    accepted = torch.tensor([0, 1, 3, 4], device=DEVICE, dtype=torch.int32)
    (qkv, _, r, b), last = case.rows, torch.arange(4, device=DEVICE) * 5 + accepted
    _, S, conv = case.pages()
    commit(backend, torch.cat([qkv, r, b], -1), case.w, S, conv, case.src, case.dst, case.past, accepted, 5)
    then = [x[last] for x in case.rows]
    got = decode(backend, then, case.w, S, conv, case.dst, case.dst, case.past + accepted)
    for i, n in enumerate(accepted.tolist()):
        _, S, conv = case.pages()
        src, dst = case.src[i : i + 1], case.dst[i : i + 1]
        for t in range(n + 1):
            row = [x[i * 5 + t][None] for x in case.rows]
            want = decode(backend, row, case.w, S, conv, dst if t else src, dst, case.past[i : i + 1] + t)
        assert rel(got[i], want[0]) < 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_rejected_drafts_and_padding_leave_no_trace(backend):
    """A NaN among what is rejected, or in a row of padding, reaches no state."""
    case = Case(3, 4, h=1)
    accepted = torch.tensor([1, 2, 4], device=DEVICE, dtype=torch.int32)
    case.dst[2] = case.src[2] = -1
    _, S, conv = case.pages()
    qkv, _, r, b = case.rows
    args = case.src, case.dst, case.past, accepted, 4
    raw = torch.cat([qkv, r, b], -1)
    commit("torch", raw, case.w, S, conv, *args)
    for i, n in enumerate([1, 2, 0]):
        raw[i * 4 + n : i * 4 + 4] = float("nan")
    slab, S2, conv2 = case.pages()
    commit(backend, raw, case.w, S2, conv2, *args)
    assert rel(S2[case.dst[:2]], S[case.dst[:2]]) < 1e-6 and torch.equal(conv2[case.dst[:2]], conv[case.dst[:2]])
    S2[case.dst[:2]], conv2[case.dst[:2]] = case.S[case.dst[:2]], case.conv[case.dst[:2]]
    assert torch.equal(slab, case.slab)


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_layers_at_once(backend):
    """Five layers in two groups of three slabs: each as it is alone."""
    cfg = tiny_config(dict(kda_layers=[1, 2, 3, 4, 5], full_attn_layers=[6, 7, 8], head_dim=32), num_hidden_layers=8)
    torch.manual_seed(0)
    cases, T = [Case(3, 4, h=3, d=32, seed=i) for i in range(5)], 4
    held = PagePool(cfg, 20, device=DEVICE)
    held.slabs.copy_(torch.randint(0, 255, held.slabs.shape))
    for i in range(5):
        for x in held.state(i):
            x.copy_(torch.randn(x.shape))
    other = PagePool(cfg, 20, device=DEVICE)
    other.slabs.copy_(held.slabs)
    pages = torch.randperm(20, device=DEVICE)
    src, dst = pages[:6].view(2, 3).T, pages[6:12].view(2, 3).T
    past, accepted = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([5, 0, 9], [1, 4, 2]))
    raw = torch.stack([torch.cat([case.qkv, case.rows[2], case.b], -1) for case in cases])
    ran(backend, "kda_commit", kda_commit, raw, [case.w for case in cases], held, src, dst, past, accepted, T)
    for i, case in enumerate(cases):
        at = (x[:, held.group(i)] for x in (src, dst))
        commit("torch", raw[i], case.w, *other.state(i), *at, past, accepted, T)
    assert held.groups == 2 and torch.equal(held.slabs.view(torch.uint8)[:, pages[12:]], other.slabs[:, pages[12:]])
    for i in range(5):
        for x, y in zip(held.state(i), other.state(i)):
            assert rel(x, y) < 1e-6


@interpreted
def test_tiles_of_a_head(monkeypatch):
    """Narrow programs, whose norm is a second launch."""
    from kernels import kda_step

    monkeypatch.setattr(kda_step, "config", lambda d, heads, output_only: (16 if output_only else d, 4))
    check_verify("triton", Case(4, 2, h=2), 1e-6)


@interpreted
def test_what_does_not_fit():
    for change in (dict(d=20), dict(dtype=torch.float64)):
        case = Case(2, **change)
        with pytest.raises(ValueError, match="cannot run here: it takes"):
            decode("triton", case.rows, case.w, *case.pages()[1:], case.src, case.dst, case.past)
    case = Case(2)
    w = case.w._replace(conv=case.w.conv[:, :3].contiguous())
    with pytest.raises(ValueError, match="4 taps, not 32 and 3"):
        decode("triton", case.rows, w, *case.pages()[1:], case.src, case.dst, case.past)


@compiles
@pytest.mark.parametrize("use, heads", [("decode", 96), ("verify", 96), ("verify", 12), ("commit", 96)])
def test_compiles(use, heads):
    from kernels import kda_step

    x, wide, page = "*bf16", "*fp32", "*i64"
    types = dict(qkv=x, gate=x, r=x, b=x, out=x, weight=wide, A_log=wide, dt_bias=wide, o_norm=wide, S=wide, conv=x)
    types |= dict(src=page, dst=page, past="*i32", accepted="*i32", eps="fp32")
    strides = "qkv_row gate_row r_row b_row S_page conv_page conv_row src_stride dst_stride raw_row raw_layer S_slab "
    types |= dict(raw=x, table=page) | dict.fromkeys((strides + "conv_slab src_group dst_group").split(), "i32")
    absent = ["accepted", "raw", "table"], ["accepted", "dst", "table"], ["out", "raw"]
    absent = dict(zip(("decode", "verify", "commit"), absent))[use]
    types = {name: type for name, type in types.items() if name not in absent}
    width, warps = kda_step.config(128, heads, use == "verify")
    constants = dict(H=heads, D=128, BV=width, LOWER_BOUND=-5.0, T=1 if use == "decode" else 4, OVERLAP=False)
    constants |= dict(PER_GROUP=23 if use == "commit" else 0)
    compile_for_all(kda_step._step, types, constants | dict.fromkeys(absent), num_warps=warps)
    types = dict(o=wide, gate=x, out=x, o_norm=wide, gate_row="i32", eps="fp32")
    compile_for_all(kda_step._norm, types, dict(H=heads, D=128, OVERLAP=False), num_warps=1)
    before, after = compile_overlapped(kda_step._norm, types, dict(H=heads, D=128), num_warps=1)
    assert "st.global" not in before and after.count("ld.global") == 4, "o, four values a thread"


class TestOnGPU:
    pytestmark = on_gpu

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("B, h, d", [(1, 96, 128), (5, 12, 128), (64, 12, 128), (300, 3, 64), (33, 7, 32)])
    def test_decode(self, B, h, d, dtype):
        for bound in (-5.0, None):
            check_decode("triton", Case(B, h=h, d=d, dtype=dtype, bound=bound))
            check_decode("triton", Case(B, h=h, d=d, dtype=dtype, bound=bound), in_place=True)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize(
        "B, T, h, d", [(2, 4, 12, 128), (20, 2, 12, 128), (20, 4, 12, 128), (20, 8, 5, 64), (20, 16, 5, 128)]
    )
    def test_verify_and_commit(self, B, T, h, d, dtype):
        case = Case(B, T, h, d, dtype=dtype)
        case.past[-2] = 0
        check_verify("triton", case, 2e-6 if dtype == torch.float32 else 5e-3)

    @pytest.mark.parametrize("op", ["decode", "verify", "commit"])
    def test_fifty_times_the_same_bits(self, op):
        case, seen = Case(16, 1 if op == "decode" else 4, 24, 128, dtype=torch.bfloat16), None
        accepted = torch.arange(16, device=DEVICE, dtype=torch.int32) % 5
        raw = torch.cat([x for x in case.rows if x is not case.gate], -1)
        for _ in range(50):
            slab, S, conv = case.pages()
            if op == "commit":
                commit("triton", raw, case.w, S, conv, case.src, case.src, case.past, accepted, 4)
                got = (slab,)
            elif op == "verify":
                got = slab, kda_verify(*case.rows, case.w, S, conv, case.src, case.past, 4, raw)
            else:
                got = slab, kda_decode(*case.rows, case.w, S, conv, case.src, case.src, case.past)
            seen = seen or got
            assert all(map(torch.equal, got, seen))

    @pytest.mark.large
    def test_pools_past_two_to_the_31(self):
        """12 GB: page ids times the page's elements pass 2^32, of conv's too."""
        torch.manual_seed(0)
        B, h, d, pages = 4, 96, 128, 1500
        small = Case(B, h=h, d=d, dtype=torch.bfloat16)
        _, S, conv = pool(pages, h, d, torch.bfloat16, spare=2**19)
        assert (pages - 9) * S.stride(0) > 2**31 and (pages - 9) * conv.stride(0) > 2**32
        src, dst = (
            torch.tensor([1499, 3, 1491, 1495], device=DEVICE),
            torch.tensor([1493, 1494, 7, 1495], device=DEVICE),
        )
        S[src], conv[src] = small.S[small.src], small.conv[small.src]
        got = decode("triton", small.rows, small.w, S, conv, src, dst, small.past)
        _, S2, conv2 = small.pages()
        want = decode("triton", small.rows, small.w, S2, conv2, small.src, small.dst, small.past)
        assert (
            torch.equal(got, want) and torch.equal(S[dst], S2[small.dst]) and torch.equal(conv[dst], conv2[small.dst])
        )

    def test_a_graph_reads_its_slots(self):
        """Field note 7: replay with permuted slots gives permuted results."""
        case = Case(4, h=8, d=128, dtype=torch.bfloat16)
        src, dst = case.src.clone(), case.dst.clone()
        _, S, conv = case.pages()
        want = decode("triton", case.rows, case.w, S, conv, src, dst, case.past)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = kda_decode(*case.rows, case.w, S, conv, src, dst, case.past)
        order = torch.tensor([2, 0, 3, 1], device=DEVICE)
        for x, new in ((src, case.src), (dst, case.dst)):
            x.copy_(new[order])
        for x in (*case.rows, case.past):
            x.copy_(x[order].clone())
        graph.replay()
        assert torch.equal(out, want[order])
