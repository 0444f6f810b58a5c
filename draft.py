"""Speculative decoding: who drafts, how many tokens, and which of them are kept.

A cycle of one request with tokens id[0..n], of which the model has read the first n:

    draft     guesses d[1..m] for the tokens n+1..n+m
    verify    the model reads id[n], d[1..m] at once and chooses t[0..m], each as it would without drafts
    accept    d[j] is kept while it is t[j-1]; the answer grows by t[0..a], where a drafts were kept
    commit    the states of the KDA layers move on by a+1 tokens; latent rows behind these are overwritten some day

What is chosen depends on the text, the seed and the position alone (sampling.py), never on a draft: the answer is the
same with every drafter, at every depth. A drafter is any object with `draft(text, count)`, as Lookup; the MTP layer of
a checkpoint is one that drafts on the device, inside the step.
"""

import dataclasses

import numpy as np
import torch

from cache import Batch, bucket, wide_enough
from sampling import sample

MOST = 7  # drafts a cycle
DEPTHS = 0, 1, 2, 3, 5, 7  # those that are chosen among: each that is run is captured as a graph
TRIED = 0, 1, 3  # of these, the ones that are measured before one is chosen
DUE = 64  # rows that steps without drafts may leave to be written
GAIN = 0.02  # what a depth must promise to be tried
PROBE = 128  # cycles between two in which another depth than the best is tried


def accept(ids, tokens, stops, room):
    """ids [B, T]: a token and its drafts; tokens [B, T]: what was chosen after each; stops [STOPS, B], room [B]: of the
    Choice -> how many of `tokens` the answer gets, and how many drafts were right: [B] int32 both.
    """
    kept = (ids[:, 1:] == tokens[:, :-1]).cumprod(1).sum(1)
    goes_on = (tokens[..., None] != stops.T[:, None]).all(-1).cumprod(1).sum(1)  # tokens before one that ends it
    return torch.minimum(torch.minimum(kept, goes_on) + 1, room).int(), kept.int()


# ---------------------------------------------------------------- drafters


class Lookup:
    """Prompt look-up (Saxena 2023): what followed where the text's last tokens stood before, the longest such ending of
    `shortest` to `longest` tokens, its latest place. For texts that repeat: edits, quotations, code.
    """

    def __init__(self, shortest=2, longest=8):
        self.shortest, self.longest = shortest, longest

    def draft(self, text, count):
        """text: int32 [n], prompt and answer so far -> `count` ids that may follow, or none."""
        at, size = np.flatnonzero(text[:-1] == text[-1]), 1  # where its last token stood
        while size < min(self.longest, len(text) - 1):
            more = at[at >= size]
            more = more[text[more - size] == text[-size - 1]]
            if not len(more):
                break
            at, size = more, size + 1
        if size < self.shortest or not len(at):
            return []
        ahead = len(text) - 1 - at[-1]  # what it copies may reach into what it writes
        return text[at[-1] + 1 + np.arange(count) % ahead]


class MTP:
    """The checkpoint's multi-token prediction layer. Its latent rows lie in a slab of the pool, behind those of the MLA
    layers: the row of (h[t], id[t+1]) at position t + 1, so that it depends on no later token, and goes where its page
    goes. Position 0 has none.
    """

    def __init__(self, model, pool):
        if model.mtp is None:
            raise ValueError('draft="mtp": this checkpoint has no MTP layer; "lookup" needs none')
        self.model, self.pool = model, pool
        kind = torch.promote_types(pool.dtype, torch.float32) if model.cfg.attn_res_block_size else pool.dtype
        self.none = torch.zeros(model.cfg.hidden_size, dtype=kind, device=pool.device)

    def stack(self, hidden):
        """A list of h [H], or None at the start of a text -> [n, H]."""
        return torch.stack([self.none if h is None else h for h in hidden]) if hidden else None

    def draft(self, part, ids, slots, before, filters, draws, kind):
        """Writes drafts to ids [B, T], behind the token of each sequence that is there.

        part: cache.Part of the drafted sequences; slots [B, T]: of the latent rows; before [B, H]: h of the token ahead
        of the first; filters [4, B, T], draws [2, B, T], kind: of the choices. Draft j is chosen with the noise of its
        position, from this layer's own distribution; its x stands in for h in the next one.
        """
        hidden = before[: len(ids)]
        for j in range(part.drafts):
            hidden, logits = self.read(part, j, ids[:, j], slots[:, j], hidden)
            ids[:, j + 1] = sample(logits, filters[..., j], draws[..., j], kind)[0]

    def read(self, part, j, ids, slots, hidden):
        """The layer over token j of each sequence of the part: ids, slots [B], hidden [B, H]: h or x of the token ahead
        -> x [B, H], logits [B, V]."""
        B = len(ids)
        one = dataclasses.replace(
            part, rows=slice(0, B), lengths=[1] * B, pasts=[n + j for n in part.pasts], past=part.past + j,
            drafts=0, raw=None, first=1,
        )  # fmt: skip
        x = self.model.mtp_hidden(ids, hidden, Batch(self.pool, [one], slots.contiguous()))
        return x, self.model.mtp_head(x)

    def write(self, ids, hidden, slots):
        """Latent rows alone: of tokens ids [N] and the h of those ahead of them [N, H], to slots [N] (below 0: not)."""
        self.model.mtp_rows(ids, hidden, self.pool, slots)

    def write_drafts(self, ids, slots, hidden, taken):
        """Rows of the drafts that were accepted, in which x stood in for h: ids, slots [B, T]; hidden [B T, H]; taken
        [B]: tokens of the answer, so one more than such drafts."""
        B, T = ids.shape
        there = torch.arange(1, T, device=ids.device) < taken[:, None]
        ahead = hidden.unflatten(0, (B, T))[:, :-1].flatten(0, 1)
        self.write(ids[:, 1:].flatten(), ahead, torch.where(there, slots[:, 1:], -1).flatten())

    def write_prompts(self, part, x, hidden, before):
        """Rows of whole chunks, the last part of a batch. x: tensors of the Feed; hidden [N, H]: h of the batch; before
        [n, H]: h of the token ahead of each chunk, the last of them of these."""
        ahead = hidden[part.rows].roll(1, 0)
        new = [i for i, follows in enumerate(part.follows) if not follows]
        ahead[part.starts[new].long()] = before[len(before) - len(part.lengths) :][new]
        self.write(x["ids"][part.rows], ahead, x["slots"][part.rows])

    def settle(self, requests):
        """Writes the rows that are due: steps without drafts leave them, so that these cost nothing."""
        due = [(r, at, h) for r in requests for at, h in r.due]
        if not due:
            return
        P, device = self.pool.page_size, self.pool.device
        ids = np.array([(r.buffer[at], r.pages[at // P] * P + at % P) for r, at, _ in due], dtype=np.int64)
        ids, slots = torch.from_numpy(ids).to(device).T
        self.write(ids, self.stack([h for _, _, h in due]), slots.contiguous())
        for request in requests:
            request.due = []


# ---------------------------------------------------------------- the plan of a step


class Drafting:
    """Who drafts for the requests of an engine, and how many tokens.

    drafter: MTP, or an object with `draft(text, count)`; tokens: k or "auto"; graphs: whether all requests of a step
    need drafts, even such as are sure to be wrong, for it to be a graph.
    """

    def __init__(self, drafter, tokens, vocab_size, graphs):
        self.drafter, self.depth, self.vocab_size, self.graphs = drafter, Depth(tokens), vocab_size, graphs
        self.mtp = drafter if isinstance(drafter, MTP) else None
        self.key = None

    def plan(self, scheduler):
        """-> {request: its drafts [m]} for those that write, the same m for all; MTP's follow on the device. Nobody
        gets any where the pool lacks free pages: a draft is not worth what would be evicted for it.
        """
        writers, pool = scheduler.writers(), scheduler.pool
        late = [r for r in scheduler.running if len(r.due) >= DUE]
        if late:
            self.mtp.settle(late)
        if not writers:
            return {}
        self.key = bucket(len(writers)), wide_enough(pool.history_pages(max(r.length for r in writers)))
        m = self.depth.choose(self.key)
        others = [r for r in scheduler.running if r not in writers]
        new = [scheduler.draft_pages(r, m) for r in writers] + [scheduler.draft_pages(r, 0) for r in others]
        if m == 0 or sum(new) > pool.free_pages:
            return {}
        if self.mtp:
            self.mtp.settle(writers)
            return dict.fromkeys(writers, np.zeros(m, dtype=np.int32))
        found = {r: self.ask(r.tokens, m) for r in writers}
        if not any(map(len, found.values())):
            return {}
        if self.graphs:
            found = {r: ids if len(ids) else np.repeat(r.tokens[-1:], m) for r, ids in found.items()}
        return {r: ids for r, ids in found.items() if len(ids)}

    def ask(self, text, m):
        """What the drafter says: m ids, or none; what is missing repeats its last."""
        text = text.view()
        text.flags.writeable = False  # it is the request's own
        given = self.drafter.draft(text, m)
        ids = np.asarray([] if given is None else given)
        whole = ids.ndim == 1 and (ids.dtype.kind in "iu" or not ids.size)
        if not whole or ((ids < 0) | (ids >= self.vocab_size)).any():
            name, most = type(self.drafter).__name__, self.vocab_size - 1
            raise ValueError(f"{name}.draft gave {given!r:.80}; it must be a list of token ids, 0 to {most}")
        return np.append(ids[:m], np.repeat(ids[-1:], m - len(ids[:m]))).astype(np.int32)

    def observe(self, step, result, taken, seconds):
        """A step has run; taken: tokens that each request with drafts got; seconds: None where it was no plain one."""
        if self.key is not None:
            seconds = seconds if step.is_decode else None
            self.depth.observe(self.key, step.drafts, seconds, result.kept, sum(taken.values()))

    @property
    def stats(self):
        name = self.drafter.__class__.__name__
        return {"draft": name, "draft_tokens": "auto" if self.depth.auto else self.depth.fixed} | self.depth.stats


# ---------------------------------------------------------------- how many


class Depth:
    """How many tokens to draft: k, or "auto": the depth m that commits the most tokens a second,

        E(m) / c(m),    E(m) = 1 + p1 + p1 p2 + ... + p1 p2 ... pm

    p_j: how often draft j was right of late where those before it were; c(m): seconds of a whole cycle, of late, with
    so many sequences and so long histories (both in powers of two); on a line between the depths that were measured.
    Depths TRIED come first; then every PROBE cycles, ever more rarely while drafting loses, one beside it again.
    """

    def __init__(self, tokens):
        self.auto = tokens == "auto"
        self.fixed = 0 if self.auto else tokens
        self.right = np.full(MOST, 0.7)  # p
        self.costs = {}  # (sequences, pages) -> {depth: seconds}
        self.seen, self.wait = {}, {}  # of a key: observations by depth; cycles until the next probe
        self.drafted, self.kept = np.zeros(MOST, dtype=np.int64), np.zeros(MOST, dtype=np.int64)
        self.cycles = self.tokens = 0
        self.took = {}  # depth -> steps, seconds

    def choose(self, key):
        if not self.auto:
            return self.fixed
        seen = self.seen.setdefault(key, {})
        for m in TRIED:
            if seen.get(m, 0) < 3:
                return m
        best = self.best(key)
        wait, again = self.wait.setdefault(key, (PROBE, PROBE))
        if wait:
            self.wait[key] = wait - 1, again
            return best
        self.wait[key] = (again, PROBE) if best else (again, min(2 * again, 16 * PROBE))
        known = sorted(self.costs[key])
        at = known.index(best) if best in known else 0
        return known[min(at + 1, len(known) - 1) if sum(seen.values()) % 2 else max(at - 1, 1)]

    def best(self, key, depths=DEPTHS):
        """Of these depths, the one with the most committed tokens a second; one that was never run, and would have to
        be captured, must promise GAIN more."""
        costs = self.costs[key]
        known = sorted(costs)
        cost = np.interp(np.arange(MOST + 1), known, [costs[m] for m in known])
        slope = (costs[known[-1]] - costs[known[-2]]) / (known[-1] - known[-2])
        cost[known[-1] + 1 :] += np.maximum(slope, 0) * np.arange(1, MOST + 1 - known[-1])
        right = [self.right[max(0, min(j, np.count_nonzero(self.drafted) - 1))] for j in range(MOST)]  # seen so far
        speed = np.cumsum(np.cumprod([1.0, *right])) / cost
        return max(depths, key=lambda m: speed[m] if m in costs else speed[m] / (1 + GAIN))

    def observe(self, key, m, seconds, kept, tokens):
        """A cycle of depth m took so long; kept: how many drafts were right in each sequence; tokens: committed.
        seconds: None where it says nothing of others, as with a prompt beside it."""
        for n in kept:
            tried = min(n + 1, m)
            self.drafted[:tried] += 1
            self.kept[:n] += 1
            weight = np.maximum(0.02, 1 / (4 + self.drafted[:tried]))
            self.right[:tried] += weight * ((np.arange(tried) < n) - self.right[:tried])
        self.cycles += len(kept)
        self.tokens += tokens
        if seconds is not None:
            steps, total = self.took.get(m, (0, 0.0))
            self.took[m] = steps + 1, total + seconds
            costs, seen = self.costs.setdefault(key, {}), self.seen.setdefault(key, {})
            weight = max(0.1, 1 / (1 + seen.get(m, 0)))
            costs[m] = costs.get(m, seconds) + weight * (seconds - costs.get(m, seconds))
            seen[m] = seen.get(m, 0) + 1

    @property
    def stats(self):
        """drafted, drafts_kept: tokens; acceptance: by position, of those whose predecessors were right;
        tokens_per_cycle: of one sequence, where it had drafts; depths: steps and their milliseconds by depth."""
        tried = self.drafted > 0
        stats = {"drafted": int(self.drafted.sum()), "drafts_kept": int(self.kept.sum())}
        stats |= {"acceptance": [round(float(x), 4) for x in self.kept[tried] / self.drafted[tried]]}
        stats |= {"tokens_per_cycle": self.tokens / self.cycles if self.cycles else 0.0}
        return stats | {"depths": {m: f"{n} x {s / n * 1e3:.2f} ms" for m, (n, s) in sorted(self.took.items())}}
