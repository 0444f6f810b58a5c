"""Choosing the next token: parameters, the sampler, log-probabilities.

A draw depends only on the request's seed and the position in its answer, never on batch mates or on how often the
engine stopped: u = uniform(seed, position), and the token is where the cumulative distribution passes u.
"""

import sys
from dataclasses import dataclass

import torch


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


def uniform(seed, position):
    """A number in (0, 1) that depends on the two integers alone (SplitMix64, Steele et al. 2014; 52 bits)."""
    mask = (1 << 64) - 1
    z = (seed * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03 + 0x9E3779B97F4A7C15) & mask
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = ((z ^ (z >> shift)) * factor) & mask
    return (((z ^ (z >> 31)) >> 12) + 0.5) / (1 << 52)


FILTERS = ("temperature", "top_k", "top_p", "min_p", "u")  # what a choice depends on beside the logits
CLOSE = 1e-6  # how far a sum of probabilities may be off: what float32 logits of usual size are worth


def filter_row(params, seed, position, vocab_size):
    """FILTERS of one request as numbers, for the token at `position` of its answer."""
    u = uniform(seed, position) if params.temperature else 0.5
    return params.temperature, min(params.top_k or vocab_size, vocab_size), params.top_p, params.min_p, u


def distribution(logits, temperature, top_k, top_p, min_p):
    """The filtered distribution of each row, likeliest token first.

    logits [R, V] float32; the parameters are tensors [R] (temperature > 0; top_k >= 1) -> probs [R, V] summing to 1 in
    float64, ids [R, V].
    """
    values, ids = logits.sort(dim=-1, descending=True, stable=True)
    values = values.double()
    probs = ((values - values[:, :1]) / temperature[:, None]).softmax(-1)  # 0 and less: no overflow at any temperature
    rank = torch.arange(probs.shape[-1], device=probs.device)
    probs = probs.masked_fill(rank >= top_k[:, None], 0)
    probs = probs / probs.sum(-1, keepdim=True)
    before = probs.cumsum(-1) - probs  # the mass of the likelier tokens; the likeliest is always kept
    enough = torch.where(top_p < 1, top_p - CLOSE, torch.inf)  # at an exact boundary the sum is there, but for rounding
    probs = probs.masked_fill((before >= enough[:, None]) & (rank > 0), 0)
    probs = probs.masked_fill(probs < min_p[:, None] * probs[:, :1], 0)
    return probs / probs.sum(-1, keepdim=True), ids


def sample(logits, filters=None):
    """logits [R, V] float32; filters [5, R] float64: FILTERS, or None: all greedy -> ids [R] int64, finite [R] bool.

    temperature 0 takes the likeliest. A row that is not finite gives some id, and False.
    """
    lowest, highest = logits.aminmax(dim=-1)  # a NaN anywhere is both
    finite = lowest.isfinite() & highest.isfinite()
    logits = logits.masked_fill(~finite[:, None], 0)
    likeliest = logits.argmax(-1)
    if filters is None:
        return likeliest, finite
    temperature, *others, u = filters
    greedy = temperature == 0
    probs, ids = distribution(logits, temperature.masked_fill(greedy, 1), *others)
    last = (probs > 0).sum(-1, keepdim=True) - 1  # rounding must not step past the kept tokens
    at = torch.searchsorted(probs.cumsum(-1), u[:, None].contiguous(), right=True).minimum(last)
    return torch.where(greedy, likeliest, ids.gather(-1, at)[:, 0]), finite


def logprobs(logits, chosen, count):
    """logits [R, V], chosen ids [R] -> log-probabilities [R, 1 + count] float64, unfiltered, and their ids: of the
    chosen token, then of the likeliest."""
    logp = logits.double().log_softmax(-1)
    best = logp.topk(min(count, logp.shape[-1]))
    ids = torch.cat([chosen[:, None], best.indices], dim=-1)
    return torch.cat([logp.gather(-1, chosen[:, None]), best.values], dim=-1), ids
