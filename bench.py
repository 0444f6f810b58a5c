"""Measures the engine; each subcommand prints a table and can write JSON (commit, versions, command, rows).

python bench.py agent     replays conversations of agents: prefix reuse, latency and speed, by pool size and by concurrency
python bench.py host      what a step costs on the host beside the model, a look-up in the prefix cache, and the cache's memory
"""

import argparse
import dataclasses
import heapq
import json
import os
import platform
import random
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from tqdm import tqdm

from cache import FP8, PagePool, PrefixCache
from engine import TINY, Engine, SamplingParams
from model import K3, K3Config
from tokenizer import CONTROL_SLOTS

# ---------------------------------------------------------------- agent: the trace
# Lengths are in 1/128 of a page of the pool: with the usual page of a small model (128 tokens), they are tokens.

SYSTEM, TOOLS = 192, 464  # the system prompt and the description of the tools, shared by all conversations
TEXT = (40, 200)  # what a user says or a tool returns, per turn: shorter ones are likelier
ANSWER = (8, 24)
PAUSE = (0, 40)  # engine steps between the end of a turn and the client's next request
BRANCHES = 0.15  # share of the turns that send 2 or 3 requests at once
EDITS = 0.1  # share of the turns that change one of the last three turns and go on from there


@dataclass(frozen=True)
class Turn:
    """What one client sends next: first it takes back its last `back` turns and waits `pause` engine steps.

    texts: what follows the history, one for each request of this turn; the conversation goes on with the first. answers: their lengths.
    """

    pause: int
    back: int
    texts: list
    answers: list


def make_trace(seed, conversations, turns, vocab, scale=1):
    """-> (shared ids, [[Turn] per conversation]); all of it follows from the arguments. scale: tokens per unit of length."""
    draw = random.Random(seed)
    ids = lambda n: draw.choices(range(vocab - CONTROL_SLOTS if vocab > CONTROL_SLOTS + 1 else vocab), k=n)
    between = lambda low, high: round(low * (high / low) ** draw.random() ** 2 * scale)
    shared, talks = ids((SYSTEM + TOOLS) * scale), []
    for _ in range(conversations):
        talk, texts = [], []  # texts: of the turns that still are the history
        for _ in range(turns):
            pause, back, text = draw.randint(*PAUSE), 0, ids(between(*TEXT))
            if texts and draw.random() < EDITS:  # the edited turn begins as before
                back = draw.randint(1, min(3, len(texts)))
                same = texts[-back][: draw.randrange(len(texts[-back]))]
                text, texts = same + text, texts[:-back]
            count = draw.choice((2, 3)) if draw.random() < BRANCHES else 1
            texts.append(text)
            others = [ids(between(*TEXT)) for _ in range(count - 1)]
            talk.append(Turn(pause, back, [text, *others], [between(*ANSWER) for _ in range(count)]))
        talks.append(talk)
    return shared, talks


def client(shared, talk):
    """One conversation: yields (pause, [(prompt, answer length)]) and is sent the answers, which become part of the history."""
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
        for _ in talk:
            _, requests = speaker.send(answers)
            found += [(len(prompt), n) for prompt, n in requests]
            answers = [[0] * n for _, n in requests]
    return found


# ---------------------------------------------------------------- agent: the replay


def reusable(prompt, texts):
    """Theoretical reuse: the most leading tokens that `prompt` shares with any one of `texts` (integer arrays)."""
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
    theory: int | None = None
    first: float = 0.0
    last: float = 0.0


def replay(engine, trace, concurrency, bar=None):
    """Runs the conversations of a trace, `concurrency` of them at a time -> [Asked], and the most pages that were taken.

    Time is counted in engine steps, and stands still while all clients pause, so that every run with one pool is the same. Theory is
    taken when a request is admitted: what an unlimited cache that can resume anywhere would have then, from all that has been computed.
    """
    shared, talks = trace
    todo, arrivals, asked, open_, clock, peak = list(enumerate(talks))[::-1], [], [], {}, 0, 0

    def turn(number, speaker, answers=None):
        try:
            pause, requests = speaker.send(answers)
            heapq.heappush(arrivals, (clock + pause, number, speaker, requests))
        except StopIteration:
            begin()

    def begin():
        if todo:
            number, talk = todo.pop()
            turn(number, client(shared, talk))

    for _ in range(concurrency):
        begin()
    while arrivals or open_:
        if not open_:
            clock = max(clock, arrivals[0][0])
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
                turn(number, speaker, [a.request.out.token_ids for a in group])
                if bar is not None:
                    bar.update(len(group))
    return asked, peak


def summary(engine, asked, seconds):
    """One row of the result. Speeds are tokens of answers per second; "p10" of a speed is what 90 % of the users get at least."""
    prompts = sum(a.request.out.prompt_tokens for a in asked)
    theory, reused = sum(a.theory for a in asked), sum(a.request.out.cached_tokens for a in asked)
    first = np.percentile([(a.first - a.added) * 1e3 for a in asked], (50, 90, 99))
    speeds = [(len(a.request.out.token_ids) - 1) / (a.last - a.first) for a in asked if a.last > a.first]
    user = np.percentile(speeds, (50, 10)) if speeds else (0.0, 0.0)
    row = {"requests": len(asked), "prompt_tokens": prompts, "theory": theory / prompts, "reuse": reused / prompts}
    row |= {"of_theory": reused / theory if theory else 1.0}
    row |= dict(zip(("ttft_p50_ms", "ttft_p90_ms", "ttft_p99_ms"), map(float, first)))
    row |= dict(zip(("user_p50_tok_s", "user_p10_tok_s"), map(float, user)))
    row |= {"total_tok_s": sum(len(a.request.out.token_ids) for a in asked) / seconds}
    row |= {name: engine.stats[name] for name in ("preemptions", "evicted", "offloaded", "restored")}
    return row | {"seconds": seconds}


def agent(args):
    """Replays an agent-like trace: conversations with one system prompt, growing turns, pauses, parallel branches and edited history.

    The pool that holds everything is measured first; then smaller pools run, each without and with a host tier, and then other
    numbers of conversations at a time. Theory: an unlimited cache that can resume at any token computed before a request's admission.
    """
    plt = _pyplot() if args.plot else None
    model = _load(args)
    P = PagePool(model.cfg, 0, model.norm.weight.dtype).page_size
    shape = args.conversations or (8 if args.quick else 16), args.turns or (6 if args.quick else 8)
    trace = make_trace(args.seed, *shape, model.cfg.vocab_size, max(P // 128, 1))
    sizes = lengths(trace)
    if max(map(sum, sizes)) > model.cfg.max_position_embeddings:
        raise ValueError(f"the longest text has {max(map(sum, sizes))} tokens, the model reads "
                         f"{model.cfg.max_position_embeddings}; give fewer --turns")  # fmt: skip
    pool = PagePool(model.cfg, 0, model.norm.weight.dtype)
    ample = sum(pool.pages_for(sum(s)) + 2 * pool.groups + 1 for s in sizes)  # more than can be taken
    least = max(pool.pages_for(sum(s)) for s in sizes)

    def run(pages, host_pages, concurrency, label):
        engine = Engine(model, num_pages=pages, host_pages=host_pages)
        with tqdm(total=len(sizes), desc=label, unit=" requests", leave=False) as bar:
            started = time.perf_counter()
            asked, peak = replay(engine, trace, concurrency, bar)
            row = summary(engine, asked, time.perf_counter() - started)
        return {"concurrency": concurrency, "pages": pages, "host_pages": host_pages} | row, peak

    run_once = SamplingParams(max_tokens=2, ignore_eos=True)
    Engine(model, num_pages=ample).generate([trace[0]] * 2, run_once)  # the first run of anything is slower
    _, full = run(ample, 0, args.concurrency, "measuring the pool")
    rows = []
    for part in (1, 4) if args.quick else (1, 2, 4, 8):
        for host_pages in (0, ample):
            pages = max(full // part, least)
            row, _ = run(pages, host_pages, args.concurrency, f"pool 1/{part}{' + host' if host_pages else ''}")
            rows.append({"sweep": "pool", "pool": pages / full} | row)
    for concurrency in (1, 2) if args.quick else (1, 2, 4, 8, 16):
        row, _ = run(ample, 0, min(concurrency, shape[0]), f"{concurrency} at a time")
        rows.append({"sweep": "concurrency", "pool": ample / full} | row)

    print(f"{shape[0]} conversations of {shape[1]} turns: {len(sizes)} requests, {rows[0]['prompt_tokens']} prompt tokens; "
          f"{full} pages of {P} tokens hold everything")  # fmt: skip
    for sweep, first in (("pool", ["pool", "pages", "host_pages"]), ("concurrency", ["concurrency"])):
        print(f"\nby {sweep}" + (f", {args.concurrency} conversations at a time" if sweep == "pool" else ""))
        chosen = [r for r in rows if r["sweep"] == sweep]
        _table(chosen, first + [name for name in rows[0] if name not in NOT_SHOWN])
    if plt:
        _plot_agent(plt, rows, args.plot)
    return rows


NOT_SHOWN = ("sweep", "pool", "concurrency", "pages", "host_pages", "requests", "prompt_tokens")


def _pyplot():
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install 'k3-engine[plots]', or leave it out") from None
    return plt


def _plot_agent(plt, rows, file):
    """Reuse and time to first token against pool size; speed per user against total speed."""
    fig, (reuse, first, speed) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for host, name in ((False, "pool alone"), (True, "with host tier")):
        part = [r for r in rows if r["sweep"] == "pool" and bool(r["host_pages"]) == host]
        x = [r["pages"] for r in part]
        reuse.plot(x, [r["reuse"] for r in part], "o-", label=name)
        for p, line in ((50, "o-"), (90, "o--")):
            first.plot(x, [r[f"ttft_p{p}_ms"] for r in part], line, color=f"C{int(host)}", label=f"P{p}, {name}")
    reuse.plot(x, [r["theory"] for r in part], "k:", label="theory")
    part = [r for r in rows if r["sweep"] == "concurrency"]
    speed.plot([r["total_tok_s"] for r in part], [r["user_p10_tok_s"] for r in part], "o-")
    for r in part:
        speed.annotate(f"{r['concurrency']} at a time", (r["total_tok_s"], r["user_p10_tok_s"]))
    for ax, x, y in (
        (reuse, "pages of the pool", "share of prompt tokens reused"),
        (first, "pages of the pool", "time to first token, ms"),
        (speed, "tokens/s in all", "tokens/s that 90 % of the users get"),
    ):
        ax.set(xlabel=x, ylabel=y, ylim=(0, None))
    reuse.legend()
    first.legend()
    fig.savefig(file, dpi=150)


# ---------------------------------------------------------------- host


class Stub:
    """Stands in for a K3 and computes nothing; `seconds` is the time spent in its own calls.

    Its sizes are those of one rank of K3 at TP8, so that pages, groups and tables are too; logits have few columns, for on a GPU the
    sampler's arithmetic is the device's and the host pays for the calls alone.
    """

    def __init__(self, rows, ranks=8):
        k3 = K3Config.k3()
        heads = k3.linear_attn_config["num_heads"] // ranks
        self.cfg = dataclasses.replace(k3, linear_attn_config=k3.linear_attn_config | {"num_heads": heads})
        self.norm = SimpleNamespace(weight=torch.zeros(1, dtype=torch.bfloat16))
        self._hidden, self._logits, self.seconds = torch.zeros(rows, 8), torch.randn(rows, 256), 0.0

    def hidden(self, ids, batch):
        started = time.perf_counter()
        hidden = self._hidden[:1].expand(len(ids), -1)
        self.seconds += time.perf_counter() - started
        return hidden

    def logits(self, hidden):
        started = time.perf_counter()
        logits = self._logits[: len(hidden)]
        self.seconds += time.perf_counter() - started
        return logits


def tree_bytes(cache, hidden_bytes):
    """Host memory of a prefix cache: nodes, their arrays and dictionaries, snapshots with a hidden of so many bytes."""
    total, nodes, whole = 0, [cache.root], {}
    while nodes:
        node = nodes.pop()
        nodes += node.children.values()
        arrays = [node.tokens, node.pages] + ([node.snapshot.pages] if node.snapshot else [])
        for array in arrays:  # a part of an array keeps the whole alive
            base = array if array.base is None else array.base
            whole[id(base)] = sys.getsizeof(base)
            total += sys.getsizeof(array) if base is not array else 0
        total += sys.getsizeof(node) + sys.getsizeof(node.children)
        if node.snapshot:
            total += (
                sys.getsizeof(node.snapshot) + sys.getsizeof(node.snapshot.__dict__) + 200 + hidden_bytes
            )  # a tensor
    tables = (cache.nodes, cache.host_nodes, cache.snapshots)
    return total + sum(whole.values()) + sum(sys.getsizeof(t) for t in tables)


def host(args):
    """What the host does beside the model, with a model that computes nothing: time per step, per look-up, and memory.

    Pages are those of K3 at TP8 with an FP8 latent (1,536 tokens); their memory is not allocated.
    """
    count, tokens = args.requests or (4 if args.quick else 64), args.tokens or (5000 if args.quick else 100_000)
    steps, edges = (20, 50) if args.quick else (300, 1000)
    stub = Stub(count)
    engine = Engine(stub, num_pages=1, max_batch=count, prefill_chunk=1 << 16)
    sizes = [tokens - 24 * i for i in range(count)]  # so that pages fill up at different steps
    groups = PagePool(stub.cfg, 0, torch.bfloat16, "meta", FP8).groups
    pages = count * (-(-(tokens + 2 * steps) // 1536) + 3 * groups + 1) + 2 * groups + tokens // 1536 + 2
    engine.pool = PagePool(stub.cfg, pages, torch.bfloat16, "meta", FP8)
    engine.cache = PrefixCache(engine.pool)
    rng, rows = np.random.default_rng(args.seed), []

    def row(name, value, unit, target=None):
        rows.append({"measure": name, "value": value, "unit": unit, "target": target})

    prompts = [rng.integers(0, 10_000, n).tolist() for n in tqdm(sizes, desc="prompts", leave=False)]
    started = time.perf_counter()
    for prompt in prompts:
        engine.add(prompt, SamplingParams(max_tokens=4 * steps, ignore_eos=True))
    adding = (time.perf_counter() - started) / count * 1e3
    with tqdm(desc="reading prompts", unit=" steps", leave=False) as bar:
        while engine.waiting or any(r.computed < r.out.prompt_tokens for r in engine.running):
            engine.step()
            bar.update()
    times = []
    for _ in tqdm(range(steps + 5), desc="writing answers", unit=" steps", leave=False):
        started, before = time.perf_counter(), stub.seconds
        engine.step()
        times.append((time.perf_counter() - started - (stub.seconds - before)) * 1e3)
    assert len(engine.running) == count
    for p in (50, 90):
        row(f"step of {count} requests of {tokens} tokens, P{p}", float(np.percentile(times[5:], p)), "ms", 1.0)
    row(f"adding a prompt of {tokens} tokens", adding, "ms")

    def look_up(cache, prompt):
        found = []
        for _ in range(20):
            started = time.perf_counter()
            _, known = cache.match(prompt)
            found.append((time.perf_counter() - started) * 1e3)
            assert known == tokens
        return float(np.median(found))

    prompt = np.append(np.array(prompts[0], dtype=np.int32), 0)
    row(f"matching {tokens} tokens, known as one text", look_up(engine.cache, prompt), "ms", 20.0)
    turns, held = PrefixCache(engine.pool), engine.pool.allocate(tokens // 1536 + 1 + groups)
    for end in tqdm(range(tokens // edges, tokens + 1, tokens // edges), desc="a long talk", leave=False):
        turns.insert(prompt[:end], held[groups:], held[:groups], torch.zeros(1))
    row(f"matching {tokens} tokens, known as {edges} turns", look_up(turns, prompt), "ms", 20.0)

    hidden, pool = 2 * stub.cfg.hidden_size, pages * engine.pool.page_bytes
    for name, cache in ((f"tree of {count} prompts", engine.cache), (f"tree of one talk of {edges} turns", turns)):
        size = tree_bytes(cache, hidden)
        row(f"{name}, its memory", size / 2**20, "MiB")
        row(f"{name}, in % of a pool of {pool / 2**30:.1f} GiB", size / pool * 100, "%", 1.0)
    _table(rows, ["measure", "value", "unit", "target"])
    return rows


# ---------------------------------------------------------------- the command line


def _load(args):
    if not Path(args.model).is_dir():
        raise FileNotFoundError(f"{args.model}: no such folder; --model takes a checkpoint folder")
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = args.dtype or ("bfloat16" if device == "cuda" else "float32")
    return K3.from_pretrained(args.model, dtype=getattr(torch, dtype), device=device)


def _table(rows, names):
    """Prints the named columns of rows, right-aligned but for text."""

    def show(name, x):
        if name in ("theory", "reuse", "of_theory"):
            return f"{x:.1%}"
        return "" if x is None else f"{x:.4g}" if isinstance(x, float) and x < 1e4 else str(x)

    cells = [[name.replace("_", " ") for name in names]] + [[show(name, r[name]) for name in names] for r in rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    for line in cells:
        aligned = (c.ljust(w) if isinstance(rows[0][n], str) else c.rjust(w) for n, c, w in zip(names, line, widths))
        print("  ".join(aligned).rstrip())


def _about(argv):
    """What a result needs to be understood and run again. Folders of this machine are left out."""
    git = ["git", "-C", str(Path(__file__).resolve().parent)]
    ask = lambda *words: subprocess.run([*git, *words], capture_output=True, text=True).stdout.strip()
    try:
        commit = ask("rev-parse", "HEAD") + (" with changes" if ask("status", "--porcelain", "-uno") else "")
    except OSError:
        commit = ""
    shown = [Path(a).name if os.path.isabs(a) or os.path.exists(a) else a for a in argv]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores"
    versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
    return {
        "commit": commit or None,
        "versions": versions,
        "machine": device,
        "command": shlex.join(["python", "bench.py", *shown]),
    }


def _arguments():
    p = argparse.ArgumentParser(prog="python bench.py", description="Measure the engine.")
    commands = p.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(run):
        about = " ".join(run.__doc__.split()).replace("%", "%%")
        c = commands.add_parser(run.__name__, help=run.__doc__.split("\n")[0].replace("%", "%%"), description=about)
        c.set_defaults(run=run)
        c.add_argument("--json", metavar="FILE", help="write commit, versions, command and rows there")
        c.add_argument("--seed", type=int, default=0, help="of all that is drawn (default %(default)s)")
        c.add_argument("--quick", action="store_true", help="a small run, to see that it works")
        return c

    c = command(agent)
    c.add_argument(
        "--model", default=TINY, metavar="FOLDER", help="checkpoint folder (default: the tiny model that is included)"
    )
    c.add_argument("--conversations", type=int, metavar="N", help="conversations in all (default 16)")
    c.add_argument("--turns", type=int, metavar="N", help="turns of each (default 8)")
    c.add_argument(
        "--concurrency",
        type=int,
        default=8,
        metavar="N",
        help="conversations at a time while pools are compared (default %(default)s)",
    )
    c.add_argument("--plot", metavar="FILE", help="draw reuse, time to first token and speed (needs the extra: plots)")
    c.add_argument("--device", choices=("cpu", "cuda"), help="where to run (default: the GPU where there is one)")
    c.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: bfloat16 on a GPU, float32 on a CPU")

    c = command(host)
    c.add_argument("--requests", type=int, metavar="N", help="requests that run at once (default 64)")
    c.add_argument("--tokens", type=int, metavar="N", help="tokens of each (default 100000)")
    return p


def main(argv=None):
    """Runs the command line; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    args = _arguments().parse_args(argv)
    try:
        rows = args.run(args)
        if args.json:
            Path(args.json).write_text(json.dumps(_about(argv) | {"rows": rows}, indent=1) + "\n", encoding="utf-8")
    except (ValueError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
