"""The registry of operators: which implementation of each op runs, and a count of what really ran.

An op is declared where its PyTorch path is written, `@kernels.op("kda_decode")`; that function is the truth. The files of
this folder implement it for other backends, `@kernels.implement("kda_decode", "triton", why_not)`: Triton kernels, and
vendor libraries where they have the op. An op is chosen call by call:

    auto                          on a GPU the first implementation that takes these shapes, PyTorch on a CPU
    Engine(kernels=...)           "torch", "triton", or op by op: "kda_decode=triton,experts=torch"
    K3_KERNELS=...                the same, from the environment
    with kernels.use(...):        the same, and functions: use(kda_decode=my_function)

A backend that is asked for by name and cannot run is an error. Where autograd records, PyTorch runs.
"""

import contextlib
import functools
import importlib
import importlib.util
import os
from collections import Counter

import torch

FILES = ("attnres", "dense", "kda", "mla", "moe")
PREFERENCE = ("triton", "cublas", "cudnn", "fla", "torch")  # what auto tries, in order; others run only by name
counts = Counter()  # (op, backend) -> calls
_ops = {}  # op -> {backend: (function, why_not)}
_stack = []  # what `use` has put on: op, or "*" for all -> backend or function


def op(name):
    """Declares the decorated function as the PyTorch path of the op `name`; its first argument is a tensor or a list."""

    def declare(torch_path):
        implementations = _ops.setdefault(name, {})
        implementations["torch"] = torch_path, None

        @functools.wraps(torch_path)
        def call(*args, **kwargs):
            backend, function = _choose(name, implementations, args, kwargs)
            counts[name, backend] += 1
            return function(*args, **kwargs)

        call.torch_path = torch_path
        return call

    return declare


def implement(name, backend, why_not=None):
    """Declares the decorated function as `backend` of the op `name`, called like its PyTorch path.

    why_not(*args, **kwargs) -> None where it can run, else the reason in a few words.
    """

    def declare(function):
        _ops.setdefault(name, {})[backend] = function, why_not
        return function

    return declare


@contextlib.contextmanager
def use(everything=None, /, **choices):
    """Within it the named ops run the given backend or function; `everything`: a string as in K3_KERNELS."""
    for name, choice in choices.items():
        _known(name, "auto" if callable(choice) else choice)
    chosen = parse(everything) | choices
    _stack.append(chosen)
    try:
        yield
    finally:
        _stack.pop()


def parse(spec):
    """"torch", "a=triton,b=torch" or None -> {op: backend}, "*" for all. Raises ValueError on what no file here has."""
    chosen = {}
    for part in filter(None, (spec or "").split(",")):
        name, _, backend = part.rpartition("=")
        chosen[name.strip() or "*"] = backend.strip()
    for name, backend in chosen.items():
        _known(name, backend)
    return {name: backend for name, backend in chosen.items() if (name, backend) != ("*", "auto")}


def current():
    """What has been chosen, innermost last: a hashable; a captured graph holds as long as it is the same."""
    return tuple(tuple(layer.items()) for layer in _layers())


def interpreted():
    """Whether Triton kernels run in its interpreter, on the CPU: TRITON_INTERPRET=1 before anything is imported."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on")


@functools.cache
def load():
    """Imports the files of this folder; without Triton there is PyTorch alone."""
    if importlib.util.find_spec("triton") is not None:
        for file in FILES:
            importlib.import_module(f"kernels.{file}")


def _layers():
    return [_parsed(os.environ["K3_KERNELS"]), *_stack] if "K3_KERNELS" in os.environ else _stack


@functools.cache
def _parsed(spec):
    return parse(spec)


def _known(name, backend):
    """ValueError unless op `name` ("*": some op) has this backend and it can run on this machine."""
    load()
    if name != "*" and name not in _ops:
        raise ValueError(f"kernels: no op is called {name!r}; there are {', '.join(sorted(_ops))}")
    backends = sorted(set().union(*_ops.values()) if name == "*" else _ops[name])
    if backend not in ("auto", *backends):
        of = "" if name == "*" else f" of {name}"
        raise ValueError(f"kernels={backend!r} is no backend{of}; there are auto, {', '.join(backends)}")
    if backend not in ("auto", "torch") and not (torch.cuda.is_available() or interpreted()):
        raise ValueError(f"kernels={backend!r} cannot run here: there is no GPU; auto and torch can")


def _choose(name, implementations, args, kwargs):
    """-> the label that is counted, the function."""
    wanted, named = "auto", False
    for layer in _layers():
        wanted, named = (layer[name], True) if name in layer else (layer.get("*", wanted), named)
    if callable(wanted):
        return getattr(wanted, "__name__", "custom"), wanted
    if wanted == "auto" or (wanted not in implementations and not named):
        x = args[0] if isinstance(args[0], torch.Tensor) else next(t for t in args[0] if t is not None)
        if not x.is_cuda:
            return "torch", implementations["torch"][0]
        load()
        backends = [b for b in PREFERENCE if b in implementations and _why_not(implementations[b][1], args, kwargs) is None]
        return backends[0], implementations[backends[0]][0]
    function, why_not = implementations[wanted]
    reason = _why_not(why_not, args, kwargs)
    if reason is not None:
        raise ValueError(f"kernels: {name}={wanted} cannot run here: {reason}; choose auto or torch")
    return wanted, function


def _why_not(why_not, args, kwargs):
    if why_not is None:
        return None
    tensors = [t for a in args for t in (a if isinstance(a, (list, tuple)) else (a,)) if isinstance(t, torch.Tensor)]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return "autograd records, and it has no backward"
    if not tensors[0].is_cuda and not interpreted():
        return "the tensors are on the CPU"
    return why_not(*args, **kwargs)
