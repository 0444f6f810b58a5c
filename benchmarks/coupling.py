"""What drafter-invariant choices cost in acceptance: the coupling by Gumbel noise against rejection sampling."""

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.report import print_table
from cache import Batch, Chunk, PagePool
from draft import MTP
from evaluate import encode, read
from model import K3
from runner import Runner
from sampling import WARM, sample
from tokenizer import Tokenizer

PROMPT, DRAFTS = 128, 3  # tokens of each prompt; drafts of a cycle
DRAWS = 8  # of noise, for each pair of distributions whose coupling is measured
GROUP = 32  # prompts, or pairs of distributions, that are held wide at once


# ---------------------------------------------------------------- the two rules


def draw(logits, temperature, seeds, positions):
    """logits [R, V]; seeds, positions [R] -> ids [R], as the engine draws them."""
    filters = torch.tensor([temperature, 0, 1, 0], dtype=torch.float64)[:, None].expand(4, len(logits))
    return sample(logits, filters, torch.stack([seeds, positions]), WARM)[0]


def reject(p, q, drafts, u):
    """Leviathan et al. 2023, algorithm 1: p [B, m+1, V] and q [B, m, V], what the model and the drafter give; drafts
    [B, m], drawn from q; u [B, m] in [0, 1) -> kept [B], and what the next token is to be drawn from [B, V], unscaled.
    """
    of = lambda probs: probs.gather(2, drafts[..., None])[..., 0]
    kept = (u * of(q) < of(p[:, :-1])).cumprod(1).sum(1)
    rest = (p - F.pad(q, (0, 0, 0, 1))).clamp(min=0)  # behind the last draft: p itself
    return kept, rest[torch.arange(len(p)), kept]


# ---------------------------------------------------------------- their rates, of one token


def overlap(p, q):
    """p, q [..., V] -> how often rejection sampling keeps a draft: 1 - TV, the most that any rule can."""
    return torch.minimum(p, q).sum(-1)


def coupled(p, q):
    """p, q [R, V], none 0 -> how often argmax(log p + noise) = argmax(log q + noise). Both are i with probability
    1 / sum over j of max(p[j] / p[i], q[j] / q[i]); in order of p / q the maximum is the first one up to j = i."""
    order = (p.log() - q.log()).argsort(dim=-1, descending=True)
    p, q = p.gather(-1, order), q.gather(-1, order)
    behind = q.flip(-1).cumsum(-1).flip(-1) - q
    return (1 / (p.cumsum(-1) / p + behind / q)).sum(-1)


def rates(pairs, temperature, seed):
    """pairs: logits of model and drafter [R, V] each -> the means of what is kept of one draft."""
    names, found = ("rejection", "coupling", "coupling_measured", "coupling_bound"), []
    for p, q in zip(*(x.split(GROUP) for x in pairs)):
        P, Q = ((x.double() / temperature).softmax(-1) for x in (p, q))
        seeds = torch.full((len(p),), seed) + sum(map(len, found)) + torch.arange(len(p))
        same = [
            draw(p, temperature, seeds, at) == draw(q, temperature, seeds, at)
            for at in (torch.full_like(seeds, -1 - n) for n in range(DRAWS))  # positions that no text has
        ]
        keeps = overlap(P, Q)  # 1 - TV
        found.append(torch.stack([keeps, coupled(P, Q), torch.stack(same).double().mean(0), keeps / (2 - keeps)], -1))
    return dict(zip(names, torch.cat(found).mean(0).tolist()))


# ---------------------------------------------------------------- the two loops


class Texts:
    """prompts [B, C], read once; `cycles` continues each of them by `new` tokens or a few more."""

    @torch.no_grad()
    def __init__(self, model, prompts, new, drafts=DRAFTS):
        (B, C), size = prompts.shape, prompts.shape[1] + new + drafts
        self.model, self.length, self.end, self.drafts = model, C, C + new, drafts
        pages = PagePool(model.cfg, 0, device="meta", mtp=True)
        need = pages.history_pages(size), pages.groups, pages.groups  # the last: where the prompt's state stays
        self.pool = PagePool(model.cfg, B * sum(need), model.norm.weight.dtype, mtp=True)
        self.pages = [np.split(self.pool.allocate(sum(need)), np.cumsum(need)[:2]) for _ in range(B)]
        self.mtp, self.runner = MTP(model, self.pool), Runner(model, self.pool, graphs=False)
        last = []
        for ids, pages in zip(prompts.split(GROUP), (self.pages[i : i + GROUP] for i in range(0, B, GROUP))):
            batch = Batch.paged(self.pool, [Chunk(C, 0, rows, start, start) for rows, _, start in pages])
            hidden = model.hidden(ids.flatten(), batch).unflatten(0, ids.shape)
            slots = batch.slots.view_as(ids)[:, 1:].flatten()
            self.mtp.write(ids[:, 1:].flatten(), hidden[:, :-1].flatten(0, 1), slots)
            last.append(hidden[:, -1])
        self.before = torch.cat(last)

    @torch.no_grad()
    def cycles(self, temperature, rejection, seed=0):
        """-> who [cycles]: whose each was; kept [cycles]: of its drafts; logits of model and drafter for the first of
        these [cycles, V] each. Both rules draw drafts with the noise of their positions; rejection: then accepts
        and draws with numbers of its own.
        """
        model, pool, m, chance = self.model, self.pool, self.drafts, torch.Generator().manual_seed(seed)
        who, before = torch.arange(len(self.before)), self.before
        n, seeds = torch.full_like(who, self.length), seed * 10**6 + who  # n: tokens that the model has read
        last = draw(model.logits(before), temperature, seeds, n - self.length)
        seen = []
        while len(who):
            state = 1 if seen else 2  # a text's first cycle begins from the state of its prompt
            chunks = zip(n.tolist(), (self.pages[i] for i in who.tolist()))
            batch = Batch.paged(pool, [Chunk(m + 1, at, own[0], own[state], own[1], drafts=m) for at, own in chunks])
            part, slots = batch.drafted, batch.slots.view(len(who), m + 1)
            ids, x, q = last[:, None].repeat(1, m + 1), before, []
            at = n[:, None] + 1 - self.length + torch.arange(m + 1)  # positions of the choices
            for j in range(m):  # as draft.MTP.draft, but what it draws from is wanted
                x, logits = self.mtp.read(part, j, ids[:, j], slots[:, j], x)
                q.append(logits)
                ids[:, j + 1] = draw(q[-1], temperature, seeds, at[:, j])
            hidden = model.hidden(ids.flatten(), batch)
            p, q, row = model.logits(hidden).unflatten(0, ids.shape), torch.stack(q, 1), torch.arange(len(who))
            if rejection:
                u = torch.rand(ids[:, 1:].shape, generator=chance, dtype=torch.float64)
                kept, rest = reject(*((y.double() / temperature).softmax(-1) for y in (p, q)), ids[:, 1:], u)
                last = torch.multinomial(rest, 1, generator=chance)[:, 0]
            else:
                tokens = draw(p.flatten(0, 1), temperature, seeds.repeat_interleave(m + 1), at.flatten()).view_as(ids)
                kept = (ids[:, 1:] == tokens[:, :-1]).cumprod(1).sum(1)
                last = tokens[row, kept]
            self.runner.commit(part, part.dst, (kept + 1).int())
            self.mtp.write_drafts(ids, slots, hidden, kept + 1)
            seen.append((who, kept, p[:, 0], q[:, 0]))
            n, before = n + kept + 1, hidden.unflatten(0, ids.shape)[row, kept]
            live = n + 1 < self.end
            who, n, seeds, last, before = (y[live] for y in (who, n, seeds, last, before))
        return [torch.cat(y) for y in zip(*seen)]


def per_cycle(who, kept, prompts):
    """-> tokens per cycle, and by how much each prompt [prompts] moves it: the error is that of a ratio of means."""
    cycles, tokens = who.bincount(minlength=prompts), who.bincount(kept + 1.0, prompts)
    ratio = tokens.sum() / cycles.sum()
    return float(ratio), (tokens - ratio * cycles) / cycles.double().mean()


def coupling(args):
    """What choices that no drafter can change cost in acceptance: Gumbel coupling against rejection sampling.

    The MTP layer drafts 3 tokens a cycle behind prompts of held-out text. Gumbel coupling, as the engine does it: model
    and drafter choose with the same noise, a draft is kept where they agree. Rejection sampling (Leviathan et al.
    2023): a draft x is kept with probability min(1, p(x) / q(x)), the token after the last is drawn from max(p - q, 0).
    Acceptance of a draft is of those whose predecessors were kept; errors are standard errors over prompts, those of
    the difference paired. Then the rates of one draft, over all first drafts of both: rejection sum min(p, q) = 1 - TV;
    coupling as computed, as measured with draws of noise, and its lower bound (1 - TV) / (1 + TV).
    """
    prompts, new = (4, 12) if args.quick else (64, 64)
    model = K3.from_pretrained(args.model, dtype=torch.float32, progress=False)
    if model.mtp is None:
        raise ValueError(f"{args.model}: this checkpoint has no MTP layer to draft with")
    ids = encode(Tokenizer.from_pretrained(args.model), read(args.val), "cpu")
    if len(ids) < PROMPT:
        raise ValueError(f"{', '.join(args.val)}: {len(ids)} tokens; a prompt alone takes {PROMPT}, give more text")
    start = torch.linspace(0, len(ids) - PROMPT, prompts).long()
    texts = Texts(model, ids[start[:, None] + torch.arange(PROMPT)].long(), new)
    rows, second = [], []
    for temperature in (0.8, 1.0):
        moves, pairs = [], []
        for method in ("rejection", "coupling"):
            who, kept, *logits = texts.cycles(temperature, method == "rejection", args.seed)
            tokens, move = per_cycle(who, kept, prompts)
            moves, pairs = [*moves, move], [*pairs, logits]
            row = {"temperature": temperature, "method": method, "cycles": len(kept), "tokens_per_cycle": tokens}
            row["error"] = float(move.std() / prompts**0.5)
            row |= {f"draft_{j + 1}": int((kept > j).sum()) / max(int((kept >= j).sum()), 1) for j in range(DRAFTS)}
            rows.append(row)
        row = {"temperature": temperature, "fewer_tokens": rows[-2]["tokens_per_cycle"] - rows[-1]["tokens_per_cycle"]}
        row["error"] = float((moves[0] - moves[1]).std() / prompts**0.5)
        second.append(row | rates([torch.cat(x) for x in zip(*pairs)], temperature, args.seed))
    print_table(rows, list(rows[0]))
    print()
    print_table(second, list(second[0]))
    return rows + second
