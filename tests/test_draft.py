"""Drafting changes no answer, and leaves nothing behind: whoever drafts, whatever is accepted."""

import contextlib
import copy
import functools
import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from helpers import CASES, case
from hypothesis import given, settings
from hypothesis import strategies as st

import draft
import kernels
from cache import STOPS
from draft import MOST, Depth, Lookup, accept
from engine import TINY, Engine, SamplingParams, Snapshots
from model import K3

GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
WARM = SamplingParams(max_tokens=40, temperature=1.0, min_p=0.01, seed=3, ignore_eos=True)
SORTED = SamplingParams(max_tokens=40, temperature=1.2, top_k=40, top_p=0.9, seed=4, ignore_eos=True)
MTP_CASES = [name for name in CASES if case(name)[0].mtp]


def text(seed, n):
    return np.random.default_rng(seed).integers(3, 257, n).tolist()


PROMPTS = [text(1, 20), text(2, 130), text(3, 1), [5, 6, 7] * 20]


class Knows:
    """Drafts the answers that it was told, and now and then a wrong token among them."""

    def __init__(self, texts, wrong=0.3):
        self.texts, self.wrong = [list(t) for t in texts], wrong

    def draft(self, text, count):
        text = text.tolist()
        known = next((t for t in self.texts if t[: len(text)] == text), None)
        if known is None:
            return []
        rng = np.random.default_rng(len(text))
        return [(i + 1) % 250 if rng.random() < self.wrong else i for i in known[len(text) : len(text) + count]]


class Wrong:
    def draft(self, text, count):
        return [(int(text.sum()) + 31 * i) % 250 for i in range(count)]


@functools.cache
def plain(name, params, **options):
    """The answers of an engine that does not draft, and its statistics."""
    engine = Engine(case(name)[0], num_pages=60, **options)
    return [out.token_ids for out in engine.generate(PROMPTS, params)]


def drafter(kind, name, params):
    if kind in ("knows", "sure"):
        texts = [p + ids for p, ids in zip(PROMPTS, plain(name, params))]
        return Knows(texts, 0.3 if kind == "knows" else 0.0)
    return {"wrong": Wrong(), "lookup": Lookup(shortest=1)}.get(kind, kind)


def same(name, kind, tokens, params, **options):
    """Answers with drafts are those without -> the engine."""
    options = {"num_pages": 60, **options}
    engine = Engine(case(name)[0], draft=drafter(kind, name, params), draft_tokens=tokens, **options)
    outs = engine.generate(PROMPTS, params)
    assert [out.token_ids for out in outs] == plain(name, params)
    return engine


def grid(values, usual):
    """All combinations; those that `usual` refuses are slow."""
    return [v if usual(*v) else pytest.param(*v, marks=pytest.mark.slow) for v in itertools.product(*values)]


KINDS = "knows", "sure", "wrong", "lookup", "mtp"


@pytest.mark.parametrize(
    "name, kind, tokens, params",
    grid(
        (CASES, KINDS, (1, 2, 3, 4, 5, 6, 7, "auto"), (GREEDY, WARM, SORTED)),
        lambda name, *setting: (
            list(setting) in (["knows", 3, SORTED], ["sure", 7, GREEDY], ["mtp", 2, WARM])
            or name == "micro-mtp"
            and list(setting)
            in (["knows", "auto", SORTED], ["wrong", 4, WARM], ["mtp", 7, GREEDY], ["mtp", "auto", SORTED])
        ),
    ),
)
def test_the_same_ids(name, kind, tokens, params):
    if kind == "mtp" and name not in MTP_CASES:
        pytest.skip("it has no MTP layer")
    engine = same(name, kind, tokens, params, prefill_chunk=50)
    stats = engine.stats
    assert stats["drafted"] > 0 and (kind != "wrong" or stats["drafts_kept"] < 3)
    if kind == "sure":
        assert stats["tokens_per_cycle"] > (1.6 if tokens == "auto" else 0.6 * (1 + tokens))
    assert engine.pool.live_pages == 0


@pytest.mark.parametrize(
    "kind, tokens, params",
    grid(
        (("mtp", "lookup"), (1, 3, 4, "auto"), (GREEDY, WARM, SORTED)),
        lambda *setting: setting in (("mtp", 3, GREEDY), ("mtp", "auto", SORTED), ("lookup", 4, WARM)),
    ),
)
def test_the_same_story(kind, tokens, params):
    """tiny/, whose drafts are often right."""
    model, prompts = tiny(), ["Once upon a time", "The king had a daughter, and the king had a"]
    want = Engine(model, num_pages=40, tokenizer=TINY).generate(prompts, params)
    engine = Engine(model, num_pages=40, tokenizer=TINY, draft=kind, draft_tokens=tokens)
    outs = engine.generate(prompts, params)
    assert [(o.token_ids, o.text) for o in outs] == [(o.token_ids, o.text) for o in want]
    if (kind, tokens) == ("mtp", 3):
        assert engine.stats["tokens_per_cycle"] > 1.7


@functools.cache
def tiny():
    return K3.from_pretrained(TINY, dtype=torch.float32, progress=False)


# ---------------------------------------------------------------- what is left behind


def by_row(x, weight):
    """A product whose bits do not depend on the rows beside one."""
    return torch.stack([torch.mv(weight, row) for row in x.flatten(0, -2)]).view(*x.shape[:-1], -1)


@pytest.fixture
def row_by_row(monkeypatch):
    """Products whose bits do not depend on the rows beside one: those of PyTorch do."""
    products = torch.bmm
    monkeypatch.setattr(torch.nn.functional, "linear", by_row)
    rows = lambda x, w: torch.cat([products(x[:, i : i + 1].contiguous(), w) for i in range(x.shape[1])], dim=1)
    monkeypatch.setattr(torch, "bmm", rows)


def slots_of(engine, request, positions):
    P = engine.pool.page_size
    return torch.from_numpy(request.pages[positions // P] * P + positions % P)


def states(engine, request):
    """Every KDA layer's S and conv window, and the latent rows of the MLA layers, of a running request."""
    pool = engine.pool
    slots = slots_of(engine, request, np.arange(request.computed))
    slots = slots.to(pool.device)
    found = [pool.rows(i)[slots] for i in range(len(engine.cfg.mla_layers))]
    for i in range(len(engine.cfg.kda_layers)):
        found += [x[request.state[pool.group(i)]] for x in pool.state(i)]
    return found


@pytest.mark.parametrize("kind, tokens", [("knows", 3), ("knows", 7), ("wrong", 2), ("mtp", 3)])
def test_states_are_those_of_who_never_drafted(kind, tokens, row_by_row):
    """Bit for bit, whenever both have read the same tokens: after a full acceptance, a part of one and none; and in
    steps without drafts, right after some that kept two or more.
    """
    name, compared, seen, accepted = "micro-mtp", Counter(), {}, 0
    drafting = Engine(case(name)[0], num_pages=60, draft=drafter(kind, name, GREEDY), draft_tokens=tokens)
    engines = Engine(case(name)[0], num_pages=60), drafting
    for engine in engines:
        for prompt in PROMPTS[:2]:
            engine.add(prompt, GREEDY)
        engine.step()
    for engine in engines:
        while engine.running:
            if engine is drafting:
                engine.drafting.depth.fixed = 0 if accepted > 2 else tokens
            before = [len(r.out.token_ids) for r in engine.running]
            engine.step()
            accepted = max((len(r.out.token_ids) - n for r, n in zip(engine.running, before)), default=0)
            for r in engine.running:
                now = [x.clone() for x in states(engine, r)]
                if engine is drafting:
                    assert all(map(torch.equal, now, seen[r.out.rid, r.computed]))
                    compared[accepted] += 1
                seen.setdefault((r.out.rid, r.computed), now)
    assert sum(compared.values()) > 20 and drafting.stats["drafted"] > 30
    assert kind != "knows" or len(compared) > 3


@pytest.mark.parametrize("name", MTP_CASES)
def test_rows_of_the_draft_layer_are_right(name):
    """For every committed position, whatever was drafted, at changing depths: those of a text that is read at once; and
    the first draft is the checkpoint's own, from whole texts."""
    model, _ = case(name)
    engine = Engine(model, num_pages=60, draft="mtp", draft_tokens=3, prefill_chunk=50)
    depth = itertools.cycle([3, 0, 0, 1, 7, 0, 2])
    outs = [engine._enqueue(np.array(prompt), GREEDY) for prompt in PROMPTS]
    while engine.running or engine.waiting:
        engine.drafting.depth.fixed = next(depth)
        engine.step()
        for r in engine.running:
            assert len(r.due) <= draft.DUE
        if len(outs[0].token_ids) == 25 or engine.running and engine.running[0].out.prompt_tokens == 130:
            engine.drafting.mtp.settle(engine.running)
            for r in engine.running:
                check_rows(engine, r)
    assert engine.stats["drafted"]


def check_rows(engine, request):
    model, n = engine.model, request.computed
    other = Engine(model, num_pages=30, draft="mtp", prefill_chunk=1000)
    other.add(request.tokens[:n].tolist(), GREEDY)
    other.step()
    (whole,) = other.running
    slab = len(model.cfg.mla_layers)
    both = (engine, request), (other, whole)
    rows = [e.pool.rows(slab)[slots_of(e, r, np.arange(1, n))] for e, r in both]
    torch.testing.assert_close(*rows, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MTP_CASES)
def test_drafts_are_those_of_whole_texts(name, monkeypatch):
    """A chain of three, greedy, against `mtp_logits`."""
    model, drafts = case(name)[0], []
    engine = Engine(model, num_pages=60, draft="mtp", draft_tokens=3)

    def note(ids, tokens, stops, room, usual=accept):
        drafts.append(ids.tolist())
        return usual(ids, tokens, stops, room)

    monkeypatch.setattr("runner.accept", note)
    (out,) = engine.generate([PROMPTS[0]], SamplingParams(max_tokens=12, ignore_eos=True))
    known = PROMPTS[0] + out.token_ids
    for ((last, *guessed),) in drafts:
        n = next(n for n in range(20, len(known)) if known[n] == last and guessed == chain(model, known[: n + 1], 3))
        assert n
    assert len(drafts) >= 3


@torch.no_grad()
def chain(model, ids, count):
    """`count` drafts behind a text: h where the model has read on, x of the draft before where it has not."""
    ids, found = torch.tensor([ids]), []
    h = model(ids, return_hidden=True)[1][:, :-1]
    for _ in range(count):
        logits, x = model.mtp_logits(ids, torch.cat([h, h[:, -1:]], 1), return_hidden=True)  # the last is not read
        found.append(int(logits[0, -1].argmax()))
        ids, h = torch.cat([ids, logits[:, -1:].argmax(-1)], 1), torch.cat([h, x[:, -1:]], 1)
    return found


# ---------------------------------------------------------------- where an answer ends


def answers(engine, prompts, params):
    outs = engine.generate(prompts, params)
    return [(o.token_ids, o.text, o.finish_reason, o.cached_tokens) for o in outs]


STORY = SamplingParams(max_tokens=60, ignore_eos=True)


@functools.cache
def told():
    return Engine(tiny(), num_pages=60, tokenizer=TINY).generate(["Once upon a time", "The wolf", "She said"], STORY)


ENDS = {
    "length": [lambda n=n: dict(max_tokens=n) for n in (6, 1, 2, 5, 7)],
    "id": [lambda n=n: dict(stop_token_ids=(told()[0].token_ids[n],)) for n in (9, 3, 14)],
    "many ids": [lambda: dict(stop_token_ids=(*range(4000, 4000 + STOPS), told()[0].token_ids[10]))],
    "text": [lambda n=n: dict(stop=told()[0].text[n : n + 3]) for n in (21, 10, 30)],
    "texts": [lambda: dict(stop=("xyz", told()[1].text[8:12], told()[2].text[5:9]), logprobs=2)],
}
ENDS = {f"{name} {i}": end for name, ends in ENDS.items() for i, end in enumerate(ends)}


@pytest.mark.parametrize(
    "end, kind, tokens",
    grid(
        (ENDS, ("sure", "mtp"), (3, 7)),
        lambda end, kind, tokens: end.endswith("0") and (kind, tokens) == ("sure", 7)
        or (end, kind, tokens) == ("texts 0", "mtp", 3),
    ),
)  # fmt: skip
def test_an_answer_ends_where_it_would_have(end, kind, tokens):
    """By length, by ids and by strings, inside a cycle; and the next turn resumes from all of it."""
    prompts = ["Once upon a time", "The wolf", "She said"]
    params = SamplingParams(**{"max_tokens": 60, "ignore_eos": True, **ENDS[end]()})
    plain = Engine(tiny(), num_pages=60, tokenizer=TINY)
    texts = [plain.tokenizer.encode(p) + o.token_ids for p, o in zip(prompts, told())]
    who = Knows(texts, 0.1) if kind == "sure" else kind
    drafting = Engine(tiny(), num_pages=60, tokenizer=TINY, draft=who, draft_tokens=tokens)
    got, want = (answers(engine, prompts, params) for engine in (drafting, plain))
    assert got == want
    turns = [plain.tokenizer.encode(p) + o[0] + [77, 78] for p, o in zip(prompts, want)]
    again = SamplingParams(max_tokens=9, ignore_eos=True)
    got, want = (answers(engine, turns, again) for engine in (drafting, plain))
    assert got == want and all(cached == len(t) - 3 for (_, _, _, cached), t in zip(got, turns))
    assert drafting.stats["drafted"] > 0 or params.max_tokens == 1


def test_log_probabilities_are_those_without_drafts():
    params = SamplingParams(max_tokens=30, temperature=0.7, seed=2, logprobs=3, ignore_eos=True)
    model, prompts = tiny(), ["Once upon a time", "The wolf"]
    want, got = (
        Engine(model, num_pages=60, tokenizer=TINY, **options).generate(prompts, [params, STORY])[0].logprobs
        for options in ({}, dict(draft="mtp", draft_tokens=4))
    )
    assert len(got) == 30 and [list(row) for row in got] == [list(row) for row in want]
    got, want = ([value for row in rows for value in row.values()] for rows in (got, want))
    assert got == pytest.approx(want, abs=1e-4)


# ---------------------------------------------------------------- the parts


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_accept(data):
    T = data.draw(st.integers(1, 8))
    few = st.integers(0, 2)
    ids, tokens = (data.draw(st.lists(few, min_size=T, max_size=T)) for _ in range(2))
    stops = data.draw(st.lists(few, max_size=1))
    room = data.draw(st.integers(0, 9))
    wanted = []  # token by token
    for j in range(T):
        if len(wanted) < room and (j == 0 or ids[j] == tokens[j - 1]) and not set(wanted) & set(stops):
            wanted.append(tokens[j])
        else:
            break
    padded = torch.tensor([[*stops, *[-1] * STOPS][:STOPS]]).T
    taken, right = accept(torch.tensor([ids]), torch.tensor([tokens]), padded, torch.tensor([room]))
    assert taken.tolist() == [len(wanted)]
    assert right.tolist() == [next((j for j in range(T - 1) if ids[j + 1] != tokens[j]), T - 1)]


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.integers(1, 7), st.integers(1, 3), st.integers(0, 4))
@settings(max_examples=300, deadline=None)
def test_lookup(ids, count, shortest, more):
    longest = shortest + more
    got = list(Lookup(shortest, longest).draft(np.array(ids, dtype=np.int32), count))
    for size in range(longest, shortest - 1, -1):
        ends = [i for i in range(size, len(ids)) if ids[i - size : i] == ids[-size:]]
        if ends:
            copy = list(ids)
            for i in range(count):
                copy.append(copy[ends[-1] + i])
            assert got == copy[len(ids) :]
            return
    assert got == []


def test_depth_is_the_one_that_commits_most_a_second():
    """Against a search by hand, with costs and acceptance that are known."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        right, base, slope = rng.uniform(0.05, 0.95, MOST), rng.uniform(1, 5), rng.uniform(0.05, 2)
        depth = Depth("auto")
        depth.right[:], depth.drafted[:] = right, 1
        depth.costs["key"] = {m: base + slope * m for m in (0, 1, 3)}
        speed = [sum(np.prod(right[:j]) for j in range(m + 1)) / (base + slope * m) for m in range(MOST + 1)]
        speed = [s if m in (0, 1, 3) else s / 1.02 for m, s in enumerate(speed)]  # the others would have to be captured
        assert depth.best("key") == max(draft.DEPTHS, key=speed.__getitem__)


@pytest.mark.parametrize(
    "share, cost, wanted", [(0.9, 0.2, (5, 7)), (0.5, 0.3, (1, 2)), (0.6, 1.2, (0,)), (0.0, 0.1, (0,))]
)
def test_depth_learns(share, cost, wanted):
    """Cycles that cost 1 + cost * m; whatever is tried besides costs little."""
    depth, rng, spent, tokens, chosen = Depth("auto"), np.random.default_rng(1), 0.0, 0, Counter()
    for _ in range(6000):
        m = depth.choose("key")
        n = next((j for j in range(m) if rng.random() >= share), m)
        seconds = (1 + cost * m) * rng.uniform(0.97, 1.03)
        depth.observe("key", m, seconds, [n] if m else [], n + 1 if m else 0)
        spent, tokens = spent + seconds, tokens + n + 1
        chosen[m] += 1
    best = max(sum(share**j for j in range(m + 1)) / (1 + cost * m) for m in range(MOST + 1))
    assert tokens / spent > 0.97 * best and chosen.most_common(1)[0][0] in wanted
    if wanted == (0,):
        assert chosen[0] > 5900 and tokens / spent > 0.985


def test_depth_0_costs_nothing():
    """As many calls of each op as without a drafter, once it has chosen 0; and answers are the same."""
    name, counts = "micro-mtp", []
    for options in (dict(), dict(draft="mtp"), dict(draft="lookup")):
        engine = Engine(case(name)[0], num_pages=60, **options)
        if options:
            engine.drafting.depth.choose = lambda key: 0
        engine.add(PROMPTS[0], GREEDY)
        for _ in range(5):
            engine.step()
        before = kernels.counts.copy()
        for _ in range(30):
            engine.step()
        counts.append(kernels.counts - before)
    assert counts[0] == counts[1] == counts[2]


class Broken:
    def __init__(self, ids):
        self.ids = ids

    def draft(self, text, count):
        if self.ids is OSError:
            raise RuntimeError("no idea")
        return self.ids


@pytest.mark.parametrize(
    "ids, says",
    [
        ([257], "must be a list of token ids, 0 to 256"),
        ([-1], "token ids"),
        ("abc", "Broken.draft gave 'abc'"),
        ([1.5], "token ids"),
        ([[1], [2]], "token ids"),
        (7, "token ids"),
        (OSError, "no idea"),
    ],
)
def test_a_drafter_that_fails_harms_nobody(ids, says):
    engine = Engine(case("micro")[0], num_pages=60, draft=Broken(ids), draft_tokens=2)
    engine.add(PROMPTS[0], GREEDY)
    engine.step()
    with pytest.raises((ValueError, RuntimeError), match=says):
        engine.step()
    engine.drafting.drafter = Lookup()
    while engine.running or engine.waiting:
        done = engine.step()
    assert done[0].token_ids == plain("micro", GREEDY)[0]


def test_short_and_long_drafts_are_made_to_fit():
    for ids in ([7], [7] * 50, np.array([7, 8]), (), None):
        engine = Engine(case("micro")[0], num_pages=60, draft=Broken(ids), draft_tokens=3)
        assert [o.token_ids for o in engine.generate(PROMPTS, GREEDY)] == plain("micro", GREEDY)
        assert engine.stats["drafted"] == 0 or len(ids)


def test_a_fault_among_drafts_ends_one_request():
    """A NaN in the history of one of two drafting requests; the other goes on, and nothing leaks."""
    engine = Engine(case("micro-mtp")[0], num_pages=60, draft="mtp", draft_tokens=3)
    outs = [engine._enqueue(np.array(p), GREEDY) for p in PROMPTS[:2]]
    for _ in range(4):
        engine.step()
    one = engine.running[0]
    engine.pool.rows(0)[one.pages[0] * engine.pool.page_size + 2] = float("nan")
    while engine.running or engine.waiting:
        engine.step()
    assert outs[0].finish_reason == "error" and outs[1].token_ids == plain("micro-mtp", GREEDY)[1]
    assert outs[0].token_ids == plain("micro-mtp", GREEDY)[0][: len(outs[0].token_ids)]
    assert not engine.pool.live_pages


def test_no_page_is_taken_for_drafts_that_the_cache_would_lose():
    """In a full pool nobody drafts: what is cached stays."""
    name = "micro"
    engine = Engine(case(name)[0], num_pages=6, draft=Lookup(1), draft_tokens=7)
    outs = [engine.generate([text(i, 120)], SamplingParams(max_tokens=30, ignore_eos=True))[0] for i in range(4)]
    other = Engine(case(name)[0], num_pages=6)
    for i, out in enumerate(outs):
        (want,) = other.generate([text(i, 120)], SamplingParams(max_tokens=30, ignore_eos=True))
        assert out.token_ids == want.token_ids and out.cached_tokens == want.cached_tokens
    assert engine.stats["evicted"] == other.stats["evicted"]


def test_snapshots_in_the_middle():
    """Prompts with snapshots every few tokens, resumed by others, with drafts in between."""
    options = dict(prefill_chunk=40, snapshots=Snapshots(every=16, branch=1))
    engine = same("micro-mtp", "mtp", 3, GREEDY, **options)
    again = engine.generate(PROMPTS, GREEDY)
    assert [o.token_ids for o in again] == plain("micro-mtp", GREEDY)
    assert [o.cached_tokens for o in again] == [len(p) for p in PROMPTS]


# ---------------------------------------------------------------- what others broke


def test_pages_of_drafts_are_counted_with_those_of_the_step():
    """A prompt that leaves snapshots takes state pages in the step in which a writer with many stop ids drafts."""
    model, options = case("micro")[0], dict(snapshots=Snapshots(False, False, every=40, branch=0))
    stops = SamplingParams(max_tokens=30, stop_token_ids=tuple(range(240, 250)), ignore_eos=True)
    for pages in (8, 9, 10, 11):
        answered = []
        for drafting in ({}, dict(draft=Wrong(), draft_tokens=3)):
            engine = Engine(model, num_pages=pages, prefill_chunk=20, max_batch=2, **options, **drafting)
            rids = [engine.add(PROMPTS[0], stops), engine.add(text(9, 200), GREEDY), engine.add(text(8, 90), stops)]
            done = {}
            while engine.running or engine.waiting:
                done |= {o.rid: o.token_ids for o in engine.step() if o.finish_reason}
            assert engine.pool.live_pages == 0 and set(done) == set(rids)
            answered.append(done)
        assert answered[0] == answered[1]


@pytest.mark.parametrize("pages", [8, 10])
def test_the_cache_is_as_without_drafts(pages):
    """One after another in a small pool: the state that a snapshot shares costs pages too."""
    base, found = [text(1, 20), text(0, 126)], []
    asked = [(base[0], 2), (base[1][:125], 1), (base[1], 2), (base[1][:125], 2), (base[0], 3), (base[1][:125], 2)]
    for options in ({}, dict(draft=Wrong(), draft_tokens=7)):
        engine = Engine(case("micro")[0], num_pages=pages, max_batch=1, **options)
        outs = [engine.generate([p], SamplingParams(max_tokens=n, ignore_eos=True))[0] for p, n in asked]
        found.append([(o.cached_tokens, o.token_ids) for o in outs] + [engine.stats["evicted"]])
    assert found[0] == found[1]


def test_stop_ids_of_any_size_harm_nobody():
    params = [SamplingParams(max_tokens=9, stop_token_ids=(2**70, -5, 2**63), ignore_eos=True), SamplingParams(9)]
    engine = Engine(case("micro")[0], num_pages=60, draft=Wrong(), draft_tokens=2)
    outs = engine.generate(PROMPTS[:2], params)
    assert [o.token_ids for o in outs] == [ids[:9] for ids in plain("micro", GREEDY)[:2]]


def test_a_commitment_that_fails_undoes_the_step():
    """Of a state that is taken back because the host saw the answer's end: its requests start again."""
    name, ids = "micro", plain("micro", GREEDY)
    late = SamplingParams(max_tokens=40, stop_token_ids=(*range(100, 109), ids[0][11]), ignore_eos=True)
    want = Engine(case(name)[0], num_pages=60).generate(PROMPTS[:2], [late, GREEDY])
    engine = Engine(case(name)[0], num_pages=60, draft=drafter("sure", name, GREEDY), draft_tokens=7)
    outs = [engine._enqueue(np.array(p), q) for p, q in zip(PROMPTS, (late, GREEDY))]
    usual, failed = engine.runner.commit_less, []

    def fails(*args):
        if not failed:
            failed.append(args)
            raise RuntimeError("no commitment")
        usual(*args)

    engine.runner.commit_less = fails
    for _ in range(60):
        with contextlib.suppress(RuntimeError):
            engine.step()
    assert failed and not (engine.running or engine.waiting) and engine.pool.live_pages == 0
    assert [o.token_ids for o in outs] == [o.token_ids for o in want]


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_a_draft_that_is_not_finite_ends_nobody(backend):
    """Its rows are NaN, and no query that counts sees them."""
    model = copy.deepcopy(case("micro")[0])
    with torch.no_grad():
        model.embed_tokens.weight[256] = float("nan")

    class Poison:
        def draft(self, text, count):
            return [256] * count

    engine = Engine(model, num_pages=60, draft=Poison(), draft_tokens=7, kernels=backend)
    assert [o.token_ids for o in engine.generate(PROMPTS, GREEDY)] == plain("micro", GREEDY)


def test_a_drafter_cannot_change_the_text():
    class Changes:
        def draft(self, text, count):
            text[-1] = 9

    engine = Engine(case("micro")[0], num_pages=60, draft=Changes(), draft_tokens=2)
    with pytest.raises(ValueError, match="read-only"):
        engine.generate(PROMPTS[:1], GREEDY)


def test_what_drafts_is_an_object_even_an_empty_one():
    class Empty(dict):
        draft = Wrong.draft

    assert Engine(case("micro")[0], num_pages=30, draft=Empty()).stats["draft"] == "Empty"
    with pytest.raises(ValueError, match="give"):
        Engine(case("micro")[0], num_pages=30, draft=Lookup)


def test_more_log_probabilities_than_there_are_tokens():
    params = SamplingParams(max_tokens=3, logprobs=300, ignore_eos=True)
    one, two = (Engine(case("micro")[0], num_pages=60).generate(PROMPTS[:n], params)[0].logprobs for n in (1, 2))
    for x, y in zip(one, two):
        assert x.keys() == y.keys() and list(x.values()) == pytest.approx(list(y.values()), abs=1e-4)
