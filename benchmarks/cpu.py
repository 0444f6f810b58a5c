"""The engine on one CPU core, and beside it another checkout of it, both in processes of their own that take turns."""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.report import print_table

HERE = Path(__file__).resolve()
PROMPT = 32  # tokens of each sequence that decodes


# ---------------------------------------------------------------- a process that measures


class Worker:
    """An engine; each line of standard input is answered by one of standard output."""

    def __init__(self, model, seed):
        import torch

        from engine import Engine, SamplingParams

        torch.set_num_threads(1)
        self.engine = Engine(model, dtype=torch.float32, device="cpu", prefix_cache=False)
        self.draw = torch.Generator().manual_seed(seed)
        self.params = lambda n: SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True)
        self.read(4)  # the first text

    def ids(self, n):
        import torch

        return torch.randint(3, self.engine.cfg.vocab_size * 7 // 8, (n,), generator=self.draw).tolist()

    @contextlib.contextmanager
    def decoding(self, sequences):
        """Within it so many sequences bring a token each in every step."""
        requests = [self.engine.add(self.ids(PROMPT), self.params(1000)) for _ in range(sequences)]
        self.engine.step()  # their prompts
        self.engine.step()
        yield
        for request in requests:
            self.engine.abort(request)
        self.engine.step()

    def decode(self, sequences, steps):
        """-> tokens/s."""
        with self.decoding(sequences):
            begin = time.perf_counter()
            for _ in range(steps):
                self.engine.step()
            return sequences * steps / (time.perf_counter() - begin)

    def read(self, tokens):
        """-> prompt tokens/s, up to the first token of the answer."""
        begin = time.perf_counter()
        self.engine.generate(self.ids(tokens), self.params(1))
        return tokens / (time.perf_counter() - begin)

    def operations(self, nested):
        """Of a token: all that PyTorch counts, or those that are called, without what these call in turn."""
        from torch.profiler import ProfilerActivity, profile
        from torch.utils._python_dispatch import TorchDispatchMode

        class Count(TorchDispatchMode):
            seen = 0

            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                Count.seen += 1
                return function(*args, **(kwargs or {}))

        with self.decoding(1), profile(activities=[ProfilerActivity.CPU]) if nested else Count() as seen:
            self.engine.step()
        return sum(event.name.startswith("aten::") for event in seen.events()) if nested else Count.seen


def serve(model, seed):
    worker = Worker(model, int(seed))
    print("ready", flush=True)
    for line in sys.stdin:
        name, *args = json.loads(line)
        print(json.dumps(getattr(worker, name)(*args)), flush=True)


# ---------------------------------------------------------------- those who ask


class Checkout:
    """A worker in a folder, and the seconds from its start to its first text."""

    def __init__(self, folder, args):
        code = f"import runpy; runpy.run_path({str(HERE)!r})['serve']({str(args.model)!r}, {args.seed})"
        begin, env = time.perf_counter(), os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], cwd=folder, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        if self.process.stdout.readline() != "ready\n":
            self.process.wait()
            raise ValueError(f"the engine in {folder} could not be started; what it said is above")
        self.start = time.perf_counter() - begin

    def ask(self, *request):
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def cpu(args):
    """One core of a CPU: decode, prompts, operations, start-up; --against another checkout, in turns.

    float32, the median of several rounds. A ratio above 1 is better. Operations are PyTorch's: those that are called,
    and all that it counts, with those that they call in turn.
    """
    args.model = Path(args.model).resolve()
    folders = {"now": HERE.parent.parent} | ({"before": Path(args.against).resolve()} if args.against else {})
    for folder in folders.values():
        if not (folder / "engine.py").exists():
            raise FileNotFoundError(f"--against {folder}: there is no engine.py")
    rounds, steps, prompt = (1, 4, 200) if args.quick else (7, 40, 2000)
    asked = {
        "decode, 1 sequence (tokens/s)": ("decode", 1, steps),
        "decode, 8 sequences (tokens/s)": ("decode", 8, steps),
        f"prompt of {prompt} (tokens/s)": ("read", prompt),
        "operations called, a token": ("operations", False),
        "operations in all, a token": ("operations", True),
    }
    seen = {name: {who: [] for who in folders} for name in (*asked, "first text after start (s)")}
    workers = {}
    try:
        for _ in range(rounds):
            for who, folder in folders.items():
                if who in workers:
                    workers.pop(who).close()
                workers[who] = Checkout(folder, args)
                seen["first text after start (s)"][who].append(workers[who].start)
            for name, request in asked.items():
                for who, worker in workers.items():
                    seen[name][who].append(worker.ask(*request))
    finally:
        for worker in workers.values():
            worker.close()
    rows = []
    for name, values in seen.items():
        row = {"what": name} | {who: statistics.median(x) for who, x in values.items()}
        if args.against:
            row["ratio"] = row["now"] / row["before"] if "/s" in name else row["before"] / row["now"]
        rows.append(row)
    print_table(rows, list(rows[0]))
    return rows
