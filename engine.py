"""The engine: many requests, one loop. `python engine.py --prompt "Once upon a time"` runs it.

    while there are requests:
        admit waiting requests, first come first served: resume from cached prefixes, take pages for the prompt
        plan a batch: one token of every answer, and chunks of the prompts that are being read, within a budget
        where pages run out, evict cached prefixes, then preempt the youngest request
        run the model; sample for every sequence that was read to its end; snapshot states worth keeping
        finish what has stopped; its prefix stays in the cache

Everything a sequence needs between steps lies in the page pool (cache.py): its latent rows and its KDA state.
"""

import argparse
import bisect
import contextlib
import operator
import os
import random
import resource
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import kernels as registry
from cache import FP8, Chunk, PagePool, PrefixCache, common
from model import K3
from runner import Runner
from sampling import SamplingParams, filters, logprobs, sample, uniform
from tokenizer import TextStream, Tokenizer

TINY = Path(__file__).resolve().parent / "tiny"  # the model that is run when none is named
SMALL = 1024  # models narrower than this run on one CPU thread
CPU_POOL_BYTES = 256 << 20
GPU_POOL_SHARE = 0.8  # of the memory that is free once the model is loaded; the rest is for activations


@dataclass(frozen=True)
class Snapshots:
    """Where a running request leaves a snapshot of its state from which later prompts can resume.

    prompt: at the end of the prompt; answer: at the end of the answer; every: in a long prompt, at multiples of so many
    tokens (0: never); branch: where a prompt leaves a prefix that the cache knows, if that prefix has at least so many
    tokens (0: never).
    """

    prompt: bool = True
    answer: bool = True
    every: int = 8192
    branch: int = 16

    def __post_init__(self):
        if any(not isinstance(n, int) or n < 0 for n in (self.every, self.branch)):
            raise ValueError(f"Snapshots.every is {self.every!r} and branch {self.branch!r}; both must be 0 or more")


@dataclass
class Output:
    """An answer; it grows in place while its request runs. finish_reason: None, "stop", "length", "abort", "error"."""

    rid: int
    prompt_tokens: int
    text: str = ""
    token_ids: list = field(default_factory=list)  # with the id that ended it, if one did
    finish_reason: str | None = None
    cached_tokens: int = 0
    logprobs: list | None = None  # a dict {id: log-probability} per token: the chosen one first, then the likeliest


class Request:
    """A request: its tokens so far, how many of them the pool holds, and where."""

    def __init__(self, rid, prompt, params, limit, text):
        self.params, self.limit, self.text = params, limit, text  # text: TextStream, or None without a tokenizer
        self.buffer, self.length = np.array(prompt, dtype=np.int32), len(prompt)
        self.pages = self.state = np.empty(0, dtype=np.int64)  # history by page index; state, one a group
        self.computed = 0  # tokens in the pool
        self.hidden = None  # of the last of them, before the final norm
        self.branch = 0  # where the prompt leaves a known prefix: a snapshot is due there
        self.transfer = None  # its prefix on its way from the host
        self.shared = False  # whether the cache holds its state pages too: they must not be written
        self.admitted = self.preempted = False
        self.seed = random.getrandbits(63) if params.seed is None else params.seed
        self.out = Output(rid, len(prompt), logprobs=None if params.logprobs is None else [])

    @property
    def tokens(self):
        """Prompt and answer so far, int32 [length]."""
        return self.buffer[: self.length]

    def append(self, token):
        if self.length == len(self.buffer):
            self.buffer = np.concatenate([self.buffer, np.empty_like(self.buffer)])
        self.buffer[self.length] = token
        self.length += 1


class Engine:
    """Generates text for many requests at once.

    model: a checkpoint folder, or a K3 (its device and dtype are then kept). device: cuda where there is one; dtype:
    bfloat16 on a GPU, float32 on a CPU. num_pages: pages of the pool (derived from memory). max_batch: requests that
    run at once. prefill_chunk: prompt tokens read per step, over all requests (512 on a CPU, 8192 on a GPU).
    prefix_cache: reuse prefixes, resumed where `snapshots` says; host_pages: pages of host memory for evicted prefixes.
    kv_dtype: "fp8" stores latent rows in 8 bits. kernels: which backend runs each op (kernels/__init__.py). graphs:
    decode steps as CUDA graphs (default: on a GPU). Raises ValueError or OSError in one line.
    """

    def __init__(
        self,
        model=TINY,
        device=None,
        dtype=None,
        num_pages=None,
        max_batch=64,
        prefill_chunk=None,
        draft_tokens=0,
        kernels="auto",
        tokenizer=None,
        prefix_cache=True,
        snapshots=Snapshots(),  # noqa: B008 (frozen)
        host_pages=0,
        kv_dtype=None,
        graphs=None,
    ):
        _check_options(num_pages, max_batch, prefill_chunk, draft_tokens, host_pages, kv_dtype)
        if not isinstance(kernels, str):
            raise ValueError(
                f"kernels is {kernels!r}; give 'auto' or 'op=backend,...', and functions by kernels.use(...)"
            )
        with registry.use(kernels):
            registry.current()  # all that is asked for exists
        if isinstance(model, (str, Path)):
            device = _pick_device(device)
            path, dtype = Path(model), dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
            if not path.is_dir():
                raise FileNotFoundError(f"{path}: no such folder; --model takes a checkpoint folder")
            model = K3.from_pretrained(path, dtype=dtype, device=device)
            if tokenizer is None and any((path / name).is_file() for name in ("tokenizer.json", "tiktoken.model")):
                tokenizer = Tokenizer.from_pretrained(path)
        self.model, self.cfg, self.tokenizer = model, model.cfg, tokenizer
        self.device, self.dtype = model.norm.weight.device, model.norm.weight.dtype
        self.max_batch, self.snapshots = max_batch, snapshots
        self.prefill_chunk = prefill_chunk or (8192 if self.device.type == "cuda" else 512)
        latent = FP8 if kv_dtype == "fp8" else None
        self.pool = PagePool(self.cfg, num_pages or self._fitting_pages(latent), self.dtype, self.device, latent)
        self.cache = PrefixCache(self.pool, host_pages)
        self.prefix_cache, self.kernels = prefix_cache, kernels
        if graphs and self.device.type != "cuda":
            raise ValueError(f"graphs=True needs a GPU, and the model is on {self.device}; leave it out")
        self.runner = Runner(model, self.pool, self.device.type == "cuda" if graphs is None else graphs)
        self.waiting, self.running, self._done = deque(), [], []  # running: in order of arrival
        self._next_rid = self.preemptions = self.faults = 0
        self._eos = self.cfg.eos_ids
        self._reused = self._asked = 0  # prompt tokens: from the cache, in all
        self._seconds, self._tokens = {"prompt": 0.0, "decode": 0.0}, {"prompt": 0, "decode": 0}
        self._ran = Counter()  # (op, backend) -> calls

    def _fitting_pages(self, latent):
        empty = PagePool(self.cfg, 0, self.dtype, "meta", latent)
        free = (
            torch.cuda.mem_get_info(self.device)[0] * GPU_POOL_SHARE if self.device.type == "cuda" else CPU_POOL_BYTES
        )
        return max(int(free) // empty.page_bytes, empty.pages_for(1))

    # ------------------------------------------------------------ requests

    def add(self, prompt, params=None):
        """Queues a prompt (str or ids) and returns its request id. Raises ValueError if it can never run."""
        params = params or SamplingParams()
        return self._enqueue(self._checked(prompt, params), params).rid

    def abort(self, rid):
        """Ends a request at once, with finish_reason "abort"; its pages are free again. False if no such request is
        alive.
        """
        for request in [*self.waiting, *self.running]:
            if request.out.rid == rid:
                self._finish(request, "abort")
                return True
        return False

    def generate(self, prompts, params=None, progress=False):
        """Answers all prompts: a str, ids, or a list of either; params: one SamplingParams or one per prompt.

        Returns a list of Output, in order. progress: a live line on standard error.
        """
        prompts = prompts.tolist() if hasattr(prompts, "tolist") else prompts
        if isinstance(prompts, str) or (
            len(prompts) and not isinstance(prompts[0], str) and not hasattr(prompts[0], "__len__")
        ):
            prompts = [prompts]
        params = SamplingParams() if params is None else params
        params = list(params) if isinstance(params, (list, tuple)) else [params] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts, but {len(params)} SamplingParams; give one, or one per prompt")
        checked = [self._checked(prompt, p) for prompt, p in zip(prompts, params)]  # all are good before any starts
        outs = [self._enqueue(ids, p) for ids, p in zip(checked, params)]
        try:
            with tqdm(total=len(outs), unit=" prompts", desc="generating", disable=not progress) as bar:
                while any(out.finish_reason is None for out in outs):
                    self._advance()
                    if progress:
                        self._show(bar, outs)
        finally:
            self._hand_over(outs)
        return outs

    def _show(self, bar, outs):
        bar.n = sum(out.finish_reason is not None for out in outs)
        decode, used = self._rate("decode"), 1 - self.pool.free_pages / self.pool.num_pages
        bar.set_postfix_str(f"{len(self.running)} running, {decode:.0f} tokens/s, pool {used:.0%} full", refresh=False)
        bar.update(0)

    def stream(self, prompt, params=None):
        """Yields the answer piece by piece: text, or lists of ids where there is no tokenizer. Closing it aborts."""
        params = params or SamplingParams()
        out = self._enqueue(self._checked(prompt, params), params)
        sent = 0
        try:
            while sent is not None:
                if out.finish_reason is None:
                    self._advance()
                grown = out.text if self.tokenizer else out.token_ids
                if len(grown) > sent:
                    yield grown[sent:]
                sent = len(grown) if out.finish_reason is None else None
        finally:
            self._hand_over([out])

    def _hand_over(self, outs):
        """Ends what still runs of `outs`; `step` will not return them any more."""
        for out in outs:
            if out.finish_reason is None:
                self.abort(out.rid)
        mine = {out.rid for out in outs}
        self._done = [done for done in self._done if done.rid not in mine]

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
        try:
            ids = [operator.index(i) for i in prompt]
        except TypeError:
            raise ValueError(f"a prompt is a str or a list of token ids, not {prompt!r:.80}") from None
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
                f"{len(ids)} prompt tokens and max_tokens {limit} need {need} pages of {self.pool.page_size} tokens, "
                f"and the pool has {self.pool.num_pages}; shorten them or raise num_pages"
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

    def step(self):
        """Runs one batch. Returns the Outputs that grew in it, and those that have finished since the last call."""
        grown = self._advance()
        done, self._done = self._done, []
        return done + [out for out in grown if out.finish_reason is None]

    @torch.inference_mode()
    def _advance(self):
        """Runs one batch; returns the Outputs that grew."""
        with registry.use(self.kernels, beneath=True), self._on_device():
            counts = registry.counts.copy()
            self._admit()
            ready = [r for r in self.running if r.computed == r.length]  # resumed at their last token: nothing to run
            started = time.perf_counter()
            plan = self._plan()
            sampled = self._run(plan, alone=not ready) if plan else None
            ends = ready + [r for r, _ in plan if r.computed == r.length]
            if ends:
                self._append(ends, *(sampled or self._sample(ends)))
            if plan:
                self._count(plan, time.perf_counter() - started)
            self._ran += registry.counts - counts
        return [r.out for r in ends]

    def _on_device(self):
        return torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()

    def _run(self, plan, alone):
        """The model over one batch; if it raises, states have moved. Returns what `_sample` would, if that is done."""
        requests, chunks = zip(*plan)
        try:
            ids = np.concatenate([r.buffer[c.past : c.past + c.tokens] for r, c in plan]).astype(np.int64)
            sampled = self._decode(requests, chunks, ids) if alone else None
            hidden = sampled[0] if sampled else self.runner.run(chunks, ids)
        except BaseException:  # Ctrl-C too: these requests start again from what the cache has, or from nothing
            for request, chunk in sorted(plan, key=lambda item: -item[0].out.rid):
                if chunk.dst is not chunk.src:
                    self.pool.drop(chunk.dst)
                self._put_back(request)
            raise
        for request, chunk, h in zip(requests, chunks, hidden):
            request.computed, request.hidden = chunk.past + chunk.tokens, h
            if chunk.dst is not chunk.src:
                self.pool.drop(chunk.src)
                request.state, request.shared = chunk.dst, False
        for request in requests:  # when all are up to date: Ctrl-C may come while the host waits for the GPU
            if request.computed <= request.out.prompt_tokens:
                self._snapshot(request)
        return sampled and sampled[1:]

    def _decode(self, requests, chunks, ids):
        """A step in which each running request gets its next token, as a CUDA graph; else None."""
        if any(r.length - c.past > 1 for r, c in zip(requests, chunks)):
            return None
        rows = [filters(r.params, self._draw(r), self.cfg.vocab_size) for r in requests]
        return self.runner.decode(chunks, ids, rows)

    def _admit(self):
        """First come, first served: takes pages for the whole prompt, resuming from what the cache has."""
        for request in [r for r in self.waiting if r.transfer is not None and r.transfer.ready()]:
            self.cache.finish(request.transfer)
            request.transfer = None
        while self.waiting and len(self.running) < self.max_batch:
            request = self.waiting[0]
            if request.limit == 0:
                self._finish(request, "length")
            elif not self._start(request):
                break

    def _start(self, request):
        """Tries to bring the first waiting request into the running ones; False where it has to wait."""
        if request.transfer is not None:
            return False
        node, known = self.cache.match(request.tokens) if self.prefix_cache else (None, 0)
        if self._soon(request, node.end if node else 0):
            return False
        if node and any(n.pins for n in node.path()):
            return False  # on its way from the host for another request: not there yet
        if node and any(n.on_host for n in node.path()):
            request.transfer = self.cache.restore(node)
            if request.transfer is None:  # no room to bring it back: worth waiting for, unless nothing will make room
                if self.running:
                    return False
                node, _ = self.cache.match(request.tokens, here=True)
            elif not request.transfer.ready():
                return False
            else:
                self.cache.finish(request.transfer)
                request.transfer = None

        P, total = self.pool.page_size, self.pool.history_pages(request.length)
        if node is not None and not self._fits(node, total):
            if self.running:
                return False
            node = None  # alone in the pool: without the cached pages it fits
        if node is None and total + self.pool.groups > self.pool.num_pages - self.pool.live_pages:
            return False
        request.computed, request.hidden = 0, None
        request.pages = request.state = np.empty(0, dtype=np.int64)
        if node is not None:
            self.cache.use(node, resume=True)
            request.computed, request.hidden, request.state = node.end, node.snapshot.hidden, node.snapshot.pages.copy()
            request.pages = self.cache.table(node)
            self.pool.hold(request.state)
            self.pool.hold(request.pages)
            if node.end % P:  # partly filled: what this request adds goes to a page of its own
                shared, copy = request.pages[-1:].copy(), self._take(1)
                self.pool.copy_page(shared[0], copy[0])
                request.pages[-1:] = copy
                self.pool.drop(shared)
        else:
            request.state = self._take(self.pool.groups)
        request.pages = np.concatenate([request.pages, self._take(total - len(request.pages))])
        leaves = known if self.snapshots.branch and known >= self.snapshots.branch else 0
        request.branch = leaves if request.computed < leaves < request.length else 0
        if not request.admitted:
            request.admitted, request.out.cached_tokens = True, request.computed
            self._reused += request.computed
            self._asked += request.length
        request.shared, request.preempted = node is not None, False
        bisect.insort(self.running, self.waiting.popleft(), key=lambda r: r.out.rid)
        return True

    def _soon(self, request, known):
        """Whether a prompt that is being read now will reach a point from which this request can resume, later than
        `known`; a snapshot is then due there. Requests that come together so read what they share only once.
        """
        least = self.snapshots.branch
        for other in self.running if self.prefix_cache and least else ():
            end = other.out.prompt_tokens
            if other.computed < end and min(end, request.length) - known >= least:
                same = common(other.buffer[:end], request.tokens)
                if other.computed < same and same - known >= least:
                    other.branch = other.branch if other.computed < other.branch <= same else same
                    return True
        return False

    def _fits(self, node, total):
        """Whether a request of `total` history pages that resumes at node fits: what it shares, copies and adds."""
        shared = np.concatenate([self.cache.table(node), node.snapshot.pages])
        new = total - node.end // self.pool.page_size + self.pool.groups
        return new + int((self.pool.live[shared] == 0).sum()) <= self.pool.num_pages - self.pool.live_pages

    def _take(self, count):
        """count fresh pages for a running request; the caller has made sure that eviction can free them."""
        self.cache.evict(count)
        pages = self.pool.allocate(count)
        self.pool.hold(pages, fresh=True)
        return pages

    def _plan(self):
        """[(request, Chunk)], fewest tokens first: decode rows, and prompt chunks within the budget, oldest first."""
        plan, budget = [], self.prefill_chunk
        for request in list(self.running):
            left = request.length - request.computed
            n = left if left <= 1 else min(left, budget, self._next_snapshot(request) - request.computed)
            if n <= 0 or request.preempted:
                continue
            at_hand = request.computed + n <= len(request.pages) * self.pool.page_size and not request.shared
            if not at_hand and not self._make_room(request, request.computed + n):
                continue
            dst = self._take(self.pool.groups) if request.shared else request.state
            plan.append((request, Chunk(n, request.computed, request.pages, request.state, dst)))
            budget -= n if left > 1 else 0
        return sorted(plan, key=lambda item: item[1].tokens)

    def _next_snapshot(self, request):
        """The position at which the next chunk of a prompt has to end."""
        stops = [request.out.prompt_tokens] if request.computed < request.out.prompt_tokens else []
        stops += [request.branch] if request.branch > request.computed else []
        every = self.snapshots.every
        stops += [(request.computed // every + 1) * every] if every else []
        return min(stops, default=request.length)

    def _make_room(self, request, tokens):
        """Gets the pages for a step: evicts, then preempts the youngest. False if `request` itself had to go."""
        pages = max(self.pool.history_pages(tokens) - len(request.pages), 0)
        while not self.cache.evict(pages + self.pool.groups * request.shared):
            if request.shared and (self.pool.references[request.state] == 1).all():
                request.shared = False  # its snapshot was evicted just now: the state is its own again
                continue
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        if pages > 0:
            request.pages = np.concatenate([request.pages, self._take(pages)])
        return True

    def _preempt(self, request):
        """Back to the head of the queue; what it has computed stays in the cache until others need the room."""
        self._keep(request)
        self._put_back(request)
        self.preemptions += 1

    def _put_back(self, request):
        self._let_go(request)
        request.preempted = True
        self.waiting.appendleft(request)

    def _snapshot(self, request):
        """Keeps the request's state in the cache where a later prompt may resume."""
        at, s = request.computed, self.snapshots
        due = s.prompt and at == request.out.prompt_tokens
        due |= at == request.branch or (s.every and at % s.every == 0 and at < request.out.prompt_tokens)
        if due:
            self._keep(request)

    def _keep(self, request):
        """Puts the request's prefix into the cache, unless it carries a fault."""
        if self.prefix_cache and request.computed and bool(request.hidden.isfinite().all()):
            pages = request.pages[: self.pool.history_pages(request.computed)]
            self.cache.insert(request.buffer[: request.computed], pages, request.state, request.hidden)
            request.shared = True

    def _let_go(self, request):
        """Gives up the request's pages; returns those that are free now."""
        freed = self.pool.drop(request.pages) + self.pool.drop(request.state)
        request.pages = request.state = np.empty(0, dtype=np.int64)
        self.running.remove(request)
        return freed

    def _sample(self, requests):
        """-> logits [R, V], ids [R], finite [R] of the next token of each request."""
        logits = self.model.logits(torch.stack([r.hidden for r in requests]))
        return logits, *sample(logits, [r.params for r in requests], [self._draw(r) for r in requests])

    def _draw(self, request):
        return uniform(request.seed, len(request.out.token_ids)) if request.params.temperature else 0.5

    def _append(self, requests, logits, tokens, finite):
        """Appends to each request its token, and finishes those that end."""
        tokens, finite = torch.stack([tokens, finite.to(tokens.dtype)]).tolist()  # here the host waits for the GPU
        for i, (request, good, token) in enumerate(zip(requests, finite, tokens)):
            if not good:
                self.faults += 1
                self._finish(request, "error")
                continue
            request.append(token)
            request.out.token_ids.append(token)
            if request.params.logprobs is not None:
                request.out.logprobs.append(logprobs(logits[i], token, request.params.logprobs))
            ended = token in request.params.stop_token_ids or (token in self._eos and not request.params.ignore_eos)
            if not ended and request.text:
                piece, ended = request.text.push(token)
                request.out.text += piece
            if ended or len(request.out.token_ids) == request.limit:
                self._finish(request, "stop" if ended else "length")

    def _finish(self, request, reason):
        """Ends a request: the rest of its text, its place in the queue, its pages; its prefix may stay in the cache."""
        if request.text:
            request.out.text += request.text.flush()
        request.out.finish_reason = reason
        if request in self.running:
            if reason == "error":
                self.cache.forget(request.tokens)
                self.pool.scrub(self._let_go(request))
            else:
                if self.snapshots.answer and reason != "abort":
                    self._keep(request)
                self._let_go(request)
        else:
            if request.transfer is not None:  # the copy goes on, into pages that stay in the cache
                self.cache.finish(request.transfer)
            self.waiting.remove(request)
        self._done.append(request.out)

    # ------------------------------------------------------------ what happened

    def _count(self, plan, seconds):
        """Splits a step's time between reading prompts and writing answers by their tokens."""
        total = sum(c.tokens for _, c in plan)
        decode = sum(c.tokens == 1 and c.past >= r.out.prompt_tokens for r, c in plan)
        for kind, tokens in (("prompt", total - decode), ("decode", decode)):
            self._tokens[kind] += tokens
            self._seconds[kind] += seconds * tokens / total

    def _rate(self, kind):
        return self._tokens[kind] / self._seconds[kind] if self._seconds[kind] else 0.0

    @property
    def stats(self):
        """What the engine holds and did: pages, requests, reuse, tokens/s, the backend each op ran with its calls."""
        pool, host = self.pool, self.cache.host
        history, state = (
            np.unique(np.concatenate([[], *[getattr(r, x) for r in self.running]])).size for x in ("pages", "state")
        )
        stats = {"pages": pool.num_pages, "pages_free": pool.free_pages, "pages_history": history, "pages_state": state}
        stats |= {"pages_cached": pool.num_pages - pool.free_pages - pool.live_pages, "page_tokens": pool.page_size}
        stats |= {
            "host_pages": host.num_pages if host else 0,
            "host_pages_used": host.num_pages - host.free_pages if host else 0,
        }
        stats |= {"hit_rate": self._reused / self._asked if self._asked else 0.0, "preemptions": self.preemptions}
        stats |= {"evicted": self.cache.evicted, "offloaded": self.cache.offloaded, "restored": self.cache.restored}
        stats |= {"faults": self.faults, "running": len(self.running), "waiting": len(self.waiting)}
        for kind in ("prompt", "decode"):
            stats |= {f"{kind}_tokens": self._tokens[kind], f"{kind}_tokens_per_s": self._rate(kind)}
        backends = {}
        for (name, backend), calls in sorted(self._ran.items()):
            backends[name] = " + ".join([*filter(None, [backends.get(name)]), f"{backend} x{calls}"])
        return stats | self.runner.stats | {"backends": backends}


def _check_options(num_pages, max_batch, prefill_chunk, draft_tokens, host_pages, kv_dtype):
    for name, value in (("num_pages", num_pages), ("max_batch", max_batch), ("prefill_chunk", prefill_chunk)):
        if not (value is None and name != "max_batch") and (not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} is {value!r}; it must be at least 1")
    if draft_tokens:
        raise ValueError(f"draft_tokens is {draft_tokens}; speculative decoding is not built yet, use 0")
    if host_pages < 0:
        raise ValueError(f"host_pages is {host_pages}; it must be 0 or more")
    if kv_dtype not in (None, "fp8"):
        raise ValueError(f"kv_dtype is {kv_dtype!r}; None (the model's dtype) and 'fp8' are supported")


def _pick_device(device):
    try:
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise ValueError(f"device {device!r} is unknown; cpu and cuda are supported") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda was asked for, but PyTorch sees no GPU here; use --device cpu")
    return device


# ---------------------------------------------------------------- the command line


def _arguments():
    p = argparse.ArgumentParser(
        prog="python engine.py",
        description="Continue a text with Kimi K3. With --prompt alone, a small K3 trained on fairy tales tells one.",
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
        if engine.cfg.hidden_size < SMALL:  # threads that wait for each other cost more than they bring
            torch.set_num_threads(1)
        first = None
        if len(prompts) == 1:
            for piece in engine.stream(prompts[0], params):
                first = first or time.perf_counter() - started
                print(piece, end="", flush=True)
            print()
            if engine.faults:
                raise ValueError("the model's output was not finite (NaN); is the checkpoint damaged?")
        else:
            for n, out in enumerate(
                engine.generate(prompts, params, progress=bool(sys.stderr) and sys.stderr.isatty()), 1
            ):
                print(f"[{n}]", file=sys.stderr, flush=True)
                print(out.text, flush=True)
            if engine.faults:
                raise ValueError(f"{engine.faults} answers ended because the model's output was not finite (NaN)")
        if args.stats:
            _print_stats(engine, first)
    except BrokenPipeError:  # the reader has left, as in `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError, RecursionError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _read_stdin():
    if sys.stdin is None:
        raise ValueError("--prompt - reads standard input, which is closed")
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
