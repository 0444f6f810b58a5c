"""Stable LatentMoE: many small experts in a latent space, chosen per token, beside a shared expert; and the dense
layer.

    SiTU(a, u) = beta tanh(a / beta) sigmoid(a) * linear_beta tanh(u / linear_beta)      (hidden_act silu: silu(a) u)

    router:  p = sigmoid(x W_router) in float32; the top k of p + correction bias are chosen, ties to the lower id;
             weights = chosen p (without the bias), normalized to sum 1, times routed_scaling_factor
    z = x W_down_latent
    y = sum_e weight_e (SiTU(z W1_e, z W3_e) W2_e)
    out = RMSNorm(y) W_up_latent + shared(x)

The routed experts are nearly all of the model's bytes. They stay packed in memory as MXFP4 (OCP Microscaling Formats
v1.0): two 4-bit floats a byte and one power-of-two scale for 32 of them; only the experts that a batch uses are
unpacked. On a CPU all experts of a small model are unpacked once, and kept: at most UNPACKED bytes of a model.
"""

import contextlib
import functools

import torch
import torch.nn.functional as F
from torch import nn

import kernels
from layers import Linear, RMSNorm, no_autocast, randn, wide, wide_dtype

GROUP = 32  # inputs that share an MXFP4 scale
TOGETHER = 8  # experts unpacked at a time
UNPACKED = 256 << 20  # bytes
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # the magnitudes of the low three bits; bit 3 is the sign


def activation(a, u, cfg):
    """The gated activation of gate a and up projection u, computed in float32, in a's dtype."""
    x, y = wide(a), wide(u)
    if cfg.hidden_act == "silu":
        return (F.silu(x) * y).to(a.dtype)
    beta, linear = cfg.activation_situ_beta, cfg.activation_situ_linear_beta
    return (beta * torch.tanh(x / beta) * torch.sigmoid(x) * linear * torch.tanh(y / linear)).to(a.dtype)


@kernels.op("gated_act")
def gated_act(x, cfg):
    """x [N, 2 I], gate | up (a view of wider rows will do) -> their activation [N, I], contiguous."""
    return activation(*x.chunk(2, dim=-1), cfg)


# ---------------------------------------------------------------- MXFP4


def mxfp4_pack(w):
    """w [..., in] float, in a multiple of 32 -> packed uint8 [..., in/2] (low nibble = even input), scale uint8 [...,
    in/32].

    Each group takes the smallest power of two under which its largest magnitude is at most 6, and rounds to the nearest
    value, ties to the even code. A group that MXFP4 represents exactly comes back exactly. Raises ValueError on a value
    that is not finite.
    """
    if w.shape[-1] % GROUP or not w.isfinite().all():
        raise ValueError(f"MXFP4 packs finite rows of a multiple of {GROUP} values, not {tuple(w.shape)}")
    groups = w.double().unflatten(-1, (-1, GROUP))
    mantissa, exponent = torch.frexp(groups.abs().amax(-1))  # mantissa in [.5, 1); 6 = .75 * 2^3
    exponent = torch.where(mantissa > 0.75, exponent - 2, exponent - 3).clamp(-127, 127)
    magnitude = torch.ldexp(groups.abs(), -exponent[..., None]).clamp(max=6.0)
    table = torch.tensor(FP4, dtype=torch.float64, device=w.device)
    middle = (table[1:] + table[:-1]) / 2
    below, upto = torch.bucketize(magnitude, middle), torch.bucketize(magnitude, middle, right=True)
    code = torch.where(below % 2 == 0, below, upto)  # they differ only on a tie, by one
    code = (code + 8 * torch.signbit(groups)).flatten(-2).to(torch.uint8)
    return code[..., ::2] | code[..., 1::2] << 4, (exponent + 127).to(torch.uint8)


def mxfp4_unpack(packed, scale, dtype):
    """packed uint8 [..., in/2], scale uint8 [..., in/32] (s is 2^(s-127)) -> [..., in], exact in bf16 and wider."""
    pairs, powers = _tables(dtype, packed.device)
    values = pairs.index_select(0, packed.flatten().int()).view(dtype).view(*scale.shape, GROUP)
    powers = powers.index_select(0, scale.flatten().int()).view(*scale.shape, 1)
    return (values * powers).flatten(-2)


@functools.cache
def _tables(dtype, device):
    """Byte -> its two values as one word of twice dtype's size [256]; scale byte -> its power of two [256]."""
    values = torch.tensor(FP4 + tuple(-v for v in FP4), dtype=torch.float64)
    byte = torch.arange(256)
    pairs = torch.stack([values[byte & 15], values[byte >> 4]], dim=1).to(device, dtype)
    powers = torch.ldexp(torch.ones(256, dtype=torch.float64), byte - 127)
    powers[255] = float("nan")
    word = {2: torch.int32, 4: torch.int64, 8: torch.complex128}[dtype.itemsize]
    return pairs.view(word).flatten(), powers.to(device, dtype)


class Experts(nn.Module):
    """E experts' matrices: `w13` [E, 2I, L] (gate rows, up rows) and `w2` [E, L, I], each float or packed MXFP4.

    keep: bytes that may stay unpacked on a CPU, in bfloat16, which is exact. They are no part of the model's state, and
    follow its packed weights: a change that PyTorch counts (not one through `.data`) or a move to another device lets
    them go.
    """

    def __init__(self, num, width, inner, keep=0):
        super().__init__()
        self.inner, self.keep, self.values, self.unpacked = inner, keep, 3 * num * width * inner, {}
        self.w13 = nn.Parameter(randn(num, 2 * inner, width, scale=0.5 * width**-0.5))
        self.w2 = nn.Parameter(randn(num, width, inner, scale=0.5 * inner**-0.5))

    def set_packed(self, name, packed, scale):
        """Replaces the float matrix `name` by its packed form (buffers: packed weights are not trained)."""
        setattr(self, name, None)
        self.register_buffer(f"{name}_packed", packed)
        self.register_buffer(f"{name}_scale", scale)

    def is_packed(self, name):
        return getattr(self, name) is None

    def matrices(self, name, ids, dtype):
        """The matrices of the experts ids, [in, out] each, in dtype; packed ones one by one, as they are asked for."""
        whole = self.whole(name)
        if whole is not None:
            matrices = whole.mT.unbind() if self.is_packed(name) else whole.to(dtype).mT.unbind()
            return (matrices[e].to(dtype) for e in ids)
        packed, scale = getattr(self, f"{name}_packed"), getattr(self, f"{name}_scale")
        groups = torch.tensor(ids, device=packed.device).split(TOGETHER)
        return (w for at in groups for w in mxfp4_unpack(packed[at], scale[at], dtype).mT)

    def whole(self, name):
        """The matrices of all experts, [E, out, in]; None where they are packed, and not kept unpacked (bfloat16)."""
        if not self.is_packed(name):
            return getattr(self, name)
        packed, scale = self._buffers[f"{name}_packed"], self._buffers[f"{name}_scale"]
        room = packed.is_cpu and 2 * self.values <= self.keep
        if not room or torch.is_grad_enabled() or packed.is_inference():
            return None
        kept, now = self.unpacked.get(name), (packed._version, scale._version)
        if kept is None or kept[0] is not packed or kept[1] is not scale or kept[2] != now:
            kept = self.unpacked[name] = packed, scale, now, mxfp4_unpack(packed, scale, torch.bfloat16)
        return kept[3]

    def _apply(self, *args, **kwargs):
        self.unpacked.clear()
        return super()._apply(*args, **kwargs)

    def __getstate__(self):
        return self.__dict__ | {"unpacked": {}}

    def published(self):
        """Published tensor name -> its shape. K3 has half a million of these: `view` makes the view of one."""
        names = {}
        for name, parts in ("w13", ("w1", "w3")), ("w2", ("w2",)):
            for suffix in ("_packed", "_scale") if self.is_packed(name) else ("",):
                for part in parts:
                    shape = tuple(self.view(f"0.{part}.weight{suffix}").shape)
                    names |= {f"{e}.{part}.weight{suffix}": shape for e in range(len(getattr(self, name + suffix)))}
        return names

    def view(self, name):
        """The view of a stacked tensor that holds a published one, as "3.w1.weight_packed". KeyError: not held so."""
        e, part, kind = name.split(".")
        stack = getattr(self, ("w2" if part == "w2" else "w13") + kind.removeprefix("weight"), None)
        if stack is None:
            raise KeyError(name)
        return {"w1": stack[int(e), : self.inner], "w2": stack[int(e)], "w3": stack[int(e), self.inner :]}[part]


@kernels.op("experts")
def routed_experts(z, ids, weights, experts, cfg):
    """z [N, L], ids [N, k] int64, weights [N, k] float32 -> sum over the k chosen experts, [N, L] in z's dtype.

    The choices are sorted by expert: each is one product of all its rows.
    """
    N, k = ids.shape
    if N == 1:
        chosen, sizes, rows = ids[0].tolist(), [1] * k, z.expand(k, -1)
    else:
        order = ids.flatten().argsort(stable=True)  # the choices by expert, token by token
        counts = ids.flatten().bincount(minlength=cfg.num_experts).tolist()
        chosen, sizes = zip(*((e, n) for e, n in enumerate(counts) if n))
        rows = z.index_select(0, order // k)
    x = _products(rows, sizes, experts.matrices("w13", chosen, z.dtype))
    y = _products(activation(*x.chunk(2, dim=-1), cfg), sizes, experts.matrices("w2", chosen, z.dtype))
    if N > 1:
        y = torch.empty_like(y).index_copy(0, order, y)
    return (wide(y).view(N, k, -1) * weights[..., None]).sum(1).to(z.dtype)


def _products(x, sizes, matrices):
    """Neighbouring rows of x, so many each, times a matrix each, [in, out]."""
    return torch.cat([torch.mm(rows, w) for rows, w in zip(x.split_with_sizes(sizes), matrices)])


@kernels.op("moe_in")
def in_projection(x, weight, num_experts):
    """x [N, H], weight [E + F, H], the router's rows first -> its logits [N, E] float32, the rest x W^T [N, F]."""
    # The logits in float64, then rounded: a float32 product may give equal rows logits that differ in the last bit by
    # how many tokens run together, and ties (by id) would be decided by that.
    router, others = weight.split_with_sizes([num_experts, len(weight) - num_experts])
    with no_autocast(x):
        logits = F.linear(x.double(), router.double()).to(torch.promote_types(x.dtype, torch.float32))
    return logits, F.linear(x, others)


class Router(nn.Module):
    """Chooses k of E experts a token by their logits; balanced without an auxiliary loss (arXiv 2412.19437)."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        bias = torch.zeros(cfg.num_experts, dtype=wide_dtype())
        self.e_score_correction_bias = nn.Parameter(bias, requires_grad=False)

    def forward(self, logits):
        """logits [N, E] -> expert ids [N, k] int64, weights [N, k] float32."""
        return route(logits, self.e_score_correction_bias, self.cfg)


@kernels.op("router")
def route(logits, bias, cfg):
    """logits [N, E], bias [E], float32 -> ids [N, k], weights [N, k]. Ties go to the lower id (and lower group)."""
    # In float64 too: the vectorized float32 sigmoid and its scalar tail differ in the last bit.
    p = logits.double().sigmoid() if cfg.moe_router_activation_func == "sigmoid" else logits.double().softmax(-1)
    p = p.to(logits.dtype)
    biased = p.detach() + bias
    if cfg.use_grouped_topk and cfg.num_expert_group > 1:
        groups = biased.unflatten(-1, (cfg.num_expert_group, -1))
        best = groups.gather(-1, top(groups, min(2, groups.shape[-1]))).sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter(-1, top(best, cfg.topk_group), True)
        biased = groups.masked_fill(~kept[..., None], -torch.inf).flatten(-2)
    ids = top(biased, cfg.num_experts_per_token)
    weights = p.gather(-1, ids)
    if cfg.moe_renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * cfg.routed_scaling_factor


def top(x, k):
    """The ids of the k largest along the last dim. Unlike torch.topk, equal values come in order of id."""
    return x.sort(dim=-1, descending=True, stable=True)[1][..., :k]


class MLP(nn.Module):
    """The dense feed-forward layer: (act(x W_gate, x W_up)) W_down."""

    def __init__(self, cfg, inner):
        super().__init__()
        self.cfg = cfg
        self.in_proj = Linear(cfg.hidden_size, 2 * inner)  # gate | up
        self.down_proj = Linear(inner, cfg.hidden_size)

    def forward(self, x):
        return self.down_proj(gated_act(self.in_proj(x), self.cfg))

    def published(self):
        """Published tensor name -> the view of our fused weights that holds it."""
        gate, up = self.in_proj.weight.chunk(2)
        return {"gate_proj.weight": gate, "up_proj.weight": up, "down_proj.weight": self.down_proj.weight}


@contextlib.contextmanager
def beside(x):
    """What is in the block runs beside what comes after it, until the function that it yields is called. For a single
    row on a GPU, where one kernel alone does not fill it; with more rows nothing is gained, and nothing happens.
    """
    if not x.is_cuda or len(x) > 1:
        yield lambda: None
        return
    main = torch.cuda.current_stream(x.device)
    side = _side_stream(main)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        yield lambda: main.wait_stream(side)


@functools.cache
def _side_stream(main):
    """One for each: it reuses its memory in its own order, and waits for nobody but `main`."""
    return torch.cuda.Stream(main.device)


class MoE(nn.Module):
    """The mixture-of-experts layer. Without routed_expert_hidden_size the experts work at full width."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.latent = cfg.routed_expert_hidden_size
        shared = cfg.num_shared_experts * cfg.moe_intermediate_size
        self.sizes = [cfg.num_experts, self.latent or 0, shared, shared]  # router | latent | shared gate | shared up
        self.gate = Router(cfg)
        self.in_proj = Linear(cfg.hidden_size, sum(self.sizes))
        layers = sum(cfg.is_moe(n) for n in range(cfg.num_hidden_layers + cfg.num_nextn_predict_layers))
        width, inner = self.latent or cfg.hidden_size, cfg.moe_intermediate_size
        self.experts = Experts(cfg.num_experts, width, inner, keep=UNPACKED // layers)
        if cfg.latent_moe_use_norm:
            self.routed_expert_norm = RMSNorm(self.latent or cfg.hidden_size, cfg.rms_norm_eps)
        if self.latent:
            self.routed_expert_up_proj = Linear(self.latent, cfg.hidden_size)
        self.shared_down_proj = Linear(shared, cfg.hidden_size)

    def forward(self, x):
        """x [N, H] -> [N, H]."""
        logits, features = in_projection(x, self.in_proj.weight, self.cfg.num_experts)
        z, shared = features.split_with_sizes([self.sizes[1], 2 * self.sizes[2]], dim=-1)
        with beside(x) as join:
            shared = self.shared_down_proj(gated_act(shared, self.cfg)) if self.cfg.num_shared_experts else None
        y = routed_experts(z if self.latent else x, *self.gate(logits), self.experts, self.cfg)
        if self.cfg.latent_moe_use_norm:
            y = self.routed_expert_norm(y)
        if self.latent:
            y = self.routed_expert_up_proj(y)
        join()
        return y if shared is None else y + shared

    def published(self):
        """Published tensor name -> the view of our fused weights that holds it; under "experts." all of its experts."""
        router, down, gate, up = self.in_proj.weight.split(self.sizes)
        names = {"gate.weight": router, "gate.e_score_correction_bias": self.gate.e_score_correction_bias}
        if self.latent:
            names |= {
                "routed_expert_down_proj.weight": down,
                "routed_expert_up_proj.weight": self.routed_expert_up_proj.weight,
            }
        if self.cfg.latent_moe_use_norm:
            names |= {"routed_expert_norm.weight": self.routed_expert_norm.weight}
        if self.cfg.num_shared_experts:
            shared = {"gate_proj": gate, "up_proj": up, "down_proj": self.shared_down_proj.weight}
            names |= {f"shared_experts.{name}.weight": w for name, w in shared.items()}
        return names | {"experts.": self.experts}
