"""Measures the engine: `agent` replays conversations of agents, `host` the cost on the host beside the model."""

import dataclasses
import heapq
import itertools
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.report import print_table
from cache import FP8, PagePool
from engine import Engine, SamplingParams
from model import K3, K3Config
from prefix import PrefixCache
from tokenizer import CONTROL_SLOTS

# ---------------------------------------------------------------- agent: the trace
# Lengths are in 1/128 of a page of the pool: with the usual page of a small model (128 tokens), they are tokens.

SYSTEM, TOOLS = 192, 464  # the system prompt and the description of the tools, shared by all conversations
TEXT = (40, 200)  # what a user says or a tool returns, per turn: shorter ones are likelier
ANSWER = (8, 16)
PAUSE = (0, 40)  # engine steps between the end of a turn and the client's next request
BRANCHES = 0.15  # share of the turns that send 2 or 3 requests at once
EDITS = 0.1  # share of the turns that change one of the last three turns and go on from there


@dataclass(frozen=True)
class Turn:
    """What one client sends next: `pause` engine steps after its last answer, with its last `back` turns taken back.

    texts: what follows the history, one for each request of the turn; the conversation goes on with the first.
    answers: how many tokens each of them writes.
    """

    pause: int
    back: int
    texts: list
    answers: list


def make_trace(seed, conversations, turns, vocab, scale=1):
    """-> (shared ids, [[Turn] per conversation]), the same for the same arguments. scale: tokens per unit of length."""
    draw = random.Random(seed)
    ids = lambda n: draw.choices(range(vocab - CONTROL_SLOTS if vocab > CONTROL_SLOTS + 1 else vocab), k=n)
    between = lambda low, high: max(round(low * (high / low) ** draw.random() ** 2 * scale), 1)
    shared, talks = ids(round((SYSTEM + TOOLS) * scale)), []
    for _ in range(conversations):
        talk, texts = [], []  # texts: of the turns that still are the history
        for _ in range(turns):
            pause, back, text = draw.randint(*PAUSE), 0, ids(between(*TEXT))
            if texts and draw.random() < EDITS:  # the changed turn begins as before
                back = draw.randint(1, min(3, len(texts)))
                text = texts[-back][: draw.randrange(len(texts[-back]))] + text
                del texts[-back:]
            texts.append(text)
            others = draw.choice((1, 2)) if draw.random() < BRANCHES else 0
            sent = [text, *(ids(between(*TEXT)) for _ in range(others))]
            talk.append(Turn(pause, back, sent, [between(*ANSWER) for _ in sent]))
        talks.append(talk)
    return shared, talks


def client(shared, talk):
    """One conversation: yields (pause, [(prompt, answer length)]) and is sent the answers, which join the history."""
    history = [shared]
    for turn in talk:
        del history[len(history) - turn.back :]
        prompts = [history[-1] + text for text in turn.texts]
        answers = yield turn.pause, list(zip(prompts, turn.answers))
        history.append(prompts[0] + answers[0])


def lengths(trace):
    """(prompt length, answer length) of every request of a trace: they do not depend on the model."""
    found, (shared, talks) = [], trace
    for talk in talks:
        speaker, answers = client(shared, talk), None
        for turn in talk:
            found += [(len(prompt), n) for prompt, n in speaker.send(answers)[1]]
            answers = [[0] * n for n in turn.answers]
    return found


# ---------------------------------------------------------------- agent: the replay


def reusable(prompt, texts):
    """Theoretical reuse: how many leading tokens of `prompt` are those of one of `texts`, at most (integer arrays)."""
    best = 0
    for text in texts:
        n = min(len(prompt), len(text))
        if n > best and (prompt[:best] == text[:best]).all():
            different = np.flatnonzero(prompt[best:n] != text[best:n])
            best = best + int(different[0]) if len(different) else n
    return best


@dataclass
class Asked:
    """A request of the replay, and when what happened."""

    request: object  # the engine's
    added: float
    computed: int = 0  # the most tokens of it that were ever in the pool
    theory: int | None = None  # prompt tokens that it could reuse when it was admitted
    first: float = 0.0
    last: float = 0.0


def replay(engine, trace, concurrency, bar=None):
    """Runs a trace, `concurrency` conversations at a time -> [Asked], and the most pages that were taken at a time.

    Time is counted in engine steps and stands still while all clients pause, so a run can be repeated exactly. Theory
    is taken when a request is admitted: from all that has been computed by then, of requests that still run as well.
    """
    shared, talks = trace
    todo, arrivals, asked, open_, clock, peak = list(enumerate(talks))[::-1], [], [], {}, 0, 0

    def next_turn(number, speaker, answers=None):
        try:
            pause, requests = speaker.send(answers)
            heapq.heappush(arrivals, (clock + pause, number, speaker, requests))
        except StopIteration:
            next_conversation()

    def next_conversation():
        if todo:
            number, talk = todo.pop()
            next_turn(number, client(shared, talk))

    for _ in range(concurrency):
        next_conversation()
    while arrivals or open_:
        clock = clock if open_ else max(clock, arrivals[0][0])
        while arrivals and arrivals[0][0] <= clock:
            _, number, speaker, requests = heapq.heappop(arrivals)
            for prompt, n in requests:
                now = time.perf_counter()
                engine.add(prompt, SamplingParams(max_tokens=n, ignore_eos=True))
                asked.append(Asked(engine.waiting[-1], now))
            open_[number] = speaker, asked[len(asked) - len(requests) :]

        queued = [a for a in asked if a.theory is None]
        known = [a.request.tokens[: a.computed] for a in asked if a.computed] if queued else []
        grown = {out.rid for out in engine.step()}
        now, clock, peak = time.perf_counter(), clock + 1, max(peak, engine.pool.num_pages - engine.pool.free_pages)
        for a in queued:
            if a.request.admitted:
                a.theory = reusable(a.request.tokens[: a.request.out.prompt_tokens], known)
        for number, (speaker, group) in list(open_.items()):
            for a in group:
                a.computed = max(a.computed, a.request.computed)
                if a.request.out.rid in grown:
                    a.first, a.last = a.first or now, now
            if all(a.request.out.finish_reason for a in group):
                del open_[number]
                next_turn(number, speaker, [a.request.out.token_ids for a in group])
                if bar is not None:
                    bar.update(len(group))
    return asked, peak


def summary(engine, asked, seconds):
    """One row of the result. Speeds are of answers; "p10" of a speed is what 90 % of the requests get at least."""
    outs = [a.request.out for a in asked]
    prompts, theory = sum(out.prompt_tokens for out in outs), sum(a.theory for a in asked)
    reused = sum(out.cached_tokens for out in outs)
    first = np.percentile([(a.first - a.added) * 1e3 for a in asked], (50, 90, 99))
    speeds = [(len(a.request.out.token_ids) - 1) / (a.last - a.first) for a in asked if a.last > a.first]
    row = {"requests": len(asked), "prompt_tokens": prompts, "theory": theory / prompts, "reuse": reused / prompts}
    row |= {"of_theory": reused / theory if theory else 1.0}
    row |= dict(zip(("ttft_p50_ms", "ttft_p90_ms", "ttft_p99_ms"), map(float, first)))
    row |= dict(zip(("user_p50_tok_s", "user_p10_tok_s"), map(float, np.percentile(speeds or [0], (50, 10)))))
    row |= {"total_tok_s": sum(len(out.token_ids) for out in outs) / seconds, "seconds": seconds}
    return row | {name: engine.stats[name] for name in ("preemptions", "evicted", "offloaded", "restored")}


def agent(args):
    """Replays conversations of agents: prefix reuse, latency and speed, by concurrency and by size of the pool.

    All share a system prompt; turns grow, with pauses between; some branch into parallel requests, some change an
    earlier turn. Theory is what an unlimited cache could reuse that resumes at any token computed before a request is
    admitted. The run at --concurrency says how many pages hold everything; then it is repeated with parts of them,
    without and with a host tier. Prompts contain the answers: they depend on the model, but on nothing else.
    """
    model = _load(args)
    pool = PagePool(model.cfg, 0, model.norm.weight.dtype)
    scale = max(pool.page_size // 128, 1) * (0.25 if args.quick else 1)
    concurrency = args.concurrency or (2 if args.quick else 8)
    shape = args.conversations or (8 if args.quick else 16), args.turns or (6 if args.quick else 8)
    trace = make_trace(args.seed, *shape, model.cfg.vocab_size, scale)
    sizes = lengths(trace)
    longest, most = max(map(sum, sizes)), model.cfg.max_position_embeddings
    if longest > most:
        raise ValueError(f"the longest text has {longest} tokens, and the model reads {most}; give fewer --turns")
    ample = sum(pool.pages_for(sum(s)) + 2 * pool.groups + 1 for s in sizes)  # more than can be taken

    def run(pages, host_pages, concurrency, label):
        engine = Engine(model, num_pages=pages, host_pages=host_pages)
        with tqdm(total=len(sizes), desc=label, unit=" requests", leave=False) as bar:
            started = time.perf_counter()
            asked, peak = replay(engine, trace, concurrency, bar)
            row = summary(engine, asked, time.perf_counter() - started)
        return {"concurrency": concurrency, "pages": pages, "host_pages": host_pages} | row, peak

    Engine(model, num_pages=ample).generate([trace[0]] * 2, SamplingParams(max_tokens=2))  # the first run is slower
    by_concurrency, by_pool, full = [], [], 0
    for n in sorted({concurrency} | (set() if args.quick else {1, 2, 4, 8, 16})):
        row, peak = run(ample, 0, n, f"{n} at a time")
        by_concurrency.append({"sweep": "concurrency", "pool": None} | row)
        full = peak if n == concurrency else full
    for part, host_pages in [(1, 0), (4, ample)] if args.quick else itertools.product((1, 2, 4, 8), (0, ample)):
        pages = max(full // part, pool.pages_for(longest))
        row, _ = run(pages, host_pages, concurrency, f"pool 1/{part}{' + host' if host_pages else ''}")
        by_pool.append({"sweep": "pool", "pool": pages / full} | row)

    print(f"{shape[0]} conversations of {shape[1]} turns: {len(sizes)} requests, {row['prompt_tokens']} prompt tokens")
    print("theory, reuse: share of them; ttft: time to first token, ms; user, total: tokens/s; p10: what 90 % get")
    shown = [name for name in row if name not in ("concurrency", "pages", "host_pages", "requests", "prompt_tokens")]
    print("\nby conversations at a time, in a pool that never fills")
    print_table(by_concurrency, ["concurrency", *shown])
    print(f"\nby pool, {concurrency} conversations at a time; {full} pages of {pool.page_size} tokens hold everything")
    print_table(by_pool, ["pool", "pages", "host_pages", *shown])
    return by_concurrency + by_pool


def plot_agent(plt, rows):
    """Reuse and time to first token against pool size; speed per user against total speed."""
    fig, (reuse, first, speed) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for tier, name in ((0, "pool alone"), (1, "with host tier")):
        part = [r for r in rows if r["sweep"] == "pool" and bool(r["host_pages"]) == tier]
        x = [r["pages"] for r in part]
        reuse.plot(x, [r["reuse"] for r in part], "o-", label=name)
        for p, line in ((50, "o-"), (90, "o--")):
            first.plot(x, [r[f"ttft_p{p}_ms"] for r in part], line, color=f"C{tier}", label=f"P{p}, {name}")
    reuse.plot(x, [r["theory"] for r in part], "k:", label="theory")
    part = [r for r in rows if r["sweep"] == "concurrency"]
    speed.plot([r["total_tok_s"] for r in part], [r["user_p10_tok_s"] for r in part], "o-")
    for r in part:
        at = (r["total_tok_s"], r["user_p10_tok_s"])
        speed.annotate(f"{r['concurrency']}", at, xytext=(4, 4), textcoords="offset points")
    pages = "pages of the pool"
    reuse.set(xlabel=pages, ylabel="share of prompt tokens reused", ylim=(0, 1))
    first.set(xlabel=pages, ylabel="time to first token, ms", ylim=(0, None))
    speed.set(xlabel="tokens/s in all, by conversations at a time", ylabel="tokens/s that 90 % get", ylim=(0, None))
    reuse.legend()
    first.legend()
    return fig


# ---------------------------------------------------------------- host


class Stub:
    """Stands in for a K3 and computes nothing; `seconds` is the time spent in its own calls.

    Its sizes are those of one rank of K3 at TP8, so that pages and groups are too. Its logits have few columns: on a
    GPU the sampler's arithmetic is the device's, and the host pays for the calls alone.
    """

    def __init__(self, rows):
        k3 = K3Config.k3()
        linear = k3.linear_attn_config | {"num_heads": k3.linear_attn_config["num_heads"] // 8}
        self.cfg = dataclasses.replace(k3, linear_attn_config=linear)
        self.norm = SimpleNamespace(weight=torch.zeros(1, dtype=torch.bfloat16))
        self.rows, self.columns, self.seconds = torch.zeros(1, 8), torch.randn(rows, 256), 0.0

    def hidden(self, ids, batch):
        return self._timed(lambda: self.rows.expand(len(ids), -1))

    def logits(self, hidden):
        return self._timed(lambda: self.columns[: len(hidden)])

    def _timed(self, call):
        started = time.perf_counter()
        result = call()
        self.seconds += time.perf_counter() - started
        return result


def tree_bytes(cache, hidden_bytes):
    """Memory of a prefix cache: nodes, their arrays and dictionaries, snapshots with a hidden of so many bytes."""
    nodes, arrays, total = [cache.root], {}, 0
    for node in nodes:
        nodes += node.children.values()
        total += sys.getsizeof(node) + sys.getsizeof(node.children)
        found = [node.tokens, node.pages]
        if node.snapshot:
            found.append(node.snapshot.pages)
            tensor = 200 + hidden_bytes
            total += sys.getsizeof(node.snapshot) + sys.getsizeof(node.snapshot.__dict__) + tensor
        for array in found:
            arrays[id(array)] = sys.getsizeof(array)
            if array.base is not None:  # a part of an array keeps the whole alive
                arrays[id(array.base)] = sys.getsizeof(array.base)
    order = sum(map(sys.getsizeof, (cache.nodes, cache.host_nodes, cache.snapshots)))
    return total + order + sum(arrays.values())


def host(args):
    """The cost on the host beside the model, which is one that computes nothing: a step, a look-up, the tree's memory.

    Pages are those of K3 at TP8 with an FP8 latent (1,536 tokens); their memory is not allocated.
    """
    count, tokens = args.requests or (4 if args.quick else 64), args.tokens or (5000 if args.quick else 100_000)
    steps, turns = (20, 50) if args.quick else (300, 1000)
    stub = Stub(count)
    engine = Engine(stub, num_pages=1, max_batch=count, prefill_chunk=1 << 16)
    pool = PagePool(stub.cfg, 0, torch.bfloat16, "meta", FP8)
    snapshots = 3 + tokens // engine.snapshots.every  # of a request, with its state and a page to copy
    pages = (count + 1) * (pool.pages_for(tokens + 3 * steps) + pool.groups * snapshots)
    pool = PagePool(stub.cfg, pages, torch.bfloat16, "meta", FP8)
    pool.device = torch.device("cpu")  # where the stub works
    cache = PrefixCache(pool)
    for part in (engine, engine.scheduler, engine.runner):
        part.pool, part.cache = pool, cache
    rng, rows = np.random.default_rng(args.seed), []

    def row(name, value, unit, target=None):
        rows.append({"measure": name, "value": float(value), "unit": unit, "target": target})

    def timed(call, times=20):
        """-> (ms of each call, without the stub's part; what the last returned)."""
        found = []
        for _ in range(times):
            started, stubs = time.perf_counter(), stub.seconds
            result = call()
            found.append((time.perf_counter() - started - (stub.seconds - stubs)) * 1e3)
        return found, result

    sizes = [max(tokens - 24 * i, 1) for i in range(count)]  # so that their pages fill up at different steps
    prompts = [rng.integers(0, 10_000, n).tolist() for n in tqdm(sizes, desc="prompts", leave=False)]
    params = SamplingParams(max_tokens=3 * steps, ignore_eos=True)
    adding = [timed(lambda prompt=prompt: engine.add(prompt, params), 1)[0] for prompt in prompts]
    with tqdm(desc="reading prompts", unit=" steps", leave=False) as bar:
        while engine.waiting or any(r.computed < r.out.prompt_tokens for r in engine.running):
            engine.step()
            bar.update()
    stepping = timed(engine.step, steps)[0]
    row(f"step of {count} requests of {tokens} tokens, P50", np.median(stepping), "ms", 1)
    row("the same, P90: on a busy machine, that of others too", np.percentile(stepping, 90), "ms")
    row(f"adding a prompt of {tokens} tokens", np.median(adding), "ms")

    prompt = np.append(np.array(prompts[0], dtype=np.int32), 0)
    talk, held = PrefixCache(pool), pool.allocate(pool.pages_for(tokens))
    for end in tqdm(range(tokens // turns, tokens + 1, tokens // turns), desc="a long talk", leave=False):
        talk.insert(prompt[:end], held[pool.groups :], held[: pool.groups], torch.zeros(1))
    taken = len(held) + pool.groups * turns  # if each turn had a state of its own
    trees = (engine.cache, f"{count} prompts", pages), (talk, f"one text in {turns} turns", taken)
    for cache, name, own in trees:
        times, (_, known) = timed(lambda cache=cache: cache.match(prompt))
        assert known >= tokens - tokens % turns
        row(f"matching {tokens} tokens in a tree of {name}", np.median(times), "ms", 20)
        size, whole = tree_bytes(cache, 2 * stub.cfg.hidden_size), own * pool.page_bytes
        row(f"memory of that tree, of {whole / 2**30:.1f} GiB", size / whole * 100, "%", 1)

    pool.allocate(pool.free_pages)  # now every page that fills up makes the cache give one up
    evicting = []
    for _ in range(2 * steps):
        before = engine.cache.evicted
        times, _ = timed(engine.step, 1)
        evicting += times if engine.cache.evicted > before else []
    if evicting:
        row("step that evicts from a full pool, P50", np.median(evicting), "ms", 1)
    print_table(rows, ["measure", "value", "unit", "target"])
    return rows


def _load(args):
    if not Path(args.model).is_dir():
        raise FileNotFoundError(f"{args.model}: no such folder; --model takes a checkpoint folder")
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = args.dtype or ("bfloat16" if device == "cuda" else "float32")
    return K3.from_pretrained(args.model, dtype=getattr(torch, dtype), device=device)
