"""The prefix cache: which texts the pool still holds, where they can be resumed, and the host tier behind it.

A radix tree over token ids. Its nodes own pages of history and, at their end, a snapshot of the recurrent state; a
prefix can be resumed where it has both. Pages move between the pool and host memory as copies that run beside the
model: rows that are on their way are never read, and pages that are being read are not free before the copy is done.
"""

import weakref
from collections import OrderedDict, deque
from dataclasses import dataclass

import numpy as np
import torch

from cache import Pages


@dataclass
class Snapshot:
    """The state after the last token of a node: one page per group, and the hidden before the final norm [H]."""

    pages: np.ndarray
    hidden: torch.Tensor


class Node:
    """An edge of the tree: tokens [start, end) of every text that passes here, their pages, and a snapshot at the end
    or None.

    pages: of page indices start // P ... (end - 1) // P. Where start lies inside a page, the first holds the rows
    before it too. on_host: whether they are pages of the host tier; arriving: its rows are on their way to the pool;
    pins: transfers that need it to stay.
    """

    __slots__ = ("parent", "tokens", "start", "pages", "snapshot", "children", "used", "snapshot_used")
    __slots__ += ("on_host", "arriving", "pins")

    def __init__(self, parent, tokens, start, pages, on_host=False):
        self.parent, self.tokens, self.start, self.pages, self.on_host = parent, tokens, start, pages, on_host
        self.snapshot, self.children, self.used, self.snapshot_used = None, {}, 0, 0
        self.arriving, self.pins = False, 0

    @property
    def end(self):
        return self.start + len(self.tokens)

    def path(self):
        """The nodes from the root's child down to this one."""
        nodes, node = [], self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def subtree(self):
        """This node and all that hangs on it, parents first."""
        nodes = [self]
        for node in nodes:
            nodes += node.children.values()
        return nodes

    def holders(self):
        """What of this node has pages: itself, and its snapshot."""
        return (self, self.snapshot) if self.snapshot else (self,)


@dataclass(eq=False)
class Transfer:
    """A text on its way back from the host: the nodes of its path, pinned, and their pages, held until it is done."""

    nodes: list
    pages: np.ndarray
    event: object
    done: bool = False


class PrefixCache:
    """A radix tree over token ids whose nodes own pages of `pool`, and of host memory once they are evicted.

    Least recently used is evicted first. Using a prefix uses all its ancestors later than itself, so the oldest node
    has no younger child: it is a leaf. It goes to the host, history and state together, or is dropped where there is
    none. Without a host tier a snapshot in the middle of a text also ages by itself, used only when something resumes
    from it: longer texts outlive it. version: changes whenever what `match` finds may have changed.
    """

    def __init__(self, pool, host_pages=0):
        self.pool = pool
        self.host = HostTier(pool, host_pages) if host_pages else None
        self.root = Node(None, np.empty(0, np.int32), 0, np.empty(0, np.int64))
        # Least recently used first: nodes in the pool, on the host, and those in the pool that have a snapshot.
        self.nodes, self.host_nodes, self.snapshots = OrderedDict(), OrderedDict(), OrderedDict()
        self.transfers = []  # under way to the pool
        self.leaving = deque()  # (event, pages, how many of them it frees): copies to the host that are not done
        self.leaving_pages, self._left = 0, np.zeros(pool.num_pages, dtype=np.int32)  # _left: references of these
        self._clock = self.version = 0
        self.evicted = self.offloaded = self.restored = 0  # nodes, since the start

    # ------------------------------------------------------------ finding

    def match(self, tokens, here=False):
        """-> (the deepest node that `tokens` can resume from, or None; how many leading tokens the tree knows at all).

        here: only what is in the pool, not on the host nor on its way from there.
        """
        node, at, best = self.root, 0, None
        while at < len(tokens):
            child = node.children.get(int(tokens[at]))
            if child is None:
                break
            same = common(child.tokens, tokens[at:])
            at += same
            if same < len(child.tokens) or (here and (child.on_host or child.arriving)):
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
            self._order(node).move_to_end(node)
            node = node.parent

    def _order(self, node):
        return self.host_nodes if node.on_host else self.nodes

    def _home(self, node):
        return self.host if node.on_host else self.pool

    # ------------------------------------------------------------ growing

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
                self.version += 1
            else:
                same = common(child.tokens, tokens[at:])
                child = self._split(child, same) if same < len(child.tokens) else child
            node, at = child, child.end
        if node.snapshot is None and not node.on_host:
            self.pool.retain(state)
            node.snapshot = Snapshot(state.copy(), hidden.clone())
            self.snapshots[node] = None
            self.version += 1
        self.use(node, resume=node.snapshot is not None)
        return node

    def _split(self, node, count):
        """Cuts `node` after `count` tokens -> the new upper part. A page that the cut goes through belongs to both; so
        does a transfer that is under way."""
        P, at = self.pool.page_size, node.start + count
        first = node.start // P
        upper = Node(node.parent, node.tokens[:count], node.start, node.pages[: -(-at // P) - first], node.on_host)
        if at % P:
            self._home(node).retain(upper.pages[-1:])
        upper.used, upper.arriving, upper.pins = node.used, node.arriving, node.pins
        for transfer in self.transfers:
            transfer.nodes += [upper] if node in transfer.nodes else []
        node.parent.children[int(node.tokens[0])] = upper
        node.parent, node.tokens, node.start, node.pages = upper, node.tokens[count:], at, node.pages[at // P - first :]
        upper.children[int(node.tokens[0])] = node
        self._order(node)[upper] = None  # younger than node; the caller uses it now
        self.version += 1
        return upper

    # ------------------------------------------------------------ shrinking

    def evict(self, free, wait=True):
        """Evicts until the pool has `free` free pages or nothing is left to evict; returns whether it has.

        Pages that are being copied to the host are free when the copy is done. wait: where that is too late, what is
        queued on the device from now on waits for it; else the answer is False, and later it may be True.
        """
        while self.pool.free_pages + self.leaving_pages < free and self._evict_one():
            pass
        self.settle()
        while wait and self.pool.free_pages < free and self.leaving:
            self.leaving[0][0].wait()
            self._end_leaving()
        return self.pool.free_pages >= free

    def _evict_one(self):
        """Evicts the least recently used node or snapshot; False if there is none."""
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
        freed = self._home(node).release(node.snapshot.pages)
        node.snapshot = None
        self.snapshots.pop(node, None)
        self.version += 1
        return [] if node.on_host else freed

    def _remove(self, node):
        """Takes `node` and all below it out of the tree, then ancestors that nothing resumes from any more. Returns the
        pages of the pool that are free now."""
        freed = []
        for n in reversed(node.subtree()):
            freed += self._remove_one(n)
        parent = node.parent
        while parent.parent is not None and not (parent.children or parent.snapshot or parent.pins):
            freed += self._remove_one(parent)
            parent = parent.parent
        return freed

    def _remove_one(self, node):
        freed = self._drop_snapshot(node) if node.snapshot else []
        pages = self._home(node).release(node.pages)
        del self._order(node)[node], node.parent.children[int(node.tokens[0])]
        self.version += 1
        return freed if node.on_host else freed + pages

    def forget(self, tokens, prompt):
        """A fault (NaN) was found in the text `tokens`, which began as a prompt of so many: drops what only this text
        has, the prompt's own end with all that hangs on it, and whatever holds a fault of those parts that it shares,
        with all that hangs on them. Pages that become free are zeroed.
        """
        node, at, path = self.root, 0, []
        while at < len(tokens) and (node := node.children.get(int(tokens[at]))):
            at += len(node.tokens)
            if at > len(tokens) or common(node.tokens, tokens[node.start :]) < len(node.tokens):
                break
            path.append(node)
        own = next((i for i, n in enumerate(path) if n.end >= prompt), len(path))
        while own and len(path[own - 1].children) <= (own < len(path)):  # up to where another text leaves
            own -= 1
        own = next((i for i, n in enumerate(path[:own]) if self._faulty(n)), own)
        if own < len(path):
            self.pool.scrub(self._remove(path[own]))

    def _faulty(self, node):
        if node.on_host or node.arriving:  # this text cannot have read it
            return False
        P, at = self.pool.page_size, np.arange(node.start, node.end)
        slots = node.pages[at // P - node.start // P] * P + at % P
        found = not self.pool.finite(slots, node.snapshot.pages if node.snapshot else None)
        return found or bool(node.snapshot and not node.snapshot.hidden.isfinite().all())

    def clear(self):
        """Forgets everything."""
        for node in list(self.root.children.values()):
            self._remove(node)

    # ------------------------------------------------------------ the host tier

    def here(self, node):
        """Whether all rows of the text that ends at `node` are in the pool: none on the host, none on its way."""
        return not any(n.on_host or n.arriving for n in node.path())

    def settle(self):
        """Ends the copies that are done: what has come can be resumed, and pages that have left are free."""
        while self.leaving and self.leaving[0][0].query():
            self._end_leaving()
        for transfer in [t for t in self.transfers if t.event.query()]:
            self._end(transfer)

    def _end_leaving(self):
        _, pages, frees = self.leaving.popleft()
        self.leaving_pages -= frees
        self._left[pages] -= 1
        self.pool.release(pages)

    def _end(self, transfer):
        transfer.event.wait()  # done here; another rank may be later, and its next kernels wait for it
        for n in transfer.nodes:
            n.pins, n.arriving = n.pins - 1, False
        self.pool.drop(transfer.pages)
        self.transfers.remove(transfer)
        transfer.done = True
        self.version += 1

    @property
    def busy(self):
        """Whether copies are under way: what has no room now may have it later."""
        return bool(self.leaving or self.transfers)

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
        pages = self._move(node, self.host)
        self._left[pages] += 1
        frees = int((self.pool.references[pages] == self._left[pages]).sum())
        self.leaving.append((self.host.event(), pages, frees))
        self.leaving_pages += frees
        self.offloaded += 1
        return True

    def _move(self, node, target):
        """Starts to copy pages and snapshot of `node` to the other tier -> the pages that it had in this one."""
        left = []
        for holder in node.holders():
            new = target.allocate(len(holder.pages))
            self.host.copy(holder.pages, new, to_host=target is self.host)
            left.append(holder.pages)
            holder.pages = new
        del self._order(node)[node]
        node.on_host, node.arriving = target is self.host, target is not self.host
        self._order(node)[node] = None
        if node.on_host:
            self.snapshots.pop(node, None)
        elif node.snapshot:
            self.snapshots[node] = None
        self.version += 1
        return np.concatenate(left)

    def room_for(self, node):
        """Whether the pool can hold the text that ends at `node`, which is partly on the host, beside what is live."""
        path = node.path()
        here = [h.pages for n in path if not n.on_host for h in n.holders()]
        idle = np.unique(np.concatenate(here)) if here else np.empty(0, dtype=np.int64)
        need = sum(_page_count(n) for n in path if n.on_host) + int((self.pool.live[idle] == 0).sum())
        return need <= self.pool.num_pages - self.pool.live_pages

    def restore(self, node):
        """Starts to bring the text that ends at `node` back from the host -> a Transfer; None where pages that are on
        their way to the host have to be waited for. Until it is done its nodes are pinned: nothing on its path is
        evicted, and nothing reads what has not arrived.
        """
        path = node.path()
        away = [n for n in path if n.on_host]
        for n in path:
            n.pins += 1
        if not self.evict(sum(map(_page_count, away)), wait=False):
            for n in path:
                n.pins -= 1
            return None
        for n in away:
            self.host.release(self._move(n, self.pool))  # whoever takes these host pages writes after the copy
        self.restored += len(away)
        pages = np.unique(np.concatenate([h.pages for n in path for h in n.holders()]))
        self.pool.hold(pages)
        transfer = Transfer(path, pages, self.host.event())
        self.transfers.append(transfer)
        self.settle()  # on a CPU it is done already
        return transfer


class HostTier(Pages):
    """Pages in host memory, pinned where there is a GPU, and copies to and from the pool on a stream of their own.

    Copies run in the order in which they are asked for.
    """

    def __init__(self, pool, num_pages):
        super().__init__(num_pages)
        self.pool, self.stream = pool, None
        self.memory = torch.empty(num_pages, pool.slabs.shape[0], pool.slabs.shape[2], dtype=torch.uint8)
        if pool.device.type == "cuda":
            self.stream = torch.cuda.Stream(pool.device)
            self._pin()

    def _pin(self):
        """Pins the memory for as long as this lives. PyTorch's own pinned allocator rounds up to a power of two."""
        cuda, at = torch.cuda.cudart(), self.memory.data_ptr()
        torch.cuda.check_error(cuda.cudaHostRegister(at, self.memory.nbytes, 0))
        weakref.finalize(self, lambda stream: (stream.synchronize(), cuda.cudaHostUnregister(at)), self.stream)

    def copy(self, source, target, to_host):
        """Queues the copy of pool pages to host pages or back, behind what is queued to use either."""
        slabs = self.pool.slabs
        if self.stream is None:
            if to_host:
                self.memory[target] = slabs[:, source].movedim(0, 1)
            else:
                slabs[:, target] = self.memory[source].movedim(1, 0)
            return
        self.stream.wait_stream(torch.cuda.current_stream(slabs.device))
        with torch.cuda.stream(self.stream):
            for s, t in zip(source.tolist(), target.tolist()):
                if to_host:
                    self.memory[t].copy_(slabs[:, s], non_blocking=True)
                else:
                    slabs[:, t] = self.memory[s].to(slabs.device, non_blocking=True)

    def event(self):
        """An event behind all copies so far: query() says whether they are done, and after wait() what is queued on
        the device runs behind them."""
        return self.stream.record_event() if self.stream else Done()


class Done:
    """The event of copies that are done when they are asked for."""

    query = staticmethod(lambda: True)
    wait = staticmethod(lambda: None)


def _page_count(node):
    return sum(len(holder.pages) for holder in node.holders())


def _is_leaf(node):
    """Whether nothing in the pool hangs on this node (what is on the host may)."""
    return all(child.on_host for child in node.children.values())


def common(a, b):
    """How many leading elements two integer arrays share. Reads little more than that."""
    n, at, step = min(len(a), len(b)), 0, 64
    while at < n:
        different = a[at : min(at + step, n)] != b[at : min(at + step, n)]
        if different.any():
            return at + int(different.argmax())
        at, step = at + step, 4 * step
    return n
