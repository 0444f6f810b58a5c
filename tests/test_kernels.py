"""The registry: which implementation runs, that it is counted, and that what cannot run says so."""

import ast
import dataclasses
import graphlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import case, perturb, tiny_config
from test_engine import byte_tokenizer

import engine
import kda
import kernels
import mla
from engine import Engine, SamplingParams
from model import K3

ROOT = Path(__file__).parent.parent
ran = []
kernels.load()  # before anything here pretends


@kernels.op("double")
def double(x):
    ran.append("torch")
    return 2 * x


@kernels.implement("double", "triton", lambda x: "odd sizes are not supported" if len(x) % 2 else None)
def double_triton(x):
    ran.append("triton")
    return x + x


@pytest.fixture(autouse=True)
def a_machine_whose_interpreter_is_on(monkeypatch):
    monkeypatch.setattr(kernels, "interpreted", lambda: True)
    monkeypatch.delenv("K3_KERNELS", raising=False)
    ran.clear()


def count(backend):
    return kernels.counts["double", backend]


def test_pytorch_runs_on_a_cpu_and_is_counted():
    before = count("torch")
    assert double(torch.ones(2)).tolist() == [2, 2]
    assert ran == ["torch"] and count("torch") == before + 1


@pytest.mark.parametrize("spec", ["triton", "double=triton", "experts=torch, double=triton"])
def test_a_backend_by_name(spec, monkeypatch):
    before = count("triton")
    with kernels.use(spec):
        double(torch.ones(2))
        with kernels.use(double="torch"):
            double(torch.ones(2))
        with kernels.use("torch"):  # for all: a choice for one op is stronger
            double(torch.ones(2))
    double(torch.ones(2))
    assert ran == ["triton", "torch", "triton" if "=" in spec else "torch", "torch"] and count(
        "triton"
    ) == before + ran.count("triton")
    monkeypatch.setenv("K3_KERNELS", spec)
    double(torch.ones(2))
    with kernels.use(double="torch"):
        double(torch.ones(2))
    with kernels.use("auto"):  # what an Engine says that was told nothing: the environment counts
        double(torch.ones(2))
    assert ran[4:] == ["triton", "torch", "triton"]


def test_a_function_of_the_user():
    def mine(x):
        return 3 * x

    before = kernels.current()
    with kernels.use(double=mine):
        assert double(torch.ones(2)).tolist() == [3, 3]
        inside = kernels.current()
        hash(inside)
    assert inside != before == kernels.current() and kernels.counts["double", "mine"] == 1
    with pytest.raises(ZeroDivisionError), kernels.use(double=lambda x: 1 // 0):
        double(torch.ones(2))
    assert double(torch.ones(2)).tolist() == [2, 2]


@pytest.mark.parametrize("spec", ["triton", "double=triton"])
def test_a_backend_that_cannot_run_is_an_error(spec, monkeypatch):
    with kernels.use(spec):
        with pytest.raises(ValueError, match="double=triton cannot run here: odd sizes are not supported"):
            double(torch.ones(3))
        with pytest.raises(ValueError, match="autograd"):
            double(torch.ones(2, requires_grad=True))
        monkeypatch.setattr(kernels, "interpreted", lambda: False)
        with pytest.raises(ValueError, match="on the CPU"):
            double(torch.ones(2))
    assert not ran


@pytest.mark.parametrize(
    "spec, says",
    [
        ("nonsense", "'nonsense' is no backend; there are auto, .*torch, triton"),
        ("double=nonsense", "'nonsense' is no backend of double; there are auto, torch, triton"),
        ("triple=torch", "no op is called 'triple'; there are .*double"),
    ],
)
def test_names_are_checked(spec, says, monkeypatch):
    with pytest.raises(ValueError, match=says), kernels.use(spec):
        pass
    name, _, choice = spec.rpartition("=")
    if name:
        with pytest.raises(ValueError, match=says), kernels.use(**{name: choice}):
            pass
    with pytest.raises(ValueError, match=says):
        Engine(engine.TINY, kernels=spec)
    monkeypatch.setenv("K3_KERNELS", spec)
    with pytest.raises(ValueError, match=says):
        double(torch.ones(2))


def test_triton_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(kernels, "interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="cannot run here: there is no GPU"), kernels.use("triton"):
        pass


def test_an_engine_runs_what_it_was_told():
    def silent(x, ids, weights, experts, cfg):
        return x.flip(-1)

    eng = Engine(engine.TINY, kernels="torch", num_pages=20)
    out = eng.generate("Once upon a time", SamplingParams(max_tokens=4))[0]
    with kernels.use(experts=silent):
        other = eng.generate("Once upon a time", SamplingParams(max_tokens=4))[0]
    assert eng.stats["backends"]["experts"] == "silent x24 + torch x32" and out.token_ids != other.token_ids
    assert eng.stats["graphs"] == 0 and eng.stats["graphs_off"] == "off"


# ---------------------------------------------------------------- ops that are parts of others


def backwards(q, k, v, g, beta, state):
    return kda.kda.torch_path(q, k, -v, g, beta, state)


def test_the_recurrence_alone_can_be_swapped():
    """In `model(ids)` and over pages, in a prompt and in decode, with all that surrounds it."""
    model, ids = case("micro")[0], torch.tensor([[5, 9, 200, 31, 8]])
    with torch.no_grad():
        logits = model(ids)
        with kernels.use(kda_recurrence=backwards):
            other = model(ids)
    eng, before = Engine(model, num_pages=20), kernels.counts.copy()
    with kernels.use(kda_recurrence=backwards):
        out = eng.generate(ids[0].tolist(), SamplingParams(max_tokens=4, ignore_eos=True))[0]
    ran = kernels.counts - before
    layers = len(model.cfg.kda_layers)
    assert not torch.equal(logits, other) and ran["kda_recurrence", "backwards"] == 4 * layers
    assert ran["kda_prefill", "torch"] == layers and ran["kda_decode", "torch"] == 3 * layers
    with kernels.use(kda_recurrence=backwards), torch.no_grad():
        again = model(torch.tensor([ids[0].tolist() + out.token_ids]))
    assert again[0, 4:-1].argmax(-1).tolist() == out.token_ids


def test_the_attention_of_a_prompt_can_be_swapped():
    def nothing(q, rows, W_kvb, mask, scale):
        return torch.zeros_like(mla.mla_expanded.torch_path(q, rows, W_kvb, mask, scale))

    model, ids = case("micro")[0], torch.arange(3, 40)[None]
    with torch.no_grad(), kernels.use(mla_expanded=nothing):
        want = model(ids)[0, -1].argmax()
        out = Engine(model, num_pages=20).generate(ids[0].tolist(), SamplingParams(max_tokens=1, ignore_eos=True))[0]
    assert out.token_ids == [want] and kernels.counts["mla_expanded", "nothing"]


def test_gradients_pass_through_a_part():
    model, ids = K3(tiny_config()), torch.arange(6)[None]
    model(ids).sum().backward()
    want = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    with kernels.use(kda_recurrence=lambda *args: kda.kda.torch_path(*args), mla_expanded="torch"):
        model(ids).sum().backward()
    got = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(want) == len(got) > 20 and all(torch.equal(a, b) for a, b in zip(want, got))


@pytest.mark.parametrize("op", ["kda_prefill", "kda_decode", "mla_prefill", "mla_decode", "latent_write"])
def test_what_a_model_without_pages_would_not_call_is_refused(op):
    model, ids = case("micro")[0], torch.tensor([[5, 9]])
    part = "kda_recurrence" if op.startswith("kda") else "mla_expanded"
    with torch.no_grad(), kernels.use(**{op: lambda *args: 1 // 0}):
        with pytest.raises(ValueError, match=f"{op}=<lambda> would not run: .* has no pages; choose {part}"):
            model(ids)
    with torch.no_grad(), kernels.use(**{op: "torch"}):
        model(ids)


def test_a_kernel_and_a_part_of_its_op_exclude_each_other():
    kernels.op("half")(lambda x: x)
    whole = kernels.op("whole", parts=("half",))(lambda x: 2 * x)
    kernels.implement("whole", "triton")(lambda x: x + x)
    kernels.implement("half", "fla", lambda x: None)(lambda x: x)
    x, ran = torch.ones(2), lambda: max((n, backend) for (op, backend), n in kernels.counts.items() if op == "whole")[1]

    def runs(*everything, **choices):
        kernels.counts.clear()
        with kernels.use(*everything, **choices):
            whole(x)
        return ran()

    assert runs("triton") == "triton" and runs("triton", half="fla") == "torch"
    assert runs("fla") == runs(half="torch") == runs(whole="torch", half="fla") == "torch"
    assert runs("triton", half="auto") == "triton" and runs(whole=lambda x: x, half="fla") == "<lambda>"
    with pytest.raises(ValueError, match="whole=triton has no part half=fla; choose one of the two"):
        runs(whole="triton", half="fla")


# ---------------------------------------------------------------- files


def imported(file):
    """Names that a file imports, also inside functions: `a.b` for `from a import b` too."""
    for node in ast.walk(ast.parse(file.read_text())):
        yield from (a.name for a in node.names) if isinstance(node, ast.Import) else ()
        if isinstance(node, ast.ImportFrom):
            yield from (node.module, *(f"{node.module}.{a.name}" for a in node.names))


def test_kernels_import_nothing_of_ours_and_not_each_other_in_a_circle():
    ours, graph = {file.stem for file in ROOT.glob("*.py")} | {"benchmarks"}, {}
    for file in (ROOT / "kernels").glob("*.py"):
        names = set(imported(file))
        assert not ours & {name.split(".")[0] for name in names}, f"{file.name}: {names}"
        graph[f"kernels.{file.stem}"] = {name for name in names if (ROOT / f"{name.replace('.', '/')}.py").exists()}
    order = list(graphlib.TopologicalSorter(graph).static_order())
    assert order.index("kernels.mla_hopper") < order.index("kernels.mla")


def test_triton_is_not_imported_before_it_may_run():
    code = "import sys, engine, kernels; kernels.use('torch,experts=auto').__enter__(); kernels.use('c').__enter__()"
    code += "; assert 'triton' not in sys.modules; print(kernels.load() or 'triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.split() == ["True"], done.stderr


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_the_command_runs_in_the_interpreter(tmp_path):
    """Two tokens of two layers: the text is that of the PyTorch path, and Triton made it."""
    cfg = case("micro")[0].cfg
    layers = cfg.linear_attn_config | {"kda_layers": [1], "full_attn_layers": [2]}
    torch.manual_seed(0)
    model = K3(dataclasses.replace(cfg, num_hidden_layers=2, linear_attn_config=layers))
    perturb(model).save_pretrained(tmp_path, mxfp4=True)
    byte_tokenizer(tmp_path)
    command = [sys.executable, "engine.py", "--model", str(tmp_path), "--prompt", "abc", "--max-tokens", "2"]
    command += ["--temperature", "0", "--stats"]
    run = lambda **env: subprocess.Popen(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"} | env, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    both = [run(TRITON_INTERPRET="1", K3_KERNELS="triton"), run(K3_KERNELS="torch")]
    (triton, said), (torch_path, _) = (p.communicate(timeout=300) for p in both)
    assert all(p.returncode == 0 for p in both), said
    assert triton == torch_path
    for name in ("kda_prefill", "kda_decode", "mla_decode", "experts", "attnres"):
        assert f"op {name} triton" in " ".join(said.split()), said
