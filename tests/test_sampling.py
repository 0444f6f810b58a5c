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
from sampling import SORTED, WARM, Choice, SamplingParams, kept, log_probs, logprobs, uniform

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
    """[(id, probability)] of the tokens that are kept, likeliest first, ties by id."""
    filters = torch.tensor([[temperature], [top_k], [top_p], [min_p]], dtype=torch.float64)
    logits = torch.tensor([logits])
    probs = log_probs(logits, filters, ~kept(logits, *filters[:3])).softmax(-1)
    values, ids = probs[0].sort(descending=True, stable=True)
    return [(i, p) for i, p in zip(ids.tolist(), values.tolist()) if p > 0]


def sample(logits, params, seeds, position=0):
    """`sampling.sample` of rows [R, V] as the engine calls it."""
    filters = torch.tensor([(p.temperature, p.top_k, p.top_p, p.min_p) for p in params], dtype=torch.float64).T
    kind = max(Choice(tuple(row)).kind for row in filters.T.tolist())
    seeds = torch.as_tensor(seeds)
    return sampling.sample(logits, filters, torch.stack([seeds, torch.full_like(seeds, position)]), kind)


MASK = (1 << 64) - 1


def scrambled(z):
    """SplitMix64's finalizer on integers of any size."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def noise(seed, position, i):
    """Gumbel noise of one id, by the words of `sampling`."""
    key = scrambled((scrambled(seed & MASK) + position * 0x9E3779B97F4A7C15) & MASK)
    u = ((scrambled((key + i * 0x9E3779B97F4A7C15) & MASK) >> 12) + 0.5) / (1 << 52)
    return -math.log(-math.log(u))


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
    assume(all(abs(c) > 2 * sampling.CLOSE for c in cuts))  # on a cut, rounding decides
    got = ours(logits, **filters)
    assert dict(got) == pytest.approx(dict(wanted), rel=1e-9)


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
    assert [i for i, p in ours(logits, **filters) if p > 1e-30] == kept


@pytest.mark.parametrize("n", [3, 7, 10, 16, 30, 39])
def test_top_p_at_an_exact_boundary(n):
    """j of n equal tokens make up j/n: no more are needed, however the sum was rounded."""
    for j in range(1, n):
        assert len(ours([1.7] * n, top_p=j / n)) == j
    assert len(ours([1.7] * n + [-60.0], top_p=1.0)) == n + 1, "1 keeps everything"


def test_rows_have_their_own_filters():
    settings = [(1.0, 8, 1.0, 0.0), (0.5, 2, 1.0, 0.0), (2.0, 0, 0.5, 0.0), (1.0, 8, 1.0, 0.3)]
    logits = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    filters = torch.tensor(settings, dtype=torch.float64).T
    probs = log_probs(logits, filters, ~kept(logits, *filters[:3])).softmax(-1)
    for row, p, filters in zip(logits.tolist(), probs.tolist(), settings):
        assert {i: x for i, x in enumerate(p) if x > 0} == pytest.approx(dict(brute(row, *filters)[0]))


@pytest.mark.parametrize("temperature", [1e-300, 1e-310, 5e-324, 1e-3, 1e300])
def test_extreme_temperatures(temperature):
    """Very cold is greedy, very hot is even; neither is a NaN."""
    params = SamplingParams(temperature=temperature)
    logits = torch.tensor([[1.0, 5.0, -3.0, 4.0]])
    got = [sample(logits, [params], [seed])[0].item() for seed in range(20)]
    assert set(got) == ({1} if temperature < 1 else {0, 1, 2, 3})


# ---------------------------------------------------------------- draws


@pytest.mark.parametrize(
    "filters", [dict(), dict(top_k=3), dict(top_p=0.8), dict(min_p=0.2), dict(temperature=2.0, top_k=6, top_p=0.9)]
)
def test_frequencies(filters):
    n = 8000
    params = SamplingParams(**{"temperature": 1.0, **filters})
    counts = Counter(sample(torch.tensor(LOGITS).expand(n, -1), [params] * n, range(n))[0].tolist())
    expected = {i: n * p for i, p in brute(LOGITS, **filters)[0]}
    assert counts.keys() <= expected.keys(), "a token that was cut was drawn"
    statistic, limit = chi_square(counts, expected)
    assert statistic < limit


@given(
    st.integers(-(1 << 63), (1 << 63) - 1), st.integers(0, 1 << 20), st.integers(0, 8), st.floats(0.1, 1),
    st.floats(0, 0.5), st.floats(0.1, 4),
)  # fmt: skip
@settings(deadline=None)
def test_a_draw_is_the_largest_sum_of_log_probability_and_noise(seed, position, top_k, top_p, min_p, temperature):
    filters = dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    kept, cuts = brute(LOGITS, **filters)
    scores = sorted((math.log(p) + noise(seed, position, i), i) for i, p in kept)
    assume(all(abs(c) > 1e-9 for c in cuts) and (len(scores) == 1 or scores[-1][0] - scores[-2][0] > 1e-9))
    assert sample(torch.tensor([LOGITS]), [SamplingParams(**filters)], [seed], position)[0].item() == scores[-1][1]


def test_without_top_k_and_top_p_nothing_is_sorted():
    """And that is the same choice."""
    logits, n = torch.randn(200, 90, generator=torch.Generator().manual_seed(0)), 200
    filters = torch.tensor([[0.7, 0, 1.0, 0.02]] * n, dtype=torch.float64).T
    draws = torch.stack([torch.arange(n), torch.arange(n) % 7])
    both = [sampling.sample(logits, filters, draws, kind)[0] for kind in (WARM, SORTED)]
    assert torch.equal(*both) and not torch.equal(both[0], logits.argmax(-1))


def test_temperature_0_is_argmax_and_rows_do_not_touch():
    logits = torch.randn(40, 50, generator=torch.Generator().manual_seed(0))
    params = [SamplingParams(temperature=i % 4 * 0.5, top_k=i % 3 * 5, top_p=1 - i % 5 / 10) for i in range(40)]
    draws = list(range(40))
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
            sample(torch.randn(3, 9), [SamplingParams(temperature=1.0, seed=1)] * 3, [1, 2, 3])
    finally:
        torch.set_warn_always(False)


def test_top_k_1_is_greedy():
    logits = torch.randn(20, 30, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(temperature=5.0, top_k=1)
    assert torch.equal(sample(logits, [params] * 20, range(20))[0], logits.argmax(-1))


@pytest.mark.parametrize(
    "pair",
    [
        lambda i: ((7, 2 * i, 3), (7, 2 * i + 1, 3)),  # neighbours in one answer
        lambda i: ((2 * i, 0, 3), (2 * i + 1, 0, 3)),  # first tokens of neighbouring seeds
        lambda i: ((7, i, 4), (7, i, 5)),  # neighbouring ids
        lambda i: ((i, 5, 0), (i + 1, 4, 0)),
        lambda i: ((7, i, 5), (7, i + 1, 4)),
        lambda i: ((i, 0, 1), (-i - 1, 0, 1)),
        lambda i: (((1 << 62) + i, i, 2), ((1 << 62) + i, i + 1, 2)),
    ],
)
def test_draws_are_independent(pair):
    n, bins = 20000, 8
    ends = zip(*(pair(i) for i in range(n)))
    draws = [uniform(*torch.tensor(end).T[:2], 6)[range(n), [at[2] for at in end]] for end in ends]
    counts = Counter(zip(*((x * bins).long().tolist() for x in draws)))
    statistic, limit = chi_square(counts, {cell: n / bins**2 for cell in itertools.product(range(bins), repeat=2)})
    assert statistic < limit


def test_uniform_stays_inside():
    u = uniform(torch.arange(-100, 100).repeat_interleave(10), torch.arange(10).repeat(200), 10)
    assert u.unique().numel() == 20000 and 0 < u.min() and u.max() < 1
    least, most = 0.5 / (1 << 52), ((1 << 52) - 0.5) / (1 << 52)
    assert 0 < least and most < 1 and all(math.isfinite(math.log(-math.log(x))) for x in (least, most))


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
