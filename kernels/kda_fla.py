"""FLA's `chunk_kda` (flash-linear-attention, github.com/fla-org) as a backend of KDA prefill, where it is installed.

It is the recurrence alone, so convolution, gates and the pages around it are those of the PyTorch path. It is a peer to
compare with, and runs only when asked for: `kernels="fla"` or `kernels.use(kda_prefill="fla")`.
"""

import importlib.util

import torch

import kernels


def why_not(qkv, gate, r, b, w, S, conv, src, dst, part):
    if kernels.interpreted() or not qkv.is_cuda:
        return "FLA has no kernels for the CPU"
    if importlib.util.find_spec("fla") is None:
        return "FLA is not installed: pip install fla-core"
    return None if qkv.dtype == torch.bfloat16 else f"FLA's kernels take bfloat16, not {qkv.dtype}"


def recurrence(q, k, v, g, beta, state):
    """As kda.py's `kda`: q, k, v, g [B, T, h, d], beta [B, T, h], state [B, h, d, d] float32 -> o, state."""
    from fla.ops.kda import chunk_kda

    q, k, v, beta = (x.bfloat16().contiguous() for x in (q, k, v, beta))
    return chunk_kda(q, k, v, g, beta, scale=1.0, initial_state=state.contiguous(), output_final_state=True)


@kernels.implement("kda_prefill", "fla", why_not)
def kda_prefill(*args):
    torch_path, _, _ = kernels._ops["kda_prefill"]["torch"]
    return torch_path(*args, recurrence=recurrence)
