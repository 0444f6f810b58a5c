"""The prefix cache and the scheduler: whatever is reused, preempted or moved, a request answers as if it were alone."""

import contextlib
import functools
import gc
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import CASES, case
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from draft import Lookup
from engine import Engine, SamplingParams, Snapshots
from mla import latent_write
from prefix import HostTier, PrefixCache

P = 128  # page size of all reference cases
ROOT = Path(__file__).parent.parent
ALL = Snapshots(every=50, branch=1)


def greedy(n):
    return SamplingParams(max_tokens=n, ignore_eos=True)


@functools.cache
def alone(name, ids, n):
    """The ids that an engine without a cache answers to this prompt alone."""
    engine = Engine(case(name)[0], num_pages=40, prefix_cache=False, prefill_chunk=512)
    return engine.generate([list(ids)], greedy(n))[0].token_ids


@functools.cache
def chosen(name, ids):
    """What the model, reading a whole text at once, would choose after each of its tokens."""
    with torch.no_grad():
        return case(name)[0](torch.tensor([ids]))[0].argmax(-1).tolist()


def text(seed, n):
    return np.random.default_rng(seed).integers(3, 257, n).tolist()


def audit(engine):
    """Every page is free, or counted once for each request, node, snapshot and copy that has it; the tree is well
    formed, and pinned where a copy from the host needs it.
    """
    pool, cache = engine.pool, engine.cache
    want, on_host = np.zeros(pool.num_pages, int), np.zeros(cache.host.num_pages if cache.host else 0, int)
    nodes = cache.root.subtree()[1:]
    for node in nodes:
        count = on_host if node.on_host else want
        for holder in node.holders():  # both families live in the same place
            count[holder.pages] += 1
        assert node.snapshot or node.children, "a prefix that nothing can resume from was kept"
        assert node in (cache.host_nodes if node.on_host else cache.nodes)
        assert node.pins == sum(node in t.nodes for t in cache.transfers) and (node.pins or not node.arriving)
        assert len(node.pages) == -(-node.end // P) - node.start // P
    assert len(nodes) == len(cache.nodes) + len(cache.host_nodes)
    for _, pages, _ in cache.leaving:
        np.add.at(want, pages, 1)
    assert cache.leaving or not (cache.leaving_pages or cache._left.any())
    live = np.zeros(pool.num_pages, int)
    for request in engine.running:
        live[request.pages] += 1
        live[request.state] += 1
    for transfer in cache.transfers:
        live[transfer.pages] += 1
    assert (live == pool.live).all() and pool.live_pages == (live > 0).sum()
    assert (want + live == pool.references).all()
    assert sorted(pool._free) == np.flatnonzero(pool.references == 0).tolist()
    if cache.host:
        assert (on_host == cache.host.references).all()


class Delayed(HostTier):
    """As on a GPU, where copies run beside the loop, in order: they move bytes only when their event has been asked for
    `polls` times, or somebody waits for it.
    """

    polls = 0

    def __init__(self, *args):
        super().__init__(*args)
        self.queue, self.ran = [], 0

    def copy(self, source, target, to_host):
        self.queue.append((source.copy(), target.copy(), to_host))

    def run(self, count):
        for copy in self.queue[: count - self.ran]:
            super().copy(*copy)
        del self.queue[: count - self.ran]
        self.ran = max(count, self.ran)

    def event(tier):
        class Event:
            left, count = tier.polls, tier.ran + len(tier.queue)

            def query(self):
                self.left -= 1
                if self.left < 0:
                    tier.run(self.count)
                return self.left < 0

            def wait(self):
                self.left = -1
                tier.run(self.count)

        return Event()


@contextlib.contextmanager
def delayed(polls):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("prefix.HostTier", type("Delayed", (Delayed,), {"polls": polls}))
        yield


def step_interrupted(engine, line):
    """A step in which Ctrl-C comes at the `line`-th line of ours that runs. Returns whether it came."""
    left = line

    def trace(frame, event, arg):
        nonlocal left
        if Path(frame.f_code.co_filename).parent != ROOT:
            return None
        left -= event == "line"
        if not left and event == "line":
            signal.raise_signal(signal.SIGINT)
        return trace

    before, usual = sys.gettrace(), signal.signal(signal.SIGINT, signal.default_int_handler)  # of a job, it is ignored
    sys.settrace(trace)
    try:
        engine.step()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
        signal.signal(signal.SIGINT, usual)
    return False


def drain(engine, limit=5000):
    for _ in range(limit):
        if not (engine.running or engine.waiting):
            return
        engine.step()
    raise AssertionError("the engine does not come to an end")


# ---------------------------------------------------------------- invariant 1 as a property

prompts = st.tuples(
    st.sampled_from([0, 1, 2]),  # which base text
    st.one_of(st.sampled_from([1, P - 1, P, P + 1, 2 * P]), st.integers(1, 300)),  # how much of it
    st.sampled_from([0, 0, 1, 3, 40]),  # own tokens behind it
)
actions = st.one_of(
    st.tuples(st.just("add"), prompts, st.sampled_from([1, 2, 5, 12])),
    st.tuples(st.just("turn"), st.integers(0, 20), st.sampled_from([1, 20])),  # the next turn of an earlier answer
    st.tuples(st.just("edit"), st.integers(0, 20), st.sampled_from([0, 9])),  # its prompt, with another last token
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(st.just("abort"), st.integers(0, 20)),
    st.tuples(st.just("interrupt"), st.integers(1, 3000)),
)
schedules = st.fixed_dictionaries(
    {
        "actions": st.lists(actions, min_size=4, max_size=14),
        "num_pages": st.sampled_from([5, 6, 7, 9, 11, 14, 17, 30]),
        "host_pages": st.sampled_from([0, 0, 6, 20, 60]),
        "polls": st.sampled_from([0, 1, 3, 9]),
        "prefill_chunk": st.sampled_from([7, 16, 33, 64, 200]),
        "short_share": st.sampled_from([0.0, 0.25, 0.5]),
        "max_batch": st.sampled_from([1, 2, 4, 8]),
        "draft": st.sampled_from([None, Lookup(shortest=1), "mtp"]),
        "draft_tokens": st.sampled_from([1, 3, 7, "auto"]),
        "snapshots": st.builds(
            Snapshots, st.booleans(), st.booleans(), st.sampled_from([0, 16, 50, P]), st.sampled_from([0, 1, 16])
        ),
    }
)


def run_schedule(name, actions, polls, **options):
    if options["draft"] is None:
        options["draft_tokens"] = 0
    elif options["draft"] == "mtp" and not case(name)[0].mtp:
        options["draft"] = Lookup(shortest=1)
    with delayed(polls):
        engine = Engine(case(name)[0], **options)
    bases, asked = [text(seed, 300) for seed in range(3)], []
    room = (engine.pool.num_pages - engine.pool.groups) * P

    def add(ids, n):
        try:
            rid = engine.add(ids, greedy(n))
        except ValueError as refused:
            assert len(ids) > room and str(engine.pool.pages_for(len(ids))) in str(refused)
            return
        n = min(n, room - len(ids) + 1)
        asked.append(([r.out for r in engine.waiting if r.out.rid == rid][0], tuple(ids), n))

    for action, *arguments in actions:
        if action == "add":
            (base, cut, own), n = arguments
            add(bases[base][:cut] + text(cut + own, own), n)
        elif action == "turn" and asked:
            out, ids, _ = asked[arguments[0] % len(asked)]
            add([*ids, *out.token_ids, *text(7, arguments[1])][:400], 5)
        elif action == "edit" and asked:
            *ids, last = asked[arguments[0] % len(asked)][1]
            add([*ids, last % 250 + 4, *text(8, arguments[1])], 3)
        elif action == "abort" and asked:
            engine.abort(asked[arguments[0] % len(asked)][0].rid)
        elif action == "interrupt":
            step_interrupted(engine, arguments[0])
        elif action == "step":
            for _ in range(arguments[0]):
                engine.step()
        audit(engine)
    drain(engine)
    audit(engine)
    for out, ids, n in asked:
        if out.finish_reason != "abort":
            assert out.finish_reason == "length" and len(out.token_ids) == n
            assert out.token_ids == chosen(name, ids + tuple(out.token_ids))[len(ids) - 1 : -1]
    for _ in range(polls + 1):  # copies that still are under way
        stats = engine.stats
        assert stats["pages_free"] + stats["pages_cached"] + engine.pool.live_pages == stats["pages"]
    assert not (engine.cache.busy or engine.pool.live_pages)
    engine.cache.clear()
    assert engine.pool.free_pages == engine.pool.num_pages


quiet = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True}
quiet["phases"] = [Phase.explicit, Phase.reuse, Phase.generate]  # a schedule takes long to shrink


@settings(max_examples=80, **quiet)
@given(schedule=schedules)
def test_same_tokens_whatever_the_schedule(schedule):
    run_schedule("micro", **schedule)


@pytest.mark.parametrize("name", CASES[1:])
@settings(max_examples=20, **quiet)
@given(schedule=schedules)
def test_same_tokens_whatever_the_checkpoint(name, schedule):
    run_schedule(name, **schedule)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@settings(max_examples=500, **(quiet | {"derandomize": False}))
@given(schedule=schedules)
def test_same_tokens_whatever_the_schedule_long(name, schedule):
    run_schedule(name, **schedule)


# ---------------------------------------------------------------- how deep reuse is


@pytest.mark.parametrize("n", [1, 2, P - 1, P, P + 1, 2 * P, 77, 200, 301])
def test_all_of_a_prompt_is_reused(n):
    """Field note 1: whatever n is, a prompt that extends it reuses n tokens, and so does the same prompt again."""
    engine = Engine(case("micro")[0], num_pages=60)
    first = text(n, n)
    longer = first + text(n + 1, 9)
    for ids, reused in ((first, 0), (longer, n), (first, n), (first, n), (longer, n + 9)):
        out = engine.generate([ids], greedy(6))[0]
        assert out.cached_tokens == reused
        assert out.token_ids == alone("micro", tuple(ids), 6)
    audit(engine)


def test_the_next_turn_reuses_prompt_and_answer():
    engine = Engine(case("micro")[0], num_pages=60)
    ids = text(1, 150)
    for _ in range(4):
        out = engine.generate([ids], greedy(9))[0]
        assert out.token_ids == alone("micro", tuple(ids), 9)
        known = len(ids) + 8  # the last sampled token was never run
        ids = ids + out.token_ids + text(len(ids), 30)
        again = engine.generate([ids], greedy(1))[0]
        assert again.cached_tokens == known


def test_a_shared_system_prompt_is_resumable_once_seen_twice():
    engine = Engine(case("micro")[0], num_pages=60)
    system = text(2, 200)
    reused = [engine.generate([system + text(i, 20)], greedy(2))[0].cached_tokens for i in range(10, 14)]
    assert reused == [0, 0, 200, 200]


def test_requests_that_come_together_read_what_they_share_once():
    engine = Engine(case("micro")[0], num_pages=90, prefill_chunk=64)
    system = text(2, 200)
    texts = [system + text(i, 20) for i in range(10, 15)]
    outs = engine.generate(texts, greedy(4))
    assert [o.cached_tokens for o in outs] == [0, 200, 200, 200, 200]
    assert [o.token_ids for o in outs] == [alone("micro", tuple(t), 4) for t in texts]
    audit(engine)


def test_snapshots_in_a_long_prompt():
    engine = Engine(case("micro")[0], num_pages=60, snapshots=Snapshots(prompt=False, answer=False, every=64, branch=0))
    ids = text(3, 300)
    engine.generate([ids], greedy(2))
    other = ids[:200] + text(4, 50)
    out = engine.generate([other], greedy(4))[0]
    assert out.cached_tokens == 192 and out.token_ids == alone("micro", tuple(other), 4)


def test_no_snapshots_no_reuse():
    engine = Engine(case("micro")[0], num_pages=60, snapshots=Snapshots(False, False, 0, 0))
    assert [o.cached_tokens for _ in range(2) for o in engine.generate([text(3, 140)], greedy(2))] == [0, 0]
    assert engine.pool.free_pages == engine.pool.num_pages


def test_edited_history_resumes_before_the_edit():
    """Field note 17: the texts agree on 100 tokens, but there is no state of their common part."""
    engine = Engine(case("micro")[0], num_pages=60, snapshots=Snapshots(branch=0))
    ids = text(5, 180)
    engine.generate([ids], greedy(8))
    edited = [*ids[:100], ids[100] % 250 + 4, *ids[101:]]
    out = engine.generate([edited], greedy(8))[0]
    assert out.cached_tokens == 0 and out.token_ids == alone("micro", tuple(edited), 8)


@pytest.mark.parametrize("more", [0, 1, 30])
def test_a_text_that_differs_in_its_last_token_is_another(more):
    engine = Engine(case("micro")[0], num_pages=40)
    for n in (2, 60, P, P + 1):
        engine.generate([text(n, n)], greedy(1))
        edited = [*text(n, n - 1), text(n, n)[-1] % 250 + 4, *text(n + 1, more)]
        out = engine.generate([edited], greedy(4))[0]
        assert out.cached_tokens == 0 and out.token_ids == alone("micro", tuple(edited), 4)


@pytest.mark.parametrize("snapshots", [ALL, Snapshots(), Snapshots(False, True, 16, 0), Snapshots(True, False, 0, 1)])
def test_warm_runs_equal_cold_runs(snapshots):
    """Field note 5: every snapshot that is offered was written."""
    engine = Engine(case("micro-mxfp4")[0], num_pages=200, prefill_chunk=48, snapshots=snapshots)
    texts = [text(6, 130)[:cut] + text(cut, 25) for cut in (20, 64, 100, 130)]
    for _ in range(3):
        outs = engine.generate(texts, greedy(10))
        assert [o.token_ids for o in outs] == [alone("micro-mxfp4", tuple(t), 10) for t in texts]
    assert engine.stats["hit_rate"] > 0.5
    audit(engine)


# ---------------------------------------------------------------- the host tier


def test_evicted_prefixes_come_back_from_the_host_whole():
    """Field note 6: history and state return together, and only then is the prefix resumed."""
    engine = Engine(case("micro")[0], num_pages=8, host_pages=40)
    texts = [text(i, 200) for i in range(4)]
    cold = [engine.generate([t], greedy(5))[0] for t in texts]
    assert engine.stats["offloaded"] > 0
    for t, before in zip(texts, cold):
        audit(engine)
        warm = engine.generate([t], greedy(5))[0]
        assert warm.token_ids == before.token_ids and warm.cached_tokens == 200
    assert engine.stats["restored"] > 0
    audit(engine)


def test_what_a_branch_shares_goes_to_the_host_with_it():
    """The common part of two texts has no snapshot of its own: evicting it must not drop what hangs on it."""
    engine = Engine(case("micro")[0], num_pages=16, host_pages=40, snapshots=Snapshots(branch=0))
    system = text(9, 140)
    texts = [system + text(i, 60) for i in range(2)]
    cold = [engine.generate([t], greedy(5))[0] for t in texts]
    assert engine.cache.evict(engine.pool.num_pages) and len(engine.cache.host_nodes) == 5
    audit(engine)
    for t, before in zip(texts, cold):
        warm = engine.generate([t], greedy(5))[0]
        assert warm.token_ids == before.token_ids and warm.cached_tokens == 200
    audit(engine)


def test_host_pages_are_byte_equal():
    """What comes back from the host is what went there, every slab of every page."""
    engine = Engine(case("micro")[0], num_pages=8, host_pages=20)
    cache, pool, ids = engine.cache, engine.pool, text(8, 150)
    engine.generate([ids], greedy(3))
    node, _ = cache.match(np.array(ids, dtype=np.int32))
    nodes = [n for n in node.path() if n.snapshot]
    before = [pool.slabs[:, np.concatenate([n.pages, n.snapshot.pages])].clone() for n in nodes]
    assert cache.evict(pool.num_pages) and all(n.on_host for n in nodes)
    pool.slabs.fill_(255)
    assert cache.restore(node).done
    after = [pool.slabs[:, np.concatenate([n.pages, n.snapshot.pages])] for n in nodes]
    assert all(torch.equal(a, b) for a, b in zip(before, after)) and not any(n.on_host for n in nodes)


# ---------------------------------------------------------------- scheduling


def test_the_youngest_is_preempted_and_nobody_starves():
    model = case("micro")[0]
    engine = Engine(model, num_pages=14, prefill_chunk=64)  # each needs 2 + 2 pages at first and 3 + 2 in the end
    texts = [text(i, 250) for i in range(4)]
    order, outs = [], []
    for t in texts:
        rid = engine.add(t, greedy(20))
        outs.append([r.out for r in engine.waiting if r.out.rid == rid][0])
    while engine.running or engine.waiting:
        order += [o.rid for o in engine.step() if o.finish_reason]
        audit(engine)
    assert engine.stats["preemptions"] > 0 and order == sorted(order)
    assert [o.token_ids for o in outs] == [alone("micro", tuple(t), 20) for t in texts]


def test_what_can_never_fit_is_refused_at_once_with_the_numbers():
    engine = Engine(case("micro")[0], num_pages=6)
    with pytest.raises(ValueError, match="7 pages of 128 tokens, and the pool has 6"):
        engine.add(text(0, 5 * P - 3), greedy(4))
    engine.add(text(0, 4 * P - 3), greedy(4))
    drain(engine)


def test_the_token_budget_bounds_a_step():
    engine = Engine(case("micro")[0], num_pages=100, prefill_chunk=32)
    seen, hidden = [], engine.model.hidden
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.model, "hidden", lambda ids, batch: seen.append(len(ids)) or hidden(ids, batch))
        outs = engine.generate([text(i, 20 + 30 * i) for i in range(5)], greedy(8))
    assert max(seen) <= 32 + 5 and all(o.finish_reason == "length" for o in outs)
    assert any(n > 32 for n in seen)  # decode rows ride along with a full prefill chunk


# ---------------------------------------------------------------- faults stay home


@pytest.mark.parametrize("at", [0, 1])
def test_a_nan_ends_its_own_request_only(at):
    """Field note 2."""
    model = case("micro")[0]
    engine = Engine(model, num_pages=40, snapshots=ALL)
    texts = [text(i, 60 + 40 * i) for i in range(3)]
    rids = [engine.add(t, greedy(16)) for t in texts]
    outs = {r.out.rid: r.out for r in engine.waiting}
    for _ in range(4):
        engine.step()
    victim = engine.running[1]
    S, conv = engine.pool.state(0)
    (S if at else conv)[victim.state[0]] = float("nan")
    pages = [*victim.pages, *victim.state]
    drain(engine)
    assert [outs[r].finish_reason for r in rids] == ["length", "error", "length"]
    assert all(outs[r].token_ids == alone("micro", tuple(t), 16) for r, t in zip(rids, texts) if r != rids[1])
    free = [p for p in pages if engine.pool.references[p] == 0]
    assert free and not engine.pool.rows(0).view(engine.pool.num_pages, -1)[free].isnan().any()
    audit(engine)
    again = engine.generate([texts[1]], greedy(16))[0]  # nothing of the fault is left in the cache
    assert again.token_ids == alone("micro", tuple(texts[1]), 16)


def test_a_pool_full_of_nan_changes_nothing():
    engine = Engine(case("micro")[0], num_pages=30)
    engine.pool.slabs.fill_(0xFF)  # NaN in every float format
    texts = [text(i, n) for i, n in enumerate((1, 60, 130, 257))]
    outs = engine.generate(texts, greedy(6))
    assert [o.token_ids for o in outs] == [alone("micro", tuple(t), 6) for t in texts]


# ---------------------------------------------------------------- FP8 rows


def test_fp8_rows_saturate_and_stay_close():
    model = case("micro")[0]
    engine = Engine(model, num_pages=30, kv_dtype="fp8")
    assert (
        engine.pool.latent_dtype == torch.float8_e4m3fn
        and engine.pool.page_size >= Engine(model, num_pages=9).pool.page_size
    )
    stored = engine.pool.rows(0)
    rank, width = engine.cfg.kv_lora_rank, stored.shape[1]
    kv = torch.tensor([[1.0] * rank + [1e6, -1e6, 0.3, 448.0] + [1.0] * (width - rank - 4)])
    latent_write(kv, torch.ones(rank), 1e-6, stored, torch.tensor([7]), torch.ones(width))
    assert stored[7].float()[rank : rank + 4].tolist() == [448.0, -448.0, 0.3125, 448.0]
    out, exact = (
        engine.generate([text(1, 90)], SamplingParams(max_tokens=1, logprobs=20))[0],
        alone("micro", tuple(text(1, 90)), 1),
    )
    assert out.logprobs[0][exact[0]] > -5  # rounded, but the exact choice stays a likely one


def test_kv_dtype_is_checked():
    with pytest.raises(ValueError, match="kv_dtype"):
        Engine(case("micro")[0], kv_dtype="int4")


# ---------------------------------------------------------------- long runs


def resident():
    """MiB of memory that this process holds now."""
    gc.collect()
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * 4096 / 2**20


def soak(requests):
    engine = Engine(case("micro")[0], num_pages=24, host_pages=24, max_batch=8, prefill_chunk=128)
    rng = np.random.default_rng(0)

    def run(count):
        for i in range(count):
            engine.add(text(int(rng.integers(40)), int(rng.integers(1, 60))), greedy(int(rng.integers(1, 4))))
            engine.step()
            if rng.random() < 0.3:
                engine.abort(int(rng.integers(i + 1)))
        drain(engine)
        audit(engine)
        engine.cache.clear()
        assert engine.pool.free_pages == engine.pool.num_pages
        return resident()

    before = run(requests // 3)  # allocators have their working set
    assert run(requests) - before < 16, "MiB: something keeps memory of requests that have ended"


def test_soak():
    soak(60)


@pytest.mark.slow
def test_soak_long():
    soak(1000)


def test_the_tree_is_small():
    """The tree of 64 texts of 20k tokens takes under 1 % of the pool that holds them."""
    import sys

    from cache import PagePool

    pool = PagePool(case("micro")[0].cfg, 64 * 160, device="meta")
    cache = PrefixCache(pool)
    rng = np.random.default_rng(0)
    for _ in range(64):
        tokens = rng.integers(0, 257, 20_000).astype(np.int32)
        pages, state = pool.allocate(157), pool.allocate(2)
        cache.insert(tokens, pages, state, torch.zeros(96))
    size = sum(sys.getsizeof(n) + n.tokens.nbytes + n.pages.nbytes + 1000 for n in cache.nodes)
    assert size < 0.01 * pool.page_bytes * pool.num_pages


# ---------------------------------------------------------------- copies that take their time


@pytest.mark.parametrize("pages, chunk, polls", [(14, 64, 0), (14, 64, 1), (14, 64, 7), (14, 512, 40), (20, 512, 40)])
def test_restores_that_take_many_steps(pages, chunk, polls):
    """Nothing is read before it has come, and nobody waits for ever."""
    options = dict(num_pages=pages, host_pages=300, snapshots=Snapshots(every=64), max_batch=3, prefill_chunk=chunk)
    with delayed(polls):
        engine, texts = Engine(case("micro")[0], **options), [text(i, 150) for i in range(6)]
    for _ in range(3):
        outs = engine.generate(texts, greedy(8))
        assert [o.token_ids for o in outs] == [alone("micro", tuple(t), 8) for t in texts]
    assert all(o.cached_tokens == 150 for o in outs) and engine.stats["restored"] > 5
    audit(engine)
