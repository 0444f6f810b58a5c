"""Drafting changes no answer, and leaves nothing behind: whoever drafts, whatever is accepted."""

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
from kda import kda_commit
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
        lambda name, kind, tokens, params: (
            (kind, tokens, params) in (("knows", 3, SORTED), ("sure", 7, GREEDY), ("mtp", 2, WARM))
            or (name in ("micro-mtp", "micro") and (kind, tokens) in (("knows", "auto"), ("wrong", 4), ("mtp", 7)))
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
        assert stats["tokens_per_cycle"] > (0.8 if tokens == "auto" else 0.6) * (1 + (1 if tokens == "auto" else tokens))
    assert engine.pool.live_pages == 0


@pytest.mark.parametrize("kind, tokens", [("mtp", 3), ("mtp", "auto"), ("lookup", 4)])
@pytest.mark.parametrize("params", [GREEDY, WARM, SORTED])
def test_the_same_story(kind, tokens, params):
    """tiny/, whose drafts are often right."""
    model, prompts = tiny(), ["Once upon a time", "The king had a daughter, and the king had a"]
    want = Engine(model, num_pages=40, tokenizer=TINY).generate(prompts, params)
    engine = Engine(model, num_pages=40, tokenizer=TINY, draft=kind, draft_tokens=tokens)
    outs = engine.generate(prompts, params)
    assert [o.token_ids for o in outs] == [o.token_ids for o in want] and [o.text for o in outs] == [o.text for o in want]
    if tokens == 3 and params is GREEDY:
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


def states(engine, request):
    """Every KDA layer's S and conv window, and the latent rows of the MLA layers, of a running request."""
    pool, n = engine.pool, request.computed
    slots = torch.from_numpy(request.pages[np.arange(n) // pool.page_size] * pool.page_size + np.arange(n) % pool.page_size)
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
