"""The flat page pool, and the Batch through which the layers read and write it.

One pool of equal pages under one page-id space; a page holds P tokens of latent history or recurrent state, so every byte can serve
either. The pool has a slab per MLA layer, and page id p is the same place in every slab:

                slab 0 (MLA layer 0)     slab 1 (MLA layer 1)    ...
    page p      P rows [c | k_pe]        P rows                         a page of history: the same P tokens in all MLA layers
    page q      KDA layer 0: S, conv     KDA layer 1: S, conv           a page of state: one group of KDA layers, one per slab

P is the fewest tokens, rounded up to a multiple of 128, whose rows hold one KDA layer's state.
"""

from dataclasses import dataclass

import numpy as np
import torch


def page_size(cfg, dtype=torch.bfloat16, latent_dtype=None, tp=1):
    """Tokens per page P. dtype: the model's; latent_dtype: of the stored rows, the model's by default; tp: tensor-parallel ranks."""
    row = (cfg.kv_lora_rank + cfg.qk_rope_head_dim) * (latent_dtype or dtype).itemsize
    tokens = -(-state_bytes(cfg, dtype, tp) // row) if cfg.kda_layers else 1
    return -(-tokens // 128) * 128


def state_bytes(cfg, dtype=torch.bfloat16, tp=1):
    """Bytes of one KDA layer's state of one sequence: S [h, d, d] in float32 and the last K-1 conv inputs [K-1, 3 h d] in dtype."""
    h, d = cfg.kda_heads // tp, cfg.kda_head_dim
    return (
        h * d * d * torch.promote_types(dtype, torch.float32).itemsize
        + (cfg.conv_kernel - 1) * 3 * h * d * dtype.itemsize
    )


class PagePool:
    """num_pages pages over one slab per MLA layer, with a reference count per page.

    rows(i): all latent rows of MLA layer i, [num_pages * P, r + p]; state(i): (S [num_pages, h, d, d], conv [num_pages, K-1, 3hd]) of
    KDA layer i. Both are views of the same bytes; which pages hold what is the caller's knowledge.
    """

    def __init__(self, cfg, num_pages, dtype=torch.float32, device="cpu", mtp=False):
        self.num_pages, self.page_size = num_pages, page_size(cfg, dtype)
        slabs = max(1, len(cfg.mla_layers) + mtp)
        self.groups = -(
            -len(cfg.kda_layers) // slabs
        )  # pages of state per sequence: each holds one layer's state per slab
        self._per_group = -(-len(cfg.kda_layers) // max(1, self.groups))
        width = cfg.kv_lora_rank + cfg.qk_rope_head_dim
        self.page_bytes = slabs * self.page_size * width * dtype.itemsize
        # Memory is not touched before it is used: on a CPU an empty pool costs nothing.
        self.slabs = torch.empty(
            slabs, num_pages, self.page_size * width * dtype.itemsize, dtype=torch.uint8, device=device
        )
        self._rows = self.slabs.view(dtype).view(slabs, -1, width)
        h, d, state_dtype = cfg.kda_heads, cfg.kda_head_dim, torch.promote_types(dtype, torch.float32)
        start = h * d * d * state_dtype.itemsize // dtype.itemsize
        self._S = self.slabs.view(state_dtype)[..., : h * d * d].unflatten(-1, (h, d, d))
        conv = (cfg.conv_kernel - 1) * 3 * h * d
        self._conv = self.slabs.view(dtype)[..., start : start + conv].unflatten(-1, (cfg.conv_kernel - 1, 3 * h * d))
        self.references = np.zeros(num_pages, dtype=np.int32)
        self._free = list(range(num_pages - 1, -1, -1))

    def rows(self, mla_index):
        return self._rows[mla_index]

    def state(self, kda_index):
        slab = kda_index % self._per_group
        return self._S[slab], self._conv[slab]

    def group(self, kda_index):
        """Which of a sequence's `groups` state pages holds this KDA layer."""
        return kda_index // self._per_group

    @property
    def free_pages(self):
        return len(self._free)

    def pages_for(self, tokens):
        """Pages that a sequence of so many tokens occupies: its history and its state."""
        return -(-tokens // self.page_size) + self.groups

    def allocate(self, count):
        """count page ids with one reference each. Raises MemoryError, and takes nothing, if fewer are free."""
        if count > len(self._free):
            raise MemoryError(f"the pool has {len(self._free)} free pages of {self.num_pages}, {count} were asked for")
        pages = np.array([self._free.pop() for _ in range(count)], dtype=np.int64)
        self.references[pages] = 1
        return pages

    def scrub(self, pages):
        """Zeroes pages, so that a fault in them (NaN) cannot reach whoever takes them next."""
        self.slabs[:, torch.as_tensor(np.asarray(pages, dtype=np.int64), device=self.slabs.device)] = 0

    def release(self, pages):
        """Drops one reference of each page; those without any become free."""
        for page in pages:
            self.references[page] -= 1
            assert self.references[page] >= 0, f"page {page} was released more often than it was taken"
            if self.references[page] == 0:
                self._free.append(int(page))


@dataclass
class Chunk:
    """What one sequence brings to a batch: `tokens` new tokens after `past` earlier ones.

    pages: ids of its history pages, covering past + tokens; src, dst: state pages (one per group) read before and written after.
    """

    tokens: int
    past: int
    pages: np.ndarray
    src: np.ndarray
    dst: np.ndarray


@dataclass
class Segment:
    """B neighbouring sequences with T new tokens each: one dense problem. rows: their rows in the batch; src, dst: [B, groups]."""

    rows: slice
    B: int
    T: int
    src: torch.Tensor | None = None
    dst: torch.Tensor | None = None
    fresh: torch.Tensor | None = None  # [B] bool: no past; whatever its state page holds is not its state
    history: torch.Tensor | None = (
        None  # [B, L] row numbers in a slab; beyond a sequence's end its own first row, again and again
    )
    mask: torch.Tensor | None = None  # [B, T, L] bool: what each new token sees

    def dense(self, x):
        """The segment's part of x [N, ...] -> [B, T, ...]."""
        return x[self.rows].unflatten(0, (self.B, self.T))


class Batch:
    """Sequences that run together, as rows one after another, with their place in the pool (or none: whole sequences, no cache)."""

    def __init__(self, segments, pool=None, slots=None):
        self.segments, self.pool, self.slots = segments, pool, slots

    @classmethod
    def whole(cls, B, T):
        """B whole sequences of T tokens, no cache."""
        return cls([Segment(slice(0, B * T), B, T)])

    @classmethod
    def paged(cls, pool, chunks):
        """One batch of chunks. Neighbours with equal numbers of new tokens share a segment: sort by `tokens` before."""
        device, P = pool.slabs.device, pool.page_size
        segments, slots, start, i = [], [], 0, 0
        while i < len(chunks):
            T = chunks[i].tokens
            same = [c for c in chunks[i:]]
            same = same[: next((j for j, c in enumerate(same) if c.tokens != T), len(same))]
            i, B = i + len(same), len(same)
            past = np.array([c.past for c in same])
            L = int(past.max()) + T
            table = np.zeros((B, -(-L // P)), dtype=np.int64)
            for row, c in zip(table, same):
                used = c.pages[: len(row)]
                row[: len(used)] = used
            position = np.arange(L)
            rows = table[:, position // P] * P + position % P
            new = past[:, None] + np.arange(T)
            slots.append(np.take_along_axis(rows, new, axis=1).ravel())
            rows = np.where(position < past[:, None] + T, rows, rows[:, :1])
            # Nothing to hide: a lone last token of equally long sequences, or whole prompts (plain causal).
            plain = (T == 1 or past[0] == 0) and (past == past[0]).all()
            mask = None if plain else torch.from_numpy(position <= new[..., None]).to(device)
            state = (torch.from_numpy(np.stack([getattr(c, side) for c in same])).to(device) for side in ("src", "dst"))
            fresh = torch.from_numpy(past == 0).to(device) if (past == 0).any() else None
            segments.append(
                Segment(slice(start, start + B * T), B, T, *state, fresh, torch.from_numpy(rows).to(device), mask)
            )
            start += B * T
        return cls(segments, pool, torch.from_numpy(np.concatenate(slots)).to(device))

    def read_state(self, kda_index, seg):
        """(conv [B, K-1, 3hd], S [B, h, d, d]) before the segment's tokens, zero where a sequence starts; None without a pool."""
        if self.pool is None:
            return None
        S, conv = self.pool.state(kda_index)
        pages = seg.src[:, self.pool.group(kda_index)]
        S, conv = S[pages], conv[pages]
        if seg.fresh is not None:
            S, conv = S.masked_fill(seg.fresh[:, None, None, None], 0), conv.masked_fill(seg.fresh[:, None, None], 0)
        return conv, S

    def write_state(self, kda_index, seg, conv, S):
        if self.pool is not None:
            pages = seg.dst[:, self.pool.group(kda_index)]
            for state, new in zip(self.pool.state(kda_index), (S, conv)):
                state[pages] = new.to(state.dtype)

    def write_rows(self, mla_index, rows):
        """Stores the latent rows [N, r + p] of all new tokens."""
        if self.pool is not None:
            self.pool.rows(mla_index)[self.slots] = rows

    def read_rows(self, mla_index, seg, rows):
        """The latent rows that the segment's tokens attend to [B, L, r + p], as stored, and the mask [B, T, L] or None (see Segment)."""
        if self.pool is None:
            return seg.dense(rows), None
        return self.pool.rows(mla_index)[seg.history], seg.mask
