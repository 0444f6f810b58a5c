"""Speculative decoding by depth and batch: tiny/ with its real acceptance, and a slice of K3 at full width."""

import dataclasses
import time
from functools import partial

import torch
from tqdm import tqdm

from benchmarks.report import print_table
from benchmarks.step import chunks_at, config, experts_hit, random_model, step_bytes
from benchmarks.timing import events_ms, median_ms
from cache import PagePool, Step
from draft import MTP, Depth
from engine import Engine, SamplingParams
from model import K3
from runner import Runner
from sampling import Choice

RIGHT = 0.75  # synthetic: how often a draft of the slice is right, given that those before it were
CONTEXT = 1024  # tokens behind each sequence of the slice
OPENINGS = ("Once upon a time", "The king said", "There was an old woman", "In the forest", "She asked him", "The wolf",
            "When the morning came", "A poor boy")  # fmt: skip
LAYERS = 93  # of K3
COLUMNS = "model sampling batch depth tok_s speedup per_cycle cycle_ms GB of_copy at_93_layers".split()


# ---------------------------------------------------------------- tiny/, through the engine


def tell(engine, prompts, params):
    """-> tokens/s, the answers."""
    engine.cache.clear()
    begin = time.perf_counter()
    answers = [out.token_ids for out in engine.generate(prompts, params)]
    return sum(map(len, answers)) / (time.perf_counter() - begin), answers


def warm(engine, prompts, params):
    """Until nothing is compiled or captured any more, in three runs: "auto" tries another depth now and then."""
    quiet = 0
    for _ in range(20):
        before = engine.runner.captures
        engine.generate(prompts, params)
        quiet = quiet + 1 if engine.runner.captures == before else 0
        if quiet == (3 if engine.runner.captures else 1):
            return


def stories(args, model, batches, temperatures, new):
    """Rows of tiny/: every depth, and "auto"."""
    depths = [0, 3, "auto"] if args.quick else [*args.depths, "auto"]
    rows, bar = [], tqdm(total=len(batches) * len(temperatures) * len(depths), leave=False, unit=" rows")
    for temperature in temperatures:
        params = SamplingParams(max_tokens=new, temperature=temperature, seed=1, ignore_eos=True)
        for batch in batches:
            prompts, want, engines = [OPENINGS[i % len(OPENINGS)] for i in range(batch)], None, {}
            for depth in depths:
                draft = dict(draft="mtp", draft_tokens=depth) if depth else {}
                engine = engines[depth] = Engine(model, tokenizer=args.model, num_pages=8 * batch + 40, **draft)
                warm(engine, prompts, params)
            best = dict.fromkeys(depths, 0.0)
            for _ in range(1 if args.quick else 3):
                for depth in depths:
                    speed, answers = tell(engines[depth], prompts, params)
                    best[depth], want = max(best[depth], speed), want or answers
                    if answers != want and args.device == "cpu":  # in bfloat16 a batch decides between near equals
                        raise ValueError(f"{depth} drafts changed an answer")
            for depth in depths:
                stats = engines[depth].stats
                row = dict.fromkeys(COLUMNS) | {"model": "tiny/", "sampling": f"temperature {temperature:g}"}
                row |= {"batch": batch, "depth": depth, "tok_s": best[depth], "speedup": best[depth] / best[0]}
                rows.append(row | {"per_cycle": stats.get("tokens_per_cycle") if depth else 1.0})
                bar.update()
    bar.close()
    return rows


# ---------------------------------------------------------------- the slice, cycle by cycle


def mtp_model(seed):
    """`bench.py step`'s four layers of K3, and an MTP layer."""
    return random_model(dataclasses.replace(config(), num_nextn_predict_layers=1), seed)


def slice_rows(args, batches, depths):
    """Rows of the slice: cycles as graphs, and the same without the MTP layer, from which that of 93 layers follows."""
    model, bandwidth = mtp_model(args.seed), args.card["copy_bytes_s"]
    pages = 2 * max(batches) * PagePool(model.cfg, 0, torch.bfloat16, "meta", mtp=True).pages_for(CONTEXT + 8)
    pool = PagePool(model.cfg, pages, torch.bfloat16, "cuda", mtp=True)
    for slab in pool.slabs:
        slab.view(torch.bfloat16).normal_(0, 0.3)
    runner, without, rows = Runner(model, pool, True, MTP(model, pool)), Runner(model, pool, True), []
    for batch in batches:
        auto, mine = Depth("auto"), []
        auto.right[:] = RIGHT
        for depth in tqdm(depths, leave=False, unit=" depths"):
            chunks = chunks_at(pool, CONTEXT, [1 + depth] * batch)
            for chunk in chunks:
                chunk.drafts = depth
            ids = torch.randint(model.cfg.vocab_size, (batch * (1 + depth),)).numpy()
            before = [torch.randn(model.cfg.hidden_size, device="cuda") for _ in chunks] if depth else ()
            step = Step.decode(chunks, ids, [Choice(room=100)] * batch, before)
            used = sum(experts_hit(model, partial(runner.forward, step)))
            ms = cycle_ms(runner, step)
            main = cycle_ms(without, step) if depth else ms
            hidden = torch.randn(batch * (1 + depth), model.cfg.hidden_size, device="cuda")
            head = median_ms([lambda hidden=hidden: model.logits(hidden)])
            layer = (main - head) / model.cfg.num_hidden_layers
            nbytes, tokens = step_bytes(model, batch, CONTEXT, used, depth), sum(RIGHT**j for j in range(depth + 1))
            auto.costs.setdefault("slice", {})[depth] = ms
            row = {"model": "slice of K3", "sampling": f"greedy, {RIGHT:.0%} right", "batch": batch, "depth": depth}
            row |= {"tok_s": batch * tokens / ms * 1e3, "per_cycle": tokens, "cycle_ms": ms, "GB": nbytes / 1e9}
            row |= {"whole_ms": ms + (LAYERS - model.cfg.num_hidden_layers) * layer, "main_ms": main, "head_ms": head}
            mine.append(row | {"of_copy": ms / (nbytes / bandwidth * 1e3)})
            for each in (runner, without):
                each.graphs.clear()
        for row in mine:
            row["speedup"] = row["tok_s"] / mine[0]["tok_s"]
            row["at_93_layers"] = row["per_cycle"] * mine[0]["whole_ms"] / row["whole_ms"]
        best = auto.best("slice", depths)
        rows += [*mine, next(r for r in mine if r["depth"] == best) | {"depth": f"auto: {best}"}]
    return rows


def cycle_ms(runner, step):
    graph = runner.graph(step)
    if graph is None:
        raise ValueError(f"the cycle could not be captured: {runner.stats['graphs_off']}")
    graph(step)
    return events_ms(graph.graph.replay)


@torch.inference_mode()
def spec(args):
    """Drafting by depth and batch: committed tokens/s against no drafts.

    tiny/ runs through the engine, with the drafts of its own MTP layer; on a CPU every answer is checked against that
    without drafts. On a GPU also four layers of K3 at full width and an MTP layer, with random weights: the time of a
    whole cycle (draft, verify, accept, commit) as one CUDA graph; the bytes that it must move over the card's copy
    bandwidth are its floor (of_copy: time over floor); tokens/s assume that a draft is right in 75 % of cases. at 93
    layers: the speed-up of the whole of K3, if 89 layers more take 89 times as long as one of these four, which is what
    the cycle without the MTP layer and the head takes over four.
    """
    gpu = args.device == "cuda"
    if not gpu:
        torch.set_num_threads(1)
    model = K3.from_pretrained(args.model, torch.bfloat16 if gpu else torch.float32, args.device, progress=False)
    batches = args.batches or ((1, 8, 32) if gpu else (1, 4))
    rows = stories(args, model, batches, (0.0, 0.8), 64 if args.quick else args.tokens)
    del model
    if gpu:
        rows += slice_rows(args, args.batches or (1, 4, 16), (0, 1, 3) if args.quick else args.depths)
    print_table(rows, COLUMNS)
    return rows


def plot(plt, rows):
    """Speed-up over depth, a line for each model and batch."""
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for key in dict.fromkeys((r["model"], r["sampling"], r["batch"]) for r in rows):
        mine = [r for r in rows if (r["model"], r["sampling"], r["batch"]) == key and isinstance(r["depth"], int)]
        axes.plot([r["depth"] for r in mine], [r["speedup"] for r in mine], marker="o", label=", ".join(map(str, key)))
    axes.axhline(1, color="black", linestyle="--")
    axes.set(xlabel="drafts a cycle", ylabel="committed tokens/s over those without drafts", ylim=0)
    axes.legend(fontsize=7)
    axes.grid(alpha=0.3)
    return figure
