"""The engine: the same tokens however a prompt is cut and whoever runs beside it; faults stay home, pages come back.

Oracles: the ids and logits of the reference files, and `model(ids)`, the path without a cache. Every pool is filled
with NaN before use: a page that is read before it is written shows.
"""

import itertools
import random
import string

import numpy as np
import pytest
import tokenizers
import torch
from helpers import CASES, DATA, case, rel, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from cache import Batch, Chunk, PagePool
from engine import Engine
from sampling import SamplingParams, sample
from tokenizer import TextStream, Tokenizer

torch.set_num_threads(1)  # the matrices are tiny: more threads would wait for one another
P = 128  # tokens in a page of the cases
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65)
all_cases = pytest.mark.parametrize("name", CASES)
both_gates = ("micro", "kimi-linear-micro")  # with a lower bound of the log-decay and without


def prompt(n, seed=0, vocab=257):
    return np.random.default_rng([n, seed]).integers(0, vocab, n).tolist()


def greedy(n, **options):
    return SamplingParams(max_tokens=n, **{"ignore_eos": True, **options})


def engine(model="micro", num_pages=24, **options):
    """An engine without a prefix cache (test_prefix.py has those), on a pool full of NaN."""
    eng = Engine(
        case(model)[0] if isinstance(model, str) else model, num_pages=num_pages, **{"prefix_cache": False, **options}
    )
    eng.pool.slabs.fill_(255)  # NaN in every dtype
    return eng


@torch.inference_mode()
def best(model, ids, past):
    """What greedy decoding must have written after the first `past` of ids: the likeliest id at each position."""
    return model(torch.tensor([ids]))[0, past - 1 : -1].argmax(-1).tolist()


def assert_greedy(eng, ids, out, n):
    assert out.token_ids == best(eng.model, ids + out.token_ids, len(ids)) and len(out.token_ids) == n
    assert out.finish_reason == "length"


def assert_idle(eng):
    assert eng.pool.free_pages == eng.pool.num_pages and not eng.pool.references.any()
    assert (eng.stats["running"], eng.stats["waiting"], eng.stats["pages_free"]) == (0, 0, eng.pool.num_pages)
    assert eng.step() == []


def drive(eng, limit=2000):
    """Steps until nothing is left -> every Output that a step returned, by rid."""
    seen = {}
    while eng.waiting or eng.running:
        seen |= {out.rid: out for out in eng.step()}
        limit -= 1
        assert limit, "the engine does not come to an end"
    return seen


# ---------------------------------------------------------------- greedy ids are the reference's


def some(always, *values):
    """Parameter sets: the product of values; those for which always(*set) is false run only with -m slow."""
    sets = itertools.product(*values)
    return [pytest.param(*v, marks=[] if always(*v) else pytest.mark.slow) for v in sets]


@pytest.mark.parametrize(
    "name, chunk", some(lambda name, chunk: name in both_gates or chunk in (1, 512), CASES, [1, 7, 16, 64, 512])
)
def test_greedy_is_the_reference(name, chunk):
    ids = case(name)[1]["greedy_from_20"].tolist()
    eng = engine(name, prefill_chunk=chunk)
    (out,) = eng.generate(ids[:20], greedy(40))
    assert out.token_ids == ids[20:]
    assert (out.finish_reason, out.prompt_tokens, out.cached_tokens, out.text) == ("length", 20, 0, "")
    assert_idle(eng)


def test_float64():
    eng = Engine(DATA / "micro", dtype=torch.float64, num_pages=3)
    eng.pool.slabs.fill_(255)
    ids = case("micro")[1]["greedy_from_20"].tolist()
    assert eng.generate(ids[:20], greedy(40))[0].token_ids == ids[20:]


@pytest.mark.parametrize("name, chunk", some(lambda name, chunk: chunk == 64, CASES, [1, 7, 16, 64, 512]))
def test_company_changes_nothing(name, chunk):
    """The reference prompt beside others of other lengths that arrive, by hand, while it is read and answered."""
    ids = case(name)[1]["greedy_from_20"].tolist()
    eng = engine(name, num_pages=30, prefill_chunk=chunk)
    arrivals = {0: (33, 12), 1: (1, 20), 2: (None, 40), 3: (75, 5), 6: (P + 2, 9), 7: (64, 12), 21: (2, 3)}
    asked, outs = {}, {}
    for step in range(1000):
        if step in arrivals:
            n, most = arrivals[step]
            own = ids[:20] if n is None else prompt(n)
            asked[eng.add(own, greedy(most))] = own, most
        outs |= {out.rid: out for out in eng.step()}
        if step > 21 and not eng.running:
            break
    assert outs.keys() == asked.keys()
    for rid, (own, most) in asked.items():
        assert_greedy(eng, own, outs[rid], most)
    assert outs[2].token_ids == ids[20:]
    assert_idle(eng)


def test_step_returns_what_grew():
    eng = engine(prefill_chunk=10)
    a, b = eng.add(prompt(4), greedy(3)), eng.add(prompt(20), greedy(2))
    grown = [[(out.rid, len(out.token_ids), out.finish_reason) for out in eng.step()] for _ in range(6)]
    assert [sorted(step) for step in grown] == [
        [(a, 1, None)],
        [(a, 2, None)],
        [(a, 3, "length"), (b, 1, None)],
        [(b, 2, "length")],
        [],
        [],
    ]


def test_outputs_of_others_are_not_lost():
    """A request that was added by hand and ends while `generate` or `stream` drives is still handed over by `step`."""
    eng = engine()
    mine = {eng.add(prompt(3), greedy(2)), eng.add(prompt(4), greedy(4))}
    eng.generate(prompt(5), greedy(3))
    list(eng.stream(prompt(6), greedy(6)))
    assert mine <= {out.rid for out in eng.step()}


@pytest.mark.parametrize("mla", [[1, 2, 3, 4, 5], [], [5], [1, 2, 3, 4]])
def test_other_mixes_of_layers(mla):
    kda = [n for n in range(1, 6) if n not in mla]
    eng = engine(tiny_model(linear=dict(kda_layers=kda, full_attn_layers=mla)), prefill_chunk=11)
    prompts = [prompt(n, vocab=61) for n in (1, 30, 9)]
    for ids, out in zip(prompts, eng.generate(prompts, greedy(6))):
        assert_greedy(eng, ids, out, 6)
    assert_idle(eng)


# ---------------------------------------------------------------- through the pool: the same logits at every position


@torch.inference_mode()
def read(model, sequences, sizes, seed=0):
    """Logits [T, V] of each sequence (a list of ids) that is fed to `model.hidden` in chunks of the given sizes.

    Round i runs chunk i of all sequences together; one of size 0 sits the round out. Page ids are a random permutation.
    """
    pool = PagePool(model.cfg, sum(-(-len(ids) // P) for ids in sequences) + 2 * len(sequences) + 3)
    assert (pool.page_size, pool.groups) == (P, 2)
    pool.slabs.fill_(255)
    pages = np.random.default_rng(seed).permutation(pool.num_pages)
    states, history = np.split(pages, [2 * len(sequences)])
    states = states.reshape(-1, 2)
    history = np.split(history, np.cumsum([-(-len(ids) // P) for ids in sequences]))
    done, logits = [0] * len(sequences), [[] for _ in sequences]
    for parts in itertools.zip_longest(*sizes, fillvalue=0):
        turn = sorted((n, s) for s, n in enumerate(parts) if n)
        chunks = [Chunk(n, done[s], history[s], states[s], states[s]) for n, s in turn]
        ids = [i for n, s in turn for i in sequences[s][done[s] : done[s] + n]]
        rows = model.logits(model.hidden(torch.tensor(ids), Batch.paged(pool, chunks)))
        for (n, s), part in zip(turn, rows.split([n for n, _ in turn])):
            logits[s].append(part)
            done[s] += n
    assert done == [len(ids) for ids in sequences]
    return [torch.cat(parts) for parts in logits]


def cut(total, size):
    """total in parts of size."""
    return [min(size, total - at) for at in range(0, total, size)]


@torch.inference_mode()
def whole(model, ids):
    return model(torch.tensor([ids]))[0]


def assert_rows(got, want):
    """Equal on the whole as closely as float32 can be, and no single position far off."""
    assert rel(got, want) < 1e-5
    assert max(rel(a, b) for a, b in zip(got, want)) < 5e-5


@pytest.mark.parametrize("name, size", some(lambda name, size: name in both_gates or size > 1, CASES, [1, 7, 16, 64]))
def test_pool_is_the_reference(name, size):
    """Two sequences in one batch, the second one round late and in other chunks."""
    model, ref = case(name)
    ids = ref["input_ids"].tolist()
    got, other = read(model, [ids, ids[::-1]], [cut(75, size), [0, *cut(75, 2 * size - 1)]])
    assert_rows(got, ref["logits"])
    assert_rows(other, whole(model, ids[::-1]))


@all_cases
def test_across_pages(name):
    """3 P + 1 tokens, over every page boundary in one chunk, in uneven ones, and token by token, interleaved."""
    model, ids = case(name)[0], prompt(3 * P + 1)
    want = whole(model, ids)
    single = [P - 2, 1, 1, 1, 1, P - 4, 1, 1, 1, 1, P - 5, 1, 1, 1, 1]
    ways = [[3 * P + 1], cut(3 * P + 1, 100), [P, P, P, 1], single]
    for got in read(model, [ids] * len(ways), ways):
        assert_rows(got, want)


PASTS = {"fresh": (0,) * 8, "continued": (5, 130, 64, 17, 1, 200, 128, 127)}
PASTS["both"] = PASTS["fresh"] + PASTS["continued"]  # each length twice, one with and one without a past


@pytest.mark.parametrize("name, pasts", some(lambda name, pasts: name in both_gates or pasts != "both", CASES, PASTS))
def test_ragged_batch(name, pasts):
    """Field note 3: each sequence of a mixed batch, prompts, continuations and decode rows, equals itself alone."""
    model = case(name)[0]
    parts = [*zip(PASTS[pasts], LENGTHS * 2), *((past, 1) for past in (3, 77, 128, 255))]
    sequences = [prompt(past + n, past) for past, n in parts]
    for ids, (past, _), got in zip(sequences, parts, read(model, sequences, parts)):
        want = whole(model, ids)
        assert_rows(got[past:], want[past:])
        assert torch.equal(got[past:].argmax(-1), want[past:].argmax(-1))


@all_cases
def test_ragged_prompts(name):
    eng = engine(name, num_pages=40)
    prompts = [prompt(n) for n in LENGTHS]
    for ids, out in zip(prompts, eng.generate(prompts, greedy(5))):
        assert_greedy(eng, ids, out, 5)


def test_every_split_in_two():
    """Field note 4."""
    model, ref = case("micro")
    ids = ref["input_ids"].tolist()[:70]
    for n in (*range(1, 19), 31, 32, 33, 47, 48, 49, *range(62, 67), 69):
        assert_rows(read(model, [ids], [[n, 70 - n]])[0], ref["logits"][:70])


@pytest.mark.parametrize(
    "name, first", some(lambda name, first: (name, first) == ("kimi-linear-micro", 1), CASES, [1, 2, 3, 4])
)
def test_splits_in_two_together(name, first):
    """Every fourth of them in one batch, so that each length occurs once, beside the others."""
    model, ref = case(name)
    ids = ref["input_ids"].tolist()[:70]
    cuts = [[n, 70 - n] for n in range(first, 70, 4)]
    for got in read(model, [ids] * len(cuts), cuts):
        assert_rows(got, ref["logits"][:70])


@torch.inference_mode()
def test_a_state_that_is_left_behind_can_be_resumed():
    """src and dst differ: the snapshot in src keeps its bytes, and two continuations start from it."""
    model, ids = case("micro")[0], prompt(60)
    pool = PagePool(model.cfg, 16)
    pool.slabs.fill_(255)
    page, snapshot, *ends = np.split(pool.allocate(9), [1, 3, 5, 7])

    def run(part, past, src, dst):
        batch = Batch.paged(pool, [Chunk(len(part), past, page, src, dst)])
        return model.logits(model.hidden(torch.tensor(part), batch))

    run(ids[:30], 0, snapshot, snapshot)
    before = pool.slabs[:, snapshot].clone()
    for end, rest in zip(ends, (ids[30:], ids[:29:-1], ids[40:])):
        assert_rows(run(rest, 30, snapshot, end), whole(model, ids[:30] + rest)[30:])
        assert torch.equal(pool.slabs[:, snapshot], before)


def test_what_lies_in_the_pool_changes_nothing():
    ids = [prompt(n) for n in (1, 20, P, 2)]
    outs = []
    for byte in (0, 255):
        eng = engine(num_pages=16, prefill_chunk=13)
        eng.pool.slabs.fill_(byte)
        outs.append([(o.token_ids, o.logprobs) for o in eng.generate(ids, greedy(4, logprobs=2))])
    assert outs[0] == outs[1]


# ---------------------------------------------------------------- a fault stays home


def plant(pool, request, where, value=float("nan")):
    if where == "rows":
        pool.rows(1)[request.pages[0] * P + 3] = value
    else:
        S, conv = pool.state(4)
        {"S": S, "conv": conv}[where][request.state[pool.group(4)]] = value


@pytest.mark.parametrize(
    "where, value, phase",
    [
        ("S", "nan", "reading"),
        ("rows", "nan", "reading"),
        ("S", "nan", "writing"),
        ("S", "inf", "writing"),
        ("conv", "nan", "writing"),
        ("rows", "nan", "writing"),
    ],
)
def test_nan_ends_one_request(where, value, phase):
    eng = engine(num_pages=9, prefill_chunk=12)
    prompts = [prompt(n, seed=1) for n in (5, 40, 30)]
    rids = [eng.add(ids, greedy(16)) for ids in prompts]
    eng.step()
    victim = eng.running[1]
    while victim.computed < (20 if phase == "reading" else 44):
        eng.step()
    assert (victim.computed < 40) == (phase == "reading") and victim.out.finish_reason is None
    pages = [*victim.pages, *victim.state]
    plant(eng.pool, victim, where, float(value))
    outs = {}
    while victim.out.finish_reason is None:
        outs |= {out.rid: out for out in eng.step()}
    assert (eng.pool.slabs[:, pages] == 0).all(), "its pages go back with the fault in them"
    assert outs[rids[1]] is victim.out and victim.out.finish_reason == "error"
    wrote = victim.out.token_ids
    assert len(wrote) == (0 if phase == "reading" else victim.computed - 40), "a token was made of the fault"
    assert wrote == (best(eng.model, prompts[1] + wrote, 40) if wrote else [])
    outs |= drive(eng)
    for i in (0, 2):
        assert_greedy(eng, prompts[i], outs[rids[i]], 16)
    for ids, out in zip(prompts, eng.generate(prompts, greedy(3))):  # these take every page of the pool
        assert_greedy(eng, ids, out, 3)
    assert_idle(eng)


@pytest.mark.parametrize("params", [greedy(9), greedy(9, temperature=1.0, seed=3, logprobs=2)])
def test_all_rows_faulty(params, monkeypatch):
    eng = engine()
    monkeypatch.setattr(eng.model, "logits", lambda hidden: torch.full((len(hidden), 257), float("nan")))
    for out in eng.generate([prompt(3), prompt(5)], params):
        assert (out.finish_reason, out.token_ids) == ("error", [])
    assert_idle(eng)


def test_a_step_that_fails_does_not_corrupt(monkeypatch):
    """A layer raises (out of memory, Ctrl-C) when earlier ones have moved their states on. No wrong text may follow."""
    eng, ids = engine(), prompt(20)
    eng.add(ids, greedy(8))
    (out,) = eng.step()

    def boom(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(eng.model.layers[7], "forward", boom)
        eng.step()
    drive(eng)
    if out.finish_reason != "error":
        assert_greedy(eng, ids, out, 8)
    assert_idle(eng)


def test_an_interrupted_generate_leaves_nothing(monkeypatch):
    eng = engine()
    step = eng._advance
    monkeypatch.setattr(
        eng, "_advance", lambda: step() if len(eng.running) < 2 or eng.running[0].computed < 6 else 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        eng.generate([prompt(3), prompt(4), prompt(5)], greedy(9))
    monkeypatch.undo()
    assert_idle(eng)


# ---------------------------------------------------------------- nothing leaks


def test_abort():
    eng = engine(max_batch=1)
    a, b, c = (eng.add(prompt(4, i), greedy(5)) for i in range(3))
    eng.step()
    assert eng.abort(b) and eng.abort(a), "one waits, one runs"
    assert not eng.abort(b) and not eng.abort(99) and not eng.abort(-1)
    outs = drive(eng)
    assert {rid: out.finish_reason for rid, out in outs.items()} == {a: "abort", b: "abort", c: "length"}
    assert (len(outs[a].token_ids), len(outs[b].token_ids)) == (1, 0)
    assert_greedy(eng, prompt(4, 2), outs[c], 5)
    assert not eng.abort(c)
    assert_idle(eng)


def test_leaving_a_stream_aborts():
    eng = engine()
    other = eng.add(prompt(9), greedy(12))
    for n, piece in enumerate(eng.stream(prompt(4), greedy(100))):
        assert isinstance(piece, list) and piece
        if n == 3:
            break
    assert [r.out.rid for r in eng.running] == [other]
    assert_greedy(eng, prompt(9), drive(eng)[other], 12)
    assert_idle(eng)


def test_aborting_under_a_stream_ends_it():
    eng = engine()
    stream = eng.stream(prompt(4), greedy(100))
    first = next(stream)
    assert eng.abort(eng.running[0].out.rid)
    assert first + sum(stream, []) == best(eng.model, prompt(4) + first, 4)
    eng.step()  # hands over what was aborted
    assert_idle(eng)


@pytest.mark.parametrize("seed", range(3))
def test_nothing_leaks(seed):
    """A random life: adding, stepping, aborting, streams closed early, faults; pages are counted after every move."""
    rng = random.Random(seed)
    eng = engine(num_pages=16, max_batch=4, prefill_chunk=40)
    outs, streams = [], []

    def add(ids, params):
        eng.add(ids, params)
        outs.append((ids, params, eng.waiting[-1].out))

    for _ in range(60):
        move = rng.choice(["add", "add", "step", "step", "step", "abort", "stream", "pull", "close", "plant"])
        if move == "add":
            add(prompt(rng.choice([1, 5, 40, P + 3]), rng.random() > 0.5), greedy(rng.choice([0, 1, 3, 30])))
        elif move == "step":
            eng.step()
        elif move == "abort" and outs:
            eng.abort(rng.choice(outs)[2].rid)
        elif move == "stream" and len(streams) < 2:
            streams.append(eng.stream(prompt(rng.choice([2, 30])), greedy(6)))
        elif move == "pull" and streams:
            next(rng.choice(streams), None)
        elif move == "close" and streams:
            streams.pop().close()
        elif move == "plant" and eng.running and rng.random() < 0.4:
            plant(eng.pool, rng.choice(eng.running), rng.choice(["S", "conv", "rows"]))
        held = [p for r in eng.running for p in [*r.pages, *r.state]]
        assert len(set(held)) == len(held) == eng.pool.num_pages - eng.pool.free_pages
        assert eng.pool.references.sum() == len(held) and len(eng.running) <= 4
    for stream in streams:
        stream.close()
    drive(eng)
    eng.step()
    reasons = {out.finish_reason for _, _, out in outs}
    assert reasons <= {"length", "abort", "error"} and "length" in reasons
    for ids, params, out in outs:
        assert out.token_ids == (best(eng.model, ids + out.token_ids, len(ids)) if out.token_ids else [])
        assert len(out.token_ids) == params.max_tokens or out.finish_reason != "length"
    assert_idle(eng)


# ---------------------------------------------------------------- who runs when


def test_first_come_first_served_in_a_small_pool():
    """Seven pages: the long second request waits for room and the small third one does not overtake it."""
    eng = engine(num_pages=7)
    asked = [(prompt(6, 0), 9), (prompt(2 * P + 9), 4), (prompt(3), 6), (prompt(5, 1), 3), (prompt(1), 8)]
    rids = [eng.add(ids, greedy(n)) for ids, n in asked]
    started, outs = [], {}
    while eng.waiting or eng.running:
        outs |= {out.rid: out for out in eng.step()}
        started += [r.out.rid for r in eng.running if r.out.rid not in started]
        assert sum(len(r.pages) + len(r.state) for r in eng.running) <= 7
        if rids[1] not in started:
            assert started == rids[:1] and eng.stats["waiting"] == 4
    assert started == rids
    for rid, (ids, n) in zip(rids, asked):
        assert_greedy(eng, ids, outs[rid], n)
    assert_idle(eng)


def test_max_batch_1_runs_one_at_a_time():
    eng = engine(max_batch=1)
    prompts = [prompt(n) for n in (3, 20, 1)]
    for ids in prompts:
        eng.add(ids, greedy(4))
    outs = {}
    while eng.waiting or eng.running:
        outs |= {out.rid: out for out in eng.step()}
        assert len(eng.running) <= 1
    for rid, ids in enumerate(prompts):
        assert_greedy(eng, ids, outs[rid], 4)


def test_a_long_prompt_does_not_stop_those_who_write():
    """Answers grow by a token in every step while a long prompt is read a chunk at a time, before or behind them."""
    eng = engine(prefill_chunk=16)
    eng.add(prompt(3), greedy(11))
    eng.step()
    long = eng.add(prompt(150), greedy(2))
    eng.add(prompt(1), greedy(10))  # its turn comes after the long one, which takes the whole budget
    for n in range(1, 10):
        grown = eng.step()
        assert sorted(len(out.token_ids) for out in grown if out.rid != long) == [n, n + 1]
        assert next(r for r in eng.running if r.out.rid == long).computed == 16 * n


# ---------------------------------------------------------------- forms of prompts and parameters


ABC = [0, 1, 2]  # the ids of "abc"
FORMS = {
    "str": ("abc", 1),
    "list": (ABC, 1),
    "tuple": (tuple(ABC), 1),
    "array": (np.array(ABC), 1),
    "tensor": (torch.tensor(ABC), 1),
    "list of str": (["abc", "abc"], 2),
    "list of lists": ([ABC], 1),
    "tuple of tuples": ((tuple(ABC), tuple(ABC)), 2),
    "list of tensors": ([torch.tensor(ABC)], 1),
    "tensor of rows": (torch.tensor([ABC, ABC]), 2),
    "mixed": (["abc", ABC, torch.tensor(ABC), np.array(ABC)], 4),
    "none": ([], 0),
}


@pytest.mark.parametrize("form, count", FORMS.values(), ids=FORMS)
def test_forms_of_prompts(tmp_path, form, count):
    eng = engine(tokenizer=byte_tokenizer(tmp_path, ABC))
    outs = eng.generate(form, greedy(1))
    assert [(out.prompt_tokens, len(out.token_ids)) for out in outs] == [(3, 1)] * count
    for out in outs:
        assert_greedy(eng, ABC, out, 1)
        assert type(out.token_ids[0]) is int


@pytest.mark.parametrize("params", [[greedy(1), greedy(0), greedy(3)], (greedy(2),) * 3, greedy(4)])
def test_params_per_prompt(params):
    eng = engine()
    outs = eng.generate([prompt(3), prompt(4), prompt(5)], params)
    params = params if isinstance(params, (list, tuple)) else [params] * 3
    assert [len(out.token_ids) for out in outs] == [p.max_tokens for p in params]
    assert_idle(eng)


@pytest.mark.parametrize("count", [0, 1, 4])
def test_params_of_another_number_than_prompts(count):
    with pytest.raises(ValueError, match=f"3 prompts, but {count} SamplingParams"):
        engine().generate([prompt(3)] * 3, [greedy(1)] * count)


def test_max_tokens():
    eng = engine()
    for out in eng.generate([prompt(3)] * 2, greedy(0)):
        assert (out.token_ids, out.text, out.finish_reason) == ([], "", "length")
    assert eng.stats["backends"] == {} and list(eng.stream(prompt(3), greedy(0))) == []
    assert_greedy(eng, prompt(3), eng.generate(prompt(3), greedy(1))[0], 1)
    assert_idle(eng)


def test_the_context_is_a_limit():
    eng = engine(tiny_model(max_position_embeddings=24))
    for n, left in ((20, 5), (23, 2), (24, 1)):
        assert_greedy(eng, prompt(n, vocab=61), eng.generate(prompt(n, vocab=61), greedy(50))[0], left)
    with pytest.raises(ValueError, match="25 tokens.* at most 24"):
        eng.add(prompt(25, vocab=61))


def test_eos_and_stop_ids():
    ids = case("micro")[1]["greedy_from_20"].tolist()
    answer, eng = ids[20:], engine()
    end = answer.index(2)  # eos_token_id of this configuration
    assert 0 < end < 39

    expected = [
        (dict(), answer[: end + 1], "stop"),
        (dict(ignore_eos=True), answer, "length"),
        (dict(ignore_eos=True, stop_token_ids=[2]), answer[: end + 1], "stop"),
        (dict(stop_token_ids=(answer[30], answer[4])), answer[:5], "stop"),
        (dict(stop_token_ids=(answer[4],), max_tokens=5), answer[:5], "stop"),
        (dict(stop_token_ids=(answer[4],), max_tokens=4), answer[:4], "length"),
    ]
    params = [SamplingParams(**{"max_tokens": 40, **options}) for options, _, _ in expected]
    for out, (options, *want) in zip(eng.generate([ids[:20]] * 6, params), expected):
        assert [out.token_ids, out.finish_reason] == want, options
    assert_idle(eng)


def test_several_eos_ids():
    eng = engine(tiny_model(eos_token_id=[5, 7, 9]))
    assert eng.cfg.eos_ids == {5, 7, 9}
    free = [o.token_ids for o in eng.generate([prompt(4, s, vocab=61) for s in range(4)], greedy(40))]
    ended = eng.generate([prompt(4, s, vocab=61) for s in range(4)], greedy(40, ignore_eos=False))
    cut = [next((n + 1 for n, i in enumerate(ids) if i in (5, 7, 9)), 40) for ids in free]
    assert min(cut) < 40, "no answer meets an end: choose other ids"
    assert [out.token_ids for out in ended] == [ids[:n] for ids, n in zip(free, cut)]


# ---------------------------------------------------------------- text


def byte_tokenizer(folder, ids=()):
    """The Tokenizer of a new tokenizer.json in folder: 256 bytes and a control token. The ids given are a, b, c, ..."""
    letters = [*string.ascii_letters]
    chars = letters + sorted({*tokenizers.pre_tokenizers.ByteLevel.alphabet()} - {*letters})
    order = list(dict.fromkeys([*ids, *range(256)]))
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE(dict(zip(chars, order, strict=True)), []))
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    bpe.add_special_tokens(["[END]"])
    bpe.save(str(folder / "tokenizer.json"))
    return Tokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def tok(tmp_path_factory):
    """In which the greedy answer of micro is letters."""
    return byte_tokenizer(tmp_path_factory.mktemp("tok"), case("micro")[1]["greedy_from_20"].tolist()[20:])


@pytest.fixture(scope="module")
def story(tok):
    """(prompt ids, greedy answer ids, its text) of micro: a letter a token."""
    ids = case("micro")[1]["greedy_from_20"].tolist()
    text = "".join(tok.decode([i]) for i in ids[20:])
    assert len(text) == 40 and text.isascii() and text.isalpha() and text.startswith("abcdefgh")
    return ids[:20], ids[20:], text


STOPS = {
    "three letters": lambda t: t[10:13],
    "the first letter": lambda t: t[0],
    "the last letters": lambda t: t[37:],
    "starts, then differs": lambda t: t[10:12] + "?",
    "the earliest of two": lambda t: (t[20:23], t[12:15]),
    "one inside the other": lambda t: (t[10:13], t[11]),
    "two end together": lambda t: [t[11:13], t[10:13]],
    "begins again": lambda t: [t[10] + t[10:12], t[24:27]],
    "longer than the answer": lambda t: t + "more",
}


def test_stop_strings(tok, story):
    """All in one batch, against looking for them in the text of the first n letters, n = 0, 1, 2, ..."""
    ids, answer, text = story
    params = [greedy(40, stop=stop(text)) for stop in STOPS.values()]
    outs = engine(tokenizer=tok, num_pages=30).generate([ids] * len(params), params)
    for name, out, p in zip(STOPS, outs, params):
        n = next((n for n in range(41) if any(s in text[:n] for s in p.stop)), None)
        shown = text if n is None else text[: min(text[:n].index(s) for s in p.stop if s in text[:n])]
        assert (out.text, out.token_ids) == (shown, answer[:n]), name
        assert out.finish_reason == ("length" if n is None else "stop"), name


@pytest.mark.parametrize("stop", [(), "the earliest of two", "starts, then differs"])
def test_the_pieces_of_a_stream_are_the_text(tok, story, stop):
    ids, _, text = story
    eng, params = engine(tokenizer=tok), greedy(25, stop=stop and STOPS[stop](text))
    pieces = list(eng.stream(ids, params))
    assert "".join(pieces) == eng.generate([ids], params)[0].text and all(pieces)
    assert len(pieces) > 10
    assert_idle(eng)


def test_a_stream_holds_back_only_what_may_be_a_stop(tok, story):
    ids, _, text = story
    pieces = list(engine(tokenizer=tok).stream(ids, greedy(14, stop=text[10:12] + "?")))
    assert pieces == [*text[:10], text[10:13], text[13]]
    pieces = list(engine(tokenizer=tok).stream(ids, greedy(12, stop=text[10:12] + "?")))
    assert pieces == [*text[:10], text[10:12]], "the end releases what was held"


def test_the_token_that_ends_is_no_text(tok, story):
    ids, answer, text = story
    eng, end = engine(tokenizer=tok), answer.index(2)
    (out,) = eng.generate([ids], SamplingParams(max_tokens=40))
    assert (out.text, len(out.token_ids)) == (text[:end], end + 1)
    assert eng.generate([ids], greedy(40, stop_token_ids=[answer[5]]))[0].text == text[:5]
    eng.add(ids, greedy(40, stop=text[3:5] + "?"))
    for _ in range(5):
        (out,) = eng.step()
    assert out.text == text[:3]
    eng.abort(out.rid)
    assert (out.text, out.finish_reason) == (text[:5], "abort")


@given(st.text("ab中🙂", max_size=14), st.lists(st.text("ab中🙂", min_size=1, max_size=4), max_size=3))
@settings(max_examples=200, deadline=None)
def test_text_stream(tok, text, stop):
    """Byte by byte: nothing of a stop string is shown, all before it is, and only what could start one is held."""
    ids, stream, shown, stopped = tok.encode(text), TextStream(tok, tuple(stop)), "", False
    for n, token in enumerate(ids):
        piece, stopped = stream.push(token)
        shown += piece
        sure = bytes(b for i in ids[: n + 1] for b in tok.token_bytes(i)).decode(errors="ignore")
        if stopped:
            assert shown == sure[: min(sure.index(s) for s in stop if s in sure)]
            break
        assert not any(s in sure for s in stop)
        held = sure[len(shown) :]
        assert sure.startswith(shown) and (not held or any(s.startswith(held) for s in stop))
    rest = stream.flush()
    assert (rest == "") if stopped else shown + rest == text


def test_half_a_character(tok):
    two = tok.encode("中")[:2]
    stream = TextStream(tok, ("\ufffd!",))
    assert [stream.push(i) for i in two] == [("", False)] * 2 and stream.flush() == "\ufffd"


def test_an_id_without_text_stays_home(tok, story, monkeypatch):
    """An output layer may have more rows than the tokenizer has ids (padding); writing one must not end the others."""
    eng, (ids, _, text) = engine(tokenizer=tok), story
    logits = eng.model.logits

    def odd(hidden):
        rows = logits(hidden)
        rows[1:, 256] = 1e9
        return rows

    monkeypatch.setattr(eng.model, "logits", odd)
    monkeypatch.setattr(tok, "vocab_size", 256)
    monkeypatch.setattr(tok, "_names", {})
    outs = eng.generate([ids, prompt(20)], greedy(5))
    assert outs[0].text == text[:5] and outs[1].finish_reason in ("length", "error")


# ---------------------------------------------------------------- sampling and log-probabilities


SAMPLED = SamplingParams(max_tokens=12, temperature=1.3, top_k=50, top_p=0.9, min_p=0.01, seed=42, ignore_eos=True)


def test_a_seed_decides_alone_in_company_and_in_chunks():
    ids, others = prompt(30), [prompt(n) for n in (1, 17, 64)]
    answers = [engine(prefill_chunk=chunk).generate(ids, SAMPLED)[0].token_ids for chunk in (7, 512)]
    answers += [engine(prefill_chunk=25).generate([*others, ids], SAMPLED)[-1].token_ids]
    assert answers[0] == answers[1] == answers[2]
    with torch.inference_mode():
        rows = case("micro")[0](torch.tensor([ids + answers[0]]))[0, 29:-1]
    filters = torch.tensor([[1.3, 50, 0.9, 0.01]] * 12, dtype=torch.float64).T
    draws = torch.stack([torch.full((12,), 42), torch.arange(12)])
    assert answers[0] == sample(rows, filters, draws)[0].tolist()
    assert answers[0] != rows.argmax(-1).tolist()


def test_without_a_seed_answers_differ():
    params = SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True)
    outs = engine().generate([prompt(9)] * 3, params)
    assert len({tuple(out.token_ids) for out in outs}) == 3


def test_top_k_1_is_greedy():
    ids = case("micro")[1]["greedy_from_20"].tolist()
    (out,) = engine().generate(ids[:20], greedy(40, temperature=3.0, top_k=1, seed=1))
    assert out.token_ids == ids[20:]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_are_the_models(temperature):
    ids = prompt(25)
    params = [greedy(6, temperature=temperature, seed=1, logprobs=n) for n in (None, 0, 5)]
    outs = engine().generate([ids] * 3, params)
    assert outs[0].logprobs is None and len({tuple(out.token_ids) for out in outs}) == 1
    with torch.inference_mode():
        exact = case("micro")[0](torch.tensor([ids + outs[0].token_ids]))[0, 24:-1].double().log_softmax(-1)
    for count, out in zip((0, 5), outs[1:]):
        assert [next(iter(row)) for row in out.logprobs] == out.token_ids
        for row, token, want in zip(out.logprobs, out.token_ids, exact):
            likeliest = want.topk(count).indices.tolist()
            assert list(row) == [token, *(i for i in likeliest if i != token)]
            assert list(row.values()) == pytest.approx(want[list(row)].tolist(), abs=1e-4)


# ---------------------------------------------------------------- what happened


def test_stats_count_what_ran():
    eng = engine(prefill_chunk=512, kernels="torch")
    eng.generate([prompt(20), prompt(33)], greedy(5))
    stats = eng.stats
    cfg = eng.cfg
    kda, mla, moe = len(cfg.kda_layers), len(cfg.mla_layers), sum(map(cfg.is_moe, range(cfg.num_hidden_layers)))
    calls = {"attnres": (2 * 9 + 1) * 5, "experts": moe * 5, "router": moe * 5, "moe_in": moe * 5, "gated_act": 9 * 5}
    calls |= {"linear": ((kda + mla) * 3 + 9 * 2 + 1) * 5, "rms_norm": (mla + moe + 1) * 5}
    calls |= {"kda_prefill": kda, "kda_decode": kda * 4, "mla_prefill": mla, "mla_decode": mla * 4}
    calls |= {"latent_write": mla * 5, "kda_recurrence": kda * 6, "mla_expanded": mla * 2}  # two prompts
    calls["gumbel_max"] = 5
    assert stats["backends"] == {op: f"torch x{n}" for op, n in calls.items()}
    assert (stats["prompt_tokens"], stats["decode_tokens"]) == (53, 8)
    assert stats["prompt_tokens_per_s"] > 0 and stats["decode_tokens_per_s"] > 0
    assert (stats["pages"], stats["pages_free"], stats["page_tokens"]) == (24, 24, P)
    assert (stats["running"], stats["waiting"]) == (0, 0)
    assert engine().stats["backends"] == {} and engine().stats["decode_tokens_per_s"] == 0


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "bad, params, says",
    [
        ([], greedy(5), "empty"),
        (torch.tensor([], dtype=torch.long), greedy(5), "empty"),
        ([5, -1], greedy(5), "-1 is outside the vocabulary of 257"),
        ([257, 5], greedy(5), "257 is outside the vocabulary of 257"),
        ([1] * 700, greedy(5), "700 tokens, which need 8 pages of 128 tokens, and the pool has 6"),
        ([1] * 513, greedy(1), "need 7 pages .* pool has 6"),
        ([1] * 4097, greedy(5), "4097 tokens; the model reads at most 4096"),
        ("text", greedy(5), "no tokenizer"),
        ([5], greedy(5, stop="x"), "stop strings need a tokenizer"),
    ],
)
def test_bad_prompts(bad, params, says):
    eng = engine(num_pages=6)
    calls = [lambda: eng.add(bad, params), lambda: next(eng.stream(bad, params))]
    calls += [lambda: eng.generate([prompt(3), bad], params if params.stop else [greedy(3), params])]
    for call in calls:
        with pytest.raises(ValueError, match=says) as e:
            call()
        assert "\n" not in str(e.value)
    assert not eng.waiting and not eng.running and eng.stats["backends"] == {}, "nothing runs, nothing is left behind"
    assert_idle(eng)


@pytest.mark.parametrize("bad", [None, [1.5, 2], torch.tensor([1.5]), ["5"], [[1, 2]], torch.tensor([[1, 2]])], ids=str)
def test_prompts_of_the_wrong_type(bad):
    """`add` takes one prompt; what is not a text or whole numbers is named, not rounded or spelled out."""
    eng = engine()
    with pytest.raises((TypeError, ValueError), match="prompt|token id"):
        eng.add(bad)
    assert_idle(eng)


def test_the_largest_request_that_fits():
    eng = engine(num_pages=6)
    ids = prompt(500)
    assert_greedy(eng, ids, eng.generate(ids, greedy(13))[0], 13)  # the last token is never stored: 512 rows, 4 pages
    assert_idle(eng)


def test_an_empty_text_is_an_empty_prompt(tok):
    with pytest.raises(ValueError, match="empty"):
        engine(tokenizer=tok).generate("")


@pytest.mark.parametrize(
    "options, says",
    [
        (dict(draft_tokens=8), "draft_tokens is 8; it must be 0 to 7"),
        (dict(draft_tokens=True), "draft_tokens is True"),
        (dict(draft="oracle"), "draft is 'oracle'; give"),
        (dict(draft="mtp"), "this checkpoint has no MTP layer"),
        (dict(kernels="triton"), "triton.*cannot run here.*torch"),
        (dict(kernels="nonsense"), "nonsense"),
        (dict(num_pages=0), "num_pages is 0; it must be at least 1"),
        (dict(num_pages=-3), "num_pages is -3"),
        (dict(prefill_chunk=0), "prefill_chunk is 0"),
        (dict(max_batch=0), "max_batch is 0"),
    ],
)
def test_bad_options(options, says):
    with pytest.raises(ValueError, match=says):
        Engine(case("micro")[0], **options)


def test_bad_devices():
    with pytest.raises(ValueError, match="nonsense"):
        Engine(DATA / "micro", device="nonsense")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="sees no GPU.*--device cpu"):
            Engine(DATA / "micro", device="cuda")


def test_missing_folder(tmp_path):
    with pytest.raises(OSError, match="nowhere: no such folder"):
        Engine(tmp_path / "nowhere")
    with pytest.raises(OSError, match="no config.json"):
        Engine(tmp_path)


def test_only_mla_layers_with_a_small_page():
    """Without KDA layers a page need not be able to hold a state."""
    mla = dict(kda_layers=[], full_attn_layers=[1, 2, 3, 4, 5], num_heads=8, head_dim=64)
    eng = engine(tiny_model(linear=mla), prefill_chunk=11)
    assert_greedy(eng, ids := prompt(30, vocab=61), eng.generate([ids], greedy(6))[0], 6)


# ---------------------------------------------------------------- decode steps by the graph's contract


@pytest.mark.parametrize("pages", [24, 25, 26])
def test_a_step_of_the_graph_answers_those_it_ran(pages):
    """`Runner.graph` replaced by what a graph returns. A request whose whole prompt is cached may be put back in the
    very step in which it would have got its first token: nobody may get another's.
    """
    model = case("micro")[0]
    rng = np.random.default_rng(1)
    texts, cached = [rng.integers(3, 257, 120).tolist() for _ in range(6)], rng.integers(3, 257, 40).tolist()
    want = Engine(model, num_pages=60, prefix_cache=False).generate([*texts, cached], greedy(14))
    eng, replays = Engine(model, num_pages=pages, max_batch=10, prefill_chunk=4096), []

    def replay(step):
        replays.append(len(step.chunks))
        return eng.runner.forward(step)

    eng.runner.graph = lambda step: replay
    outs = [eng._enqueue(np.array(text), greedy(14)) for text in texts]
    for _ in range(6):
        eng.step()
    eng._enqueue(np.array(cached), greedy(1))
    while eng.running[0].computed < 128:
        eng.step()
    outs.append(eng._enqueue(np.array(cached), greedy(14)))  # in the step in which six requests need another page
    while eng.running or eng.waiting:
        eng.step()
    assert [o.token_ids for o in outs] == [o.token_ids for o in want]
    assert outs[-1].cached_tokens == 40 and len(replays) > 10 and not eng.pool.live_pages
