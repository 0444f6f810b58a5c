"""Choosing the next token: parameters, the sampler, log-probabilities.

    token = argmax over ids of  log p(id) + noise(seed, position, id)        p: the filtered distribution

With Gumbel noise that is a draw from p (the Gumbel-max trick); without, it is greedy. The noise is a hash of three
numbers, so a draw depends on nothing else: not on batch mates, not on how often the engine stopped, and not on drafts.
A drafter that chooses with the same noise from its own distribution agrees with the model often (Daliri et al. 2024,
arXiv 2408.07978), and what the model would have chosen is known whatever was drafted.
"""

import sys
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

import kernels


@dataclass(frozen=True)
class SamplingParams:
    """How one request is answered.

    max_tokens: at most so many new tokens. temperature: 0 is greedy. top_k: keep the k likeliest (0: all); top_p: the
    fewest likeliest tokens whose probabilities reach p; min_p: those at least min_p times as likely as the likeliest;
    all three after the temperature, in this order. seed: None draws one. stop: strings that end the answer (not part of
    the text); stop_token_ids: ids that do. ignore_eos: go on after the end-of-text id. logprobs: None, or how many of
    the likeliest tokens to report beside the chosen one.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple | list | str = ()
    stop_token_ids: tuple | list = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self):
        def need(ok, name, what):
            if not ok:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be {what}")

        def is_a(name, *types):
            return isinstance(getattr(self, name), types) and not isinstance(getattr(self, name), bool)

        number, listed, most = (int, float), (tuple, list), sys.float_info.max
        need(is_a("max_tokens", int) and self.max_tokens >= 0, "max_tokens", "a whole number, 0 or more")
        warm = is_a("temperature", *number) and 0 <= self.temperature <= most
        need(warm, "temperature", "a number, 0 or more")
        need(is_a("top_k", int) and self.top_k >= 0, "top_k", "a whole number, 0 (all) or more")
        need(is_a("top_p", *number) and 0 < self.top_p <= 1, "top_p", "a number above 0 and at most 1")
        need(is_a("min_p", *number) and 0 <= self.min_p <= 1, "min_p", "a number between 0 and 1")
        need(self.seed is None or is_a("seed", int), "seed", "a whole number or None")
        count = self.logprobs is None or is_a("logprobs", int) and self.logprobs >= 0
        need(count, "logprobs", "None, or a whole number, 0 or more")
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        need(isinstance(stop, listed) and all(isinstance(s, str) and s for s in stop), "stop", "strings, none empty")
        object.__setattr__(self, "stop", tuple(stop))
        ids = self.stop_token_ids
        need(isinstance(ids, listed) and all(isinstance(i, int) for i in ids), "stop_token_ids", "whole numbers")


@dataclass
class Output:
    """An answer; it grows in place while its request runs. finish_reason: None, "stop", "length", "abort", "error"."""

    rid: int
    prompt_tokens: int
    text: str = ""
    token_ids: list = field(default_factory=list)  # with the id that ended it, if one did
    finish_reason: str | None = None
    cached_tokens: int = 0
    logprobs: list | None = None  # a dict {id: log-probability} per token: the chosen one first, then the likeliest


class Choice(NamedTuple):
    """How one token is chosen, in plain numbers. filters: FILTERS; seed, position: of the noise, position counts the
    answer's tokens; stops: ids that end the answer; room: how many tokens it may still get; logprobs: how many are
    reported, or None.
    """

    filters: tuple = (0.0, 1.0, 1.0, 0.0)
    seed: int = 0
    position: int = 0
    stops: tuple = ()
    room: int = 1
    logprobs: int | None = None

    @property
    def kind(self):
        """What the sampler has to do: GREEDY, WARM (noise, and min_p at most), or SORTED (top_k or top_p)."""
        temperature, top_k, top_p, _ = self.filters
        return SORTED if temperature and (top_k or top_p < 1) else WARM if temperature else GREEDY


GREEDY, WARM, SORTED = range(3)
FILTERS = ("temperature", "top_k", "top_p", "min_p")
CLOSE = 1e-6  # how far a sum of probabilities may be off: what float32 logits of usual size are worth
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, and far from any pattern: 2^64 over the golden ratio


def signed(seed):
    """The lower 64 bits of an integer, as int64 has them."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)


def scramble(x):
    """int64 -> int64: every bit depends on all (the finalizer of SplitMix64, Steele et al. 2014)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> shift & (1 << 64 - shift) - 1)) * (factor - (1 << 64))  # a shift that brings in zeros
    return x ^ (x >> 31 & (1 << 33) - 1)


def uniform(seed, position, size):
    """seed, position [R] int64 -> [R, size] float64 in (0, 1), 52 bits of a hash of seed, position and column."""
    key = scramble(scramble(seed) + position * GOLDEN)
    bits = scramble(key[:, None] + torch.arange(size, device=seed.device) * GOLDEN)
    return ((bits >> 12 & (1 << 52) - 1).double() + 0.5) / (1 << 52)


def gumbel(seed, position, size):
    return -(-uniform(seed, position, size).log()).log()


def kept(logits, temperature, top_k, top_p):
    """logits [R, V]; temperature (0: as 1), top_k (0: all), top_p [R] -> [R, V] bool: what top_k and top_p leave."""
    values, ids = logits.sort(dim=-1, descending=True, stable=True)
    rank, probs = torch.arange(logits.shape[-1], device=logits.device), scale(values, temperature).softmax(-1)
    out = (rank >= top_k[:, None]) & (top_k > 0)[:, None]
    probs = probs.masked_fill(out, 0)
    probs = probs / probs.sum(-1, keepdim=True)
    before = probs.cumsum(-1) - probs  # the mass of the likelier tokens; the likeliest is always kept
    enough = torch.where(top_p < 1, top_p - CLOSE, torch.inf)  # at an exact boundary the sum is there, but for rounding
    out |= (before >= enough[:, None]) & (rank > 0)
    return torch.empty_like(out).scatter_(-1, ids, ~out)


def scale(logits, temperature):
    """logits [R, V], temperature [R] (0: as 1) -> logits over temperature in float64, at most 0: no overflow."""
    top = logits.amax(-1, keepdim=True)
    return (logits.double() - top) / torch.where(temperature > 0, temperature, 1)[:, None]


def log_probs(logits, filters, cut=None):
    """logits [R, V]; filters [4, R], of which temperature and min_p count here; cut [R, V] bool: which tokens are out
    already, or None -> log-probabilities of the filtered distribution [R, V] float64, but for a constant of each row;
    -inf where a token is filtered out."""
    scaled = scale(logits, filters[0])
    out = scaled < filters[3].log()[:, None]
    return scaled.masked_fill(out if cut is None else out | cut, -torch.inf)


@kernels.op("gumbel_max")
def gumbel_max(logits, filters, draws, cut):
    """logits [R, V]; filters [4, R] float64: FILTERS, of which temperature and min_p count here; draws [2, R] int64:
    seeds, positions, or both None: greedy; cut [R, V] bool: which tokens are out, or None -> ids [R] int64, finite [R]
    bool. A row that is not finite gives some id, and False.
    """
    lowest, highest = logits.aminmax(dim=-1)  # a NaN anywhere is both
    finite = lowest.isfinite() & highest.isfinite()
    logits = logits.masked_fill(~finite[:, None], 0)
    if filters is None:
        return logits.argmax(-1), finite
    noise = gumbel(*draws, logits.shape[-1]).masked_fill((filters[0] == 0)[:, None], 0)
    return (log_probs(logits, filters, cut) + noise).argmax(-1), finite


def sample(logits, filters=None, draws=None, kind=SORTED):
    """The tokens of R rows: logits [R, V] float32; the rest as in `gumbel_max`; kind: of the Choice that needs most."""
    if kind == GREEDY:
        return gumbel_max(logits, None, None, None)
    cut = ~kept(logits, *filters[:3]) if kind == SORTED else None
    return gumbel_max(logits, filters, draws, cut)


def logprobs(logits, chosen, count):
    """logits [R, V], chosen ids [R] -> log-probabilities [R, 1 + count] float64, unfiltered, and their ids: of the
    chosen token, then of the likeliest."""
    logp = logits.double().log_softmax(-1)
    best = logp.topk(min(count, logp.shape[-1]))
    ids = torch.cat([chosen[:, None], best.indices], dim=-1)
    return torch.cat([logp.gather(-1, chosen[:, None]), best.values], dim=-1), ids
