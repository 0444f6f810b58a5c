"""Mixture of experts: the layer's input projection, the router, and which kernel takes the routed experts.

A routed expert is read as it is stored, MXFP4. One token: moe_gemv.py; up to about a thousand: moe_split.py; more, and
what FP8 cannot hold: moe_grouped.py.
"""

import torch
import triton
import triton.language as tl

import kernels
from kernels.moe_gemv import experts_gemv
from kernels.moe_grouped import experts_grouped, why_not
from kernels.moe_split import experts_split, split_why_not, too_many

FEW = 64  # up to so many tokens the products with one weight are bound by its bytes
ALONE = 16  # up to so many tokens each choice reads its expert by itself, where FP8 does not serve


# ---------------------------------------------------------------- the input projection


@triton.jit
def _in_kernel(
    x, w, logits, features, N, outs, x_row,
    H: tl.constexpr, E: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    n, o, h = tl.arange(0, BLOCK_N), tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O), tl.arange(0, BLOCK_K)
    rows = w + o[:, None].to(tl.int64) * H
    acc = tl.zeros([BLOCK_O, BLOCK_N], tl.float32)
    for k in range(0, H, BLOCK_K):
        wk = tl.load(rows + (k + h), mask=(o[:, None] < outs) & (k + h < H), other=0)
        xk = tl.load(x + n * x_row + (k + h)[:, None], mask=(n < N) & ((k + h)[:, None] < H), other=0)
        acc = tl.dot(wk, xk, acc, input_precision="ieee")
    acc, n = acc.T, n[:, None]
    tl.store(logits + n * E + o, acc, mask=(n < N) & (o < E))
    tl.store(features + n * (outs - E) + (o - E), acc, mask=(n < N) & (o >= E) & (o < outs))


def in_tile(N):
    """Stages of weights on their way as deep as shared memory; at K3's size the programs are one for each SM."""
    rows = max(16, triton.next_power_of_2(N))
    return dict(BLOCK_N=rows, BLOCK_O=128, BLOCK_K=128, num_warps=4, num_stages=5 if rows <= 32 else 4)


def _in_why_not(x, weight, num_experts):
    if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        return "it is for bfloat16"
    if len(x) > FEW:
        return f"more than {FEW} rows: cuBLAS has it"
    return None if x.stride(1) == 1 and weight.is_contiguous() else "rows are strided"


@kernels.implement("moe_in", "splitk", _in_why_not)
def in_projection(x, weight, num_experts, tile=None):
    """x [N, H], weight [E + F, H] bf16 -> logits [N, E] float32, features [N, F] bf16: one read of one weight."""
    (N, H), (outs, _) = x.shape, weight.shape
    logits = x.new_empty(N, num_experts, dtype=torch.float32)
    features = x.new_empty(N, outs - num_experts)
    tile = tile or in_tile(N)
    _in_kernel[triton.cdiv(outs, tile["BLOCK_O"]),](
        x, weight, logits, features, N, outs, x.stride(0), H=H, E=num_experts, **tile
    )  # fmt: skip
    return logits, features


@kernels.implement("moe_in", "cublas", lambda x, *_: None if x.is_cuda and x.dtype == torch.bfloat16 else "not bf16")
def in_projection_of_many(x, weight, num_experts):
    """The same as two products: of many rows the outputs cost more than a launch, and only the logits need float32."""
    router, others = weight[:num_experts], weight[num_experts:]
    return torch.mm(x, router.T, out_dtype=torch.float32), torch.nn.functional.linear(x, others)


# ---------------------------------------------------------------- the router


@triton.jit
def _sortable(x):
    """float32 -> int32 in the same order (NaN last); applied to the int32 bits again it is the inverse."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _score(x, top, total, SOFTMAX: tl.constexpr):
    return tl.exp(x - top) / total if SOFTMAX else 1 / (1 + tl.exp(-x))


@triton.jit
def _router_kernel(
    logits, bias, ids, weights, row_stride, scaling,
    E: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, SOFTMAX: tl.constexpr,
    NORMALIZE: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program a token. Experts lie in a tile [groups, members]; a key is (score, -id), so that keys differ."""
    SIZE: tl.constexpr = E // GROUPS
    LOWEST: tl.constexpr = -(2**63)
    row = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, BLOCK_G)[:, None], tl.arange(0, BLOCK_S)[None, :]
    expert = group * SIZE + member
    real = (group < GROUPS) & (member < SIZE)
    x = tl.load(logits + row * row_stride + expert, mask=real, other=float("-inf"))
    top, total = 0.0, 1.0
    if SOFTMAX:
        top = tl.max(x)
        total = tl.sum(tl.exp(x - top))
    biased = _score(x, top, total, SOFTMAX) + tl.load(bias + expert, mask=real, other=0)
    keys = tl.where(real, (_sortable(biased).to(tl.int64) << 32) | (0x7FFFFFFF - expert), LOWEST)

    if GROUPS > 1:  # the groups with the largest sum of their best two members
        first = tl.max(keys, 1, keep_dims=True)
        two = tl.max(tl.where(keys == first, biased, float("-inf")), 1, keep_dims=True)
        if SIZE > 1:
            two += tl.max(tl.where(real & (keys != first), biased, float("-inf")), 1, keep_dims=True)
        sums = tl.where(group < GROUPS, (_sortable(two).to(tl.int64) << 32) | (0x7FFFFFFF - group), LOWEST)
        left = sums
        for _ in range(KEPT):
            left = tl.where(left == tl.max(left), LOWEST, left)
        keys = tl.where(left == sums, LOWEST, keys)

    place = tl.arange(0, BLOCK_K)
    chosen = tl.zeros([BLOCK_K], tl.int32)
    for k in range(K):
        best = tl.max(keys)
        keys = tl.where(keys == best, LOWEST, keys)
        chosen = tl.where(place == k, 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32), chosen)
    p = _score(tl.load(logits + row * row_stride + chosen), top, total, SOFTMAX)  # without the bias
    if NORMALIZE:
        p /= tl.sum(tl.where(place < K, p, 0)) + 1e-20
    tl.store(ids + row * K + place, chosen.to(tl.int64), mask=place < K)
    tl.store(weights + row * K + place, p * scaling, mask=place < K)


def _router_why_not(logits, bias, cfg):
    if logits.dtype != torch.float32 or bias.dtype != torch.float32:
        return "it is for float32 logits"
    return None if cfg.num_experts <= 4096 and logits.stride(1) == 1 else "more than 4096 experts, or strided logits"


@kernels.implement("router", "triton", _router_why_not)
def route(logits, bias, cfg):
    """logits [N, E], bias [E], float32 -> ids [N, k] int64, weights [N, k] float32: k rounds of a maximum."""
    (N, E), K = logits.shape, cfg.num_experts_per_token
    groups = cfg.num_expert_group if cfg.use_grouped_topk else 1
    ids, weights = logits.new_empty(N, K, dtype=torch.int64), torch.empty_like(logits[:, :K])
    _router_kernel[N,](
        logits, bias, ids, weights, logits.stride(0), cfg.routed_scaling_factor,
        E=E, K=K, GROUPS=groups, KEPT=cfg.topk_group, SOFTMAX=cfg.moe_router_activation_func == "softmax",
        NORMALIZE=cfg.moe_renormalize, BLOCK_G=triton.next_power_of_2(groups),
        BLOCK_S=triton.next_power_of_2(E // groups), BLOCK_K=triton.next_power_of_2(K), num_warps=1,
    )  # fmt: skip
    return ids, weights


# ---------------------------------------------------------------- the routed experts


@kernels.implement("experts", "triton", why_not)
def routed_experts(z, ids, weights, experts, cfg):
    """z [N, L], ids [N, k] int64, weights [N, k] float32 -> sum over the k chosen experts, [N, L] in z's dtype."""
    args = z, ids, weights, experts, cfg
    split = split_why_not(*args) is None
    if len(z) <= (1 if split else ALONE):
        return experts_gemv(*args)
    return (experts_split if split and not too_many(len(z), cfg) else experts_grouped)(*args)
