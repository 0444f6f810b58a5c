"""Each kernel at the sizes of K3, against the floor of this GPU and against peers in the same run."""

import dataclasses
from collections import namedtuple
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F

import kda
import kernels
import mla
import moe
from attnres import attnres_norm
from benchmarks.report import print_table
from benchmarks.timing import events_ms, median_ms, sets_for
from cache import PagePool, Part
from config import K3Config
from layers import linear, rms_norm_op

BF16 = torch.bfloat16
H, HEADS, D, RANK, PE, L, INNER, E, K = 7168, 96, 128, 512, 64, 3584, 3072, 896, 16
COLUMNS = ("op", "shape", "backend", "ms", "GB", "TFLOP", "floor_ms", "of_floor", "target", "peer", "peer_ms")

OPS = (
    "kda_prefill",
    "kda_decode",
    "kda_verify",
    "kda_commit",
    "mla_decode",
    "mla_prefill",
    "attnres",
    "rms_norm",
    "router",
    "linear",
    "experts",
)

# One row of the table. make(i) -> a call on the i-th set of inputs; nbytes, flops: what it must move and compute;
# target: in ms, or a function of the row and the time of its bytes; peers: name -> make, as for the op itself.
Case = namedtuple("Case", "op shape make nbytes flops target peers use", defaults=(0, None, {}, {}))


def rand(*shape, scale=1.0, dtype=BF16):
    return torch.randn(*shape, device="cuda", dtype=dtype) * scale


def part(lengths, past, pages_per_sequence=1, page_size=128, pages=None):
    """Sequences with pages of their own in random order; state page i belongs to sequence i."""
    B = len(lengths)
    pages = pages or B * pages_per_sequence
    table = torch.randperm(pages, device="cuda")[: B * pages_per_sequence].view(B, -1).int()
    state = torch.arange(B, device="cuda")[:, None]
    longest = max(p + n for p, n in zip(past, lengths))
    rows = slice(0, sum(lengths))
    on_gpu = torch.tensor(past, dtype=torch.int32, device="cuda"), table, state, state
    return Part(rows, list(lengths), list(past), [False] * B, longest, page_size, *on_gpu)


# ---------------------------------------------------------------- KDA


def kda_weights(heads):
    hd = heads * D
    conv, A_log = rand(3 * hd, 4, scale=0.3, dtype=torch.float32), torch.rand(heads, device="cuda") * 2 - 1
    dt_bias = torch.rand(hd, device="cuda") * 6 - 7
    return kda.Weights(conv, A_log, dt_bias, torch.ones(D, device="cuda"), 1e-5, -5.0)


def kda_rows(n, heads):
    hd = heads * D
    qkv, gate, r, b = rand(n, 4 * hd + heads + D).split([3 * hd, hd, D, heads], dim=-1)
    return qkv, gate, rand(n, hd), b


def kda_prefill(lengths, heads, target=None, peer=False):
    n, B, hd, w = sum(lengths), len(lengths), heads * D, kda_weights(heads)

    def make(i):
        S, conv = rand(B, heads, D, D, scale=0.1, dtype=torch.float32), rand(B, 3, 3 * hd)
        p = part(lengths, [64] * B)
        return partial(kda.kda_prefill, *kda_rows(n, heads), w, S, conv, p.src[:, 0], p.dst[:, 0], p)

    def fla(i):
        from fla.ops.kda import chunk_kda

        q, k, v = (F.normalize(rand(1, n, heads, D), dim=-1) for _ in range(3))
        g, beta = -torch.rand(1, n, heads, D, device="cuda"), torch.rand(1, n, heads, device="cuda").bfloat16()
        state = rand(B, heads, D, D, scale=0.1, dtype=torch.float32)
        starts = None if B == 1 else torch.tensor(np.cumsum([0, *lengths]), device="cuda", dtype=torch.int64)
        return partial(
            chunk_kda, q, k, v, g, beta, scale=D**-0.5, initial_state=state, output_final_state=True, cu_seqlens=starts
        )

    nbytes = 2 * n * hd * 6 + 2 * 4 * B * heads * D * D
    flops = n * heads * (4 * 64 * D + 2 * 64 * D + 6 * D * D + 64 * 64 // 3)
    shape = (
        f"{'+'.join(map(str, lengths)) if B > 1 and len(set(lengths)) > 1 else f'{B} x {lengths[0]}'}, {heads} heads"
    )
    return Case(
        "kda_prefill", shape, make, nbytes, flops, target, {"FLA chunk_kda, recurrence alone": fla} if peer else {}
    )


def kda_decode(B, heads, target=None, peer=False):
    hd, w, pages = heads * D, kda_weights(heads), max(B, 64)
    nbytes = B * (2 * 4 * heads * D * D + 2 * hd * (6 + 2 * 9))

    def make(i):
        S, conv = rand(pages, heads, D, D, scale=0.1, dtype=torch.float32), rand(pages, 3, 3 * hd)
        pages_used = torch.randperm(pages, device="cuda")[:B]
        past = torch.full((B,), 99, dtype=torch.int32, device="cuda")
        return partial(kda.kda_decode, *kda_rows(B, heads), w, S, conv, pages_used, pages_used, past)

    def fla(i):
        from fla.ops.kda import fused_recurrent_kda

        q, k, v = (F.normalize(rand(B, 1, heads, D), dim=-1) for _ in range(3))
        g, beta = -torch.rand(B, 1, heads, D, device="cuda"), torch.rand(B, 1, heads, device="cuda").bfloat16()
        state = rand(B, heads, D, D, scale=0.1, dtype=torch.float32)
        return partial(
            fused_recurrent_kda, q, k, v, g, beta, scale=D**-0.5, initial_state=state, output_final_state=True
        )

    peers = {"FLA fused_recurrent_kda, recurrence alone": fla} if peer else {}
    return Case("kda_decode", f"{B} sequences, {heads} heads", make, nbytes, 0, target, peers)


def kda_verify(B, T, heads, target=None):
    hd, w = heads * D, kda_weights(heads)

    def make(i):
        S, conv = rand(max(B, 8), heads, D, D, scale=0.1, dtype=torch.float32), rand(max(B, 8), 3, 3 * hd)
        src, past = torch.arange(B, device="cuda"), torch.full((B,), 99, dtype=torch.int32, device="cuda")
        raw = torch.empty(B * T, (4 * D + 1) * heads, dtype=BF16, device="cuda")
        return partial(kda.kda_verify, *kda_rows(B * T, heads), w, S, conv, src, past, T, raw)

    nbytes = B * (4 * heads * D * D + 2 * hd * (9 + 10 * T))
    return Case("kda_verify", f"{B} x {T}, {heads} heads", make, nbytes, 0, target)


def kda_commit(B, T, heads, target=None):
    """All KDA layers of K3, three of four tokens accepted."""
    cfg = K3Config.k3()
    cfg = dataclasses.replace(cfg, linear_attn_config=cfg.linear_attn_config | {"num_heads": heads})
    layers, hd = len(cfg.kda_layers), heads * D
    weights = [kda_weights(heads) for _ in range(layers)]

    def make(i):
        pool = PagePool(cfg, 3 * B + 1, BF16, "cuda")
        for layer in range(layers):
            for x in pool.state(layer):
                x.copy_(rand(*x.shape, scale=0.1))
        pages = torch.randperm(3 * B + 1, device="cuda")[: 3 * B].view(B, 3)
        past, taken = (torch.full((B,), n, dtype=torch.int32, device="cuda") for n in (99, T - 1))
        return partial(kda.kda_commit, rand(layers, B * T, 4 * hd + heads), weights, pool, pages, pages, past, taken, T)

    nbytes = layers * B * (2 * 4 * heads * D * D + 2 * hd * (2 * 9 + 4 * (T - 1)))
    return Case("kda_commit", f"{layers} layers, {B} x {T}, {heads} heads", make, nbytes, 0, target)


# ---------------------------------------------------------------- MLA


def mla_decode(B, context, heads, target=None, T=1, fp8=False):
    P = 1536
    pages = -(-context // P)
    size = torch.float8_e4m3fn.itemsize if fp8 else 2
    nbytes = B * (context * (RANK + PE) * size + 2 * T * heads * (2 * RANK + PE))
    flops = 2 * B * T * heads * context * (2 * RANK + PE)

    def make(i):
        stored = rand(B * pages * P, RANK + PE)
        stored = stored.to(torch.float8_e4m3fn) if fp8 else stored
        p = part([T] * B, [context - T] * B, pages, P)
        scales = torch.ones(RANK + PE, device="cuda", dtype=BF16) if fp8 else None
        return partial(mla.mla_decode, rand(B, T, heads, RANK + PE), stored, RANK, p, 192**-0.5, scales)

    def plain(i):
        q, rows = rand(B, T * heads, RANK + PE), rand(B, context, RANK + PE)
        return lambda: ((q @ rows.mT) * 192**-0.5).softmax(-1) @ rows[..., :RANK]

    shape = f"{B} x {context:,}, {heads} heads" + f", {T} queries" * (T > 1) + ", FP8" * fp8
    return Case(
        "mla_decode", shape, make, nbytes, flops, target, {} if fp8 else {"torch products and softmax, no pages": plain}
    )


def mla_prefill(lengths, past, target=None):
    n, P = sum(lengths), 1536
    pages = -(-(past + max(lengths)) // P)
    seen = sum(past + t / 2 for t in lengths) / len(lengths)
    flops = 2 * len(lengths) * (past + lengths[0]) * RANK * HEADS * 256 + int(2 * n * HEADS * 320 * seen)
    nbytes = len(lengths) * past * (RANK + PE) * 2 + 2 * n * HEADS * 320

    def make(i):
        stored = rand(len(lengths) * pages * P, RANK + PE)
        p = part(lengths, [past] * len(lengths), pages, P)
        W = rand(HEADS, 256, RANK, scale=RANK**-0.5)
        return partial(mla.mla_prefill, rand(n, HEADS, 192), W, stored, p, 192**-0.5, None)

    def sdpa(i):  # what a model without a cache would run on the new tokens, expanded
        q, k = rand(2, len(lengths), HEADS, lengths[0], 192)
        v = rand(len(lengths), HEADS, lengths[0], 128)
        return partial(F.scaled_dot_product_attention, q, k, v, is_causal=True, scale=192**-0.5)

    shape = f"{len(lengths)} x {lengths[0]:,} over {past:,} cached, {HEADS} heads"
    return Case("mla_prefill", shape, make, nbytes, flops, target, {} if past else {"torch SDPA, expanded": sdpa})


# ---------------------------------------------------------------- MoE


def packed_experts():
    """Random packed experts of one layer of K3, on the GPU."""
    experts = SimpleNamespace(inner=INNER, is_packed=lambda name: True)
    for name, out, inner in (("w13", 2 * INNER, L), ("w2", L, INNER)):
        packed = torch.randint(256, (E, out, inner // 2), dtype=torch.uint8, device="cuda")
        scale = torch.randint(118, 122, (E, out, inner // 32), dtype=torch.uint8, device="cuda")
        setattr(experts, f"{name}_packed", packed), setattr(experts, f"{name}_scale", scale)
    return experts


def router(n):
    def make(i):
        logits, bias = rand(n, E, dtype=torch.float32), rand(E, scale=0.1, dtype=torch.float32)
        return partial(moe.route, logits, bias, K3Config.k3())

    return Case("router", f"{n} tokens", make, n * (4 * E + 12 * K))


def routed(n, experts, target=None, use=None):
    choose = lambda: torch.rand(n, E, device="cuda").topk(K).indices
    used = int(choose().unique().numel())
    nbytes = used * 3 * L * INNER * 17 // 32 + 4 * n * L
    flops = 2 * n * K * 3 * L * INNER

    def make(i):
        weights = torch.rand(n, K, device="cuda")
        return partial(
            moe.routed_experts, rand(n, L), choose(), weights / weights.sum(-1, True), experts, K3Config.k3()
        )

    shape = f"{n} tokens, {used} experts" + ", w4a8" * bool(use)
    return Case("experts", shape, make, nbytes, flops, target, {}, {"experts": use} if use else {})


# ---------------------------------------------------------------- the residual stream, dense


def attnres(n, candidates, target=None):
    def make(i):
        *blocks, s, y = rand(candidates + 1, n, H)
        mix = rand(H), rand(1, H, scale=H**-0.5), 1e-5
        return partial(attnres_norm, (s, y), list(blocks), mix, (rand(H), 1e-5))

    def without(i):
        *blocks, s = rand(candidates, n, H)
        mix = rand(H), rand(1, H, scale=H**-0.5), 1e-5
        return partial(attnres_norm, (s, None), list(blocks), mix, (rand(H), 1e-5))

    shape = f"{n} tokens, {candidates} candidates"
    yield Case("attnres", shape, without, 2 * n * H * (candidates + 1), 0, target)
    yield Case("attnres", shape + ", with the sum", make, 2 * n * H * (candidates + 3))


def dense(n, out, inner):
    make = lambda i: partial(linear, rand(n, inner), rand(out, inner, scale=inner**-0.5))
    cublas = lambda i: partial(F.linear, rand(n, inner), rand(out, inner, scale=inner**-0.5))
    return Case(
        "linear",
        f"{n} x {inner} -> {out}",
        make,
        2 * (out * inner + n * (out + inner)),
        2 * n * out * inner,
        None,
        {"cuBLAS": cublas},
    )


def norms(n):
    yield Case("rms_norm", f"{n} tokens", lambda i: partial(rms_norm_op, rand(n, H), rand(H), 1e-5), 4 * n * H)


def rate(tflop_s):
    """A target in TFLOP/s."""
    return lambda row, copied: row["TFLOP"] / tflop_s * 1e3


def cases(quick):
    """All rows, made one by one: the inputs of one are freed before the next."""
    yield kda_prefill([1024], HEADS, 0.15)
    yield kda_prefill([8192], 12)
    yield kda_prefill([1, 2, 15, 300, 700, 1024, 2048, 4102], HEADS)
    yield kda_decode(8, HEADS)
    yield kda_decode(1, HEADS, 0.010)
    yield kda_verify(1, 4, 12, 0.006)
    yield kda_verify(16, 4, HEADS)
    yield kda_commit(1, 4, 12, 0.045)
    yield kda_commit(16, 4, 12)
    yield mla_decode(1, 131072, HEADS, 0.075)
    yield mla_decode(16, 16384, HEADS, 0.13)
    yield mla_decode(1, 16384, 12, 0.020)
    yield mla_decode(16, 16384, HEADS, fp8=True)
    yield mla_decode(1, 16384, HEADS, T=4)
    yield mla_prefill([4096], 65536, rate(450))
    yield mla_prefill([8192], 0)
    yield mla_prefill([1024] * 8, 0)
    yield from attnres(8192, 9, 0.32)
    yield from attnres(1, 9, 0.005)
    yield from norms(8192)
    for n in (1, 64, 8192):
        yield router(n)
    for out, inner in (
        (4 * 12288 + 224, H),
        (H, 12288),
        (14400, H),
        (16768, H),
        (163840, H),
        (49376 // 8, H),
        (H, 1536),
    ):
        for n in (1, 16, 64):
            yield dense(n, out, inner)
    experts = packed_experts()
    yield routed(1, experts, 0.10)
    yield routed(4, experts)
    yield routed(16, experts)
    yield routed(64, experts, lambda row, copied: 1.35 * copied)
    if not quick:
        yield routed(512, experts)
        yield routed(8192, experts, rate(350))
        yield routed(8192, experts, rate(500), "triton_w4a8")
    yield kda_prefill([8192], HEADS, 1.0, peer=True)  # FLA tunes itself for a minute: it stands in two rows, the last
    yield kda_decode(64, HEADS, 0.21, peer=True)


def measure(case, rates):
    """The row of one case; a case or a peer that fails says so in its row."""
    fp8 = "fp8_flops_s" if "w4a8" in case.shape else "matrix_flops_s"
    floors = case.nbytes / rates["copy_bytes_s"] * 1e3, case.flops / rates.get(fp8, torch.inf) * 1e3
    row = dict.fromkeys(COLUMNS) | {"op": case.op, "shape": case.shape, "floor_ms": max(floors)}
    row |= {"GB": case.nbytes / 1e9, "TFLOP": case.flops / 1e12}
    row["target"] = case.target(row, floors[0]) if callable(case.target) else case.target
    sets = sets_for(case.nbytes)
    try:
        with kernels.use(**case.use):
            before = kernels.counts.copy()
            calls = [case.make(i) for i in range(sets)]
            calls[0]()
            ran = kernels.counts - before
            row["backend"] = "+".join(sorted(backend for op, backend in ran if op == case.op))
            row["ms"] = median_ms(calls) if row["backend"] != "torch" or case.op in GRAPHABLE else events_ms(calls[0])
            row["of_floor"] = row["ms"] / row["floor_ms"]
    except Exception as e:  # noqa: BLE001 (of the compiler too: the other rows still count)
        row["backend"] = f"failed: {type(e).__name__}: {e}".splitlines()[0][:90]
    calls = None
    for name, make in case.peers.items():
        try:
            row["peer"], row["peer_ms"] = name, median_ms([make(i) for i in range(sets)])
        except Exception as e:  # noqa: BLE001
            row["peer"] = f"{name}: {type(e).__name__}"
    torch.cuda.empty_cache()
    return row


GRAPHABLE = ("linear", "rms_norm", "attnres", "router", "mla_decode")  # their PyTorch paths do not wait for the GPU


@torch.inference_mode()
def ops(args):
    """Each kernel at the sizes of K3 in bf16: median time, the floor from bytes and FLOPs, and a peer in the same run.

    Times are of CUDA graphs, with inputs rotated past the L2. The floor is the larger of bytes over the card's measured
    copy bandwidth and FLOPs over its measured bf16 matrix rate; of_floor is the time over it. --only: the ops named.
    Ctrl-C ends early and keeps the rows that are done.
    """
    torch.manual_seed(args.seed)
    only, rows = set(filter(None, (args.only or "").split(","))), []
    if not only <= set(OPS):
        raise ValueError(f"--only {args.only}: there are {', '.join(OPS)}")
    try:
        for case in cases(args.quick):
            if not only or case.op in only:
                rows.append(measure(case, args.card))
                print(f"{case.op} {case.shape}: {rows[-1]['ms'] or rows[-1]['backend']}", file=args.log, flush=True)
    except KeyboardInterrupt:
        print(f"interrupted: {len(rows)} rows are done", file=args.log)
    if rows:
        print_table(rows, COLUMNS)
    return rows


def plot(plt, rows, card):
    """A roofline: what each op that counts FLOPs reaches of the card's bandwidth and matrix rate."""
    bandwidth, rate = card["copy_bytes_s"], card["matrix_flops_s"]
    figure, axes = plt.subplots(figsize=(9, 5.5), layout="constrained")
    intensities = [r["TFLOP"] * 1e3 / r["GB"] for r in rows if r["ms"] and r["TFLOP"]]
    x = np.geomspace(min(intensities, default=1) / 2, max(intensities, default=1e3) * 2, 200)
    axes.loglog(x, np.minimum(x * bandwidth, rate) / 1e12, color="black", label="floor: measured copy and matrix rate")
    for op in dict.fromkeys(r["op"] for r in rows):
        mine = [r for r in rows if r["op"] == op and r["ms"] and r["TFLOP"]]
        at = [r["TFLOP"] * 1e3 / r["GB"] for r in mine]
        axes.scatter(at, [r["TFLOP"] / r["ms"] * 1e3 for r in mine], label=op, s=18) if mine else None
    axes.set(xlabel="FLOP per byte", ylabel="TFLOP/s")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    return figure
