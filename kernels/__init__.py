"""The registry of operators: which implementation of each op runs, and a count of what really ran.

An op is declared where its PyTorch path is written, `@kernels.op("kda_decode")`; that function is the truth. The files
of this folder implement it for other backends, `@kernels.implement("kda_decode", "triton", why_not)`: Triton kernels,
vendor libraries where they have the op, and C for a few rows on a CPU. The backend is chosen call by call:

    auto                          the first implementation that takes these shapes, and is not slower; else PyTorch
    Engine(kernels=...)           "torch", "triton", or op by op: "kda_decode=triton,experts=torch"
    K3_KERNELS=...                the same, from the environment
    with kernels.use(...):        the same, and functions: use(kda_decode=my_function)

A choice for one op is stronger than a choice for all; the innermost wins. What is asked for and cannot run is an error.
Where autograd records, auto is PyTorch. An op may be part of another's PyTorch path, as the recurrence is of KDA's
prefill: where it is chosen, the whole runs in PyTorch.
"""

import contextlib
import functools
import importlib.util
import os
from collections import Counter

import torch

FILES = ("attnres", "dense", "kda", "kda_fla", "kda_step", "mla", "mla_prefill", "moe", "sample")
PREFERENCE = ("gluon", "triton", "splitk", "cublas", "cudnn")  # on a GPU auto tries them in order; others run by name
ANYWHERE = ("auto", "torch", "c")  # what needs no GPU
counts = Counter()  # (op, backend) -> calls
_events = Counter()
_ops = {}  # op -> {backend: (function, why_not, slower)}
_stack = []  # what `use` has put on: op, or "*" for all -> backend or function
_memo = {}  # what that, and the environment when it was put on, mean for an op


def op(name, parts=()):
    """Declares the decorated function as the PyTorch path of the op `name`; its first argument has the tensors.

    parts: the ops that it calls.
    """

    def declare(torch_path):
        implementations = _ops.setdefault(name, {})
        implementations["torch"] = torch_path, None, None

        @functools.wraps(torch_path)
        def call(*args, **kwargs):
            wanted = _memo.get(name) if _stack else None
            if wanted is None:
                wanted = _memo[name] = _resolve(name, parts)
            backend, function = wanted if type(wanted) is tuple else _choose(name, wanted, args, kwargs)
            counts[name, backend] += 1
            return function(*args, **kwargs)

        call.torch_path = torch_path
        return call

    return declare


def implement(name, backend, why_not=None, slower=None):
    """Declares the decorated function as `backend` of the op `name`, called like its PyTorch path.

    why_not(*args) -> None where it can run, else the reason in a few words; slower(*args): whether auto passes it by.
    """

    def declare(function):
        _ops.setdefault(name, {})[backend] = function, why_not, slower
        return function

    return declare


@contextlib.contextmanager
def use(everything=None, /, beneath=False, **choices):
    """Within it the named ops run a backend or a function, `everything` as in K3_KERNELS; or beneath what is chosen."""
    for name, choice in choices.items():
        _known(name, "auto" if callable(choice) else choice)
    _stack.insert(0 if beneath else len(_stack), _parse(everything) | choices)
    _memo.clear()
    try:
        yield
    finally:
        _stack.pop(0 if beneath else -1)
        _memo.clear()


def _parse(spec):
    """'torch', 'a=triton,b=torch' or None -> {op: backend}, '*' for all. ValueError: nothing here is called that."""
    chosen = {}
    for part in filter(None, (spec or "").split(",")):
        name, _, backend = (word.strip() for word in part.rpartition("="))
        _known(name or "*", backend)
        chosen[name or "*"] = backend
    return {name: backend for name, backend in chosen.items() if (name, backend) != ("*", "auto")}


def current():
    """What has been chosen, innermost last: a hashable; a captured graph holds as long as it is the same."""
    return tuple(tuple(layer.items()) for layer in _layers())


def interpreted():
    """Whether Triton kernels run in its interpreter, on the CPU: TRITON_INTERPRET=1 before anything is imported."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on")


@functools.cache
def load():
    """Imports the files of this folder, where there is Triton: not before one of them may run, for that takes time."""
    if importlib.util.find_spec("triton") is not None:
        for file in ("interpreter", *FILES) if interpreted() else FILES:
            importlib.import_module(f"kernels.{file}")
        _listen(importlib.import_module("triton").knobs.compilation)


def compilations():
    """How many kernels Triton has compiled, or loaded from its cache, in this process."""
    return _events["compiled"]


def _listen(knobs):
    """Counts what Triton compiles, beside whoever else listens."""
    usual = knobs.listener

    def listener(**news):
        _events["compiled"] += 1
        return usual and usual(**news)

    knobs.listener = listener


def refuse(why, *names):
    """ValueError where one of the ops was chosen by name, said by one who would not call it."""
    for name in names:
        wanted, by_name = _wanted(name, _layers())
        if by_name and wanted not in ("auto", "torch"):
            raise ValueError(f"kernels: {name}={_label(wanted)} would not run: {why}")


def _layers():
    chosen = os.environ.get("K3_KERNELS")
    return [layer for layer in (_parse(chosen) if chosen else None, *_stack) if layer]


def _known(name, backend):
    """ValueError unless op `name` ("*": some op) has this backend and it can run on this machine."""
    if backend not in ANYWHERE or name not in ("*", *_ops):
        load()
    if name not in ("*", *_ops):
        raise ValueError(f"kernels: no op is called {name!r}; there are {', '.join(sorted(_ops))}")
    backends = ["auto", *sorted(set().union(*_ops.values()) if name == "*" else _ops[name])]
    if backend not in backends:
        of = "" if name == "*" else f" of {name}"
        raise ValueError(f"kernels={backend!r} is no backend{of}; there are {', '.join(backends)}")
    if backend not in ANYWHERE and not (torch.cuda.is_available() or interpreted()):
        raise ValueError(f"kernels={backend!r} cannot run here: there is no GPU; auto and torch can")


def _wanted(name, layers):
    """-> the backend or function that is chosen for the op, or "auto"; whether by its own name."""
    own, for_all = None, "auto"
    for layer in layers:
        for_all = layer["*"] if layer.get("*") in _ops[name] else for_all
        own = layer.get(name, own)
    return (for_all, False) if own is None else (own, True)


def _label(choice):
    return getattr(choice, "__name__", "custom") if callable(choice) else choice


def _choose(name, wanted, args, kwargs):
    """-> the label that is counted, the function."""
    implementations = _ops[name]
    if wanted != "auto":
        function, why_not, _ = implementations[wanted]
        reason = why_not and _why_not(why_not, args, kwargs, wanted)
        if reason is not None:
            raise ValueError(f"kernels: {name}={wanted} cannot run here: {reason}; choose auto or torch")
        return wanted, function
    x = args[0] if isinstance(args[0], torch.Tensor) else next(t for t in args[0] if t is not None)
    if x.is_cpu:  # where every microsecond counts
        function, why_not, slower = implementations.get("c", (None, None, None))
        if function and not torch.is_grad_enabled() and not slower(*args) and why_not(*args) is None:
            return "c", function
        return "torch", implementations["torch"][0]
    for backend in PREFERENCE if x.is_cuda and load() is None else ():
        function, why_not, slower = implementations.get(backend, (None, None, None))
        if function and not (why_not and _why_not(why_not, args, kwargs) or slower and slower(*args, **kwargs)):
            return backend, function
    return "torch", implementations["torch"][0]


def _resolve(name, parts):
    """What is wanted for the op: a function and its label, or a backend; "torch" where one of its parts was chosen,
    which only its PyTorch path calls.
    """
    layers = _layers()
    wanted, by_name = _wanted(name, layers)
    for part in parts:
        choice, part_by_name = _wanted(part, layers)
        if callable(wanted) or choice == "auto" or not part_by_name and (wanted != "auto" or choice == "torch"):
            continue
        if by_name and wanted not in ("auto", "torch"):
            raise ValueError(f"kernels: {name}={wanted} has no part {part}={_label(choice)}; choose one of the two")
        wanted = "torch"
    return (_label(wanted), wanted) if callable(wanted) else wanted


def _why_not(why_not, args, kwargs, backend="triton"):
    tensors = [t for a in args for t in (a if isinstance(a, (list, tuple)) else (a,)) if isinstance(t, torch.Tensor)]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return "autograd records, and it has no backward"
    if backend == "c" and not tensors[0].is_cpu:
        return "the tensors are on a GPU"
    if backend != "c" and not tensors[0].is_cuda and not interpreted():
        return "the tensors are on the CPU"
    return why_not(*args, **kwargs)


from kernels import cpu  # noqa: E402, F401  it needs no Triton
