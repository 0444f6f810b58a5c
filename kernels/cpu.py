"""Ops for a few rows on a CPU, in C (cpu.c): to start an operation takes PyTorch a microsecond or more, and one token
of a small model is a thousand of them on some hundred numbers each.

The C file is built by the machine's compiler when it is first needed, in half a second, and kept in the user's cache
folder. Where there is no compiler, auto is PyTorch. Like PyTorch's paths these are float32, and use one core.
"""

import ctypes
import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F

import kernels

ROWS = 16  # auto takes PyTorch's path for more
SOURCE = Path(__file__).with_name("cpu.c")
# Sums in any order, as vectors need them; else what is written, NaN and infinity included.
FLAGS = "-O3 -shared -fPIC -fno-math-errno -fno-trapping-math -fno-signed-zeros -fassociative-math"


@functools.cache
def library():
    """-> the functions of cpu.c, or why there are none."""
    compiler = shlex.split(os.environ.get("CC", "")) or [next(filter(shutil.which, ("cc", "gcc", "clang")), None)]
    if compiler == [None]:
        return "there is no C compiler (cc, gcc or clang)"
    source = SOURCE.read_text()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "k3-engine"
    name = hashlib.sha256(repr((source, FLAGS, compiler, platform.machine(), _cpu())).encode()).hexdigest()[:16]
    try:
        if not (cache / f"{name}.so").exists():
            cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=cache) as folder:
                _build(compiler, Path(folder) / "cpu.so").replace(cache / f"{name}.so")
        loaded = ctypes.CDLL(str(cache / f"{name}.so"))
    except (OSError, subprocess.SubprocessError) as e:
        return f"cpu.c cannot be built: {getattr(e, 'stderr', None) or e}".splitlines()[0]
    for function, parameters in re.findall(r"^void (\w+)\((.*?)\) \{", source, re.M | re.S):
        kind = lambda p: ctypes.c_void_p if "*" in p else ctypes.c_float if "float" in p else ctypes.c_int64
        getattr(loaded, function).argtypes = [kind(p) for p in parameters.split(",")]
    return loaded


def _build(compiler, file):
    run = lambda *flags: subprocess.run(
        [*compiler, *flags, *FLAGS.split(), str(SOURCE), "-o", str(file), "-lm"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    try:
        run("-march=native")
    except subprocess.CalledProcessError:  # not every compiler knows that
        run()
    return file


def _cpu():
    """What -march=native may depend on: a home folder may be that of many machines."""
    info = Path("/proc/cpuinfo")
    return re.findall(r"^(?:model name|flags|Features)\s*:.*", info.read_text(), re.M)[:2] if info.exists() else ""


_array = functools.cache(lambda kind, n: kind * n)  # else the type would be made again and again


def _op(name, rows, tensors, why_not=lambda *args: None):
    """Declares a function for the op; rows(*args): how many there are; tensors(*args): those that must be float32, and
    contiguous but for what lies between rows.
    """

    def reason(*args):
        if isinstance(library(), str):
            return library()
        for x in tensors(*args):
            if x.dtype is not torch.float32:
                return f"{x.dtype}, not float32"
            if x.stride(-1) != 1:
                return "rows that are not contiguous"
        return why_not(*args)

    return kernels.implement(name, "c", reason, lambda *args: rows(*args) > ROWS)


def _betas(cfg):
    """Of SiTU; zero where it is SiLU."""
    return (0, 0) if cfg.hidden_act == "silu" else (cfg.activation_situ_beta, cfg.activation_situ_linear_beta)


# ---------------------------------------------------------------- between sub-layers


def _apart(terms, blocks, mix, norm):
    for x in (*terms, *blocks, *(mix[:2] if blocks else ()), norm and norm[0]):
        if x is not None and not (x.dtype is torch.float32 and x.is_contiguous()):
            return f"candidates and weights in {x.dtype}, or not contiguous"


@_op("attnres", lambda terms, *_: len(terms[0] if terms[1] is None else terms[1]), lambda *_: (), _apart)
def attnres_norm(terms, blocks, mix, norm):
    s, y = terms
    s, y = (y, None) if s is None else (s, y)
    total, out, (N, H), J = s if y is None else torch.empty_like(s), torch.empty_like(s), s.shape, len(blocks) + 1
    candidates = _array(ctypes.c_void_p, J)(*[x.data_ptr() for x in blocks], total.data_ptr())
    query, proj, eps = (mix[0].data_ptr(), mix[1].data_ptr(), mix[2]) if blocks else (None, None, 0)
    weight, norm_eps = (norm[0].data_ptr(), norm[1]) if norm else (None, 0)
    library().attnres(
        s.data_ptr(), None if y is None else y.data_ptr(), total.data_ptr(), candidates, J, query, proj, eps,
        weight, norm_eps, out.data_ptr(), N, H,
    )  # fmt: skip
    return total, out


def _no_matrix(x, weight, eps):
    return None if x.ndim == 2 else "no rows [N, D]"


@_op("rms_norm", lambda x, *_: len(x), lambda x, weight, eps: (x, weight), _no_matrix)
def rms_norm(x, weight, eps):
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    library().rms_norm(x.data_ptr(), x.stride(0), weight.data_ptr(), eps, out.data_ptr(), *x.shape)
    return out


# ---------------------------------------------------------------- MoE


@_op("gated_act", lambda x, cfg: len(x), lambda x, cfg: (x,))
def gated_act(x, cfg):
    N, inner = len(x), x.shape[1] // 2
    out = x.new_empty(N, inner)
    library().gated_act(x.data_ptr(), x.stride(0), *_betas(cfg), out.data_ptr(), N, inner)
    return out


def _strided_rows(x, *_):
    return None if x.is_contiguous() else "rows that are not contiguous"


@_op("moe_in", lambda x, *_: len(x), lambda x, weight, num_experts: (x, weight), _strided_rows)
def in_projection(x, weight, num_experts):
    logits = x.new_empty(len(x), num_experts)
    library().router_logits(x.data_ptr(), weight.data_ptr(), logits.data_ptr(), *x.shape, num_experts)
    return logits, F.linear(x, weight[num_experts:])


def _groups(logits, bias, cfg):
    return "groups of experts" if cfg.use_grouped_topk and cfg.num_expert_group > 1 else _strided_rows(logits)


@_op("router", lambda logits, *_: len(logits), lambda logits, bias, cfg: (logits, bias), _groups)
def route(logits, bias, cfg):
    (N, E), k = logits.shape, cfg.num_experts_per_token
    ids, weights = logits.new_empty(N, k, dtype=torch.int64), logits.new_empty(N, k)
    library().router(
        logits.data_ptr(), bias.data_ptr(), cfg.moe_router_activation_func == "sigmoid", cfg.moe_renormalize,
        cfg.routed_scaling_factor, ids.data_ptr(), weights.data_ptr(), N, E, k,
    )  # fmt: skip
    return ids, weights


def _not_whole(z, ids, weights, experts, cfg):
    w13, w2 = experts.whole("w13"), experts.whole("w2")
    if w13 is None or w2 is None:
        return "packed experts, too large to be kept unpacked"
    if w13.dtype != w2.dtype or w13.dtype not in (torch.float32, torch.bfloat16):
        return f"experts in {w13.dtype} and {w2.dtype}"
    together = all(x.is_contiguous() for x in (ids, weights, w13, w2))
    return None if together else "choices or experts that are not contiguous"


@_op("experts", lambda z, *_: len(z), lambda z, ids, weights, experts, cfg: (z, weights), _not_whole)
def routed_experts(z, ids, weights, experts, cfg):
    (N, L), w13, w2 = z.shape, experts.whole("w13"), experts.whole("w2")
    out, scratch = z.new_empty(N, L), z.new_empty(3 * experts.inner + L)
    library().experts(
        z.data_ptr(), z.stride(0), ids.data_ptr(), weights.data_ptr(), w13.data_ptr(), w2.data_ptr(),
        w13.dtype == torch.bfloat16, *_betas(cfg), scratch.data_ptr(), out.data_ptr(), N, ids.shape[1], len(w13), L,
        experts.inner,
    )  # fmt: skip
    return out


# ---------------------------------------------------------------- KDA


def _float(qkv, gate, r, b, w, S, conv, *_):
    return qkv, gate, r, b, w.conv, w.A_log, w.dt_bias, w.o_norm, S, conv


def _other_pages(qkv, gate, r, b, w, S, conv, src, dst, past):
    d = S.shape[-1]
    indices = (src.dtype, dst.dtype, past.dtype) == (torch.int64, torch.int64, torch.int32)
    return None if indices and S.stride()[1:] == (d * d, d, 1) else "pages of another kind"


def _token(qkv, gate, r, b, w, state, state_to, src, dst, past):
    """One token of B sequences; state, state_to: (S, conv) that are read and written."""
    B, h, d = len(qkv), *state[0].shape[1:3]
    strides = _array(ctypes.c_int64, 4)(*[x.stride(0) for x in (qkv, gate, r, b)])
    out, scratch = qkv.new_empty(B, h * d), qkv.new_empty(3 * h * d + 2 * d)
    places = [
        (S.data_ptr(), conv.data_ptr(), _array(ctypes.c_int64, 3)(S.stride(0), conv.stride(0), conv.stride(1)))
        for S, conv in (state, state_to)
    ]
    library().kda_decode(
        *(x.data_ptr() for x in (qkv, gate, r, b)), strides,
        *(x.data_ptr() for x in (w.conv, w.A_log, w.dt_bias, w.o_norm)), w.eps, w.lower_bound or 0,
        *places[0], *places[1], src.data_ptr(), src.stride(0), dst.data_ptr(), dst.stride(0), past.data_ptr(),
        scratch.data_ptr(), out.data_ptr(), B, h, d, w.conv.shape[1],
    )  # fmt: skip
    return out


@_op("kda_decode", lambda qkv, *_: len(qkv), _float, _other_pages)
def kda_decode(qkv, gate, r, b, w, S, conv, src, dst, past):
    return _token(qkv, gate, r, b, w, (S, conv), (S, conv), src, dst, past)


def _verify_pages(qkv, gate, r, b, w, S, conv, src, past, T, raw):
    return _other_pages(qkv, gate, r, b, w, S, conv, src, src, past)


@_op("kda_verify", lambda qkv, *_: len(qkv), _float, _verify_pages)
def kda_verify(qkv, gate, r, b, w, S, conv, src, past, T, raw):
    """Token by token, as `kda_decode`, so that bits are the same; the states lie in memory of its own."""
    torch.cat([qkv, r, b], dim=-1, out=raw)
    B, rows = len(past), [x.unflatten(0, (-1, T)) for x in (qkv, gate, r, b)]
    own = S.new_empty(B, *S.shape[1:]), conv.new_empty(B, *conv.shape[1:])
    at, one = torch.arange(B), torch.ones(B, dtype=torch.int32)
    out = [_token(*(x[:, 0] for x in rows), w, (S, conv), own, src, at, torch.where(src < 0, 0, past))]
    out += [_token(*(x[:, t] for x in rows), w, own, own, at, at, one) for t in range(1, T)]
    return torch.stack(out, dim=1).flatten(0, 1)


def _commit_tensors(raw, weights, pool, *_):
    return raw, *(x for w in weights for x in w[:4]), *(x for x in pool.state(0))


def _commit_pages(raw, weights, pool, src, dst, past, accepted, T):
    S = pool.state(0)[0]
    d = S.shape[-1]
    return None if S.stride()[1:] == (d * d, d, 1) else "pages of another kind"


@_op("kda_commit", lambda raw, *_: raw.shape[1], _commit_tensors, _commit_pages)
def kda_commit(raw, weights, pool, src, dst, past, accepted, T):
    one = torch.ones_like(past)
    takes = [torch.where((accepted > t)[:, None], dst, -1) for t in range(T)]
    none = ((accepted <= 0)[:, None] & (dst >= 0) & (dst != src)).any()
    for i, w in enumerate(weights):
        state, group, hd = pool.state(i), pool.group(i), len(w.dt_bias)
        rows = [x.unflatten(0, (-1, T)) for x in raw[i].split([3 * hd, hd, len(w.A_log)], dim=-1)]
        if none:
            idle = (accepted <= 0) & (dst[:, group] >= 0)
            for x in state:
                fresh = ((past == 0) | (src[:, group] < 0))[idle].view(-1, *[1] * (x.ndim - 1))
                x[dst[idle, group]] = x[src[idle, group].clamp(min=0)].masked_fill(fresh, 0)
        for t, to in enumerate(takes):
            qkv, r, b = (x[:, t] for x in rows)
            _token(qkv, r, r, b, w, state, state, (dst if t else src)[:, group], to[:, group], one if t else past)


# ---------------------------------------------------------------- MLA


@_op("latent_write", lambda kv, *_: len(kv), lambda kv, norm, eps, stored, *_: (kv, norm, stored))
def latent_write(kv, norm, eps, stored, slots, scale):
    rank = len(norm)
    library().latent_write(
        kv.data_ptr(), kv.stride(0), norm.data_ptr(), eps, stored.data_ptr(), slots.data_ptr(), len(kv), rank,
        kv.shape[1] - rank,
    )  # fmt: skip


def _other_table(q, stored, rank, part, *_):
    there = part.table.dtype == part.past.dtype == torch.int32 and stored.is_contiguous()
    return None if there else "a page table of another kind"


@_op("mla_decode", lambda q, *_: len(q) * q.shape[1], lambda q, stored, *_: (q, stored), _other_table)
def mla_decode(q, stored, rank, part, scale, row_scale):
    B, T, heads, width = q.shape
    q, new = q.contiguous(), q.new_empty
    o, lse, scores = new(B, T, heads, rank), new(B, T, heads), new(heads, part.longest)
    library().mla_decode(
        q.data_ptr(), stored.data_ptr(), part.table.data_ptr(), part.past.data_ptr(), scale, scores.data_ptr(),
        o.data_ptr(), lse.data_ptr(), B, T, heads, rank, width - rank, part.table.stride(0), part.page_size,
        part.longest, part.first,
    )  # fmt: skip
    return o, lse
