"""Who runs when, what a failed or interrupted step leaves, and what the host does for a step."""

import random

import numpy as np
import pytest
import torch
from helpers import DATA, case
from test_prefix import P, alone, audit, delayed, drain, greedy, step_interrupted, text
from torch.utils._python_dispatch import TorchDispatchMode

import runner
import scheduler
from benchmarks.serving import Stub
from engine import Engine, SamplingParams
from kernels import use
from scheduler import Snapshots, Status


def steps_to_first_token(engine, outs, limit=100):
    """{rid: number of the step that gave its first token}, once all have one."""
    found = {}
    for n in range(1, limit):
        engine.step()
        found |= {out.rid: n for out in outs if out.token_ids and out.rid not in found}
        if len(found) == len(outs):
            return found
    raise AssertionError(f"no first token of some after {limit} steps: {found}")


def add(engine, ids, n=1, **params):
    return engine._enqueue(np.array(ids), SamplingParams(max_tokens=n, ignore_eos=True, **params))


# ---------------------------------------------------------------- who runs when


@pytest.mark.parametrize("share, short, long", [(0.25, 3, 22), (0.0, 21, 21)])
def test_a_short_prompt_does_not_wait_for_a_long_one(share, short, long):
    """Field note 24: 5 tokens come a step behind a prompt of 640, 32 a step."""
    engine = Engine(case("micro")[0], num_pages=30, prefill_chunk=32, short_share=share, prefix_cache=False)
    first = add(engine, text(0, 640))
    engine.step()
    second = add(engine, text(1, 5))
    found = steps_to_first_token(engine, [first, second])
    assert found[second.rid] + 1 <= short and found[first.rid] + 1 <= long
    assert share or found[second.rid] + 1 >= 20
    for out, ids in ((first, text(0, 640)), (second, text(1, 5))):
        assert out.token_ids == alone("micro", tuple(ids), 1)


def test_nobody_starves():
    """Short prompts arrive in every step, more than the budget; a long and a middling one are read all the same."""
    engine = Engine(case("micro")[0], num_pages=60, prefill_chunk=16, max_batch=64, prefix_cache=False)
    long, middling = add(engine, text(0, 200)), add(engine, text(1, 40))
    for n in range(60):
        add(engine, text(n, 12))
        add(engine, text(n, 13))
        engine.step()
        if n == 17:
            assert long.token_ids, "it has three quarters of each step"
    assert middling.token_ids, "it is the oldest once the long one is read"
    assert len(engine.waiting) > 20, "or they did not compete"


def test_a_request_whose_prefix_runs_already_needs_few_pages():
    """Pages that are in use and on the path of a restore count once, and nobody waits behind it for nothing."""
    engine = Engine(case("micro")[0], num_pages=24, host_pages=60)
    system, own = text(0, 8 * P), text(1, P)
    engine.generate([system], greedy(1))
    engine.generate([system + own], greedy(1))
    (child,) = [n for n in engine.cache.nodes if n.start == 8 * P]
    assert engine.cache._offload(child)
    engine.step()
    runs = add(engine, system + text(2, 3 * P), 60)
    for _ in range(4):
        engine.step()
    outs = [add(engine, system + own + text(3, 9), 2), add(engine, text(4, 9), 2)]
    found = steps_to_first_token(engine, outs, 60)
    assert max(found.values()) <= 2 and not runs.finish_reason
    assert outs[0].cached_tokens == 9 * P
    drain(engine)
    assert outs[0].token_ids == alone("micro", tuple(system + own + text(3, 9)), 2)
    audit(engine)


def test_who_is_put_back_keeps_its_place():
    engine = Engine(case("micro")[0], num_pages=40, max_batch=2)
    outs = [add(engine, text(i, 20), 4) for i in range(4)]
    engine.step()
    for request in list(engine.running):
        engine.scheduler._put_back(request)
    assert [r.out.rid for r in engine.waiting] == [out.rid for out in outs]
    drain(engine)
    assert [o.token_ids for o in outs] == [alone("micro", tuple(text(i, 20)), 4) for i in range(4)]
    audit(engine)


def test_who_waits_for_rows_lets_others_pass():
    with delayed(20):
        engine = Engine(case("micro")[0], num_pages=20, host_pages=60)
    ids = text(0, 200)
    engine.generate([ids], greedy(1))
    engine.cache.evict(20)
    waits, passes = add(engine, [*ids, 7], 2), add(engine, text(1, 20), 2)
    engine.step()
    assert [r.status for r in engine.waiting] == [Status.FETCHING] and passes.token_ids
    drain(engine)
    assert waits.cached_tokens == 200 and waits.token_ids == alone("micro", (*ids, 7), 2)
    audit(engine)


def test_making_room_may_evict_what_a_request_resumes_from(monkeypatch):
    engine, ids = Engine(case("micro")[0], num_pages=20), text(0, 100)
    engine.generate([ids], greedy(1))
    node, evict = engine.cache.match(np.array(ids, dtype=np.int32))[0], engine.cache.evict

    def all_of_it(free, wait=True):
        if node.snapshot:
            engine.cache._remove(node)
        return evict(free, wait)

    monkeypatch.setattr(engine.cache, "evict", all_of_it)
    (out,) = engine.generate([[*ids, 7]], greedy(4))
    assert (out.cached_tokens, out.token_ids) == (100, alone("micro", (*ids, 7), 4))
    audit(engine)


def test_an_answer_is_cut_to_the_pool():
    engine = Engine(case("micro")[0], num_pages=6)
    (out,) = engine.generate([text(0, 500)], greedy(10_000))
    assert out.finish_reason == "length" and out.token_ids == alone("micro", tuple(text(0, 500)), 13)
    (out,) = engine.generate([text(0, 512)], greedy(9))
    assert len(out.token_ids) == 1, "the last token is never stored"


# ---------------------------------------------------------------- rows that have not arrived


def test_a_text_that_is_split_on_its_way_back_is_not_read_before_it_is_there():
    with delayed(1000):
        engine = Engine(case("micro")[0], num_pages=17, host_pages=60, snapshots=Snapshots(False, True, 0, 0))
    ids, cache = text(0, 200), engine.cache
    engine.generate([ids], greedy(1))
    other = add(engine, ids[:100] + text(1, 18), 9)
    engine.step()
    cache.evict(engine.pool.free_pages + 3)  # the text leaves for the host while the other one runs
    engine.pool.slabs[:, np.flatnonzero(engine.pool.references == 0)] = 255
    node, known = cache.match(np.array(ids, dtype=np.int32))
    transfer = cache.restore(node)
    assert known >= 200 and not transfer.done and node.arriving
    engine.scheduler.keep(engine.running[0])  # as pre-emption does: the tree splits the text at token 100
    upper = node.path()[0]
    assert upper is not node and upper.end == 100 and upper.arriving and upper in transfer.nodes
    third = add(engine, ids[:100] + text(1, 18) + [9], 3)
    for _ in range(3):
        engine.step()
    assert not third.token_ids, "its rows are on their way"
    for _ in range(1000):
        cache.settle()
    drain(engine)
    assert third.token_ids == alone("micro", tuple(ids[:100] + text(1, 18) + [9]), 3) and third.cached_tokens == 118
    assert other.token_ids == alone("micro", tuple(ids[:100] + text(1, 18)), 9)
    audit(engine)


def test_pages_that_leave_are_free_when_the_copy_is_done():
    """No step waits for copies to the host unless it needs their pages; and they are not written before that."""
    with delayed(15):
        engine = Engine(case("micro")[0], num_pages=14, host_pages=60)
    outs, cache = engine.generate([text(i, 200) for i in range(3)], greedy(3)), engine.cache
    outs.append(add(engine, text(9, 20), 12))
    engine.step()
    cache.evict(engine.pool.free_pages + 5, wait=False)
    free, waited = engine.pool.free_pages, []
    assert len(cache.leaving) > 1 and cache.leaving_pages >= 5
    for event, _, _ in cache.leaving:
        event.wait, event.run = lambda: waited.append(1), event.wait
    for _ in range(3):
        engine.step()
    assert not waited and cache.leaving and engine.pool.free_pages <= free, "the copies are not done"
    for event, _, _ in cache.leaving:
        event.wait = event.run
    drain(engine)
    for _ in range(60):
        cache.settle()
    assert not cache.leaving and engine.pool.free_pages > free
    outs += engine.generate([text(i, 200) for i in range(3)], greedy(3))
    want = [alone("micro", tuple(text(i, 200)), 3) for i in range(3)]
    assert [o.token_ids for o in outs] == [*want, alone("micro", tuple(text(9, 20)), 12), *want]
    assert engine.stats["restored"]
    audit(engine)


# ---------------------------------------------------------------- faults in the cache, and in the tree


def talk(engine, turns):
    """Caches a text of so many turns without running them -> its ids."""
    ids, pool = np.array(text(0, 2 * turns + 5), dtype=np.int32), engine.pool
    pages, state = pool.allocate(pool.history_pages(len(ids))), pool.allocate(pool.groups)
    pool.slabs[:, pages], pool.slabs[:, state] = 0, 0
    for end in range(4, 2 * turns, 2):
        engine.cache.insert(ids[:end], pages, state, torch.zeros(engine.cfg.hidden_size))
    pool.release(pages)
    pool.release(state)
    return ids.tolist()


def test_a_long_talk_is_forgotten_without_recursion(monkeypatch):
    engine = Engine(case("micro")[0], num_pages=60)
    ids = talk(engine, 1200)
    assert len(engine.cache.nodes) > 1100
    engine.cache.clear()
    assert engine.pool.free_pages == 60 and not engine.cache.nodes
    talk(engine, 1200)
    logits = engine.model.logits
    monkeypatch.setattr(engine.model, "logits", lambda hidden: logits(hidden) * float("nan"))
    (out,) = engine.generate([ids], greedy(4))
    assert out.finish_reason == "error" and out.cached_tokens > 2300
    assert not engine.running and engine.pool.free_pages == 60 and not engine.cache.nodes
    audit(engine)


def test_a_nan_drops_its_own_text_and_no_other():
    """All begin with the same token, as with a [BOS]."""
    engine, bos = Engine(case("micro")[0], num_pages=60), [5]
    texts = [bos + text(i, 150) for i in range(3)]
    engine.generate(texts, greedy(2))
    victim = add(engine, texts[1] + text(7, 5), 30)
    for _ in range(3):
        engine.step()
    engine.pool.state(0)[0][engine.running[0].state[0]] = float("nan")
    drain(engine)
    assert victim.finish_reason == "error"
    audit(engine)
    outs = engine.generate([ids + text(8, 5) for ids in texts], greedy(3))
    assert [o.cached_tokens for o in outs] == [151, 151, 151], "what the faulty text shared was sound"
    assert [o.token_ids for o in outs] == [alone("micro", tuple(ids + text(8, 5)), 3) for ids in texts]


def test_a_prompt_that_ends_in_a_nan_is_forgotten(monkeypatch):
    """With the answers that hang on it; what it shares with others stays."""
    engine, bos = Engine(case("micro")[0], num_pages=60), [5]
    texts = [bos + text(i, 150) for i in range(3)]
    engine.generate(texts, greedy(2))
    with monkeypatch.context() as patch:
        logits = engine.model.logits
        patch.setattr(engine.model, "logits", lambda hidden: logits(hidden) * float("nan"))
        assert engine.generate([texts[1]], greedy(2))[0].finish_reason == "error"
    audit(engine)
    assert [o.cached_tokens for o in engine.generate(texts, greedy(2))] == [151, 0, 151]


@pytest.mark.parametrize("where", ["rows", "state", "hidden"])
def test_a_fault_in_what_texts_share_is_forgotten_with_all_that_hangs_on_it(where):
    engine = Engine(case("micro")[0], num_pages=60)
    system, other = text(0, 150), text(1, 60)
    engine.generate([system, other], greedy(1))
    engine.generate([system + text(i, 9) for i in (2, 3)], greedy(1))
    node, _ = engine.cache.match(np.array(system, dtype=np.int32))
    if where == "rows":
        engine.pool.rows(1)[node.pages[0] * P + 3] = float("nan")
    elif where == "state":
        engine.pool.state(2)[0][node.snapshot.pages[engine.pool.group(2)]] = float("inf")
    else:
        node.snapshot.hidden = torch.full_like(node.snapshot.hidden, float("nan"))
    ids = system if where == "hidden" else system + text(4, 9)
    assert engine.generate([ids], greedy(3))[0].finish_reason == "error"
    assert engine.cache.match(np.array(system, dtype=np.int32)) == (None, 0)
    for ids, cached in ((system + text(2, 9), 0), (other + [3], 60)):
        (out,) = engine.generate([ids], greedy(3))
        assert (out.token_ids, out.cached_tokens) == (alone("micro", tuple(ids), 3), cached)
    audit(engine)


def test_forgetting_costs_what_the_text_costs():
    engine = Engine(case("micro")[0], num_pages=9000)
    cache, pool, rng = engine.cache, engine.pool, np.random.default_rng(0)
    state, visited = pool.allocate(2), []
    for ids in rng.integers(3, 257, (4000, 8)).astype(np.int32):
        ids[0] = 5
        cache.insert(ids, pool.allocate(1), state, torch.zeros(96))
    subtree = type(cache.root).subtree
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(cache.root), "subtree", lambda node: visited.append(nodes := subtree(node)) or nodes)
        cache.forget(ids, len(ids))
    assert sum(map(len, visited)) < 10 and len(cache.nodes) > 3900 and cache.match(ids)[1] < 8


def test_a_fault_of_the_cache_does_not_keep_pages(monkeypatch):
    engine = Engine(case("micro")[0], num_pages=20)
    out = add(engine, text(0, 30), 3)
    engine.step()
    monkeypatch.setattr(engine.cache, "insert", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        drain(engine)
    monkeypatch.undo()
    assert out.finish_reason == "length" and not engine.running
    drain(engine)
    audit(engine)


# ---------------------------------------------------------------- a step is whole, or it is not


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
@pytest.mark.parametrize("step", [1, 2, 5])
def test_a_wait_for_the_device_that_is_interrupted(error, step, monkeypatch):
    """Also at the last token: the answer has as many tokens as it may have, each with its log-probabilities."""
    engine, ids = Engine(case("micro")[0], num_pages=20, prefix_cache=False), text(0, 30)
    (want,) = engine.generate([ids], greedy_with_logprobs(5))
    out = add(engine, ids, 5, logprobs=3)
    for _ in range(step - 1):
        engine.step()

    def interrupted(*args):
        raise error

    with monkeypatch.context() as patch, pytest.raises(error):
        patch.setattr(runner, "logprobs", interrupted)
        engine.step()
    drain(engine)
    assert (out.token_ids, out.finish_reason) == (want.token_ids, "length")
    assert [list(row) for row in out.logprobs] == [list(row) for row in want.logprobs]
    audit(engine)


def greedy_with_logprobs(n):
    return SamplingParams(max_tokens=n, ignore_eos=True, logprobs=3)


def test_ctrl_c_at_any_line():
    """It comes at every 61st line that a step runs, one after another, while prompts are read, shared and answered."""
    rng, line, came = random.Random(0), 1, 0
    engine = Engine(case("micro")[0], num_pages=14, prefill_chunk=40, max_batch=3)
    asked = []
    while line < 2200:
        if len(engine.waiting) + len(engine.running) < 3:
            ids = text(0, 60) + text(len(asked), rng.randrange(1, 60))
            asked.append((add(engine, ids, 4, logprobs=1), ids))
        came += step_interrupted(engine, line)
        audit(engine)
        for _ in range(rng.randrange(1, 7)):
            engine.step()
        line += 61
    drain(engine)
    audit(engine)
    assert came > 25 and len(asked) > 6
    for out, ids in asked:
        assert out.token_ids == alone("micro", tuple(ids), 4) and [*map(next, map(iter, out.logprobs))] == out.token_ids


# ---------------------------------------------------------------- what the host does


class Calls(TorchDispatchMode):
    """Counts the ops that PyTorch runs, by name."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__.split(".")[0])
        return func(*args, **(kwargs or {}))


def test_the_host_waits_once_a_step():
    """A step with log-probabilities, samplers and snapshots that are due reads nothing from the device but its end."""
    engine = Engine(Stub(16), num_pages=200, max_batch=16, prefill_chunk=64)
    for i in range(16):
        engine.add(text(i, 9 + i), SamplingParams(max_tokens=5, temperature=i % 2, seed=1, logprobs=20))
    with Calls() as calls:
        while engine.running or engine.waiting:
            calls.names.clear()
            engine.step()
            waits = [name for name in calls.names if name in ("_local_scalar_dense", "item", "equal", "is_nonzero")]
            assert not waits and calls.names.count("topk") <= 1
    assert engine.cache.nodes


def test_prompts_are_compared_once(monkeypatch):
    """However long they wait, and however many run: a blocked head of the queue costs nothing a step."""
    compared, matched = [], []
    engine = Engine(case("micro")[0], num_pages=40, max_batch=8, prefill_chunk=8)
    monkeypatch.setattr(scheduler, "common", lambda a, b, f=scheduler.common: compared.append(1) or f(a, b))
    match = engine.cache.match
    monkeypatch.setattr(engine.cache, "match", lambda *args, **more: matched.append(1) or match(*args, **more))
    for i in range(3):
        add(engine, text(i, 7 * P), 40)
    add(engine, text(9, 15 * P), 2)  # no room for it before the others have ended
    for _ in range(30):
        engine.step()
    assert len(engine.waiting) == 1 and len(compared) == 6, "each pair once"
    assert len(matched) <= 4 + 3 * engine.cache.version


def test_comparing_texts_stops_where_they_differ():
    class Counting(np.ndarray):
        read = 0

        def __getitem__(self, item):
            if isinstance(item, slice):
                Counting.read += len(range(*item.indices(len(self))))
            return super().__getitem__(item)

    a = np.arange(1 << 20).view(Counting)
    for n in (0, 1, 63, 64, 65, 5000, 1 << 20):
        b, Counting.read = np.arange(1 << 20), 0
        b[n:] += 1
        assert scheduler.common(a, b) == n and Counting.read <= 5 * n + 64
    assert scheduler.common(a[:0], b) == 0


def test_many_waiting_requests_cost_nothing(monkeypatch):
    engine = Engine(case("micro")[0], num_pages=20, max_batch=4)
    for i in range(300):
        add(engine, text(i, 3), 9)
    seen = []
    monkeypatch.setattr(engine.scheduler, "_start", lambda r, f=engine.scheduler._start: seen.append(r) or f(r))
    engine.step()
    engine.step()
    assert len(seen) == 4


@pytest.mark.parametrize("form", [np.array, torch.tensor, list])
def test_a_prompt_is_checked_at_once(form, monkeypatch):
    engine = Engine(case("micro")[0], num_pages=20)
    ids = engine._checked(form(text(0, 1000)), SamplingParams())
    assert isinstance(ids, np.ndarray) and ids.tolist() == text(0, 1000)


# ---------------------------------------------------------------- graphs


class Stand:
    """In place of a captured graph, on a CPU. No memory for 4 sequences and more."""

    def __init__(self, runner, B, W, drafts, kind):
        if B >= 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore words.")
        self.runner = runner

    def __call__(self, step):
        return self.runner.forward(step)


@pytest.fixture
def graphs(monkeypatch):
    """An engine on a CPU that takes steps as graphs."""
    monkeypatch.setattr(runner, "Graph", Stand)
    engine = Engine(case("micro")[0], num_pages=60, prefix_cache=False)
    engine.runner.eager, engine.runner.memory = None, None
    return engine


def test_a_graph_that_memory_is_short_for_leaves_its_bucket_eager(graphs):
    texts = [text(i, 10 + i) for i in range(5)]
    outs = graphs.generate(texts, [greedy(n) for n in (3, 4, 5, 30, 30)])
    for ids, out, n in zip(texts, outs, (3, 4, 5, 30, 30)):
        assert out.token_ids == alone("micro", tuple(ids), n) and out.finish_reason == "length"
    stats = graphs.stats
    assert stats["graphs_off"] == "no memory to capture 4 sequences with tables of 1 pages; " \
        "no memory to capture 8 sequences with tables of 1 pages"
    assert stats["graphs"] == 1 and stats["graph_replays"] > 20, "two sequences run as a graph"


def test_graphs_are_dropped_at_a_bound(graphs, monkeypatch):
    monkeypatch.setattr(runner, "GRAPHS", 5)
    for _ in range(12):
        with use(gated_act=lambda x, cfg: torch.nn.functional.silu(x.chunk(2, -1)[0])):
            graphs.generate([text(0, 9)], greedy(3))
    assert graphs.stats["graphs"] == 5
    want = graphs.generate([text(0, 9)], greedy(3))[0].token_ids
    assert want == alone("micro", tuple(text(0, 9)), 3)


def test_another_error_of_a_capture_is_raised(graphs, monkeypatch):
    def broken(*args):
        raise RuntimeError("something else")

    monkeypatch.setattr(runner, "Graph", broken)
    with pytest.raises(RuntimeError, match="something else"):
        graphs.generate([text(0, 9)], greedy(3))
    audit(graphs)


# ---------------------------------------------------------------- options, statistics


@pytest.mark.parametrize("options", [dict(snapshots=None), dict(host_pages=None), dict(dtype="float32")], ids=str)
def test_what_is_obvious_is_accepted(options):
    engine = Engine(DATA / "micro", num_pages=20, **options)
    assert engine.dtype == torch.float32 and engine.cache.host is None
    (out,) = engine.generate([text(0, 40)], greedy(3))
    assert out.token_ids == alone("micro", tuple(text(0, 40)), 3)
    assert options != {"snapshots": None} or not engine.cache.nodes


def test_a_tokenizer_by_its_folder():
    import engine as module

    assert Engine(case("micro")[0], num_pages=9, tokenizer=str(module.TINY)).tokenizer.encode("a")


@pytest.mark.parametrize("dtype", ["float31", "int8", torch.int64, 3, "nn"])
def test_a_dtype_that_is_none(dtype):
    with pytest.raises(ValueError, match="dtype is .*float32"):
        Engine(DATA / "micro", dtype=dtype)


def test_rates_leave_out_what_was_compiled(monkeypatch):
    """Steps in which something was captured or compiled say nothing of speed; what is long ago does not either."""
    now, engine = [100.0], Engine(case("micro")[0], num_pages=20)
    monkeypatch.setattr("engine.time.perf_counter", lambda: now[0])
    run = engine.runner.run

    def slowly(step, seconds, cold):
        result = run(step)
        now[0] += seconds
        result.cold = cold
        return result

    add(engine, text(0, 20), 40)
    for seconds, cold in ((50.0, True), (9.0, True), (0.5, False), (0.5, False)):
        monkeypatch.setattr(engine.runner, "run", lambda step, s=seconds, c=cold: slowly(step, s, c))
        engine.step()
    assert engine.stats["decode_tokens_per_s"] == pytest.approx(2.0) and engine.stats["decode_tokens"] == 3
    assert engine.stats["prompt_tokens_per_s"] == 0 and engine.stats["prompt_tokens"] == 20
    monkeypatch.setattr(engine.runner, "run", lambda step: slowly(step, 0.1, False))
    for _ in range(30):
        now[0] += 1.0
        engine.step()
    assert 1 < engine.stats["decode_tokens_per_s"] <= 10.001
