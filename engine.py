"""The engine: many requests, one loop. `python engine.py --prompt "Once upon a time"` runs it.

    while there are requests:
        admit waiting requests while slots and pages last
        one batch: the next chunk of every prompt that is still being read, one token of every answer that is being written
        run the model over it; sample a token for every sequence that has been read to its end
        finish what has stopped, and free its pages

Everything a sequence needs between steps lies in the page pool (cache.py): its latent rows and its KDA state.
"""

import argparse
import os
import random
import resource
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import torch

import kernels as registry
from cache import Batch, Chunk, PagePool
from model import K3
from sampling import SamplingParams, logprobs, sample, uniform
from tokenizer import Tokenizer

TINY = Path(__file__).resolve().parent / "tiny"  # the model that is run when none is named
CPU_POOL_BYTES = 256 << 20
GPU_POOL_SHARE = 0.8  # of the memory that is free once the model is loaded; the rest is for activations


@dataclass
class Output:
    """An answer; it grows in place while its request runs. finish_reason: None, "stop", "length", "abort" or "error"."""

    rid: int
    prompt_tokens: int
    text: str = ""
    token_ids: list = field(default_factory=list)  # with the id that ended it, if one did
    finish_reason: str | None = None
    cached_tokens: int = 0
    logprobs: list | None = None  # a dict {id: log-probability} per token: the chosen one first, then the likeliest


class Request:
    """A running request: its tokens so far, how many of them the pool holds, and where."""

    def __init__(self, rid, prompt, params, limit, text):
        self.params, self.limit = params, limit
        self.tokens = list(prompt)  # prompt and answer
        self.computed = 0  # of them, in the pool
        self.pages = self.state = None
        self.seed = random.getrandbits(63) if params.seed is None else params.seed
        self.text = text  # TextStream, or None without a tokenizer
        self.out = Output(rid, len(prompt), logprobs=None if params.logprobs is None else [])


class TextStream:
    """Turns ids into text piece by piece and watches for stop strings; text that may be the start of one is held back."""

    def __init__(self, tokenizer, stop):
        self.decoder, self.stop, self.held = tokenizer.stream(), stop, ""

    def push(self, token):
        """-> (text that is safe to show, whether a stop string was completed)."""
        return self._release(self.held + self.decoder.push(token))

    def flush(self):
        """-> what is left at the end of the answer, up to a stop string that its last character completes."""
        text, stopped = self._release(self.held + self.decoder.flush())
        return text if stopped else text + self.held

    def _release(self, text):
        found = [at for at in (text.find(s) for s in self.stop) if at >= 0]
        if found:
            self.held = ""
            return text[: min(found)], True
        keep = max(
            (n for s in self.stop for n in range(1, min(len(s), len(text) + 1)) if text.endswith(s[:n])), default=0
        )
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep], False


class Engine:
    """Generates text for many requests at once.

    model: a checkpoint folder, or a K3 (its device and dtype are then kept). device: cuda where there is one; dtype: bfloat16 on a GPU,
    float32 on a CPU. num_pages: pages of the pool (derived from memory). max_batch: requests that run at once. prefill_chunk: prompt
    tokens read per step, over all requests. Raises ValueError or OSError with one line that says what is wrong.
    """

    def __init__(self, model=TINY, device=None, dtype=None, num_pages=None, max_batch=64, prefill_chunk=512, draft_tokens=0,
                 kernels="auto", tokenizer=None):  # fmt: skip
        _check_options(num_pages, max_batch, prefill_chunk, draft_tokens, kernels)
        if not isinstance(model, K3):
            device = _pick_device(device)
            path, dtype = Path(model), dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
            if not path.is_dir():
                raise FileNotFoundError(f"{path}: no such folder; --model takes a checkpoint folder")
            model = K3.from_pretrained(path, dtype=dtype, device=device)
            if tokenizer is None and any((path / name).is_file() for name in ("tokenizer.json", "tiktoken.model")):
                tokenizer = Tokenizer.from_pretrained(path)
        self.model, self.cfg, self.tokenizer = model, model.cfg, tokenizer
        self.device, self.dtype = model.norm.weight.device, model.norm.weight.dtype
        self.max_batch, self.prefill_chunk = max_batch, prefill_chunk
        self.pool = PagePool(self.cfg, num_pages or self._fitting_pages(), self.dtype, self.device)
        self.waiting, self.running, self._done = deque(), [], []
        self._next_rid = 0
        self._seconds, self._tokens = {"prompt": 0.0, "decode": 0.0}, {"prompt": 0, "decode": 0}
        self._counts_before = registry.counts.copy()

    def _fitting_pages(self):
        page = PagePool(self.cfg, 0, self.dtype, "meta").page_bytes
        free = (
            torch.cuda.mem_get_info(self.device)[0] * GPU_POOL_SHARE if self.device.type == "cuda" else CPU_POOL_BYTES
        )
        return max(int(free) // page, 1)

    # ------------------------------------------------------------ requests

    def add(self, prompt, params=None):
        """Queues a prompt (str or ids) and returns its request id. Raises ValueError if it can never run."""
        return self._enqueue(self._checked(prompt, params or SamplingParams()), params or SamplingParams()).rid

    def abort(self, rid):
        """Ends a request at once, with finish_reason "abort"; its pages are free again. False if no such request is alive."""
        for request in [*self.waiting, *self.running]:
            if request.out.rid == rid:
                self._finish(request, "abort")
                return True
        return False

    def generate(self, prompts, params=None):
        """prompts: a str, ids, or a list of either; params: one SamplingParams or one per prompt -> list of Output, in order."""
        if isinstance(prompts, str) or (
            len(prompts) and not isinstance(prompts[0], str) and not hasattr(prompts[0], "__len__")
        ):
            prompts = [prompts]
        params = params or SamplingParams()
        params = list(params) if isinstance(params, (list, tuple)) else [params] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts, but {len(params)} SamplingParams; give one, or one per prompt")
        checked = [self._checked(prompt, p) for prompt, p in zip(prompts, params)]  # all are good before any starts
        outs = [self._enqueue(ids, p) for ids, p in zip(checked, params)]
        try:
            while any(out.finish_reason is None for out in outs):
                self.step()
        finally:
            for out in outs:
                self.abort(out.rid)
        return outs

    def stream(self, prompt, params=None):
        """Yields the answer's text in pieces as it is written (lists of ids where there is no tokenizer). Closing it aborts."""
        params = params or SamplingParams()
        out = self._enqueue(self._checked(prompt, params), params)
        sent = 0
        try:
            while sent is not None:
                if out.finish_reason is None:
                    self.step()
                grown = out.text if self.tokenizer else out.token_ids
                if len(grown) > sent:
                    yield grown[sent:]
                sent = len(grown) if out.finish_reason is None else None
        finally:
            self.abort(out.rid)

    def _checked(self, prompt, params):
        """The prompt as a list of ids, or a ValueError that says why it cannot run."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError(
                    "this model has no tokenizer: give token ids, or put a tokenizer.json beside its config.json"
                )
            prompt = self.tokenizer.encode(prompt)
        elif params.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and this model has none; use stop_token_ids")
        ids = [int(i) for i in prompt]
        wrong = next((i for i in ids if not 0 <= i < self.cfg.vocab_size), None)
        if wrong is not None:
            raise ValueError(f"token id {wrong} is outside the vocabulary of {self.cfg.vocab_size}")
        if not ids:
            raise ValueError("the prompt is empty; give at least one token")
        limit, most = self._limit(ids, params), self.cfg.max_position_embeddings
        if len(ids) > most:
            raise ValueError(f"the prompt has {len(ids)} tokens; the model reads at most {most}")
        need = self.pool.pages_for(len(ids) + max(limit - 1, 0))
        if need > self.pool.num_pages:
            raise ValueError(
                f"{len(ids)} prompt tokens and max_tokens {limit} need {need} pages of {self.pool.page_size} tokens, and the pool has "
                f"{self.pool.num_pages}; shorten them or raise num_pages"
            )
        return ids

    def _limit(self, ids, params):
        """How many tokens the answer may have: max_tokens, or what the context leaves (one is always sampled)."""
        return min(params.max_tokens, max(self.cfg.max_position_embeddings - len(ids), 0) + 1)

    def _enqueue(self, ids, params):
        text = TextStream(self.tokenizer, params.stop) if self.tokenizer else None
        request = Request(self._next_rid, ids, params, self._limit(ids, params), text)
        self._next_rid += 1
        self.waiting.append(request)
        return request.out

    # ------------------------------------------------------------ the loop

    @torch.inference_mode()
    def step(self):
        """Runs one batch. Returns the Outputs that grew or finished since the last step."""
        self._admit()
        plan, ends = self._plan(), []
        if plan:
            started = time.perf_counter()
            chunks = [Chunk(n, r.computed, r.pages, r.state, r.state) for r, n in plan]
            ids = [i for r, n in plan for i in r.tokens[r.computed : r.computed + n]]
            hidden = self.model.hidden(torch.tensor(ids, device=self.device), Batch.paged(self.pool, chunks))
            row, rows = -1, []
            for request, n in plan:
                row += n
                request.computed += n
                if request.computed == len(request.tokens):
                    ends.append(request)
                    rows.append(row)
            if ends:
                self._sample(ends, self.model.logits(hidden[rows]))
            self._count(plan, time.perf_counter() - started)
        done, self._done = self._done, []
        return done + [r.out for r in ends if r.out.finish_reason is None]

    def _admit(self):
        """First come, first served; pages for the whole answer are taken at once, so a running request never lacks one."""
        while self.waiting and len(self.running) < self.max_batch:
            request = self.waiting[0]
            if request.limit == 0:
                self._finish(request, "length")
                continue
            need = self.pool.pages_for(len(request.tokens) + request.limit - 1)
            if need > self.pool.free_pages:
                break
            pages = self.pool.allocate(need)
            request.state, request.pages = pages[: self.pool.groups], pages[self.pool.groups :]
            self.running.append(self.waiting.popleft())

    def _plan(self):
        """[(request, tokens to run)], fewest first: all decode rows, and prompt chunks within the budget."""
        plan, budget = [], self.prefill_chunk
        for request in self.running:
            left = len(request.tokens) - request.computed
            n = left if left == 1 else min(left, budget)
            budget -= n if left > 1 else 0
            plan += [(request, n)] if n else []
        return sorted(plan, key=lambda item: item[1])

    def _sample(self, requests, logits):
        """Appends a token to each request from its row of logits [R, V], and finishes those that end."""
        finite = logits.isfinite().all(-1).tolist()
        draws = [uniform(r.seed, len(r.out.token_ids)) for r in requests]
        tokens = sample(logits.nan_to_num(), [r.params for r in requests], draws).tolist()
        for request, row, good, token in zip(requests, logits, finite, tokens):
            if not good:
                self.pool.scrub([*request.pages, *request.state])
                self._finish(request, "error")
                continue
            request.tokens.append(token)
            request.out.token_ids.append(token)
            if request.params.logprobs is not None:
                request.out.logprobs.append(logprobs(row, token, request.params.logprobs))
            ended = token in request.params.stop_token_ids or (
                token in self.cfg.eos_ids and not request.params.ignore_eos
            )
            if not ended and request.text:
                piece, ended = request.text.push(token)
                request.out.text += piece
            if ended or len(request.out.token_ids) == request.limit:
                self._finish(request, "stop" if ended else "length")

    def _finish(self, request, reason):
        """Ends a request: the rest of its text, its pages, its place in the queue."""
        if request.text:
            request.out.text += request.text.flush()
        request.out.finish_reason = reason
        if request in self.running:
            self.running.remove(request)
            self.pool.release([*request.pages, *request.state])
        else:
            self.waiting.remove(request)
        self._done.append(request.out)

    # ------------------------------------------------------------ what happened

    def _count(self, plan, seconds):
        """Splits a step's time between reading prompts and writing answers by their tokens."""
        total = sum(n for _, n in plan)
        decode = sum(1 for r, n in plan if n == 1 and r.computed > r.out.prompt_tokens)
        for kind, tokens in (("prompt", total - decode), ("decode", decode)):
            self._tokens[kind] += tokens
            self._seconds[kind] += seconds * tokens / total

    @property
    def stats(self):
        """What the engine holds and did: pages, requests, tokens, tokens/s, and the backend each op really ran with its calls."""
        ran = registry.counts - self._counts_before
        stats = {"pages": self.pool.num_pages, "pages_free": self.pool.free_pages, "page_tokens": self.pool.page_size}
        stats |= {"running": len(self.running), "waiting": len(self.waiting)}
        for kind in ("prompt", "decode"):
            seconds = self._seconds[kind]
            stats |= {
                f"{kind}_tokens": self._tokens[kind],
                f"{kind}_tokens_per_s": self._tokens[kind] / seconds if seconds else 0.0,
            }
        return stats | {"backends": {name: f"{backend} x{calls}" for (name, backend), calls in sorted(ran.items())}}


def _check_options(num_pages, max_batch, prefill_chunk, draft_tokens, backend):
    for name, value in (("num_pages", num_pages), ("max_batch", max_batch), ("prefill_chunk", prefill_chunk)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    if draft_tokens:
        raise ValueError(f"draft_tokens is {draft_tokens}; speculative decoding is not built yet, use 0")
    registry.check(backend)


def _pick_device(device):
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda was asked for, but PyTorch sees no GPU here; use --device cpu")
    return device


# ---------------------------------------------------------------- the command line


def _arguments():
    p = argparse.ArgumentParser(
        prog="python engine.py",
        description="Continue a text with Kimi K3. With --prompt alone, a small K3 that was trained on fairy tales tells a story.",
    )
    p.add_argument(
        "--prompt",
        action="append",
        required=True,
        metavar="TEXT",
        help="text to continue; repeat it to run several at once; - reads standard input",
    )
    p.add_argument(
        "--model",
        default=TINY,
        metavar="FOLDER",
        help="checkpoint folder: config.json, safetensors, tokenizer (default: the tiny model that is included)",
    )
    p.add_argument(
        "--max-tokens", type=int, default=256, metavar="N", help="write at most N tokens (default %(default)s)"
    )
    p.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="T",
        help="0 always takes the likeliest token; higher is more varied (default %(default)s)",
    )
    p.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="choose among the K likeliest tokens only (default 0: all)"
    )
    p.add_argument(
        "--top-p",
        type=float,
        default=0.95,
        metavar="P",
        help="choose among the likeliest tokens that make up P of the probability (default %(default)s)",
    )
    p.add_argument(
        "--seed", type=int, metavar="S", help="the same seed gives the same text (default: a new one each time)"
    )
    p.add_argument("--device", choices=("cpu", "cuda"), help="where to run (default: the GPU where there is one)")
    p.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float64"),
        help="of weights and cache (default: bfloat16 on a GPU, float32 on a CPU)",
    )
    p.add_argument(
        "--stats",
        action="store_true",
        help="afterwards print speed, peak memory and which backend each op ran, on standard error",
    )
    return p


def main(argv=None):
    """Runs the command line. Text goes to standard output, all else to standard error; returns the exit code."""
    args = _arguments().parse_args(argv)
    started = time.perf_counter()
    try:
        prompts = [_read_stdin() if p == "-" else p for p in args.prompt]
        params = SamplingParams(args.max_tokens, args.temperature, args.top_k, args.top_p, seed=args.seed)
        engine = Engine(args.model, args.device, args.dtype and getattr(torch, args.dtype))
        first = None
        if len(prompts) == 1:
            for piece in engine.stream(prompts[0], params):
                first = first or time.perf_counter() - started
                print(piece, end="", flush=True)
            print()
        else:
            for n, out in enumerate(engine.generate(prompts, params), 1):
                print(f"[{n}]", file=sys.stderr, flush=True)
                print(out.text, flush=True)
        if args.stats:
            _print_stats(engine, first)
    except BrokenPipeError:  # the reader has left, as in `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _read_stdin():
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as e:
        raise ValueError(f"standard input is not UTF-8: byte {e.object[e.start]:#04x} at offset {e.start}") from None


def _print_stats(engine, first):
    stats = engine.stats
    if first is not None:
        print(f"first text    {first:.2f} s after start-up (imports not counted)", file=sys.stderr)
    for kind in ("prompt", "decode"):
        print(
            f"{kind:<9} {stats[f'{kind}_tokens']:>8} tokens {stats[f'{kind}_tokens_per_s']:>10.1f} tokens/s",
            file=sys.stderr,
        )
    if engine.device.type == "cuda":
        print(
            f"peak memory   {torch.cuda.max_memory_allocated(engine.device) / 2**20:.0f} MiB on the GPU",
            file=sys.stderr,
        )
    print(
        f"peak memory   {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10:.0f} MiB of the process",
        file=sys.stderr,
    )
    print(
        f"pool          {stats['pages']} pages of {stats['page_tokens']} tokens, {stats['pages_free']} free",
        file=sys.stderr,
    )
    for name, ran in stats["backends"].items():
        print(f"op {name:<12} {ran}", file=sys.stderr)


if __name__ == "__main__":
    raise SystemExit(main())
