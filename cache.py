"""The flat page pool, and the Batch through which layers read and write it.

One pool of equal pages under one page-id space; a page holds P tokens of latent history or recurrent state, so every
byte can serve either. The pool has a slab per MLA layer, and page id p is the same place in every slab:

              slab 0 (MLA layer 0)    slab 1 (MLA layer 1)   ...
    page p    P rows [c | k_pe]       P rows [c | k_pe]      history: the same P tokens in every MLA layer
    page q    KDA layer 0: S, conv    KDA layer 1: S, conv   state: one group of KDA layers, a slab each

P is the fewest tokens, rounded up to a multiple of 128, whose rows hold one KDA layer's state.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
STOPS = 8  # ids that end an answer, as far as the device knows them
NONE = (-1,) * STOPS


def page_size(cfg, dtype=torch.bfloat16, latent_dtype=None, tp=1):
    """Tokens per page P. dtype: the model's; latent_dtype: of stored rows, None: the same; tp: tensor-parallel size."""
    row = (cfg.kv_lora_rank + cfg.qk_rope_head_dim) * (latent_dtype or dtype).itemsize
    tokens = -(-state_bytes(cfg, dtype, tp) // row) if cfg.kda_layers else 1
    return -(-tokens // 128) * 128


def state_bytes(cfg, dtype=torch.bfloat16, tp=1):
    """Bytes of one KDA layer's state of a sequence: S [h, d, d] in float32, the last K-1 conv inputs [K-1, 3 h d]."""
    h, d = cfg.kda_heads // tp, cfg.kda_head_dim
    wide = torch.promote_types(dtype, torch.float32).itemsize
    return h * d * d * wide + (cfg.conv_kernel - 1) * 3 * h * d * dtype.itemsize


class Pages:
    """Which of num_pages pages are taken, and how often: a reference count per page."""

    def __init__(self, num_pages):
        self.num_pages = num_pages
        self.references = np.zeros(num_pages, dtype=np.int32)
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def free_pages(self):
        return len(self._free)

    def allocate(self, count):
        """count page ids with one reference each. Raises MemoryError, and takes nothing, if fewer are free."""
        if count > len(self._free):
            raise MemoryError(f"the pool has {len(self._free)} free pages of {self.num_pages}, {count} were asked for")
        pages = np.array([self._free.pop() for _ in range(count)], dtype=np.int64)
        self.references[pages] = 1
        return pages

    def retain(self, pages):
        """One more reference for each page (no page twice)."""
        assert (self.references[pages] > 0).all(), "a free page was retained"
        self.references[pages] += 1

    def release(self, pages):
        """Drops one reference of each page; those without any become free, and are returned."""
        pages = np.asarray(pages, dtype=np.int64)
        np.subtract.at(self.references, pages, 1)
        assert (self.references[pages] >= 0).all(), "a page was released more often than it was taken"
        freed = np.unique(pages[self.references[pages] == 0]).tolist()
        self._free += freed
        return freed


class PagePool(Pages):
    """num_pages pages over one slab per MLA layer.

    rows(i): all latent rows of MLA layer i, [num_pages * P, r + p]; state(i): (S [num_pages, h, d, d], conv [num_pages,
    K-1, 3hd]) of KDA layer i. Both are views of the same bytes; which pages hold what is the caller's knowledge.
    """

    def __init__(self, cfg, num_pages, dtype=torch.float32, device="cpu", latent_dtype=None, mtp=False):
        super().__init__(num_pages)
        self.cfg, self.dtype, self.latent_dtype = cfg, dtype, latent_dtype or dtype
        self.page_size = page_size(cfg, dtype, latent_dtype)
        slabs = max(1, len(cfg.mla_layers) + mtp)
        # pages of state per sequence: each holds one layer's state per slab
        self.groups = -(-len(cfg.kda_layers) // slabs)
        self.per_group = -(-len(cfg.kda_layers) // max(1, self.groups))
        width = cfg.kv_lora_rank + cfg.qk_rope_head_dim
        slab_bytes = self.page_size * width * self.latent_dtype.itemsize
        self.page_bytes = slabs * slab_bytes
        # Memory is not touched before it is used: on a CPU an empty pool costs nothing.
        self.slabs = torch.empty(slabs, num_pages, slab_bytes, dtype=torch.uint8, device=device)
        self.device = self.slabs.device
        self._rows = self.slabs.view(self.latent_dtype).view(slabs, -1, width)
        if cfg.kda_layers:
            h, d, state_dtype = cfg.kda_heads, cfg.kda_head_dim, torch.promote_types(dtype, torch.float32)
            start = h * d * d * state_dtype.itemsize // dtype.itemsize
            self._S = self.slabs.view(state_dtype)[..., : h * d * d].unflatten(-1, (h, d, d))
            conv = (cfg.conv_kernel - 1) * 3 * h * d
            shape = cfg.conv_kernel - 1, 3 * h * d
            self._conv = self.slabs.view(dtype)[..., start : start + conv].unflatten(-1, shape)
        self._raw = None
        self.live = np.zeros(num_pages, dtype=np.int32)  # references held by running requests, the rest are the cache's
        self.live_pages = 0

    def rows(self, mla_index):
        return self._rows[mla_index]

    def state(self, kda_index):
        slab = kda_index % self.per_group
        return self._S[slab], self._conv[slab]

    def slab_strides(self):
        """Values from a layer's S, and its conv, to those of the next in its group."""
        return self._S.stride(0), self._conv.stride(0)

    def raw(self, rows):
        """Where verification keeps what `kda_commit` reads, [KDA layers, rows, 4 h d + h]: the same memory for every
        step, for none reads what another has left.
        """
        layers, heads, dim = len(self.cfg.kda_layers), self.cfg.kda_heads, self.cfg.kda_head_dim
        size = layers * rows * (width := 4 * heads * dim + heads)
        if self._raw is None or self._raw.numel() < size:
            self._raw = torch.empty(size, dtype=self.dtype, device=self.device)
        return self._raw[:size].view(layers, rows, width)

    def group(self, kda_index):
        """Which of a sequence's `groups` state pages holds this KDA layer."""
        return kda_index // self.per_group

    def history_pages(self, tokens):
        return -(-tokens // self.page_size)

    def pages_for(self, tokens):
        """Pages that a sequence of so many tokens occupies: its history and its state."""
        return self.history_pages(tokens) + self.groups

    def hold(self, pages, fresh=False):
        """A running request takes a reference of each page; fresh: it has the one that `allocate` gave."""
        if not fresh:
            self.retain(pages)
        self.live_pages += int((self.live[pages] == 0).sum())
        self.live[pages] += 1

    def drop(self, pages):
        """A running request gives up its reference of each page; returns those that became free."""
        self.live[pages] -= 1
        self.live_pages -= int((self.live[pages] == 0).sum())
        return self.release(pages)

    def copy_page(self, source, target):
        self.slabs[:, target] = self.slabs[:, source]

    def scrub(self, pages):
        """Zeroes pages, so that a fault in them (NaN) cannot reach whoever takes them next."""
        self.slabs[:, torch.as_tensor(np.asarray(pages, dtype=np.int64), device=self.device)] = 0

    def finite(self, slots, state=None):
        """Whether the latent rows at slots [n], and the states in the pages `state` (one a group) are all finite."""
        found, P = [], self.page_size
        for at in np.split(slots, range(64 * P, len(slots), 64 * P)):  # a bounded copy at a time
            at = torch.from_numpy(at).to(self.device)
            for slab in self._rows:
                rows = slab.view(torch.uint8)[at].view(slab.dtype)
                found.append(((rows.view(torch.uint8) & 127) < 127 if slab.dtype == FP8 else rows.isfinite()).all())
        for i in range(len(self.cfg.kda_layers) if state is not None else 0):
            found += [x[state[self.group(i)]].isfinite().all() for x in self.state(i)]
        return not found or bool(torch.stack(found).all())


# ---------------------------------------------------------------- what a batch reads and writes


@dataclass
class Chunk:
    """What one sequence brings to a batch: `tokens` new tokens after `past` earlier ones.

    pages: ids of its history pages, covering past + tokens; src, dst: state pages (one per group) read before and
    written after.
    """

    tokens: int
    past: int
    pages: np.ndarray
    src: np.ndarray
    dst: np.ndarray
    follows: bool = False  # the same text as the chunk before it, which ends where a snapshot is due
    drafts: int = 0  # so many of the tokens, the last, are drafts: the state is written once some are accepted


@dataclass
class Step:
    """One step of the model in plain numbers, so that one rank can plan it for all.

    ids [N] int: the tokens of all chunks: first the chunks of one token, then those with drafts, `drafts` each, then
    the others; ends: indices of the chunks whose last token is followed by a choice of the next, and each draft before
    it; choices: a sampling.Choice for each of these, and for each of held: hidden [H] of further sequences that only
    choose; before: where there is a draft layer, the hidden of the token ahead of each chunk of more than one token.
    """

    chunks: list
    ids: np.ndarray
    ends: list
    choices: list
    held: tuple = ()
    before: tuple = ()

    @classmethod
    def decode(cls, chunks, ids, choices, before=()):
        """One token of each sequence, or one and its drafts, and the choices behind them."""
        return cls(chunks, ids, [*range(len(chunks))], choices, (), before)

    @property
    def drafts(self):
        """How many drafts each chunk brings that has some."""
        return max((c.drafts for c in self.chunks), default=0)

    @property
    def is_decode(self):
        """Whether every chunk is one token and its drafts, followed by a choice: what a graph can be captured of."""
        drafts = self.drafts
        alike = all(c.drafts == drafts for c in self.chunks)
        return alike and len(self.ids) == len(self.ends) * (1 + drafts) and len(self.ends) == len(self.choices)

    @property
    def kind(self):
        """What the sampler has to do: sampling.GREEDY, WARM or SORTED."""
        return max((choice.kind for choice in self.choices), default=0)

    @property
    def rows(self):
        """[3, R] int64: after which rows of the batch a choice is (0 for those of `held`), the index of its Choice, and
        after how many drafts."""
        last = np.cumsum([0, *(c.tokens for c in self.chunks)])[np.array(self.ends, dtype=int) + 1] - 1
        drafts = np.array([self.chunks[end].drafts for end in self.ends] + [0] * len(self.held), dtype=int)
        first = np.concatenate([last, np.zeros(len(self.held), dtype=int)]) - drafts
        index = np.repeat(np.arange(len(drafts)), drafts + 1)
        draft = np.arange(len(index)) - (np.cumsum(drafts + 1) - drafts - 1)[index]
        return np.stack([first[index] + draft, index, draft])


@dataclass
class Part:
    """Neighbouring sequences of a batch that one op handles together, and where their history and state lie.

    lengths, pasts: new tokens of each and tokens before these, on the host; follows[i]: sequence i continues sequence
    i - 1, the same text cut where a snapshot is due, and reads the state page that i - 1 writes; drafts: how many of
    the new tokens are drafts; raw: what verification keeps of them for each KDA layer, [layers, rows, .]. Page ids
    below 0 are of padding: nothing is read or written there.
    """

    rows: slice  # of the batch
    lengths: list
    pasts: list
    follows: list
    longest: int  # no sequence has more tokens, past ones included
    page_size: int
    past: torch.Tensor  # [B] int32: pasts
    table: torch.Tensor  # [B, W] int32: history pages
    src: torch.Tensor  # [B, groups] int64: state pages read, unless past is 0
    dst: torch.Tensor  # [B, groups] int64: state pages written
    first: int = 0  # positions below it are not seen: the draft layer has no row for position 0
    drafts: int = 0
    raw: torch.Tensor | None = None

    @property
    def decode(self):
        """Whether each sequence brings one token."""
        return max(self.lengths) == 1 and not any(self.follows)

    @cached_property
    def runs(self):
        """[(first, last + 1, T, rows)]: neighbours that bring T tokens each and do not wait for each other; rows:
        theirs in the part.
        """
        runs, first, row = [], 0, 0
        for i in range(1, len(self.lengths) + 1):
            if i == len(self.lengths) or self.lengths[i] != self.lengths[first] or self.follows[i]:
                end = row + (i - first) * self.lengths[first]
                runs.append((first, i, self.lengths[first], slice(row, end)))
                first, row = i, end
        return runs

    @cached_property
    def starts(self):
        """[B + 1] int32: the first row of each sequence in the part."""
        return self._upload(np.cumsum([0, *self.lengths]))

    def chunks(self, size):
        """The sequences cut into chunks of at most `size` rows -> table [C, 4] int32 (first row, rows, sequence, if it
        is its last), chains [n + 1] int32: the first chunk of each text, which may be several pieces.
        """
        if size not in self._chunks:
            table, chains, row = [], [], 0
            for i, (length, follows) in enumerate(zip(self.lengths, self.follows)):
                chains += [] if follows else [len(table)]
                for at in range(0, length, size):
                    table.append((row + at, min(size, length - at), i, at + size >= length))
                row += length
            self._chunks[size] = self._upload(np.array(table)), self._upload(np.array([*chains, len(table)]))
        return self._chunks[size]

    @cached_property
    def _chunks(self):
        return {}

    def _upload(self, x):
        return torch.from_numpy(x.astype(np.int32)).to(self.past.device, non_blocking=True)


# what a Feed holds where there is nothing
EMPTY = dict(slots=-1, src=-1, dst=-1, table=-1, past=0, ids=0, rows=0, room=0, filters=0, draws=0, stops=-1)


class Feed:
    """What a step reads beside the pool, in one buffer, so that one copy brings it to the device.

    For N tokens of B sequences with tables of W pages, and R choices of a token: ids, slots [N] int64: the tokens, and
    the row of a slab where the latent row of each goes; past [B] and table [B, W] int32: tokens before, history pages;
    src, dst [groups, B] int64: state pages; rows [R] int64: after which token a choice is; and of its sampling.Choice
    filters [4, R] float64, draws [2, R], stops [STOPS, R], room [R] int64.
    """

    def __init__(self, pool, N, B, W, R=0):
        wide, groups = torch.int64, pool.groups
        self.page_size, self.device = pool.page_size, pool.device
        self.sections = {"ids": (wide, N), "slots": (wide, N), "rows": (wide, R), "room": (wide, R)}
        self.sections |= {"src": (wide, groups, B), "dst": (wide, groups, B), "filters": (torch.float64, 4, R)}
        self.sections |= {"draws": (wide, 2, R), "stops": (wide, STOPS, R)}
        self.sections |= {"past": (torch.int32, B), "table": (torch.int32, B, W)}
        words = sum(-(-math.prod(shape) * dtype.itemsize // 8) for dtype, *shape in self.sections.values())
        self.host = torch.empty(words, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        self.rows = {name: x.numpy() for name, x in self.views(self.host).items()}

    def views(self, buffer):
        """name -> its part of such a buffer."""
        found, at = {}, 0
        for name, (dtype, *shape) in self.sections.items():
            n = math.prod(shape)
            words = -(-n * dtype.itemsize // 8)
            found[name] = buffer[at : at + words].view(dtype)[:n].view(shape)
            at += words
        return found

    def fill(self, chunks, ids=None, rows=None, choices=()):
        """Writes what `chunks` need, ids [N] their tokens; rows, choices: of a Step. What is left over is padding: it
        has no pages (below 0), and nothing is read or written for it.
        """
        x, P, n, total = self.rows, self.page_size, len(chunks), sum(c.tokens for c in chunks)
        for name, value in EMPTY.items():
            x[name].fill(value)
        tokens, past = np.array([(c.tokens, c.past) for c in chunks], dtype=np.int64).reshape(-1, 2).T
        x["past"][:n], x["table"][:n] = past, 0
        for i, c in enumerate(chunks):
            used = c.pages[: x["table"].shape[1]]
            x["table"][i, : len(used)] = used
            x["src"][: len(c.src), i], x["dst"][: len(c.dst), i] = c.src, c.dst
        owner, stop = np.repeat(np.arange(n), tokens), np.cumsum(tokens)
        position = past[owner] + np.arange(total) - (stop - tokens)[owner]
        x["slots"][:total] = x["table"][owner, position // P].astype(np.int64) * P + position % P
        if ids is not None:
            x["ids"][:total] = ids
        if rows is not None:
            (row, index, draft), R = rows, rows.shape[1]
            values = zip(*((c.filters, c.seed, c.position, c.room, (*c.stops, *NONE)[:STOPS]) for c in choices))
            filters, seed, position, room, stops = (np.array(column)[index].T for column in values)
            x["rows"][:R], x["room"][:R], x["filters"][:, :R], x["stops"][:, :R] = row, room, filters, stops
            x["draws"][0, :R], x["draws"][1, :R] = seed, position + draft

    def upload(self):
        """name -> tensor on the device."""
        if self.device.type == "cpu":
            return {name: torch.from_numpy(x) for name, x in self.rows.items()}
        return self.views(self.host.to(self.device, non_blocking=True))


class Batch:
    """Sequences that run together, their rows one after another: first those that bring one token, then those that
    bring drafts too, then the others.

    parts: their places in the pool; slots [N] int64: the row of a slab where each new token's latent row goes. Without
    a pool: B whole sequences of T tokens, the differentiable path.
    """

    def __init__(self, pool, parts, slots):
        self.pool, self.parts, self.slots = pool, parts, slots

    @classmethod
    def whole(cls, B, T):
        """B whole sequences of T tokens, no cache."""
        batch = cls(None, [], None)
        batch.B, batch.T = B, T
        return batch

    @classmethod
    def paged(cls, pool, chunks):
        """One batch of chunks, those with one token first. Neighbours with equal numbers of new tokens run together."""
        feed = Feed(pool, sum(c.tokens for c in chunks), len(chunks), table_width(pool, chunks))
        feed.fill(chunks)
        return cls.fed(pool, feed.upload(), chunks)

    @classmethod
    def fed(cls, pool, x, chunks):
        """The same from a Feed's tensors x, and of the chunks what the host has to know: not their pages."""
        tokens, pasts, follows = ([getattr(c, name) for c in chunks] for name in ("tokens", "past", "follows"))
        waits = [*follows[1:], False]  # a piece with another behind it is no decode row, even if it is one token
        ones = next((i for i, n in enumerate(tokens) if n > 1 or follows[i] or waits[i]), len(tokens))
        drafted = next((i for i in range(ones, len(chunks)) if not chunks[i].drafts), len(chunks))
        parts, row, where = [], 0, (x["past"], x["table"], x["src"].T, x["dst"].T)
        for i, j in ((0, ones), (ones, drafted), (drafted, len(tokens))):
            if i < j:
                own = where if j - i == len(tokens) else [t[i:j] for t in where]
                lengths, before = tokens[i:j], pasts[i:j]
                longest, end = max(map(sum, zip(lengths, before))), row + sum(lengths)
                part = Part(slice(row, end), lengths, before, follows[i:j], longest, pool.page_size, *own)
                if chunks[i].drafts:
                    part.drafts, part.raw = chunks[i].drafts, pool.raw(end - row)
                parts.append(part)
                row = end
        return cls(pool, parts, x["slots"])

    @property
    def drafted(self):
        """The part with drafts, or None."""
        return next((part for part in self.parts if part.drafts), None)

    def state(self, kda_index, part):
        """S [pages, h, d, d] and conv [pages, K-1, 3hd] of a KDA layer; pages src, dst [B] of a part's sequences."""
        group = self.pool.group(kda_index)
        return *self.pool.state(kda_index), part.src[:, group], part.dst[:, group]


def table_width(pool, chunks):
    """Pages of the longest history that these chunks end with."""
    return max((pool.history_pages(c.past + c.tokens) for c in chunks), default=0)


def bucket(n):
    """The number of sequences that a graph for n is captured with: 1, 2, 4, 8, then multiples of 8."""
    return 1 << (n - 1).bit_length() if n <= 8 else -(-n // 8) * 8


def wide_enough(pages):
    """The width of the page tables that a graph is captured with: a power of two."""
    return 1 << (pages - 1).bit_length()
