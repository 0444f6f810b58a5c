"""Shared by the kernels' tests: where they run (interpreter, compiler, GPU), and the compile-only check."""

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    import kernels.interpreter  # noqa: F401

DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"

# A kernel's test runs in the interpreter or on a GPU; whether it compiles for a GPU needs none. See conftest.py.
interpreted = pytest.mark.interpreted
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(DEVICE != "cuda", reason="no CUDA GPU here")]
compiles = pytest.mark.compiles
slow = lambda *values: pytest.param(*values, marks=pytest.mark.slow)


def compile_for_all(kernel, signature, constants, num_warps=4, num_stages=2):
    """Compiles a kernel for sm_90 and gfx950 without a GPU. signature: name -> "*bf16", "i32", ...; returns both."""
    import triton
    from triton.backends.compiler import GPUTarget

    built = {}
    for name, target in (("sm_90", GPUTarget("cuda", 90, 32)), ("gfx950", GPUTarget("hip", "gfx950", 64))):
        full = {arg: signature.get(arg, "constexpr") for arg in kernel.arg_names}
        source = triton.compiler.ASTSource(fn=kernel, signature=full, constexprs=constants)
        built[name] = triton.compile(source, target=target, options={"num_warps": num_warps, "num_stages": num_stages})
    return built


def compile_overlapped(kernel, signature, constants, num_warps):
    """Compiles a kernel for sm_90 that starts before the one ahead ends (OVERLAP=True) -> its PTX before it waits for
    that end, and after.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    full = {arg: signature.get(arg, "constexpr") for arg in kernel.arg_names}
    source = triton.compiler.ASTSource(fn=kernel, signature=full, constexprs=constants | {"OVERLAP": True})
    options = {"num_warps": num_warps, "launch_pdl": True}
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    before, wait, after = ptx.partition("griddepcontrol.wait")
    assert wait, "it never waits"
    return before, after


def rel(a, b):
    """Norm of the difference over norm of b, in float64; NaN where a has one."""
    a, b = a.detach().double().cpu(), b.detach().double().cpu()
    assert a.shape == b.shape, f"{tuple(a.shape)} against {tuple(b.shape)}"
    return float((a - b).norm() / b.norm())
