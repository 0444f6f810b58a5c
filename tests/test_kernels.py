"""The registry: which implementation runs, that it is counted, and that what cannot run says so."""

import ast
from pathlib import Path

import pytest
import torch

import engine
import kernels
from engine import Engine, SamplingParams

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


def test_kernels_import_nothing_of_ours():
    ours = {file.stem for file in ROOT.glob("*.py")} | {"benchmarks"}
    for file in (ROOT / "kernels").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert not ours & {name.split(".")[0] for name in names}, f"{file.name}: {names}"
    assert len((ROOT / "kernels" / "__init__.py").read_text().splitlines()) < 150
