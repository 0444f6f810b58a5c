"""The engine: many requests, one loop. `python engine.py --prompt "Once upon a time"` runs it.

    while there are requests:
        plan a step: who is admitted, who reads which part of its prompt, who gets a token       (scheduler.py)
        run it: the model over all of them at once, and the choice of tokens                     (runner.py)
        commit it: requests move on, snapshots are kept; append the tokens; finish what has ended

Everything a sequence needs between steps lies in the page pool (cache.py): its latent rows and its KDA state. A step
happens whole or not at all: the model may fail or be interrupted, what comes before and after it is not.
"""

import contextlib
import itertools
import random
import sys
import time
from collections import Counter, deque
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import kernels as registry
from cache import FP8, PagePool
from draft import MOST, MTP, Drafting, Lookup
from model import K3
from prefix import PrefixCache
from runner import Runner
from sampling import Output, SamplingParams
from scheduler import Request, Scheduler, Snapshots, Status, uninterrupted
from tokenizer import TextStream, Tokenizer

TINY = Path(__file__).resolve().parent / "tiny"  # the model that is run when none is named
CPU_POOL_BYTES = 256 << 20
GPU_POOL_SHARE = 0.8  # of the memory that is free once the model is loaded; the rest is for activations
RATE_SECONDS = 10.0  # over how long the speeds in `stats` are taken


class Engine:
    """Generates text for many requests at once.

    model: a checkpoint folder, or a K3 (its device and dtype are then kept). device: cuda where there is one; dtype:
    bfloat16 on a GPU, float32 on a CPU. num_pages: pages of the pool (derived from memory). max_batch: requests that
    run at once. prefill_chunk: prompt tokens read per step, over all requests (512 on a CPU, 8192 on a GPU), of which
    short_share goes to prompts that came after the oldest, the shortest rest first. draft: "mtp", "lookup" or an object
    (draft.py) drafts tokens, which are then verified together; draft_tokens: how many, 0 to 7 or "auto": no answer
    depends on either. tokenizer: a Tokenizer or its folder. prefix_cache: reuse prefixes, resumed where `snapshots`
    says (None: nowhere); host_pages: pages of host memory for evicted prefixes. kv_dtype: "fp8" stores latent rows in 8
    bits. kernels: which backend runs each op (kernels/__init__.py). graphs: decode steps as CUDA graphs (default: on a
    GPU). Raises ValueError or OSError in one line.
    """

    def __init__(
        self, model=TINY, device=None, dtype=None, num_pages=None, max_batch=64, prefill_chunk=None, draft_tokens=None,
        kernels="auto", draft=None, tokenizer=None, prefix_cache=True, snapshots=Snapshots(),  # noqa: B008 (frozen)
        host_pages=0, kv_dtype=None, graphs=None, short_share=0.25,
    ):  # fmt: skip
        snapshots, host_pages = snapshots or Snapshots(False, False, 0, 0), host_pages or 0
        _check(num_pages, max_batch, prefill_chunk, host_pages, kv_dtype, kernels, short_share)
        _check_draft(draft, draft_tokens)
        with registry.use(kernels):
            registry.current()  # all that is asked for exists
        if isinstance(model, (str, Path)):
            device = _pick_device(device)
            path, dtype = Path(model), _pick_dtype(dtype, device)
            if not path.is_dir():
                raise FileNotFoundError(f"{path}: no such folder; --model takes a checkpoint folder")
            model = K3.from_pretrained(path, dtype=dtype, device=device)
            if tokenizer is None and any((path / name).is_file() for name in ("tokenizer.json", "tiktoken.model")):
                tokenizer = path
        if isinstance(tokenizer, (str, Path)):
            tokenizer = Tokenizer.from_pretrained(tokenizer)
        self.model, self.cfg, self.tokenizer = model, model.cfg, tokenizer
        self.device, self.dtype = model.norm.weight.device, model.norm.weight.dtype
        on_gpu = self.device.type == "cuda"
        if graphs and not on_gpu:
            raise ValueError(f"graphs=True needs a GPU, and the model is on {self.device}; leave it out")
        self.kernels, self.snapshots = kernels, snapshots
        latent = FP8 if kv_dtype == "fp8" else None
        graphs = on_gpu if graphs is None else graphs
        tokens = draft_tokens if draft_tokens is not None else 0 if draft is None else "auto"
        draft = ("mtp" if model.mtp else "lookup") if draft is None and tokens != 0 else draft
        mtp = tokens != 0 and isinstance(draft, str) and draft == "mtp"
        num_pages = num_pages or self._fitting_pages(latent, mtp)
        self.pool = PagePool(self.cfg, num_pages, self.dtype, self.device, latent, mtp)
        draft = MTP(model, self.pool) if mtp else Lookup() if isinstance(draft, str) else draft
        self.drafting = Drafting(draft, tokens, self.cfg.vocab_size, graphs) if tokens != 0 else None
        self.cache = PrefixCache(self.pool, host_pages)
        chunk = prefill_chunk or (8192 if on_gpu else 512)
        options = (max_batch, chunk, short_share, snapshots, prefix_cache)
        self.scheduler = Scheduler(self.pool, self.cache, self.drafting, *options)
        self.runner = Runner(model, self.pool, graphs, self.drafting and self.drafting.mtp)
        self._next_rid = self.faults = 0
        self._done = []  # Outputs that `step` has still to return
        self._open = None  # the plan of a step that is under way
        self._eos = self.cfg.eos_ids
        self._tokens = {"prompt": 0, "decode": 0}
        self._steps = deque()  # (kind, tokens, seconds, the clock) of the last steps
        self._ran = Counter()  # (op, backend) -> calls

    waiting = property(lambda self: self.scheduler.waiting)
    running = property(lambda self: self.scheduler.running)  # in order of arrival

    def _fitting_pages(self, latent, mtp):
        empty, cuda = PagePool(self.cfg, 0, self.dtype, "meta", latent, mtp), self.device.type == "cuda"
        free = torch.cuda.mem_get_info(self.device)[0] * GPU_POOL_SHARE if cuda else CPU_POOL_BYTES
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
                with uninterrupted():
                    self._undo()
                    self._finish(request, "abort")
                return True
        return False

    def generate(self, prompts, params=None, progress=False):
        """Answers all prompts: a str, ids, or a list of either; params: one SamplingParams or one per prompt.

        Returns a list of Output, in order. progress: a live line on standard error.
        """
        prompts = prompts.tolist() if hasattr(prompts, "tolist") else prompts
        one = isinstance(prompts, str) or len(prompts) and not isinstance(prompts[0], str)
        if isinstance(prompts, str) or (one and not hasattr(prompts[0], "__len__")):
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
        """The prompt as ids, an integer array [n], or a ValueError that says why it cannot run."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("this model has no tokenizer: give ids, or put a tokenizer.json there")
            prompt = self.tokenizer.encode(prompt)
        elif params.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and this model has none; use stop_token_ids")
        if not hasattr(prompt, "__len__"):
            raise ValueError(f"a prompt is a str or a list of token ids, not {prompt!r:.80}")
        if not len(prompt):
            raise ValueError("the prompt is empty; give at least one token")
        try:
            ids = np.asarray(prompt)
        except (ValueError, TypeError):  # rows of different lengths; a tensor on a GPU
            ids = np.asarray(prompt.tolist() if hasattr(prompt, "tolist") else None)
        if ids.ndim != 1 or ids.dtype.kind not in "iu" and not _are_integers(ids):
            raise ValueError(f"a prompt is a str or a list of token ids, not {prompt!r:.80}")
        wrong = (ids < 0) | (ids >= self.cfg.vocab_size)
        if wrong.any():
            which = ids[int(wrong.argmax())]
            raise ValueError(f"token id {which} is outside the vocabulary of {self.cfg.vocab_size}")
        most, room = self.cfg.max_position_embeddings, self._room()
        if len(ids) > most:
            raise ValueError(f"the prompt has {len(ids)} tokens; the model reads at most {most}")
        if len(ids) > room:
            need, pages, P = self.pool.pages_for(len(ids)), self.pool.num_pages, self.pool.page_size
            raise ValueError(
                f"the prompt has {len(ids)} tokens, which need {need} pages of {P} tokens, and the pool has {pages}; "
                "shorten it or raise num_pages"
            )
        return ids

    def _room(self):
        """The most tokens of one request that the pool can hold."""
        return (self.pool.num_pages - self.pool.groups) * self.pool.page_size

    def _enqueue(self, ids, params):
        """Queues checked ids -> Output. Its answer is cut to what the context and the pool leave; the last token is
        never stored, so one is always left."""
        n = len(ids)
        limit = min(params.max_tokens, max(min(self.cfg.max_position_embeddings, self._room()) - n, 0) + 1)
        out = Output(self._next_rid, n, logprobs=None if params.logprobs is None else [])
        text = TextStream(self.tokenizer, params.stop, ids) if self.tokenizer else None
        seed = random.getrandbits(63) if params.seed is None else params.seed
        self._next_rid += 1
        stops = tuple(params.stop_token_ids) + (() if params.ignore_eos else tuple(self._eos))
        stops = tuple(i for i in dict.fromkeys(stops) if 0 <= i < self.cfg.vocab_size)
        self.waiting.append(Request(out, ids, params, limit, text, seed, stops))
        return out

    # ------------------------------------------------------------ the loop

    def step(self):
        """Runs one batch. Returns the Outputs that grew in it, and those that have finished since the last call."""
        grown = self._advance()
        done, self._done = self._done, []
        return done + [out for out in grown if out.finish_reason is None]

    @torch.inference_mode()
    def _advance(self):
        """One step: plan it, run it, commit it; returns the Outputs that grew."""
        with registry.use(self.kernels, beneath=True), self._on_device():
            counts, started = registry.counts.copy(), time.perf_counter()
            try:
                with uninterrupted():
                    self._undo()
                    self._finish_ended()  # an answer of no tokens is complete before it starts
                    plan = self._open = self.scheduler.schedule()
                if not (plan.work or plan.choosing):
                    return []
                result = self.runner.run(plan.step)  # at its end the host waits for the device
                with uninterrupted():
                    taken = self._append(plan, result)
                    self._open = None
                    self._commit(plan, result, taken)
            except BaseException:  # Ctrl-C too
                with uninterrupted():
                    self._undo()
                raise
            self._count(plan, result, taken, time.perf_counter() - started)
            self._ran += registry.counts - counts
        return [request.out for request in plan.choosing]

    def _undo(self):
        """A step that did not come to its end is undone: its requests start again."""
        if self._open is not None:
            self.scheduler.undo(self._open)
            self._open = None

    def _append(self, plan, result):
        """Appends what was chosen, up to where an answer ends -> {request: how many tokens}, of those with drafts."""
        for request, *news in zip(plan.choosing, result.tokens, result.logprobs, result.finite):
            for token, logprobs, finite in zip(*news):
                request.faulty = not finite
                if request.faulty or request.ended:
                    break
                self._append_token(request, token, logprobs)
        drafted = [request for request, chunk in plan.work if chunk.drafts]
        taken = {request: request.length - 1 - request.computed for request in drafted}
        for i, (request, count) in enumerate(taken.items()):
            if request.ends_late and request.ended == "stop" and count:
                self.runner.commit_less(i, count)
        return taken

    def _commit(self, plan, result, taken):
        """Requests move on, then those end that have to."""
        self.scheduler.commit(plan, result, taken)
        faulty = [request for (request, _), sound in zip(plan.work, result.sound) if not sound]
        for request in dict.fromkeys([*faulty, *(request for request in plan.choosing if request.faulty)]):
            self._finish(request, "error")
        self._finish_ended()

    def _on_device(self):
        return torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()

    def _append_token(self, request, token, logprobs):
        """Appends a token to a request's answer; whether that ends it, `request.ended` says."""
        out, piece, stopped = request.out, "", token in request.stops
        if not stopped and request.text:
            piece, stopped = request.text.push(token)
        out.text += piece
        if logprobs is not None:
            out.logprobs.append(logprobs)
        out.token_ids.append(token)
        request.append(token)
        request.stopped = stopped

    def _finish_ended(self):
        for request in [*self.running, *itertools.islice(self.waiting, self.scheduler.max_batch)]:
            if request.ended:
                self._finish(request, request.ended)

    def _finish(self, request, reason):
        """Ends a request, once: the rest of its text, its pages; its prefix may stay in the cache."""
        if request.status is Status.ENDED:
            return
        try:
            freed = self.scheduler.end(request, keep=self.snapshots.answer and reason in ("stop", "length"))
        finally:
            request.out.finish_reason = reason
            request.out.text += request.text.flush() if request.text else ""
            self._done.append(request.out)
        if reason == "error":
            self.faults += 1
            self.pool.scrub(freed)
            self.cache.forget(request.tokens, request.out.prompt_tokens)

    # ------------------------------------------------------------ what happened

    def _count(self, plan, result, taken, seconds):
        """Splits a step's time between reading prompts and writing answers by their rows. Steps in which something was
        captured or compiled say nothing of speed."""
        writers = [(r, c) for r, c in plan.work if c.drafts or c.tokens == 1 and c.past >= r.out.prompt_tokens]
        rows, now = sum(c.tokens for _, c in writers), time.perf_counter()
        written, total = sum(taken.get(r, 1) for r, _ in writers), len(plan.step.ids)
        for kind, tokens, n in (("prompt", total - rows, total - rows), ("decode", written, rows)):
            self._tokens[kind] += tokens
            if n and not result.cold:
                self._steps.append((kind, tokens, seconds * n / total, now))
        if self.drafting:
            self.drafting.observe(plan.step, result, taken, None if result.cold else seconds)
        while self._steps and self._steps[0][3] < now - RATE_SECONDS:
            self._steps.popleft()

    def _rate(self, kind):
        steps = [(tokens, seconds) for name, tokens, seconds, _ in self._steps if name == kind]
        return sum(tokens for tokens, _ in steps) / sum(seconds for _, seconds in steps) if steps else 0.0

    @property
    def stats(self):
        """What the engine holds and did: pages, requests, reuse, tokens/s over the last seconds, the backend each op
        ran with its calls."""
        pool, cache, host, scheduler = self.pool, self.cache, self.cache.host, self.scheduler
        cache.settle()
        held = [[r.pages for r in self.running], [r.state for r in self.running]]
        held = [np.unique(np.concatenate([[], *pages])).size for pages in held]
        stats = {"pages": pool.num_pages, "pages_free": pool.free_pages, "page_tokens": pool.page_size}
        stats |= {"pages_history": held[0], "pages_state": held[1]}
        stats |= {"pages_cached": pool.num_pages - pool.free_pages - pool.live_pages}
        stats |= {"host_pages": host.num_pages if host else 0}
        stats |= {"host_pages_used": host.num_pages - host.free_pages if host else 0}
        stats |= {"hit_rate": scheduler.reused / scheduler.asked if scheduler.asked else 0.0}
        stats |= {"evicted": cache.evicted, "offloaded": cache.offloaded, "restored": cache.restored}
        stats |= {"preemptions": scheduler.preemptions, "faults": self.faults}
        stats |= {"running": len(self.running), "waiting": len(self.waiting)}
        for kind in ("prompt", "decode"):
            stats |= {f"{kind}_tokens": self._tokens[kind], f"{kind}_tokens_per_s": self._rate(kind)}
        backends = {}
        for (name, backend), calls in sorted(self._ran.items()):
            backends[name] = " + ".join([*filter(None, [backends.get(name)]), f"{backend} x{calls}"])
        drafts = self.drafting.stats if self.drafting else {"draft": None}
        return stats | drafts | self.runner.stats | {"backends": backends}


def _are_integers(ids):
    """Whether an array of objects holds nothing but integers, some too large for int64."""
    return ids.dtype == object and all(isinstance(i, int) for i in ids)


def _check_draft(draft, tokens):
    named = draft is None or isinstance(draft, str) and draft in ("mtp", "lookup")
    if not named and (isinstance(draft, type) or not callable(getattr(draft, "draft", None))):
        raise ValueError(f'draft is {draft!r}; give "mtp", "lookup", or an object with draft(text, count)')
    if tokens not in (None, "auto") and not (type(tokens) is int and 0 <= tokens <= MOST):
        raise ValueError(f'draft_tokens is {tokens!r}; it must be 0 to {MOST}, or "auto"')


def _check(num_pages, max_batch, prefill_chunk, host_pages, kv_dtype, kernels, short_share):
    def need(ok, what):
        if not ok:
            raise ValueError(what)

    whole = lambda value, least: isinstance(value, int) and value >= least
    for name, value in (("num_pages", num_pages), ("max_batch", max_batch), ("prefill_chunk", prefill_chunk)):
        derived = value is None and name != "max_batch"
        need(derived or whole(value, 1), f"{name} is {value!r}; it must be at least 1")
    need(whole(host_pages, 0), f"host_pages is {host_pages!r}; it must be 0 or more")
    need(kv_dtype in (None, "fp8"), f"kv_dtype is {kv_dtype!r}; None (the model's dtype) and 'fp8' are supported")
    what = f"kernels is {kernels!r}; give 'auto' or 'op=backend,...', and functions by kernels.use(...)"
    need(isinstance(kernels, str), what)
    share = isinstance(short_share, (int, float)) and 0 <= short_share < 1
    need(share, f"short_share is {short_share!r}; it must be 0 or more, and below 1")


def _pick_device(device):
    try:
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise ValueError(f"device {device!r} is unknown; cpu and cuda are supported") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda was asked for, but PyTorch sees no GPU here; use --device cpu")
    return device


def _pick_dtype(dtype, device):
    if dtype is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    named = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(named, torch.dtype) or not named.is_floating_point or named.itemsize < 2:
        raise ValueError(f"dtype is {dtype!r}; float32, bfloat16, float16 and float64 are supported")
    return named


if __name__ == "__main__":
    sys.modules["engine"] = sys.modules[__name__]  # the command line finds this module, not a second one

    from cli import main

    raise SystemExit(main())
