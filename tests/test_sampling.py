"""The sampler against the words of its docstring, carried out one token at a time in Python."""

import dataclasses
import itertools
import math
import warnings
from collections import Counter

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import sampling
from sampling import SamplingParams, distribution, logprobs, uniform

INF, NAN = float("inf"), float("nan")
LOGITS = [1.0, 3.0, 2.0, 3.0, -1.0, 0.5, 2.5, -4.0]


def brute(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """[(id, probability)] of the tokens that are kept, likeliest first, ties by id; and how far each is from a cut."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    weight = {i: math.exp((logits[i] - logits[order[0]]) / temperature) for i in order}
    kept = order[: top_k or len(order)]
    total = math.fsum(weight[i] for i in kept)
    mass = [math.fsum(weight[i] for i in kept[: n + 1]) / total for n in range(len(kept))]
    if top_p < 1:
        kept = kept[: 1 + sum(m < top_p for m in mass[:-1])]  # the fewest that reach it
    kept = [i for i in kept if weight[i] >= min_p]
    total = math.fsum(weight[i] for i in kept)
    return [(i, weight[i] / total) for i in kept], [*(m - top_p for m in mass), *(w - min_p for w in weight.values())]


def ours(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """[(id, probability)] of the tokens that `distribution` keeps, and the order of all ids."""
    filters = (temperature, top_k or len(logits), top_p, min_p)
    probs, ids = distribution(torch.tensor([logits]), *(torch.tensor([f], dtype=torch.float64) for f in filters))
    assert abs(probs.sum().item() - 1) < 1e-12
    return [(i, p) for i, p in zip(ids[0].tolist(), probs[0].tolist()) if p > 0], ids[0].tolist()


def sample(logits, params, draws):
    """`sampling.sample` with filters as the engine makes them, but for the draws."""
    rows = [(*sampling.filter_row(p, 0, 0, logits.shape[-1])[:4], u) for p, u in zip(params, draws)]
    return sampling.sample(logits, torch.tensor(rows, dtype=torch.float64).T)


def chi_square(counts, expected):
    """(statistic, what it exceeds about once in 3 million fair experiments)."""
    statistic = sum((counts[k] - e) ** 2 / e for k, e in expected.items())
    n = len(expected) - 1
    return statistic, n * (1 - 2 / (9 * n) + 5 * math.sqrt(2 / (9 * n))) ** 3  # Wilson and Hilferty


# ---------------------------------------------------------------- the distribution


@given(
    logits=st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=9),
    temperature=st.floats(0.3, 4),
    top_k=st.integers(0, 10),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 0.9)),
)
@example(logits=LOGITS, temperature=1.0, top_k=3, top_p=0.6, min_p=0.0)
@example(logits=LOGITS, temperature=2.0, top_k=6, top_p=0.9, min_p=0.4)
@example(logits=LOGITS, temperature=0.5, top_k=0, top_p=0.95, min_p=0.1)
@settings(max_examples=300, deadline=None)
def test_distribution_is_what_the_words_say(logits, **filters):
    wanted, cuts = brute(logits, **filters)
    assume(all(abs(c) > 1e-9 for c in cuts))  # on a cut, rounding decides
    got, order = ours(logits, **filters)
    assert [i for i, _ in got] == [i for i, _ in wanted]
    assert [p for _, p in got] == pytest.approx([p for _, p in wanted], rel=1e-9)
    assert order == sorted(range(len(logits)), key=lambda i: (-logits[i], i))


@pytest.mark.parametrize(
    "filters, kept",
    [
        (dict(top_k=1), [1]),
        (dict(top_k=3), [1, 2, 5]),  # of equals, the lower ids
        (dict(top_p=0.25), [1]),  # reached exactly: no more are needed
        (dict(top_p=0.5), [1, 2]),
        (dict(top_p=0.51), [1, 2, 5]),
        (dict(min_p=1.0), [1, 2, 5, 6]),  # as likely as the likeliest
        (dict(top_k=2, top_p=0.75), [1, 2]),  # top_p sees what top_k has left, made to sum to 1
        (dict(top_p=1e-9), [1]),
        (dict(top_k=100), [1, 2, 5, 6]),
    ],
)
def test_ties(filters, kept):
    logits = [-100.0, 2, 2, -100, -100, 2, 2]
    assert [i for i, p in ours(logits, **filters)[0] if p > 1e-30] == kept


@pytest.mark.parametrize("n", [3, 7, 10, 16, 30, 39])
def test_top_p_at_an_exact_boundary(n):
    """j of n equal tokens make up j/n: no more are needed, however the sum was rounded."""
    for j in range(1, n):
        assert len(ours([1.7] * n, top_p=j / n)[0]) == j
    assert len(ours([1.7] * n + [-60.0], top_p=1.0)[0]) == n + 1, "1 keeps everything"


def test_rows_have_their_own_filters():
    settings = [(1.0, 8, 1.0, 0.0), (0.5, 2, 1.0, 0.0), (2.0, 8, 0.5, 0.0), (1.0, 8, 1.0, 0.3)]
    logits = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    probs, ids = distribution(logits, *torch.tensor(settings, dtype=torch.float64).T)
    for row, p, i, filters in zip(logits.tolist(), probs.tolist(), ids.tolist(), settings):
        assert dict(x for x in zip(i, p) if x[1] > 0) == pytest.approx(dict(brute(row, *filters)[0]))


@pytest.mark.parametrize("temperature", [1e-300, 1e-310, 5e-324, 1e-3, 1e300])
def test_extreme_temperatures(temperature):
    """Very cold is greedy, very hot is even; neither is a NaN."""
    params = SamplingParams(temperature=temperature)
    logits = torch.tensor([[1.0, 5.0, -3.0, 4.0]])
    got = [sample(logits, [params], [u])[0].item() for u in (0.1, 0.3, 0.6, 0.9)]
    assert got == [1, 1, 1, 1] if temperature < 1 else sorted(got) == [0, 1, 2, 3]


# ---------------------------------------------------------------- draws


@pytest.mark.parametrize(
    "filters", [dict(), dict(top_k=3), dict(top_p=0.8), dict(min_p=0.2), dict(temperature=2.0, top_k=6, top_p=0.9)]
)
def test_frequencies(filters):
    n = 8000
    params = SamplingParams(**{"temperature": 1.0, **filters})
    draws = [uniform(12345, i) for i in range(n)]
    counts = Counter(sample(torch.tensor(LOGITS).expand(n, -1), [params] * n, draws)[0].tolist())
    expected = {i: n * p for i, p in brute(LOGITS, **filters)[0]}
    assert counts.keys() <= expected.keys(), "a token that was cut was drawn"
    statistic, limit = chi_square(counts, expected)
    assert statistic < limit


@given(st.floats(0, 1, exclude_min=True), st.integers(0, 8), st.floats(0.1, 1), st.floats(0, 0.5))
@example(1.0, 3, 1.0, 0.0)  # rounding must not step past the kept tokens
@example(1.0, 0, 1.0, 0.0)
@settings(deadline=None)
def test_a_draw_is_where_the_cumulative_distribution_passes_it(u, top_k, top_p, min_p):
    filters = dict(temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p)
    kept, cuts = brute(LOGITS, **filters)
    passed = list(itertools.accumulate(p for _, p in kept))
    assume(all(abs(c) > 1e-9 for c in cuts) and all(abs(u - p) > 1e-9 for p in passed[:-1]))
    wanted = next((i for (i, _), p in zip(kept, passed) if p > u), kept[-1][0])
    assert sample(torch.tensor([LOGITS]), [SamplingParams(**filters)], [u])[0].item() == wanted


def test_temperature_0_is_argmax_and_rows_do_not_touch():
    logits = torch.randn(40, 50, generator=torch.Generator().manual_seed(0))
    params = [SamplingParams(temperature=i % 4 * 0.5, top_k=i % 3 * 5, top_p=1 - i % 5 / 10) for i in range(40)]
    draws = [uniform(i, 0) for i in range(40)]
    together = sample(logits, params, draws)[0]
    alone = torch.cat([sample(logits[i : i + 1], params[i : i + 1], draws[i : i + 1])[0] for i in range(40)])
    assert torch.equal(together, alone)
    assert torch.equal(together[::4], logits.argmax(-1)[::4])
    assert not torch.equal(together, logits.argmax(-1))


def test_sampling_warns_of_nothing():
    """PyTorch prints some warnings once a process, on the user's standard error."""
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            sample(torch.randn(3, 9), [SamplingParams(temperature=1.0, seed=1)] * 3, [0.1, 0.5, 0.9])
    finally:
        torch.set_warn_always(False)


def test_top_k_1_is_greedy():
    logits = torch.randn(20, 30, generator=torch.Generator().manual_seed(0))
    params, draws = SamplingParams(temperature=5.0, top_k=1), [uniform(3, i) for i in range(20)]
    assert torch.equal(sample(logits, [params] * 20, draws)[0], logits.argmax(-1))


@pytest.mark.parametrize(
    "pair",
    [
        lambda i: ((7, 2 * i), (7, 2 * i + 1)),  # neighbours in one answer
        lambda i: ((2 * i, 0), (2 * i + 1, 0)),  # first tokens of neighbouring seeds
        lambda i: ((i, 5), (i + 1, 4)),
        lambda i: ((i, 0), (-i - 1, 0)),
        lambda i: (((1 << 62) + i, i), ((1 << 62) + i, i + 1)),
    ],
)
def test_draws_are_independent(pair):
    n, bins = 20000, 8
    counts = Counter(tuple(int(uniform(*at) * bins) for at in pair(i)) for i in range(n))
    statistic, limit = chi_square(counts, {cell: n / bins**2 for cell in itertools.product(range(bins), repeat=2)})
    assert statistic < limit


def test_uniform_depends_on_its_arguments_alone_and_stays_inside():
    assert uniform(1, 2) == uniform(1, 2) == uniform(1 + (1 << 64), 2)
    assert len({uniform(seed, position) for seed in range(-100, 100) for position in range(100)}) == 20000
    assert 0 < uniform(2680405707206929691, 0) < 1  # the seed whose 53 bits are all ones


# ---------------------------------------------------------------- log-probabilities


@pytest.mark.parametrize("count", [0, 1, 3, 8, 100])
def test_logprobs(count):
    logits = [1.0, 3.0, 2.0, 4.5, -1.0, 0.5, 2.5, -4.0]
    total = math.log(math.fsum(map(math.exp, logits)))
    likeliest = sorted(range(8), key=lambda i: -logits[i])[:count]
    values, ids = logprobs(torch.tensor(logits).expand(8, -1), torch.arange(8), count)
    assert ids.tolist() == [[chosen, *likeliest] for chosen in range(8)]
    assert values.flatten().tolist() == pytest.approx([logits[i] - total for i in ids.flatten()], abs=1e-12)


# ---------------------------------------------------------------- parameters


@pytest.mark.parametrize(
    "name, values",
    [
        ("max_tokens", [-1, 1.5, "5", None]),
        ("temperature", [-0.1, INF, NAN]),
        ("top_k", [-1, 2.0]),
        ("top_p", [0, -1, 1.01, NAN]),
        ("min_p", [-0.01, 1.01, NAN]),
        ("seed", [1.5, "1"]),
        ("logprobs", [-1, 2.5]),
        ("stop", ["", ["a", ""], [5]]),
        ("stop_token_ids", [["a"], (1, 2.0)]),
    ],
)
def test_bad_parameters_are_named(name, values):
    for value in values:
        with pytest.raises(ValueError, match=f"{name} is .*must be"):
            SamplingParams(**{name: value})


@pytest.mark.parametrize(
    "name, value", [("temperature", "1"), ("top_p", None), ("min_p", None), ("stop", None), ("stop_token_ids", 5)]
)
def test_parameters_of_the_wrong_type_are_named(name, value):
    with pytest.raises((TypeError, ValueError), match=f"{name} is .*must be"):
        SamplingParams(**{name: value})


def test_good_parameters():
    assert SamplingParams().temperature == 0
    assert SamplingParams(stop="ab").stop == ("ab",) and SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    SamplingParams(max_tokens=0, top_k=0, top_p=1, min_p=1, seed=-5, logprobs=0, stop_token_ids=[3])
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().top_k = 3
