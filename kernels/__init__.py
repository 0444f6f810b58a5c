"""The registry of operators: which implementation of each op runs, and a count of what really ran.

An op is declared where its PyTorch path is written, `@kernels.op("kda")`; that function is the truth. Calls go through
the registry, so `kernels.counts` can say which backend each op ran. PyTorch is the only backend so far.
"""

import functools
from collections import Counter

BACKENDS = ("torch",)
counts = Counter()  # (op, backend) -> calls


def op(name):
    """Declares the decorated function as the PyTorch path of the op `name`."""

    def declare(torch_path):
        @functools.wraps(torch_path)
        def call(*args):
            counts[name, "torch"] += 1
            return torch_path(*args)

        return call

    return declare


def check(backend):
    """Raises ValueError for a backend that cannot run here; "auto" means the best one that can."""
    if backend != "auto" and backend not in BACKENDS:
        raise ValueError(f"kernels={backend!r} cannot run here; available: auto, {', '.join(BACKENDS)}")
