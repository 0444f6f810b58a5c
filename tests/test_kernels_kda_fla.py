"""FLA's chunk_kda as a backend of KDA's recurrence."""

import sys

import pytest
import torch
from kernel_helpers import interpreted, on_gpu, rel
from test_kernels_kda import RAGGED, problem, truth

import kernels
from kda import kda_prefill
from kernels import kda_fla


@interpreted
def test_says_why_it_cannot_run():
    for choice in ({"kda_recurrence": "fla"}, {}):
        with kernels.use(*([] if choice else ["fla"]), **choice), torch.no_grad():
            with pytest.raises(ValueError, match="kda_recurrence=fla cannot run here: FLA has no kernels for the CPU"):
                kda_prefill(*problem([5], h=1))


def test_is_the_recurrence_of_the_pytorch_path(monkeypatch):
    """With FLA's function replaced by the recurrence in float64, nothing differs: arguments and pages are right."""
    modules = {"fla": object(), "fla.ops": object(), "fla.ops.kda": type("Module", (), {"chunk_kda": chunk_kda})}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    args = problem([20, 3], h=1, dtype=torch.bfloat16)
    want, want_S, _ = truth(args)
    with kernels.use(kda_recurrence=kda_fla.kda_recurrence), torch.no_grad():
        o = kda_prefill(*args)
    assert rel(o, want) < 1e-2 and rel(args[5][args[8]], want_S[args[8]]) < 1e-2


def chunk_kda(q, k, v, g, beta, scale, initial_state, output_final_state):
    """What FLA documents, one token at a time."""
    q, k, v, g, beta, S = (x.double() for x in (q, k, v, g, beta, initial_state))
    out = []
    for t in range(q.shape[1]):
        S = S * g[:, t].exp()[..., None]
        u = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], S))
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], u)
        out.append(torch.einsum("bhk,bhkv->bhv", q[:, t] * scale, S))
    return torch.stack(out, 1).bfloat16(), S.float()


@pytest.mark.parametrize("h, d", [pytest.param(3, 128, marks=on_gpu)])
def test_gpu(h, d):
    pytest.importorskip("fla")
    args = problem([*RAGGED, 300], follows={6}, h=h, d=d, dtype=torch.bfloat16)
    (want, want_S, _), before = truth(args), kernels.counts["kda_recurrence", "fla"]
    with kernels.use(kda_recurrence="fla"), torch.no_grad():
        o = kda_prefill(*args)
    assert kernels.counts["kda_recurrence", "fla"] > before
    assert rel(o, want) < 2e-2 and rel(args[5][args[8]], want_S[args[8]]) < 2e-2
