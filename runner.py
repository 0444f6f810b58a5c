"""Running a step (cache.Step) that the scheduler has planned: op by op, or a decode step as one CUDA graph.

What a step reads goes to the device in one copy (cache.Feed); what the host needs of it comes back in one. A decode
step launches a few hundred kernels that each take microseconds: launched one by one they wait for the host; a graph
launches them as one. It is captured once per bucket (number of sequences, width of the page table, greedy or sampled).
Sequences that fill up a bucket have no pages (ids below 0): kernels read and write nothing for them.
"""

from collections import OrderedDict
from dataclasses import dataclass

import torch

import kernels
from cache import Batch, Feed, table_width
from sampling import logprobs, sample

SYNC_FREE = ("kda_decode", "latent_write", "mla_decode", "experts", "router")  # in PyTorch shapes depend on data
GRAPHS = 64  # captured graphs that are kept: those used last


@dataclass
class Result:
    """What a step gave.

    hidden: of each chunk's last token, before the final norm, [H] on the device. On the host: sound: for each chunk,
    whether that is free of faults (NaN); and for each request that chooses, in the step's order: tokens; finite:
    whether its logits were; logprobs: {id: log-probability}, the token's own first, or None. cold: whether time went
    into capturing or compiling.
    """

    hidden: list
    sound: list
    tokens: list
    finite: list
    logprobs: list
    cold: bool = False


class Runner:
    """Runs the model over `pool` as a step says. graphs: False, or True: decode steps are captured where possible."""

    def __init__(self, model, pool, graphs):
        self.model, self.pool = model, pool
        self.eager = None if graphs else "off"  # why no graphs are used
        self.graphs = OrderedDict()  # key -> Graph, or why there is none; least recently used first
        self.replays = self.captures = 0
        self.memory = torch.cuda.graph_pool_handle() if graphs else None

    def run(self, step):
        """step: cache.Step -> Result. The host waits for the device at the end, and nowhere else."""
        before = self.captures, kernels.compilations()
        graph = self.graph(step) if step.is_decode else None
        result = self.download(step, *(graph(step) if graph else self.forward(step)))
        result.cold = before != (self.captures, kernels.compilations())
        return result

    def forward(self, step):
        """Op by op -> hidden [B, H] of each chunk's last token, logits [R, V], tokens and finite [R] of the choices."""
        chunks = step.chunks
        feed = Feed(self.pool, len(step.ids), len(chunks), table_width(self.pool, chunks), len(step.filters))
        feed.fill(chunks, step.ids, step.filters)
        x, hidden = feed.upload(), []
        if chunks:
            sizes = zip(*((c.tokens, c.past, c.follows) for c in chunks))
            hidden = self.model.hidden(x["ids"], Batch.fed(self.pool, x, *sizes))
            hidden = hidden if len(hidden) == len(chunks) else hidden[x["last"]]
        rows = [*(hidden[i] for i in step.ends), *step.held]
        if not rows:
            return hidden, None, *torch.empty(2, 0, device=hidden.device)
        logits = self.model.logits(torch.stack(rows))
        return hidden, logits, *sample(logits, x["filters"] if step.sampled else None)

    def download(self, step, hidden, logits, tokens, finite):
        """Brings to the host, in one copy, what it has to know -> Result."""
        sound = finite if step.is_decode else hidden.isfinite().all(-1) if step.chunks else finite[:0]
        most = max((n for n in step.logprobs if n is not None), default=None)
        wanted = () if most is None else logprobs(logits, tokens, most)
        parts = [x.flatten().double() for x in (sound, tokens, finite, *wanted)]
        sound, tokens, finite, *wanted = (x.tolist() for x in torch.cat(parts).cpu().split([len(x) for x in parts]))
        rows, each = [None] * len(tokens), len(wanted[0]) // len(tokens) if wanted else 0
        for i, n in enumerate(step.logprobs):
            if n is not None:
                values, ids = (x[i * each : i * each + 1 + n] for x in wanted)
                rows[i] = {int(token): value for token, value in zip(ids, values)}
        return Result(list(hidden), [*map(bool, sound)], [*map(int, tokens)], [*map(bool, finite)], rows)

    # ------------------------------------------------------------ graphs

    def graph(self, step):
        """The graph for a step of one token of each sequence; None where it cannot be captured."""
        if self.eager is not None:
            return None
        width = table_width(self.pool, step.chunks)
        shape = bucket(len(step.chunks)), 1 << (width - 1).bit_length(), step.sampled
        key = shape, kernels.current()
        if key not in self.graphs:
            self.graphs[key] = self.capture(*shape)
            while len(self.graphs) > GRAPHS:
                self.graphs.popitem(last=False)
        self.graphs.move_to_end(key)
        graph = self.graphs[key]
        self.replays += not isinstance(graph, str)
        return None if isinstance(graph, str) else graph

    def capture(self, B, W, sampled):
        """-> Graph, or in words why there is none."""
        self.captures += 1
        try:
            return Graph(self.model, self.pool, B, W, sampled, self.memory)
        except NotCapturable as e:
            return str(e)
        except RuntimeError as e:
            reason = self.end_capture(e)
        if "out of memory" in reason:
            torch.cuda.empty_cache()
            return f"no memory to capture {B} sequences with tables of {W} pages"
        return reason

    def end_capture(self, error):
        """Leaves no capture behind -> the error in a line. Raises it, unless memory is short or it is a user's doing: a
        function of `kernels.use` that waits for the GPU, as a print does, cannot be captured."""
        index = self.pool.device.index or 0
        for generator in torch.cuda.default_generators[index : index + 1]:
            generator.graphsafe_set_state(generator.clone_state())  # or PyTorch takes it to be capturing still
        if "out of memory" not in str(error) and not any(
            callable(choice) for layer in kernels.current() for _, choice in layer
        ):
            raise error
        return str(error).splitlines()[0]

    @property
    def stats(self):
        reasons = {graph for graph in self.graphs.values() if isinstance(graph, str)}
        captured = sum(isinstance(graph, Graph) for graph in self.graphs.values())
        off = "; ".join(sorted(reasons)) or self.eager
        return {"graphs": captured, "graph_replays": self.replays, "graphs_off": off}


def bucket(n):
    """The number of sequences that a graph for n is captured with: 1, 2, 4, 8, then multiples of 8."""
    return 1 << (n - 1).bit_length() if n <= 8 else -(-n // 8) * 8


class NotCapturable(RuntimeError):
    pass


class Graph:
    """One captured decode step of B sequences with tables of W pages. Its logits are gone once the tokens are chosen:
    graphs share the memory of what they compute on the way.
    """

    def __init__(self, model, pool, B, W, sampled, memory):
        self.model, self.feed, self.copied = model, Feed(pool, B, B, W, B), torch.cuda.Event()
        self.inputs = torch.empty_like(self.feed.host, device=pool.device)
        self.write([], [], [])
        x, longest = self.feed.views(self.inputs), W * pool.page_size
        batch = Batch.fed(pool, x, [1] * B, [longest - 1] * B, [False] * B)

        def run():
            hidden = model.hidden(x["ids"], batch)
            return hidden, *sample(model.logits(hidden), x["filters"] if sampled else None)

        counts = kernels.counts.copy()
        try:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # compiles kernels and creates handles; with no pages it writes nothing
                run()
            torch.cuda.current_stream().wait_stream(side)
            self.calls = kernels.counts - counts
            slow = [op for op in SYNC_FREE if self.calls[op, "torch"]]
            if slow:
                raise NotCapturable(f"{', '.join(slow)} ran in PyTorch, where shapes depend on data")
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, pool=memory):
                self.hidden, self.tokens, self.finite = run()
        finally:  # none of these calls answered anyone
            kernels.counts.clear()
            kernels.counts.update(counts)

    def write(self, chunks, ids, filters):
        self.copied.synchronize()  # the host buffer may still be read
        self.feed.fill(chunks, ids, filters)
        self.inputs.copy_(self.feed.host, non_blocking=True)
        self.copied.record()

    def __call__(self, step):
        """As Runner.forward; the logits are computed again where they are asked for."""
        self.write(step.chunks, step.ids, step.filters)
        self.graph.replay()
        kernels.counts.update(self.calls)
        n = len(step.chunks)
        logits = self.model.logits(self.hidden)[:n] if any(k is not None for k in step.logprobs) else None
        return self.hidden[:n].clone(), logits, self.tokens[:n], self.finite[:n]
