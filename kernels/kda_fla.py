"""FLA's `chunk_kda` (flash-linear-attention, github.com/fla-org) as a backend of KDA's recurrence, where it is there.

Convolution, gates and the pages around it are those of the PyTorch path. It is a peer to compare with, computes in
bfloat16, and runs only when asked for: `kernels="fla"` or `kernels.use(kda_recurrence="fla")`.
"""

import importlib.util

import torch

import kernels


def why_not(q, k, v, g, beta, state):
    if kernels.interpreted() or not q.is_cuda:
        return "FLA has no kernels for the CPU"
    if importlib.util.find_spec("fla") is None:
        return "FLA is not installed: pip install fla-core"
    return None if state.dtype == torch.float32 else f"FLA's kernels take states in float32, not {state.dtype}"


@kernels.implement("kda_recurrence", "fla", why_not)
def kda_recurrence(q, k, v, g, beta, state):
    from fla.ops.kda import chunk_kda

    q, k, v, beta = (x.bfloat16().contiguous() for x in (q, k, v, beta))
    return chunk_kda(q, k, v, g, beta, scale=1.0, initial_state=state.contiguous(), output_final_state=True)
