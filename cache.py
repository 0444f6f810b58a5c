"""The flat page pool, the Batch through which layers read and write it, and the prefix cache over it.

One pool of equal pages under one page-id space; a page holds P tokens of latent history or recurrent state, so every
byte can serve either. The pool has a slab per MLA layer, and page id p is the same place in every slab:

              slab 0 (MLA layer 0)    slab 1 (MLA layer 1)   ...
    page p    P rows [c | k_pe]       P rows [c | k_pe]      history: the same P tokens in every MLA layer
    page q    KDA layer 0: S, conv    KDA layer 1: S, conv   state: one group of KDA layers, a slab each

P is the fewest tokens, rounded up to a multiple of 128, whose rows hold one KDA layer's state.

The prefix cache is a radix tree over token ids. Its nodes own pages of history and, at their end, a snapshot of the
recurrent state; a prefix can be resumed where it has both.
"""

from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


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
        np.subtract.at(self.references, pages, 1)
        assert (self.references[pages] >= 0).all(), "a page was released more often than it was taken"
        freed = [int(p) for p in pages if self.references[p] == 0]
        self._free += freed
        return freed


class PagePool(Pages):
    """num_pages pages over one slab per MLA layer.

    rows(i): all latent rows of MLA layer i, [num_pages * P, r + p]; state(i): (S [num_pages, h, d, d], conv [num_pages,
    K-1, 3hd]) of KDA layer i. Both are views of the same bytes; which pages hold what is the caller's knowledge.
    """

    def __init__(self, cfg, num_pages, dtype=torch.float32, device="cpu", latent_dtype=None, mtp=False):
        super().__init__(num_pages)
        self.latent_dtype = latent_dtype or dtype
        self.page_size = page_size(cfg, dtype, latent_dtype)
        slabs = max(1, len(cfg.mla_layers) + mtp)
        self.groups = -(
            -len(cfg.kda_layers) // slabs
        )  # pages of state per sequence: each holds one layer's state per slab
        self._per_group = -(-len(cfg.kda_layers) // max(1, self.groups))
        width = cfg.kv_lora_rank + cfg.qk_rope_head_dim
        slab_bytes = self.page_size * width * self.latent_dtype.itemsize
        self.page_bytes = slabs * slab_bytes
        # Memory is not touched before it is used: on a CPU an empty pool costs nothing.
        self.slabs = torch.empty(slabs, num_pages, slab_bytes, dtype=torch.uint8, device=device)
        self._rows = self.slabs.view(self.latent_dtype).view(slabs, -1, width)
        if cfg.kda_layers:
            h, d, state_dtype = cfg.kda_heads, cfg.kda_head_dim, torch.promote_types(dtype, torch.float32)
            start = h * d * d * state_dtype.itemsize // dtype.itemsize
            self._S = self.slabs.view(state_dtype)[..., : h * d * d].unflatten(-1, (h, d, d))
            conv = (cfg.conv_kernel - 1) * 3 * h * d
            self._conv = self.slabs.view(dtype)[..., start : start + conv].unflatten(
                -1, (cfg.conv_kernel - 1, 3 * h * d)
            )
        self.live = np.zeros(num_pages, dtype=np.int32)  # references held by running requests, the rest are the cache's
        self.live_pages = 0

    def rows(self, mla_index):
        return self._rows[mla_index]

    def state(self, kda_index):
        slab = kda_index % self._per_group
        return self._S[slab], self._conv[slab]

    def group(self, kda_index):
        """Which of a sequence's `groups` state pages holds this KDA layer."""
        return kda_index // self._per_group

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
        self.slabs[:, torch.as_tensor(np.asarray(pages, dtype=np.int64), device=self.slabs.device)] = 0


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


@dataclass
class Part:
    """Neighbouring sequences of a batch that one op handles together, and where their history and state lie.

    lengths, pasts: new tokens of each and tokens before these, on the host; follows[i]: sequence i continues sequence
    i - 1, the same text cut where a snapshot is due, and reads the state page that i - 1 writes. Page ids below 0 are
    of padding: nothing is read or written there.
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


class Batch:
    """Sequences that run together, their rows one after another: first those that bring one token, then the others.

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
        P, device = pool.page_size, pool.slabs.device
        tokens, past = np.array([(c.tokens, c.past) for c in chunks], dtype=np.int64).T
        width = int((past + tokens + P - 1).max()) // P
        table = np.zeros((len(chunks), width), dtype=np.int32)
        for row, c in zip(table, chunks):
            used = c.pages[:width]
            row[: len(used)] = used
        owner = np.repeat(np.arange(len(chunks)), tokens)
        starts = np.cumsum(tokens) - tokens
        position = past[owner] + np.arange(tokens.sum()) - starts[owner]
        slots = table[owner, position // P].astype(np.int64) * P + position % P
        src, dst = np.array([c.src for c in chunks]), np.array([c.dst for c in chunks])
        arrays = (past.astype(np.int32), table, src, dst, slots)
        *where, slots = [torch.from_numpy(x).to(device, non_blocking=True) for x in arrays]

        follows = [c.follows for c in chunks]
        waits = [*follows[1:], False]  # a piece with another behind it is no decode row, even if it is one token
        ones = next((i for i, n in enumerate(tokens) if n > 1 or follows[i] or waits[i]), len(chunks))
        parts, end = [], int(tokens.sum())
        for i, j, rows in ((0, ones, slice(0, ones)), (ones, len(chunks), slice(ones, end))):
            if i < j:
                longest = int((past[i:j] + tokens[i:j]).max())
                lengths, pasts = tokens[i:j].tolist(), past[i:j].tolist()
                parts.append(Part(rows, lengths, pasts, follows[i:j], longest, P, *(x[i:j] for x in where)))
        return cls(pool, parts, slots)

    def state(self, kda_index, part):
        """S [pages, h, d, d] and conv [pages, K-1, 3hd] of a KDA layer; pages src, dst [B] of a part's sequences."""
        group = self.pool.group(kda_index)
        return *self.pool.state(kda_index), part.src[:, group], part.dst[:, group]


# ---------------------------------------------------------------- the prefix cache


@dataclass
class Snapshot:
    """The state after the last token of a node: one page per group, and the hidden before the final norm [H]."""

    pages: np.ndarray
    hidden: torch.Tensor


class Node:
    """An edge of the tree: tokens [start, end) of every text that passes here, their pages, and a snapshot at the end
    or None.

    pages: of page indices start // P ... (end - 1) // P. Where start lies inside a page, the first holds the rows
    before it too.
    """

    __slots__ = (
        "parent",
        "tokens",
        "start",
        "pages",
        "snapshot",
        "children",
        "on_host",
        "pins",
        "used",
        "snapshot_used",
    )

    def __init__(self, parent, tokens, start, pages, on_host=False):
        self.parent, self.tokens, self.start, self.pages, self.on_host = parent, tokens, start, pages, on_host
        self.snapshot, self.children, self.pins, self.used, self.snapshot_used = None, {}, 0, 0, 0

    @property
    def end(self):
        return self.start + len(self.tokens)

    def path(self):
        """The nodes from the root's child down to this one."""
        nodes = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


class PrefixCache:
    """A radix tree over token ids whose nodes own pages of `pool`, and of host memory once they are evicted.

    Least recently used is evicted first. Using a prefix uses all its ancestors later than itself, so the oldest node
    has no younger child: it is a leaf. It goes to the host, history and state together, or is dropped where there is
    none. Without a host tier a snapshot in the middle of a text also ages by itself, used only when something resumes
    from it: longer texts outlive it.
    """

    def __init__(self, pool, host_pages=0):
        self.pool = pool
        self.host = HostTier(pool, host_pages) if host_pages else None
        self.root = Node(None, np.empty(0, np.int32), 0, np.empty(0, np.int64))
        self.nodes, self.host_nodes, self.snapshots = (
            OrderedDict(),
            OrderedDict(),
            OrderedDict(),
        )  # least recently used first
        self._clock = 0
        self.evicted = self.offloaded = self.restored = 0  # nodes, since the start

    # -- finding

    def match(self, tokens, here=False):
        """-> (the deepest node that `tokens` can resume from, or None; how many leading tokens the tree knows at all).

        here: only what is in the pool, not on the host.
        """
        node, at, best = self.root, 0, None
        while at < len(tokens):
            child = node.children.get(int(tokens[at]))
            if child is None:
                break
            same = common(child.tokens, tokens[at:])
            at += same
            if same < len(child.tokens) or (here and child.on_host):
                break
            node = child
            best = node if node.snapshot else best
        return best, at

    def table(self, node):
        """The history pages of the text that ends at `node`, by page index."""
        P, table = self.pool.page_size, np.zeros(self.pool.history_pages(node.end), dtype=np.int64)
        for n in node.path():
            table[n.start // P : n.start // P + len(n.pages)] = n.pages
        return table

    def use(self, node, resume=False):
        """Marks the text that ends at `node` as used now, and with resume its snapshot."""
        self._clock += 1
        if resume and not node.on_host:
            node.snapshot_used = self._clock
            self.snapshots.move_to_end(node)
        while node.parent is not None:  # deepest first: ancestors are younger than what hangs on them
            node.used = self._clock
            (self.host_nodes if node.on_host else self.nodes).move_to_end(node)
            node = node.parent

    # -- growing

    def insert(self, tokens, pages, state, hidden):
        """Stores a text of n tokens [n] that can be resumed at its end; takes its own references. Returns its node.

        pages: its history pages by page index; state: its state pages; hidden: of its last token, [H]. What is known
        stays as it is.
        """
        P, node, at = self.pool.page_size, self.root, 0
        while at < len(tokens):
            child = node.children.get(int(tokens[at]))
            if child is None:
                child = Node(node, tokens[at:].copy(), at, pages[at // P : self.pool.history_pages(len(tokens))].copy())
                self.pool.retain(child.pages)
                self.nodes[child] = None
                node.children[int(tokens[at])] = child
            else:
                same = common(child.tokens, tokens[at:])
                child = self._split(child, same) if same < len(child.tokens) else child
            node, at = child, child.end
        if node.snapshot is None and not node.on_host:
            self.pool.retain(state)
            node.snapshot = Snapshot(state.copy(), hidden.clone())
            self.snapshots[node] = None
        self.use(node, resume=node.snapshot is not None)
        return node

    def _split(self, node, count):
        """Cuts `node` after `count` tokens -> the new upper part. A page that the cut goes through belongs to both."""
        P, at = self.pool.page_size, node.start + count
        first = node.start // P
        upper = Node(node.parent, node.tokens[:count], node.start, node.pages[: -(-at // P) - first], node.on_host)
        if at % P:
            self._home(node).retain(upper.pages[-1:])
        upper.used = node.used
        node.parent.children[int(node.tokens[0])] = upper
        node.parent, node.tokens, node.start, node.pages = upper, node.tokens[count:], at, node.pages[at // P - first :]
        upper.children[int(node.tokens[0])] = node
        (self.host_nodes if node.on_host else self.nodes)[upper] = None  # younger than node; the caller uses it now
        return upper

    def _home(self, node):
        return self.host if node.on_host else self.pool

    # -- shrinking

    def evict(self, free):
        """Evicts until the pool has `free` free pages or nothing is left to evict; returns whether it has."""
        while self.pool.free_pages < free:
            node = next((n for n in self.nodes if not n.pins and _is_leaf(n)), None)
            middle = None if self.host else next((n for n in self.snapshots if not n.pins), None)
            if middle and not _is_leaf(middle) and (node is None or middle.snapshot_used < node.used):
                self._drop_snapshot(middle)
            elif node is None:
                return False
            elif not (self.host and self._offload(node)):
                self._remove(node)
            self.evicted += 1
        return True

    def _drop_snapshot(self, node):
        self._home(node).release(node.snapshot.pages)
        node.snapshot = None
        self.snapshots.pop(node, None)

    def _remove(self, node):
        """Takes `node` and all below it out of the tree, then ancestors that nothing resumes from any more."""
        for child in list(node.children.values()):
            self._remove_one(child, recurse=True)
        while node.parent is not None and not node.children:
            parent = node.parent
            self._remove_one(node)
            node = parent
            if node.snapshot is not None or node.pins:
                break

    def _remove_one(self, node, recurse=False):
        for child in list(node.children.values()) if recurse else ():
            self._remove_one(child, recurse=True)
        if node.snapshot is not None:
            self._drop_snapshot(node)
        self._home(node).release(node.pages)
        (self.host_nodes if node.on_host else self.nodes).pop(node)
        del node.parent.children[int(node.tokens[0])]

    def forget(self, tokens):
        """Drops every text that begins like `tokens`: a fault was found that may lie in a page or state they share."""
        top = self.root.children.get(int(tokens[0]))
        if top is None:
            return
        below = [n for n in [*self.nodes, *self.host_nodes] if n.path()[0] is top]
        if not any(n.pins for n in below):
            self._remove_one(top, recurse=True)
        for n in below if top.pins else ():  # a transfer is under way: nothing resumes from the others
            if n.snapshot is not None and not n.pins:
                self._drop_snapshot(n)

    def clear(self):
        """Forgets everything, unless a transfer is under way."""
        if not any(n.pins for n in [*self.nodes, *self.host_nodes]):
            for child in list(self.root.children.values()):
                self._remove_one(child, recurse=True)

    # -- the host tier

    def _offload(self, node):
        """Moves a node's history and snapshot to host memory.

        False, and nothing is moved, where there is no room, or nothing resumes from it nor from what hangs on it.
        """
        need, oldest = _page_count(node), True
        node.pins += 1  # room is made by dropping others, perhaps those that hang on it
        while self.host.free_pages < need and oldest:
            oldest = next((n for n in self.host_nodes if not n.pins and not n.children), None)
            if oldest:
                self._remove(oldest)
        node.pins -= 1
        if self.host.free_pages < need or not (node.snapshot or node.children):
            return False
        self._move(node, self.pool, self.host)
        self.offloaded += 1
        return True

    def _move(self, node, source, target):
        """Copies pages and snapshot of `node` to the other tier and gives up the old ones."""
        for holder in (node, node.snapshot) if node.snapshot else (node,):
            old, new = holder.pages, target.allocate(len(holder.pages))
            self.host.copy(old, new, to_host=target is self.host)
            source.release(old)
            holder.pages = new
        node.on_host = target is self.host
        before, after = (self.nodes, self.host_nodes) if node.on_host else (self.host_nodes, self.nodes)
        del before[node]
        after[node] = None
        if node.on_host:
            self.snapshots.pop(node, None)
        elif node.snapshot:
            self.snapshots[node] = None

    def restore(self, node):
        """Starts to bring the text that ends at `node` back from the host. Returns a Transfer, or None where the pool
        has no room.

        Until `finish`, its nodes are pinned: nothing on its path is evicted.
        """
        path = node.path()
        away = [n for n in path if n.on_host]
        need = sum(_page_count(n) for n in away)
        here = sum(_page_count(n) for n in path if not n.on_host)
        if need + here > self.pool.num_pages - self.pool.live_pages:
            return None
        self._pin(path, 1)
        if not self.evict(need):
            self._pin(path, -1)
            return None
        for n in away:
            self._move(n, self.host, self.pool)
        self.restored += len(away)
        pages = np.unique(np.concatenate([holder.pages for n in path for holder in (n, n.snapshot) if holder]))
        self.pool.hold(pages)
        return Transfer(path, pages, self.host.event())

    def finish(self, transfer):
        """Ends a transfer: its text can be resumed, and evicted, like any other."""
        if (
            transfer.event is not None and not transfer.ready()
        ):  # given up early: what is queued from now on waits for it
            torch.cuda.current_stream(self.pool.slabs.device).wait_event(transfer.event)
        self._pin(transfer.path, -1)
        self.pool.drop(transfer.pages)

    def _pin(self, path, by):
        for n in path:
            n.pins += by


@dataclass
class Transfer:
    """Nodes on their way back from the host, and their pages."""

    path: list
    pages: np.ndarray
    event: object  # a CUDA event, or None where copies are immediate

    def ready(self):
        return self.event is None or self.event.query()


class HostTier(Pages):
    """Pages in (pinned) host memory, and copies to and from the pool on a stream of their own."""

    def __init__(self, pool, num_pages):
        super().__init__(num_pages)
        self.pool, slabs = pool, pool.slabs
        cuda = slabs.device.type == "cuda"
        self.memory = torch.empty(num_pages, slabs.shape[0], slabs.shape[2], dtype=torch.uint8, pin_memory=cuda)
        self.stream = torch.cuda.Stream(slabs.device) if cuda else None

    def copy(self, source, target, to_host):
        """Copies pool pages to host pages or back; on a GPU, after what is queued to write the source."""
        slabs = self.pool.slabs
        if self.stream is None:
            if to_host:
                self.memory[target] = slabs[:, source].movedim(0, 1)
            else:
                slabs[:, target] = self.memory[source].movedim(1, 0)
            return
        main = torch.cuda.current_stream(slabs.device)
        self.stream.wait_stream(main)
        with torch.cuda.stream(self.stream):
            for s, t in zip(source.tolist(), target.tolist()):
                if to_host:
                    self.memory[t].copy_(slabs[:, s], non_blocking=True)
                else:
                    slabs[:, t] = self.memory[s].to(slabs.device, non_blocking=True)
        if to_host:
            main.wait_stream(self.stream)  # the device pages are free now: their next writer comes after the copy

    def event(self):
        """An event behind all copies so far, for Transfer."""
        return self.stream.record_event() if self.stream else None


def _page_count(node):
    return len(node.pages) + (len(node.snapshot.pages) if node.snapshot else 0)


def _is_leaf(node):
    """Whether nothing in the pool hangs on this node (what is on the host may)."""
    return all(child.on_host for child in node.children.values())


def common(a, b):
    """How many leading elements two integer arrays share."""
    n = min(len(a), len(b))
    different = a[:n] != b[:n]
    return int(different.argmax()) if different.any() else n
