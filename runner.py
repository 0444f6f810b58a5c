"""Running a step (cache.Step) that the scheduler has planned: op by op, or a decode step as one CUDA graph.

What a step reads goes to the device in one copy (cache.Feed); what the host needs of it comes back in one. A decode
step launches a few hundred kernels that each take microseconds: launched one by one they wait for the host; a graph
launches them as one. It is captured once per bucket (number of sequences, width of the page table, drafts, what the
sampler does), and holds all of a cycle: draft, verify, accept, commit. Sequences that fill up a bucket have no pages
(ids below 0): kernels read and write nothing for them.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

import kernels
from cache import Batch, Chunk, Feed, Step, bucket, table_width, wide_enough
from draft import accept
from kda import KDA, kda_commit
from sampling import Choice, logprobs, sample

# in PyTorch shapes depend on data
SYNC_FREE = ("kda_decode", "kda_verify", "kda_commit", "latent_write", "mla_decode", "experts", "router")
GRAPHS = 64  # captured graphs that are kept: those used last


@dataclass
class Result:
    """What a step gave.

    hidden: for each chunk that of its last token, [H] on the device, before the final norm; where it has drafts, [T, H]
    of all its tokens. On the host: sound: for each chunk, whether it is free of faults (NaN); and for each request that
    chooses, in the step's order: tokens; finite: whether the logits of each were; logprobs: of each a dict
    {id: log-probability}, the token's own first, or None; kept: of each chunk with drafts, how many of these were
    right. cold: whether time went into capturing or compiling.
    """

    hidden: list
    sound: list
    tokens: list
    finite: list
    logprobs: list
    kept: list
    cold: bool = False


class Computed(NamedTuple):
    """What a step leaves on the device: hidden [N, H]; logits [R, V], tokens and finite [R] of each choice; counts [2,
    B]: of each sequence with drafts, tokens for its answer, and drafts that were right. drafted: cache.Part of these.
    """

    hidden: torch.Tensor
    logits: torch.Tensor
    tokens: torch.Tensor
    finite: torch.Tensor
    counts: torch.Tensor
    drafted: object = None


class Runner:
    """Runs the model over `pool` as a step says. graphs: False, or True: decode steps are captured where possible; mtp:
    draft.MTP, which drafts on the device, or None."""

    def __init__(self, model, pool, graphs, mtp=None):
        self.model, self.pool, self.mtp = model, pool, mtp
        self.eager = None if graphs else "off"  # why no graphs are used
        self.graphs = OrderedDict()  # key -> Graph, or why there is none; least recently used first
        self.replays = self.captures = 0
        self.memory = torch.cuda.graph_pool_handle() if graphs else None
        self.last = None  # the part with drafts of the last step

    def run(self, step):
        """step: cache.Step -> Result. The host waits for the device at the end, and nowhere else."""
        before = self.captures, kernels.compilations()
        graph = self.graph(step) if step.is_decode else None
        computed = graph(step) if graph else self.forward(step)
        self.last = computed.drafted
        result = self.download(step, computed)
        result.cold = before != (self.captures, kernels.compilations())
        return result

    def forward(self, step):
        """Op by op."""
        chunks, rows = step.chunks, step.rows
        feed = Feed(self.pool, len(step.ids), len(chunks), table_width(self.pool, chunks), rows.shape[1])
        feed.fill(chunks, step.ids, rows if rows.size else None, step.choices)
        return self.compute(step, feed.upload(), self.mtp and self.mtp.stack(step.before), step.kind)

    def compute(self, step, x, before, kind):
        """All that a step does on the device, from the tensors x of its Feed -> Computed. before [n, H]: h of the token
        ahead of each chunk, for those with drafts or more than one token, where there is an MTP layer.
        """
        hidden = drafted = mine = counts = None
        if step.chunks:
            batch = Batch.fed(self.pool, x, step.chunks)
            drafted = batch.drafted
            if drafted:
                mine = self.drafted_rows(step, x, drafted)
                if self.mtp:
                    self.mtp.draft(drafted, mine["ids"], mine["slots"], before, mine["filters"], mine["draws"], kind)
            hidden = self.model.hidden(x["ids"], batch)
            if self.mtp and not (batch.parts[-1].decode or batch.parts[-1].drafts):
                self.mtp.write_prompts(batch.parts[-1], x, hidden, before)
        rows = [hidden if step.is_decode else hidden[x["rows"][: len(x["rows"]) - len(step.held)]]] if step.ends else []
        rows += [torch.stack(step.held)] if step.held else []
        if not rows:
            return Computed(hidden, None, *hidden.new_empty(2, 0), None, None)
        logits = self.model.logits(torch.cat(rows) if len(rows) > 1 else rows[0])
        tokens, finite = sample(logits, x["filters"], x["draws"], kind)
        if drafted:
            chosen = tokens[mine["choices"]].view_as(mine["ids"])
            taken, right = accept(mine["ids"], chosen, mine["stops"], mine["room"])
            counts = torch.stack([taken, right])
            self.commit(drafted, drafted.dst, taken)
            if self.mtp:
                self.mtp.write_drafts(mine["ids"], mine["slots"], hidden[drafted.rows], taken)
        return Computed(hidden, logits, tokens, finite, counts, drafted)

    def drafted_rows(self, step, x, part):
        """What of a Feed is of the part with drafts: B sequences, a token and its drafts each."""
        B, T = len(part.lengths), part.drafts + 1
        first = next(i for i, end in enumerate(step.ends) if step.chunks[end].drafts)  # plain decodes stand before
        choices = slice(first, first + B * T)
        mine = {name: x[name][part.rows].view(B, T) for name in ("ids", "slots")}
        mine |= {name: x[name][:, choices].unflatten(1, (B, T)) for name in ("filters", "draws")}
        return mine | {"stops": x["stops"][:, choices][:, ::T], "room": x["room"][choices][::T], "choices": choices}

    def commit(self, part, dst, taken):
        """The KDA states of the sequences of a part after so many of their tokens [B] int32, to pages dst."""
        weights = [layer.self_attn.weights() for layer in self.model.layers if isinstance(layer.self_attn, KDA)]
        if weights:
            kda_commit(part.raw, weights, self.pool, part.src, dst, part.past, taken, part.drafts + 1)

    def commit_less(self, index, taken):
        """Again, for one sequence of the last step's part with drafts: its answer ended before what was accepted. Its
        state before the step is there still: src is another page than dst."""
        part = self.last
        dst, count = torch.full_like(part.dst, -1), torch.zeros_like(part.past)
        dst[index], count[index] = part.dst[index], taken
        self.commit(part, dst, count)

    def download(self, step, computed):
        """Brings to the host, in one copy, what it has to know -> Result."""
        hidden, logits, tokens, finite, counts, _ = computed
        ends = np.cumsum([c.tokens for c in step.chunks], dtype=np.int64) - 1
        sound = finite[:0]
        if not step.is_decode and step.chunks:  # else `finite` says it
            sound = hidden[torch.from_numpy(ends).to(hidden.device)].isfinite().all(-1)
        most = max((choice.logprobs for choice in step.choices if choice.logprobs is not None), default=None)
        wanted = () if most is None else logprobs(logits, tokens, most)
        counts = finite[:0] if counts is None else counts
        parts = [x.flatten().double() for x in (sound, tokens, finite, counts, *wanted)]
        parts = torch.cat(parts).cpu().split([len(x) for x in parts])
        sound, tokens, finite, counts, *wanted = (x.tolist() for x in parts)
        taken, kept = (list(map(int, half)) for half in np.reshape(counts, (2, -1)))
        each, row, take = len(wanted[0]) // len(tokens) if wanted else 0, 0, iter(taken)
        result = Result([], [], [], [], [], kept)
        for i, (end, chunk) in enumerate(zip(ends.tolist(), step.chunks)):
            result.hidden.append(hidden[end - chunk.drafts : end + 1] if chunk.drafts else hidden[end])
            # of a decode, and of what has drafts, `finite` speaks
            result.sound.append(bool(sound[i]) if sound and not chunk.drafts else chunk.drafts > 0 or bool(finite[i]))
        drafts = [step.chunks[end].drafts for end in step.ends] + [0] * len(step.held)
        for choice, m in zip(step.choices, drafts):
            n = next(take) if m else 1
            result.tokens.append([int(t) for t in tokens[row : row + n]])
            result.finite.append([bool(f) for f in finite[row : row + n]])
            result.logprobs.append([None] * n)
            if choice.logprobs is not None:
                few = min(each, 1 + choice.logprobs)
                cut = [slice(i * each, i * each + few) for i in range(row, row + n)]
                result.logprobs[-1] = [dict(zip(map(int, wanted[1][c]), wanted[0][c])) for c in cut]
            row += 1 + m
        return result

    # ------------------------------------------------------------ graphs

    def graph(self, step):
        """The graph for a step of one token of each sequence, and its drafts; None where it cannot be captured."""
        if self.eager is not None:
            return None
        width = wide_enough(table_width(self.pool, step.chunks))
        shape = bucket(len(step.chunks)), width, step.drafts, step.kind
        key = shape, kernels.current()
        if key not in self.graphs:
            self.graphs[key] = self.capture(*shape)
            while len(self.graphs) > GRAPHS:
                self.graphs.popitem(last=False)
        self.graphs.move_to_end(key)
        graph = self.graphs[key]
        self.replays += not isinstance(graph, str)
        return None if isinstance(graph, str) else graph

    def capture(self, B, W, drafts, kind):
        """-> Graph, or in words why there is none."""
        self.captures += 1
        try:
            return Graph(self, B, W, drafts, kind)
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


class NotCapturable(RuntimeError):
    pass


class Graph:
    """One captured cycle of B sequences, each a token and its drafts, with tables of W pages. Its logits are gone once
    the tokens are chosen: graphs share the memory of what they compute on the way.
    """

    def __init__(self, runner, B, W, drafts, kind):
        self.runner, self.T, self.pool = runner, drafts + 1, runner.pool
        self.feed, self.copied = Feed(self.pool, B * self.T, B, W, B * self.T), torch.cuda.Event()
        self.inputs = torch.empty_like(self.feed.host, device=self.pool.device)
        self.before = runner.mtp.stack([None] * B) if runner.mtp and drafts else None
        past = W * self.pool.page_size - self.T
        none = [Chunk(self.T, past, *[()] * 3, drafts=drafts) for _ in range(B)]
        self.step = Step.decode(none, [0] * (B * self.T), [Choice()] * B)
        self.write([], [], None, ())
        x = self.feed.views(self.inputs)

        def run():
            return runner.compute(self.step, x, self.before, kind)._replace(logits=None)

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
            with torch.cuda.graph(self.graph, pool=runner.memory):
                self.computed = run()
        finally:  # none of these calls answered anyone
            kernels.counts.clear()
            kernels.counts.update(counts)

    def write(self, chunks, ids, rows, choices):
        self.copied.synchronize()  # the host buffer may still be read
        self.feed.fill(chunks, ids, rows, choices)
        self.inputs.copy_(self.feed.host, non_blocking=True)
        self.copied.record()

    def __call__(self, step):
        """As Runner.forward; the logits are computed again where they are asked for."""
        self.write(step.chunks, step.ids, step.rows, step.choices)
        B = len(step.chunks)
        if self.before is not None:
            torch.stack(step.before, out=self.before[:B])
        self.graph.replay()
        kernels.counts.update(self.calls)
        hidden, _, tokens, finite, counts, drafted = self.computed
        hidden = hidden[: B * self.T].clone()
        logits = None
        if any(choice.logprobs is not None for choice in step.choices):
            logits = self.runner.model.logits(hidden)
        counts = None if counts is None else counts[:, :B]
        return Computed(hidden, logits, tokens[: B * self.T], finite[: B * self.T], counts, drafted)
