"""Running the model over a batch of chunks: op by op, or a whole decode step as one CUDA graph.

A decode step launches a few hundred kernels that each take microseconds: launched one by one they wait for the host. A
graph launches them as one. It is captured once per bucket (number of sequences, width of the page table, greedy or
sampled), reads its inputs from one buffer that a single copy fills, and ends with the sampled tokens, so that the host
waits once a step. Sequences that fill up a bucket have no pages (ids below 0): kernels read and write nothing for them.
"""

import numpy as np
import torch

import kernels
from cache import Batch, Part
from sampling import FILTERS, draw

SYNC_FREE = ("kda_decode", "latent_write", "mla_decode", "experts", "router")  # in PyTorch shapes depend on data
PADDING = dict(zip(FILTERS, (0.0, 1.0, 1.0, 0.0, 0.5))) | {"ids": 0, "past": 0}  # a greedy row; no pages: below 0


def bucket(n):
    """The number of sequences that a graph for n is captured with: 1, 2, 4, 8, then multiples of 8."""
    return 1 << (n - 1).bit_length() if n <= 8 else -(-n // 8) * 8


class Graph:
    """One captured decode step of B sequences with tables of W pages."""

    def __init__(self, model, pool, B, W, sampled, memory):
        self.pool, self.B, self.W = pool, B, W
        groups = max(pool.groups, 1)
        self.sizes = {"ids": 1, "past": 1, "slots": 1, "src": groups, "dst": groups, "table": W}
        self.sizes |= dict.fromkeys(FILTERS, 1)
        length = B * sum(self.sizes.values())
        self.host = torch.empty(length, dtype=torch.int64, pin_memory=True)
        self.inputs = torch.empty(length, dtype=torch.int64, device=pool.slabs.device)
        self.copied = torch.cuda.Event()
        self.rows = {name: part.numpy() for name, part in self.views(self.host).items()}
        for name in FILTERS:
            self.rows[name] = self.rows[name].view(np.float64)
        for name, shape in (("src", (-1, B)), ("dst", (-1, B)), ("table", (B, W))):
            self.rows[name] = self.rows[name].reshape(shape)
        self.fill([], np.empty(0, dtype=np.int64), [])
        x = self.views(self.inputs)
        filters = {name: x[name].view(torch.float64) for name in FILTERS}
        where = (x["past"], x["table"].view(B, W), x["src"].view(groups, B).T, x["dst"].view(groups, B).T)
        lengths, longest = [1] * B, W * pool.page_size
        part = Part(slice(0, B), lengths, [longest - 1] * B, [False] * B, longest, pool.page_size, *where)
        batch = Batch(pool, [part], x["slots"])

        def step():
            hidden = model.hidden(x["ids"], batch)
            logits = model.logits(hidden)
            return hidden, logits, *draw(logits, filters if sampled else None)

        counts = kernels.counts.copy()
        try:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # compiles kernels and creates handles; with no pages it writes nothing
                step()
            torch.cuda.current_stream().wait_stream(side)
            self.calls = kernels.counts - counts
            slow = [op for op in SYNC_FREE if self.calls[op, "torch"]]
            if slow:
                raise NotCapturable(f"{', '.join(slow)} ran in PyTorch, where shapes depend on data")
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, pool=memory):
                self.hidden, self.logits, self.tokens, self.finite = step()
        finally:  # none of these calls answered anyone
            kernels.counts.clear()
            kernels.counts.update(counts)

    def views(self, buffer):
        parts = buffer.split([self.B * n for n in self.sizes.values()])
        return dict(zip(self.sizes, parts))

    def fill(self, chunks, ids, filters):
        """Writes what a step reads, and padding, into the input buffer: one copy."""
        self.copied.synchronize()  # the host buffer may still be read
        x, n, P = self.rows, len(chunks), self.pool.page_size
        for name, part in x.items():
            part.fill(PADDING.get(name, -1))
        x["ids"][:n] = ids
        for i, c in enumerate(chunks):
            used = c.past // P + 1
            x["past"][i], x["table"][i, :used] = c.past, c.pages[:used]
            x["slots"][i] = c.pages[used - 1] * P + c.past % P
            x["src"][: len(c.src), i], x["dst"][: len(c.dst), i] = c.src, c.dst
        for name, column in zip(FILTERS, zip(*filters)):
            x[name][:n] = column
        self.inputs.copy_(self.host, non_blocking=True)
        self.copied.record()

    def __call__(self, chunks, ids, filters):
        self.fill(chunks, ids, filters)
        self.graph.replay()
        kernels.counts.update(self.calls)
        n = len(chunks)
        return self.hidden[:n].clone(), self.logits[:n], self.tokens[:n], self.finite[:n]


class NotCapturable(RuntimeError):
    pass


class Runner:
    """Runs the model over chunks in `pool`. graphs: False, or True: decode steps are captured where they can be."""

    def __init__(self, model, pool, graphs):
        self.model, self.pool = model, pool
        self.eager = None if graphs else "off"  # why no graphs are used
        self.graphs, self.replays = {}, 0  # key -> Graph, or why there is none
        self.memory = torch.cuda.graph_pool_handle() if graphs else None

    def run(self, chunks, ids):
        """ids int64 [N]: the tokens of all chunks -> hidden [R, H] of each chunk's last token."""
        last = np.cumsum([c.tokens for c in chunks]) - 1
        device = self.pool.slabs.device
        hidden = self.model.hidden(torch.from_numpy(ids).to(device), Batch.paged(self.pool, chunks))
        return hidden[torch.from_numpy(last).to(device)]

    def decode(self, chunks, ids, filters):
        """One token of each chunk as one graph -> hidden [R, H], logits [R, V], tokens [R], finite [R]
        (`sampling.draw`); None where it cannot be captured. filters: a row of `sampling.FILTERS` for each chunk.
        """
        if self.eager is not None:
            return None
        W = max(c.past // self.pool.page_size + 1 for c in chunks)
        shape = bucket(len(chunks)), 1 << (W - 1).bit_length(), any(row[0] for row in filters)
        key = shape, kernels.current()
        if key not in self.graphs:
            self.graphs[key] = self.capture(*shape)
        graph = self.graphs[key]
        if isinstance(graph, str):
            return None
        self.replays += 1
        return graph(chunks, ids, filters)

    def capture(self, B, W, sampled):
        try:
            return Graph(self.model, self.pool, B, W, sampled, self.memory)
        except NotCapturable as e:
            return str(e)
        except RuntimeError as e:  # a function of `kernels.use` that waits for the GPU, as a print does
            generator = torch.cuda.default_generators[self.pool.slabs.device.index or 0]
            generator.graphsafe_set_state(generator.clone_state())  # or PyTorch takes it to be capturing still
            if any(callable(choice) for layer in kernels.current() for _, choice in layer):
                return f"{e}".splitlines()[0]
            raise

    @property
    def stats(self):
        reasons = {graph for graph in self.graphs.values() if isinstance(graph, str)}
        captured = sum(isinstance(graph, Graph) for graph in self.graphs.values())
        off = "; ".join(sorted(reasons)) or self.eager
        return {"graphs": captured, "graph_replays": self.replays, "graphs_off": off}
