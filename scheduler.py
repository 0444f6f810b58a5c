"""Who runs next: requests, admission, the plan of a step, pre-emption, snapshots.

    schedule():  admit waiting requests: resume from cached prefixes, take pages for the prompt
                 plan a step: one token of every answer, and chunks of the prompts that are being read, within a budget
                 where pages run out, evict cached prefixes, then pre-empt the youngest request
    commit():    the model has run: requests have moved on; states worth keeping go to the prefix cache
    undo():      it failed on the way, and states have moved: these requests start again from what the cache has

First come, first served. All is decided here, by what requests and pages are: a plan holds no clock and no chance, so
one rank can plan for all.
"""

import bisect
import contextlib
import itertools
import signal
import threading
from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np

from cache import STOPS, Chunk, Step
from prefix import common
from sampling import Choice, signed


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


class Status(Enum):
    WAITING = "in the queue, new or pre-empted"
    FETCHING = "in the queue, its prefix on its way from the host"
    RUNNING = "running"
    ENDED = "ended"


class Request:
    """A request: its tokens so far, how many of them the pool holds, and where. stops: ids that end its answer."""

    def __init__(self, out, prompt, params, limit, text, seed, stops=()):
        self.out, self.params, self.limit, self.text, self.stops = out, params, limit, text, stops
        self.filters = params.temperature, params.top_k, params.top_p, params.min_p
        self.seed = signed(seed)
        self.buffer, self.length = np.array(prompt, dtype=np.int32), len(prompt)
        self.status = Status.WAITING
        self.pages = self.state = np.empty(0, dtype=np.int64)  # history by page index; state, one a group
        self.computed = 0  # tokens in the pool
        self.hidden = None  # of the last of them, before the final norm
        self.due = []  # (position, h of the token ahead): rows of the draft layer that are not written yet
        self.branch = 0  # where the prompt leaves a known prefix: a snapshot is due there
        self.transfer = None  # prefix.Transfer, while it is FETCHING
        self.stopped = False  # its last token ended the answer
        self.faulty = False  # its last logits were not finite (NaN)
        self.found = None  # what the cache answered, and of which version
        self.compared, self.siblings = 0, []  # admissions whose prompts it was compared with; those that share a prefix
        self.admission = 0

    @property
    def tokens(self):
        """Prompt and answer so far, int32 [length]."""
        return self.buffer[: self.length]

    @property
    def admitted(self):
        """Whether it has ever run."""
        return self.admission > 0

    @property
    def reading(self):
        return self.computed < self.out.prompt_tokens

    @property
    def ended(self):
        """Why its answer is complete, or None."""
        return "stop" if self.stopped else "length" if len(self.out.token_ids) >= self.limit else None

    @property
    def choice(self):
        """How its next token is chosen."""
        n = len(self.out.token_ids)
        return Choice(self.filters, self.seed, n, self.stops, self.limit - n, self.params.logprobs)

    @property
    def ends_late(self):
        """Whether its answer may end where only the host sees it, among drafts that the device has accepted."""
        return bool(self.params.stop) or len(self.stops) > STOPS

    def append(self, token):
        if self.length == len(self.buffer):
            self.buffer = np.concatenate([self.buffer, np.empty_like(self.buffer)])
        self.buffer[self.length] = token
        self.length += 1


class Plan(NamedTuple):
    """What a step does, and for whom. work: (request, Chunk), fewest tokens first; choosing: who gets a token: those of
    `work` that are read to their end, then those that were resumed at their last token, which the pool holds already.
    """

    work: list
    choosing: list
    step: Step


class Scheduler:
    """The requests that wait and run, in order of arrival, and their pages. Options: see engine.Engine."""

    def __init__(self, pool, cache, drafting, max_batch, prefill_chunk, short_share, snapshots, prefix_cache):
        self.pool, self.cache, self.drafting = pool, cache, drafting
        self.max_batch, self.prefill_chunk, self.short_share = max_batch, prefill_chunk, short_share
        self.snapshots, self.prefix_cache = snapshots, prefix_cache
        self.waiting, self.running = deque(), []
        self.admissions = self.preemptions = 0
        self.reused = self.asked = 0  # prompt tokens: from the cache, in all

    def schedule(self):
        """-> Plan; it is empty where nobody can run."""
        self.cache.settle()
        self._admit()
        drafts = self.drafting.plan(self) if self.drafting else {}
        work = []
        try:
            self._plan(drafts, work)
        except BaseException:
            self.undo(Plan(work, [], None))
            raise
        held = [r for r in self.running if r.computed == r.length]
        ends = [i for i, (r, c) in enumerate(work) if c.drafts or c.past + c.tokens == r.length]
        choosing = [work[i][0] for i in ends] + held
        parts = [np.append(r.tokens[c.past :], drafts[r]) if c.drafts else r.buffer[c.past : c.past + c.tokens]
                 for r, c in work]  # fmt: skip
        ids = np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)
        before = [r.hidden for r, c in work if c.tokens > 1] if self.drafting and self.drafting.mtp else ()
        chunks, choices = [c for _, c in work], [r.choice for r in choosing]
        return Plan(work, choosing, Step(chunks, ids, ends, choices, [r.hidden for r in held], before))

    def writers(self):
        """The requests that get their next token in this step, after one token."""
        return [r for r in self.running if not r.reading and r.computed == r.length - 1]

    def commit(self, plan, result, taken):
        """The step has run: requests have moved on, and prompts leave the snapshots that are due. taken: {request: how
        many tokens of those that it brought with drafts count}."""
        for (request, chunk), hidden in zip(plan.work, result.hidden):
            if chunk.drafts:
                count = taken[request]
                request.computed, request.hidden = chunk.past + count, hidden[count - 1]
            else:
                if self.drafting and self.drafting.mtp and chunk.tokens == 1:
                    request.due.append((chunk.past, request.hidden))
                request.computed, request.hidden = chunk.past + chunk.tokens, hidden
            if chunk.dst is not chunk.src:
                self.pool.drop(chunk.src)
                request.state = chunk.dst
        for (request, _), sound in zip(plan.work, result.sound):
            if sound and request.computed <= request.out.prompt_tokens and self._is_due(request):
                self.keep(request)

    def undo(self, plan):
        """The step failed, perhaps when some states had moved: its requests go back to the queue."""
        for request, chunk in plan.work:
            if chunk.dst is not chunk.src:
                self.pool.drop(chunk.dst)
            self._put_back(request)

    # ------------------------------------------------------------ admission

    def _admit(self):
        """First come, first served; who waits for rows that another is reading or copying lets the next ones pass."""
        for request in list(itertools.islice(self.waiting, self.max_batch - len(self.running))):
            if not request.ended and self._start(request) is False:
                break

    def _start(self, request):
        """Tries to admit a request -> True; False: it waits for room, or None: for rows that are on their way."""
        if request.status is Status.FETCHING and not request.transfer.done:
            return None
        request.status, request.transfer = Status.WAITING, None
        node, known = self._find(request)
        if self._soon(request, node.end if node else 0):
            return None
        if node and not self.cache.here(node):
            node, verdict = self._fetch(request, node)
            if not verdict:
                return verdict
        if not self._take_pages(request, node):
            return False
        leaves = known if self.snapshots.branch and known >= self.snapshots.branch else 0
        request.branch = leaves if request.computed < leaves < request.length else 0
        if not request.admitted:
            request.out.cached_tokens = request.computed
            self.reused += request.computed
            self.asked += request.length
        self.admissions += 1
        request.admission, request.status = self.admissions, Status.RUNNING
        self.waiting.remove(request)
        bisect.insort(self.running, request, key=lambda r: r.out.rid)
        return True

    def _find(self, request):
        """The deepest node that the request can resume from, or None; how many of its tokens the cache knows."""
        if not self.prefix_cache:
            return None, 0
        if request.found is None or request.found[0] != self.cache.version:
            request.found = self.cache.version, *self.cache.match(request.tokens)
        return request.found[1:]

    def _soon(self, request, known):
        """Whether a prompt that is being read now will reach a point from which this request can resume, later than
        `known`; a snapshot is then due there. Requests that come together so read what they share only once.
        """
        least = self.snapshots.branch
        if not (self.prefix_cache and least):
            return False
        for other in self.running if request.compared < self.admissions else ():
            if other.reading and other.admission > request.compared:  # each pair is compared once
                same = common(other.buffer[: other.out.prompt_tokens], request.tokens)
                request.siblings += [(other, same)] if same >= least else []
        request.compared = self.admissions
        for other, same in request.siblings:
            if other.status is Status.RUNNING and other.computed < same and same - known >= least:
                other.branch = other.branch if other.computed < other.branch <= same else same
                return True
        return False

    def _fetch(self, request, node):
        """Brings the text up to `node` back from the host -> the node to resume from, and a verdict as `_start`'s."""
        if any(n.arriving for n in node.path()):  # for another request
            return node, None
        transfer = self.cache.restore(node) if self.cache.room_for(node) else None
        if transfer is None:  # worth waiting for, unless nothing will make room
            if self.running or self.cache.busy:
                return node, False
            return self.cache.match(request.tokens, here=True)[0], True
        if not transfer.done:
            request.status, request.transfer = Status.FETCHING, transfer
        return node, transfer.done or None

    def _take_pages(self, request, node):
        """Takes pages for the whole prompt, those of `node` (or None) among them; False where there is no room yet."""
        P, total, groups = self.pool.page_size, self.pool.history_pages(request.length), self.pool.groups
        if node is not None and not self._fits(node, total):
            if self.running or self.cache.busy:
                return False
            node = None  # alone in the pool: without the cached pages it fits
        if node is None and total + groups > self.pool.num_pages - self.pool.live_pages:
            return False
        pages, state, hidden = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64), None
        if node is not None:  # eviction may take it out of the tree: what it holds is taken first
            pages, state, hidden = self.cache.table(node), node.snapshot.pages.copy(), node.snapshot.hidden
            self.cache.use(node, resume=True)
            self.pool.hold(state)
            self.pool.hold(pages)
        end = node.end if node else 0
        wait = not self.running  # for copies to the host that are not done: nobody is held up
        if not self.cache.evict(total - end // P + groups, wait):
            self.pool.drop(state)
            self.pool.drop(pages)
            return False
        request.computed, request.hidden = end, hidden
        if end % P:  # partly filled: what this request adds goes to a page of its own
            shared, copy = pages[-1:].copy(), self._take(1)
            self.pool.copy_page(shared[0], copy[0])
            pages[-1:] = copy
            self.pool.drop(shared)
        request.pages = np.concatenate([pages, self._take(total - len(pages))])
        request.state = self._take(groups) if node is None else state
        return True

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

    # ------------------------------------------------------------ the plan of a step

    def _plan(self, drafts, work):
        """Fills work with (request, Chunk): decode rows, those with drafts, and prompt chunks within the budget, short
        ones first."""
        budget = self._budget()
        for request in list(self.running):
            left = request.length - request.computed
            m = len(drafts.get(request, ()))
            m = m if m and self.draft_pages(request, m) <= self.pool.free_pages else 0  # others may have taken some
            n = left + m if left <= 1 else budget.get(request, 0)
            if n <= 0 or request.status is not Status.RUNNING:
                continue
            at_hand = request.computed + n <= len(request.pages) * self.pool.page_size and not self._is_shared(request)
            if not at_hand and not self._make_room(request, request.computed + n):
                continue
            fresh = self._is_shared(request) or m and request.ends_late
            dst = self._take(self.pool.groups) if fresh else request.state
            work.append((request, Chunk(n, request.computed, request.pages, request.state, dst, drafts=m)))
        work.sort(key=lambda w: (w[1].tokens > 1, not w[1].drafts, w[1].tokens))

    def draft_pages(self, request, m):
        """How many pages a step with m drafts takes for a request: of history, and for a state beside the old one."""
        history = max(self.pool.history_pages(request.length + m) - len(request.pages), 0)
        return history + self.pool.groups * (self._is_shared(request) or m > 0 and request.ends_late)

    def _budget(self):
        """{request: how many tokens of its prompt this step reads}, `prefill_chunk` in all.

        The oldest prompt has the budget but for `short_share` of it, which the others get, shortest rest first, so that
        a short one does not wait for a long one; what they leave is the oldest one's, and what that leaves is for the
        others in order of arrival. So everybody is the oldest some day, and nobody starves.
        """
        need = {r: self._next_stop(r) - r.computed for r in self.running if r.length - r.computed > 1}
        given, left = dict.fromkeys(need, 0), self.prefill_chunk

        def give(request, most):
            nonlocal left
            n = max(min(need[request] - given[request], most, left), 0)
            given[request] += n
            left -= n

        oldest, *others = need or [None]
        kept = left - max(int(left * self.short_share), self.short_share > 0)
        for request in sorted(others, key=lambda r: r.length - r.computed):
            give(request, left - kept)
        for request in need:
            give(request, left)
        return given

    def _next_stop(self, request):
        """The position at which the next chunk of a prompt has to end."""
        stops = [request.out.prompt_tokens] if request.reading else []
        stops += [request.branch] if request.branch > request.computed else []
        every = self.snapshots.every
        stops += [(request.computed // every + 1) * every] if every else []
        return min([*stops, request.length])

    def _is_shared(self, request):
        """Whether the cache holds the request's state pages too: they must not be written."""
        return bool(len(request.state)) and bool(self.pool.references[request.state[0]] > 1)

    def _make_room(self, request, tokens):
        """Gets the pages for a step: evicts, then pre-empts the youngest. False if `request` itself had to go."""
        pages = max(self.pool.history_pages(tokens) - len(request.pages), 0)
        while not self.cache.evict(pages + self.pool.groups * (shared := self._is_shared(request))):
            if shared and not self._is_shared(request):
                continue  # its snapshot was evicted just now: the state is its own again
            victim = self.running[-1]
            self.keep(victim)  # what it has computed stays in the cache until others need the room
            self._put_back(victim)
            self.preemptions += 1
            if victim is request:
                return False
        if pages > 0:
            request.pages = np.concatenate([request.pages, self._take(pages)])
        return True

    # ------------------------------------------------------------ what is kept, what is given up

    def _is_due(self, request):
        """Whether a later prompt may resume where the request is now."""
        at, s = request.computed, self.snapshots
        end = s.prompt and at == request.out.prompt_tokens
        return end or at == request.branch or (s.every and at % s.every == 0 and at < request.out.prompt_tokens)

    def keep(self, request):
        """Puts the request's prefix into the cache."""
        if self.prefix_cache and request.computed:
            try:
                if request.due:
                    self.drafting.mtp.settle([request])
            except Exception:  # noqa: BLE001  the model's: a prefix without its rows is not kept
                return
            pages = request.pages[: self.pool.history_pages(request.computed)]
            self.cache.insert(request.buffer[: request.computed], pages, request.state, request.hidden)

    def end(self, request, keep=False):
        """Takes a request out, with keep its prefix goes to the cache; returns the pages that are free now."""
        freed = []
        try:
            if keep and request.status is Status.RUNNING:
                self.keep(request)
        finally:
            if request.status is Status.RUNNING:
                freed = self._let_go(request)
            else:  # a copy from the host goes on, into pages that stay in the cache
                self.waiting.remove(request)
            request.status = Status.ENDED
        return freed

    def _put_back(self, request):
        self._let_go(request)
        request.status = Status.WAITING
        bisect.insort(self.waiting, request, key=lambda r: r.out.rid)

    def _let_go(self, request):
        """Gives up the request's pages; returns those that are free now."""
        freed = self.pool.drop(request.pages) + self.pool.drop(request.state)
        request.pages = request.state = np.empty(0, dtype=np.int64)
        request.due = []
        self.running.remove(request)
        return freed


@contextlib.contextmanager
def uninterrupted():
    """Ctrl-C in the block is raised at its end: pages, requests and the tree change together or not at all."""
    if threading.current_thread() is not threading.main_thread() or not callable(signal.getsignal(signal.SIGINT)):
        yield  # no Ctrl-C arrives here
        return
    came = []
    usual = signal.signal(signal.SIGINT, lambda *args: came.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        if came:
            usual(*came[0])
