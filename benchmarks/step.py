"""Whole steps of a slice of K3 at full width: four layers (KDA, KDA, KDA, MLA), each with all 896 experts."""

import dataclasses
from collections import Counter
from functools import partial

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.report import print_table
from benchmarks.timing import events_ms
from cache import Chunk, PagePool, Step
from engine import TINY
from model import K3, K3Config
from moe import MoE
from runner import Runner
from sampling import Choice
from tokenizer import Tokenizer

CONTEXTS, BATCHES = (1024, 16384, 131072), (1, 2, 4, 8, 16, 32, 64)
MIXED = 512  # prompt tokens in a mixed step
REST = ("experts_hit", "with_host_ms", "GB", "of_copy", "target")
TEXT = "Once upon a time there was a king who had twelve daughters, and each was more beautiful than the other. "


def config():
    """K3 with four layers: three KDA and one MLA, all with MoE, in one AttnRes block."""
    cfg = K3Config.k3()
    attn = cfg.linear_attn_config | {"kda_layers": [1, 2, 3], "full_attn_layers": [4]}
    return dataclasses.replace(cfg, num_hidden_layers=4, first_k_dense_replace=0, linear_attn_config=attn)


def random_model(cfg, seed=0):
    """A bf16 model with random weights and packed experts, made on the GPU."""
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        model = K3(cfg)
        for _, experts in model.expert_stacks():
            for name in ("w13", "w2"):
                shape = getattr(experts, name).shape
                packed, scale = (torch.empty(*shape[:2], shape[2] // n, dtype=torch.uint8) for n in (2, 32))
                experts.set_packed(name, packed, scale)
    torch.set_default_dtype(torch.float32)
    model = model.to_empty(device="cuda").eval()
    torch.manual_seed(seed)
    for name, p in model.named_parameters():
        if name.endswith("norm.weight") or name.endswith("norm_weight"):
            torch.nn.init.ones_(p)
        elif p.ndim > 1:
            p.data.normal_(0, p.shape[-1] ** -0.5)
        elif "bias" not in name or name.endswith("dt_bias"):  # the routers' stays zero: even choices
            p.data.uniform_(-1, 0)
        else:
            p.data.zero_()
    for _, experts in model.expert_stacks():
        for name, b in experts.named_buffers():
            b.random_(118, 122) if name.endswith("_scale") else b.random_(0, 256)
    return model.requires_grad_(False)


def tiny_concentration():
    """How unevenly tiny/ uses its experts on text: number of experts times sum of squared loads; 1 is uniform."""
    model = K3.from_pretrained(TINY, dtype=torch.float32, device="cuda", progress=False)
    ids, loads = torch.tensor([Tokenizer.from_pretrained(TINY).encode(TEXT * 4)], device="cuda"), []

    def note(module, inputs, output):
        load = output[0].flatten().bincount(minlength=model.cfg.num_experts).double()
        loads.append(len(load) * (load / load.sum()).square().sum())

    gates = [layer.ffn.gate for _, layer in model.decoder_layers() if isinstance(layer.ffn, MoE)]
    hooks = [gate.register_forward_hook(note) for gate in gates]
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    return float(torch.stack(loads).mean())


def skew(model, concentration, seed=0):
    """Sets the routers' correction bias so that the choices of random inputs have this concentration; returns it."""
    cfg, draw = model.cfg, torch.Generator(device="cuda").manual_seed(seed)
    p = torch.randn(4096, cfg.num_experts, device="cuda", generator=draw).sigmoid()
    z = torch.randn(cfg.num_experts, device="cuda", generator=draw)
    low, high = 0.0, 1.0
    for _ in range(20):
        scale = (low + high) / 2
        load = (p + scale * z).topk(cfg.num_experts_per_token).indices.flatten().bincount(minlength=len(z)).double()
        found = float(len(z) * (load / load.sum()).square().sum())
        low, high = (scale, high) if found < concentration else (low, scale)
    for _, layer in model.decoder_layers():
        layer.ffn.gate.e_score_correction_bias.copy_(scale * z)
    return found


def step_bytes(model, batch, context, experts, drafts=0):
    """Bytes that a decode step must move: every weight outside the experts but the embedding, the MTP layer's and the
    head's once a draft, the packed matrices of so many `experts` (over all layers and drafts), the latent rows, and the
    states of KDA, read and written.
    """
    cfg = model.cfg
    size = {name: p.numel() * p.element_size() for name, p in model.named_parameters() if ".inert." not in name}
    mtp, head = sum(n for name, n in size.items() if name.startswith("mtp.")), size["lm_head.weight"]
    main = sum(size.values()) - mtp - size["embed_tokens.weight"]
    packed = sum(b[0].numel() for b in model.expert_stacks()[0][1].buffers())
    rows = (len(cfg.mla_layers) + drafts) * context * (cfg.kv_lora_rank + cfg.qk_rope_head_dim) * 2
    state = len(cfg.kda_layers) * 2 * 4 * cfg.kda_heads * cfg.kda_head_dim**2
    return main + drafts * (mtp + head) + experts * packed + batch * (rows + state)


def experts_hit(model, run):
    """Distinct experts that each call of a MoE layer uses in a run."""
    found = []
    note = lambda module, inputs, output: found.append(output[0].unique().numel())
    hooks = [layer.ffn.gate.register_forward_hook(note) for _, layer in model.decoder_layers()]
    run()
    for hook in hooks:
        hook.remove()
    return found


def launches(call):
    """Kernels and copies that one call launches, by the profiler: Counter of names."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return Counter(e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA)


def chunks_at(pool, context, tokens):
    """A chunk of each of so many tokens, with `context` tokens behind it, and pages of its own in random order."""
    pages, out = torch.randperm(pool.num_pages).numpy(), []
    for n in tokens:
        need = pool.history_pages(context + n)
        mine, pages = pages[: need + pool.groups], pages[need + pool.groups :]
        out.append(Chunk(n, context, mine[:need], mine[need:], mine[need:]))
    return out


@torch.inference_mode()
def step(args):
    """Whole decode steps of four layers of K3 at full width (3 KDA, 1 MLA, 896 experts each), over batch and context.

    Random weights made on the GPU. A step is one CUDA graph from token ids to sampled tokens; bytes are all that it
    must read and write, the floor is the card's measured copy bandwidth. Experts are chosen evenly, and as unevenly as
    tiny/ chooses its own on text. Then steps that also read 512 tokens of a prompt, launched from the host, and what a
    step launches, layer by layer.
    """
    cfg, bandwidth = config(), args.card["copy_bytes_s"]
    model, rows = random_model(cfg, args.seed), []
    contexts, batches = ((1024,), (1, 4)) if args.quick else (CONTEXTS, BATCHES)
    probe = PagePool(cfg, 0, torch.bfloat16, "meta")
    need = lambda batch, context: batch * (probe.pages_for(context + MIXED) + 1)
    pages = int(torch.cuda.mem_get_info()[0] * 0.8) // probe.page_bytes
    pages = min(pages, max(need(b, c) for c in contexts for b in batches))
    pool = PagePool(cfg, pages, torch.bfloat16, "cuda")
    for slab in pool.slabs:
        slab.view(torch.bfloat16).normal_(0, 0.3)
    runner, concentration = Runner(model, pool, True), tiny_concentration()
    cases = [("even", c, b) for c in contexts for b in batches] + [("as tiny/", contexts[0], b) for b in batches]
    for choice, context, batch in tqdm([case for case in cases if need(case[2], case[1]) <= pages], leave=False):
        if choice != "even":
            skew(model, concentration, args.seed)
        ids = torch.randint(cfg.vocab_size, (batch,)).numpy()
        decode = Step.decode(chunks_at(pool, context, [1] * batch), ids, [Choice()] * batch)
        found = experts_hit(model, partial(runner.forward, decode))
        graph = runner.graph(decode)
        if graph is None:
            raise ValueError(f"the step could not be captured: {runner.stats['graphs_off']}")
        call = partial(graph, decode)
        ms, nbytes = events_ms(graph.graph.replay), step_bytes(model, batch, context, sum(found))
        row = {"step": f"decode, experts {choice}", "batch": batch, "context": context, "ms": ms}
        row["experts_hit"] = sum(found) / len(found)  # in a layer
        row |= {"with_host_ms": events_ms(call), "GB": nbytes / 1e9, "of_copy": nbytes / bandwidth / ms * 1e3}
        rows.append(row | {"target": 0.8 if batch == 1 else 0.7 if batch in (16, 64) else None})
        runner.graphs.clear()
    skew(model, 1.0)
    for batch in (0, *batches):
        chunks = chunks_at(pool, contexts[0], [1] * batch + [MIXED])
        ids = torch.randint(cfg.vocab_size, (batch + MIXED,)).numpy()
        mixed = Step(chunks, ids, [*range(batch)], [Choice()] * batch)
        row = {"step": f"{MIXED} prompt tokens too", "batch": batch, "context": contexts[0]}
        rows.append(row | {"ms": events_ms(partial(runner.forward, mixed)), **dict.fromkeys(REST)})
    print_table(rows, ["step", "batch", "context", "experts_hit", "ms", "with_host_ms", "GB", "of_copy", "target"])
    chunks, ids = chunks_at(pool, contexts[0], [1] * batches[0]), np.zeros(batches[0], dtype=np.int64)
    graph = runner.graph(Step.decode(chunks, ids, [Choice()] * batches[0]))
    names = launches(graph.graph.replay)
    copies = sum(n for name, n in names.items() if "copy" in name.lower() or "memcpy" in name.lower())
    total, layers = sum(names.values()), cfg.num_hidden_layers
    print(f"\na decode step launches {total} kernels, {total / layers:.1f} a layer, {copies} of them copies:")
    for name, count in names.most_common():
        print(f"{count:5}  {name[:110]}")
    return rows


def plot(plt, rows, card):
    """The bandwidth of decode steps over batch and context, and that of a copy."""
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for step, context in dict.fromkeys((r["step"], r["context"]) for r in rows if r["of_copy"]):
        mine = [r for r in rows if (r["step"], r["context"]) == (step, context)]
        speeds = [r["GB"] / r["ms"] for r in mine]
        axes.plot([r["batch"] for r in mine], speeds, marker="o", label=f"{context:,} tokens, {step.split(', ')[1]}")
    axes.axhline(card["copy_bytes_s"] / 1e12, color="black", linestyle="--", label="copy")
    axes.set(xlabel="sequences", ylabel="TB/s of all bytes a step must move", xscale="log", ylim=0)
    batches = sorted({r["batch"] for r in rows if r["of_copy"]})
    axes.set_xticks(batches, labels=batches)
    axes.minorticks_off()
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    return figure
