"""The distribution of whole answers: triples of tokens against exact probabilities, and an error of 2 % shows."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from helpers import tiny_config
from test_sampling import brute

import sampling
from engine import Engine, SamplingParams
from sampling import Choice

V, LAST, N = 8, 3, 150_000  # ids; the prompt's last token; draws: 50,000 are too few for an error of 2 % to show
TABLE = 1.2 * torch.randn(V, V, generator=torch.Generator().manual_seed(0))  # logits by the token ahead
SETTINGS = {
    "temperature": dict(temperature=0.8),
    "top_k": dict(temperature=1.0, top_k=4),
    "top_p": dict(temperature=1.0, top_p=0.85),
    "min_p": dict(temperature=1.0, min_p=0.1),
    "all": dict(temperature=1.5, top_k=6, top_p=0.93, min_p=0.15),
}
each_setting = pytest.mark.parametrize("filters", SETTINGS.values(), ids=SETTINGS)


class Known:
    """Stands in for a K3: the logits after a token are its row of TABLE."""

    mtp, layers = None, ()

    def __init__(self):
        self.cfg = tiny_config(vocab_size=V, hidden_size=V)
        self.norm = SimpleNamespace(weight=TABLE[0])

    def hidden(self, ids, batch):
        return TABLE[ids]

    def logits(self, hidden):
        return hidden


class Likeliest:
    def draft(self, text, count):
        ids = [int(text[-1])]
        for _ in range(count):
            ids.append(int(TABLE[ids[-1]].argmax()))
        return ids[1:]


def chosen(last, filters, seeds, positions):
    """The ids [R] that follow `last` [R]; seeds, positions [R]."""
    row = tuple(float(filters.get(name, usual)) for name, usual in zip(sampling.FILTERS, (0, 0, 1, 0)))
    rows = torch.tensor(row, dtype=torch.float64)[:, None].expand(-1, len(last))
    return sampling.sample(TABLE[last], rows, torch.stack([seeds, positions]), Choice(row).kind)[0]


def answers(filters, n, length):
    """[n, length]: answers with seeds 0 to n - 1, drawn token by token, each token for many seeds at once."""
    found = []
    for seeds in torch.arange(n).split(8192):
        ids = [torch.full_like(seeds, LAST)]
        for position in range(length):
            ids.append(chosen(ids[-1], filters, seeds, torch.full_like(seeds, position)))
        found.append(torch.stack(ids[1:], dim=1))
    return torch.cat(found)


def exact(filters):
    """{triple: its probability}."""
    after = [dict(brute(row, **filters)[0]) for row in TABLE.tolist()]
    return {
        (a, b, c): p * q * r for a, p in after[LAST].items() for b, q in after[a].items() for c, r in after[b].items()
    }


def p_value(drawn, probs):
    """How often draws of `probs` would differ more than these [n, m] do; the cells that expect less than 5 are one."""
    n, m = drawn.shape
    counts = (drawn * V ** torch.arange(m).flip(0)).sum(1).bincount(minlength=V**m).tolist()
    counts = dict(zip(itertools.product(range(V), repeat=m), counts))
    assert sum(counts[key] for key in probs) == n, "a token that was cut was drawn"
    cells = sorted((n * p, counts[key]) for key, p in probs.items())
    few = max(sum(e < 5 for e, _ in cells), 1)
    while sum(e for e, _ in cells[:few]) < 5:
        few += 1
    cells = [tuple(map(sum, zip(*cells[:few]))), *cells[few:]]
    statistic = math.fsum((count - e) ** 2 / e for e, count in cells)
    halves = torch.tensor([len(cells) - 1, statistic], dtype=torch.float64) / 2
    return float(torch.special.gammaincc(*halves))


# ---------------------------------------------------------------- triples


def test_settings_cut():
    """Every filter takes something from some row, in company too; and none so closely that rounding decides."""
    for filters in SETTINGS.values():
        found = [brute(row, **filters) for row in TABLE.tolist()]
        assert min(abs(cut) for _, cuts in found for cut in cuts[: -V - 1] + cuts[-V:]) > 1e-4  # the last sum is 1
        for name in filters.keys() - {"temperature"}:
            others = {key: value for key, value in filters.items() if key != name}
            assert any(len(brute(row, **others)[0]) > len(kept) for row, (kept, _) in zip(TABLE.tolist(), found))


@each_setting
def test_triples(filters):
    assert p_value(answers(filters, N, 3), exact(filters)) > 1e-3


@each_setting
def test_an_error_of_2_percent_shows(filters, monkeypatch):
    """Every id by turns 2 % more and less likely than it should be."""
    right = sampling.gumbel
    monkeypatch.setattr(sampling, "gumbel", lambda *args: right(*args) + 0.02 * (-1) ** torch.arange(V))
    assert p_value(answers(filters, N, 3), exact(filters)) < 1e-3


def test_noise_that_comes_again_shows(monkeypatch):
    """Each token has its distribution, but two of one answer have the same noise."""
    right, filters = sampling.uniform, SETTINGS["temperature"]
    monkeypatch.setattr(sampling, "uniform", lambda seed, position, size: right(seed, position // 2, size))
    assert p_value(answers(filters, 20000, 3), exact(filters)) < 1e-3


# ---------------------------------------------------------------- through the engine


@pytest.mark.parametrize("options", [dict(), dict(draft=Likeliest(), draft_tokens=3)], ids=["plain", "drafts"])
def test_the_engine_draws_the_same(options):
    """So what holds for triples holds for its answers, with all settings in a batch, and with drafts that are often
    right."""
    n, length, settings = 2000, 6, list(SETTINGS.values())
    engine = Engine(Known(), device="cpu", num_pages=2000, max_batch=256, prefix_cache=False, **options)
    params = [SamplingParams(max_tokens=length, ignore_eos=True, seed=i, **settings[i % 5]) for i in range(n)]
    outs = engine.generate([[LAST]] * n, params)
    want = torch.stack([answers(filters, n, length) for filters in settings])
    assert [out.token_ids for out in outs] == [want[i % 5, i].tolist() for i in range(n)]
    stats = engine.stats
    assert not options or 0.2 < stats["drafts_kept"] / stats["drafted"] < 0.95


# ---------------------------------------------------------------- pairs


@pytest.mark.parametrize(
    "pair",
    [
        lambda i: ((7, 2 * i), (7, 2 * i + 1)),  # (seed, position): neighbours in one answer
        lambda i: ((7, i), (7, i + 20000)),
        lambda i: ((2 * i, 0), (2 * i + 1, 0)),  # first tokens of neighbouring seeds
        lambda i: ((i, 5), (-i - 1, 5)),
        lambda i: ((i, 1), (i + 1, 0)),
    ],
)
@pytest.mark.parametrize("name", ["temperature", "all"])
def test_pairs_are_independent(name, pair):
    n, filters = 20000, SETTINGS[name]
    after = dict(brute(TABLE[LAST].tolist(), **filters)[0])
    last = torch.full((n,), LAST)
    ends = [[torch.as_tensor(x).expand(n) for x in end] for end in pair(torch.arange(n))]
    drawn = torch.stack([chosen(last, filters, *end) for end in ends], dim=1)
    assert p_value(drawn, {(a, b): after[a] * after[b] for a, b in itertools.product(after, repeat=2)}) > 1e-3
