"""Behind train.py: Muon; what makes a step quick on a GPU; experts trained as the MXFP4 they are stored in."""

import itertools
import re

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

import moe
from attnres import attnres_norm
from kda import KDA, kda_chunked


class Muon(torch.optim.Optimizer):
    """Momentum, its matrices replaced by the nearest orthogonal ones (Jordan et al. 2024; the scale, which makes steps
    as large as AdamW's, and weight decay from Liu et al. 2025, arXiv 2502.16982).

    params: of shape [..., out, in]; a fused one has an attribute `parts`: the sizes of its parts along `out`, each a
    matrix of its own. Matrices of one shape are orthogonalized together.
    """

    def __init__(self, params, lr, weight_decay, momentum=0.95):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, momentum=momentum))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                if not self.state[p]:
                    self.state[p]["momentum"] = torch.zeros_like(p)
            state = [self.state[p]["momentum"] for p in params]
            torch._foreach_lerp_(state, [p.grad for p in params], 1 - group["momentum"])
            updates = torch._foreach_lerp([p.grad for p in params], state, group["momentum"])
            shapes = {}
            for p, u in zip(params, updates):
                sizes = getattr(p, "parts", p.shape[-2])
                for matrix, update in zip(p.split(sizes, -2), u.split(sizes, -2)):
                    shapes.setdefault(update.shape[-2:], []).append((matrix, update.reshape(-1, *update.shape[-2:])))
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            for (m, n), pairs in shapes.items():
                matrices, updates = zip(*pairs)
                new = orthogonal(torch.cat(updates)).mul_(-0.2 * group["lr"] * max(m, n) ** 0.5)
                new = new.split([len(u) for u in updates])
                torch._foreach_add_(list(matrices), [u.view(p.shape) for p, u in zip(matrices, new)])


def orthogonal(g, steps=5):
    """g [N, m, n] -> U V^T of its singular value decomposition U S V^T, about: Newton-Schulz in bfloat16 on a GPU."""
    x = g.to(torch.bfloat16 if g.is_cuda else torch.float32)
    x = x.mT if g.shape[-2] > g.shape[-1] else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        A = x @ x.mT
        x = 3.4445 * x + (-4.7750 * A + 2.0315 * A @ A) @ x
    return (x.mT if g.shape[-2] > g.shape[-1] else x).to(g.dtype)


def make_optimizers(model, opt):
    """Muon for the matrices of the layers, AdamW for all else."""
    for module in model.modules():
        if isinstance(module, KDA):
            module.in_proj.weight.parts = [module.heads * module.dim] * 3 + module.sizes[1:]
        elif hasattr(module, "sizes"):
            module.in_proj.weight.parts = [n for n in module.sizes if n]
        elif isinstance(module, moe.MLP):
            module.in_proj.weight.parts = module.in_proj.weight.shape[0] // 2
        elif isinstance(module, moe.Experts):
            module.w13.parts = module.inner
    matrices, rest = [], []
    for name, p in model.named_parameters():
        matrix = p.ndim >= 2 and 1 not in p.shape and not re.search("conv|embed|lm_head", name)
        (matrices if matrix else rest).append(p)
    rates = torch.tensor([opt.lr, opt.adam_lr], device=rest[0].device).unbind()  # tensors: a graph reads them again
    fast = {"fused": True, "capturable": True} if rest[0].is_cuda else {"foreach": False}
    adam = torch.optim.AdamW(rest, rates[1].clone(), (0.9, 0.95), weight_decay=0.0, **fast)
    return Muon(matrices, rates[0].clone(), opt.weight_decay), adam


def grouped_experts(z, ids, weights, experts, cfg):
    """The op `experts` in bfloat16: the rows, sorted by expert, in two grouped products. The host never waits."""
    k, load = ids.shape[1], torch.zeros(cfg.num_experts, dtype=torch.int32, device=z.device)
    order = ids.flatten().argsort()
    ends = load.scatter_add(0, ids.flatten(), torch.ones_like(ids.flatten(), dtype=torch.int32)).cumsum(0).int()
    rows = F.grouped_mm(z.bfloat16()[order // k], experts.w13.bfloat16().mT, offs=ends)
    y = F.grouped_mm(moe.activation(*rows.chunk(2, dim=-1), cfg), experts.w2.bfloat16().mT, offs=ends)
    y = y[order.argsort()].unflatten(0, ids.shape)  # back to token by token
    return (y.float() * weights[..., None]).sum(1).to(z.dtype)


def fast_ops(device, frozen):
    """What training replaces on a GPU by kernels.use: {op: function}."""
    if device.type != "cuda":
        return {}
    compiled = {"kda_recurrence": kda_chunked}
    if not frozen:  # then drafts of several lengths run, and each would be compiled
        compiled |= {"attnres": attnres_norm.torch_path, "gated_act": moe.gated_act.torch_path}
    torch._dynamo.config.recompile_limit = 64  # AttnRes: one for each number of snapshots
    return {op: torch.compile(f, dynamic=False) for op, f in compiled.items()} | {"experts": grouped_experts}


class Graphed:
    """A function of tensors, whose shapes stay as they are, as one CUDA graph: launched op by op it waits for the host.
    The first calls run as they are, and so do all on a CPU."""

    def __init__(self, run, device):
        self.run, self.calls, self.graph = run, 0 if device.type == "cuda" else None, None

    def __call__(self, *inputs):
        if self.calls is None:
            return self.run(*inputs)
        self.calls += 1
        if self.calls <= 3:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self.run(*inputs)
            return torch.cuda.current_stream().wait_stream(side)
        if self.graph is None:
            self.inputs, self.graph = [x.clone() for x in inputs], torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.run(*self.inputs)
        for static, x in zip(self.inputs, inputs):
            static.copy_(x)
        self.graph.replay()


# ---------------------------------------------------------------- training what will be quantized


class FakeMXFP4(nn.Module):
    """Parametrization: a float32 weight reads as what MXFP4 makes of it; its gradient passes straight through.

    Equal to mxfp4_unpack(*mxfp4_pack(w)) for groups whose largest magnitude is 0 or at least 2^-124, and fast.
    """

    def forward(self, w):
        """w [..., in] -> the same shape, rounded."""
        with torch.no_grad():
            groups = w.unflatten(-1, (-1, moe.GROUP))
            # amax = 1.m 2^e: scale 2^(e-2), or twice that where 1.m > 1.5 (amax > 6 scale); read off the float's bits
            bits = groups.abs().amax(-1, keepdim=True).view(torch.int32)
            scale = ((((bits + 0x3FFFFF) >> 23) - 2).clamp(min=1) << 23).view(torch.float32)
            x = groups / scale
            gap = 0.5 * (1.0 + (x.abs() >= 2)) * (1.0 + (x.abs() >= 4))  # between neighbours in FP4: 0.5, 1, 2
            rounded = ((x / gap).round() * gap * scale).flatten(-2)  # ties to even
        return w + (rounded - w).detach()  # exactly `rounded`, which is 0 or within a factor of 2 of w


def quantize(model, on):
    """Puts FakeMXFP4 on all expert stacks, or takes it off and leaves the rounded values; same Parameter objects."""
    for (_, experts), name in itertools.product(model.expert_stacks(), ("w13", "w2")):
        if on and not parametrize.is_parametrized(experts, name):
            parametrize.register_parametrization(experts, name, FakeMXFP4())
        elif not on and parametrize.is_parametrized(experts, name):
            parametrize.remove_parametrizations(experts, name, leave_parametrized=True)
