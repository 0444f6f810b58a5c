"""bench.py: a trace follows from its seed, theory is brute force, and a quick run of each command says what it must."""

import itertools
import json
import random
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import DATA, case
from hypothesis import given, settings
from hypothesis import strategies as st

import bench
import evaluate
from benchmarks import coupling, ops, serving, step, timing
from cache import PagePool
from engine import TINY, Engine
from model import K3
from prefix import PrefixCache

ids = st.lists(st.integers(0, 2), max_size=12)
array = lambda x: np.array(x, dtype=np.int32)


# ---------------------------------------------------------------- the trace


def test_trace_follows_from_its_seed():
    trace = serving.make_trace(3, 4, 5, 1000)
    assert trace == serving.make_trace(3, 4, 5, 1000) and trace != serving.make_trace(4, 4, 5, 1000)
    shared, talks = trace
    assert len(shared) == serving.SYSTEM + serving.TOOLS and [len(talk) for talk in talks] == [5] * 4


@pytest.mark.parametrize("vocab, most", [(64, 64), (257, 257), (2048, 2048 - 256)])
def test_trace_leaves_control_slots_out(vocab, most):
    shared, talks = serving.make_trace(0, 10, 5, vocab)
    used = {*shared, *(i for talk in talks for turn in talk for text in turn.texts for i in text)}
    assert used <= set(range(most)) and max(used) > 0.9 * most


def test_the_default_trace_has_all_it_should():
    """Over 90 % theoretical reuse; branches, edits that keep a part of what they change, pauses."""
    trace = serving.make_trace(0, 16, 8, 257)
    shared, talks = trace
    turns = [turn for talk in talks for turn in talk]
    assert {len(turn.texts) for turn in turns} == {1, 2, 3} and {turn.back for turn in turns} >= {0, 1, 2}
    assert max(turn.pause for turn in turns) > 30
    draw, known, theory, asked = random.Random(0), [], 0, []
    for talk in talks:
        speaker, answers, before = serving.client(shared, talk), None, []
        for turn in talk:
            pause, requests = speaker.send(answers)
            prompts = [array(prompt) for prompt, _ in requests]
            assert pause == turn.pause and [n for _, n in requests] == turn.answers
            assert turn.back or all((prompt[: len(before)] == before).all() for prompt in prompts)
            theory += sum(serving.reusable(prompt, known) for prompt in prompts)
            asked += [(len(prompt), n) for prompt, n in requests]
            answers = [draw.choices(range(257), k=n) for n in turn.answers]
            texts = [np.append(prompt, answer) for prompt, answer in zip(prompts, answers)]
            known += [text[:-1] for text in texts]
            before = texts[0]
    assert asked == serving.lengths(trace) and max(map(sum, asked)) <= case("micro")[0].cfg.max_position_embeddings
    assert theory > 0.9 * sum(n for n, _ in asked)


# ---------------------------------------------------------------- theory


@given(ids, st.lists(ids, max_size=6))
@settings(deadline=None)
def test_theory_is_brute_force(prompt, texts):
    starts = {tuple(text[:n]) for text in texts for n in range(len(text) + 1)}
    want = max((n for n in range(len(prompt) + 1) if tuple(prompt[:n]) in starts), default=0)
    assert serving.reusable(array(prompt), [array(text) for text in texts]) == want


def test_nothing_reuses_more_than_theory_and_a_replay_repeats():
    """In pools large and small, with and without a host tier; the answers, and so the prompts, are always the same."""
    model, trace = case("micro")[0], serving.make_trace(1, 3, 3, 257, 0.25)
    seen = set()
    for pages, host_pages, concurrency in ((300, 0, 3), (300, 0, 3), (12, 0, 2), (12, 300, 3)):
        engine = Engine(model, num_pages=pages, host_pages=host_pages)
        asked, peak = serving.replay(engine, trace, concurrency)
        assert len(asked) == len(serving.lengths(trace)) and 0 < peak <= pages
        for a in asked:
            assert a.request.out.cached_tokens <= a.theory <= a.request.out.prompt_tokens
            assert a.added < a.first <= a.last and a.request.out.finish_reason == "length"
        seen.add(tuple(sorted(tuple(a.request.tokens) for a in asked)))
        assert not engine.pool.live_pages and not engine.waiting
    assert len(seen) == 1


# ---------------------------------------------------------------- rules that keep drafts


EIGHTHS = torch.tensor([[1.0, 2, 3, 2], [4, 2, 1, 1]], dtype=torch.float64) / 8  # p, q: every p / q is in quarters


def law_of(rule):
    """The joint law [V, V, V] of the first three tokens when two are drafted, of all drafts and chances, and what it
    must be. Model and drafter: p and q rolled by the tokens before; what a cycle leaves open the model adds alone.
    """
    (p, q), V = EIGHTHS, range(4)
    after = lambda row, *before: row.roll(sum((i + 1) * t for i, t in enumerate(before)))
    law, want, even = torch.zeros(4, 4, 4).double(), torch.zeros(4, 4, 4).double(), (torch.arange(4).double() + 0.5) / 4
    u = torch.cartesian_prod(even, even)  # the chance below any quarter is exact
    for a, b in itertools.product(V, V):
        want[a, b] = p[a] * after(p, a)[b] * after(p, a, b)
        P, Q = torch.stack([p, after(p, a), after(p, a, b)]), torch.stack([q, after(q, a)])
        drafts = torch.tensor([[a, b]]).expand(16, 2)
        for kept, rest in zip(*rule(P.expand(16, 3, 4), Q.expand(16, 2, 4), drafts, u)):
            share, rest = q[a] * after(q, a)[b] / 16, rest / rest.sum()
            if kept == 2:
                law[a, b] += share * rest
            for x in V if kept == 1 else ():
                law[a, x] += share * rest[x] * after(p, a, x)
            for x, y in itertools.product(V, V) if kept == 0 else ():
                law[x, y] += share * rest[x] * after(p, x)[y] * after(p, x, y)
    return law, want


def test_rejection_leaves_the_distribution_of_the_model():
    law, want = law_of(coupling.reject)
    assert torch.allclose(law, want, atol=1e-12) and law.sum().item() == pytest.approx(1)


def from_the_model(p, q, drafts, u):
    kept, _ = coupling.reject(p, q, drafts, u)
    return kept, p[torch.arange(len(p)), kept]


def of_another_row(p, q, drafts, u):
    kept, _ = coupling.reject(p, q, drafts, u)
    rest = (p - torch.cat([q[:, :1], q], 1)).clamp(min=0)
    return kept, rest[torch.arange(len(p)), kept] + 1e-9


@pytest.mark.parametrize(
    "wrong",
    [
        from_the_model,
        of_another_row,
        lambda p, q, drafts, u: coupling.reject(p, q, drafts, 0 * u),  # keeps every draft
        lambda p, q, drafts, u: coupling.reject(p, q, drafts, u**2),  # too many
        lambda p, q, drafts, u: coupling.reject(p, q, drafts.flip(1), u),  # asks about another one
    ],
)
def test_a_wrong_rule_is_found(wrong):
    law, want = law_of(wrong)
    assert (law - want).abs().max() > 0.005


def test_rates_of_one_draft():
    """Rejection keeps sum min(p, q) over all drafts and chances; coupling what its noise gives, between its bounds."""
    p, q = EIGHTHS[:, None]
    u = ((torch.arange(64) + 0.5) / 64)[:, None].double()
    each = [coupling.reject(p.expand(64, 2, 4), q.expand(64, 1, 4), torch.full((64, 1), x), u)[0] for x in range(4)]
    kept = sum(q[0, x] * n.double().mean() for x, n in enumerate(each))
    assert coupling.overlap(p, q).item() == pytest.approx(kept.item()) == 5 / 8
    logits = 2 * torch.randn(2, 20, 50, generator=torch.Generator().manual_seed(0))
    P, Q = (logits.double() / 0.8).softmax(-1)
    brute = 1 / torch.maximum(P[:, None] / P[..., None], Q[:, None] / Q[..., None]).sum(-1)  # [R, i, j]: over j
    exact, most = coupling.coupled(P, Q), coupling.overlap(P, Q)
    assert torch.allclose(exact, brute.sum(-1)) and (most / (2 - most) < exact).all() and (exact < most).all()
    many = [x.repeat(500, 1) for x in logits]
    found = coupling.rates(many, 0.8, 0)
    assert found["coupling"] == pytest.approx(exact.mean().item())
    assert found["coupling_measured"] == pytest.approx(found["coupling"], abs=4 * (0.25 / 80_000) ** 0.5)
    assert torch.allclose(coupling.coupled(P, P), torch.ones(20).double())


@torch.no_grad()
def test_cycles_are_those_of_whole_texts():
    """Without noise, cycle by cycle, through pages and their commits; twice, for prompts are read once."""
    model = K3.from_pretrained(TINY, dtype=torch.float32, progress=False)
    prompts = torch.randint(3, 3000, (3, 20), generator=torch.Generator().manual_seed(0))
    texts = coupling.Texts(model, prompts, 16)
    for _ in range(2):
        who, kept, p, q = texts.cycles(0.0, rejection=False)
        assert kept.tolist() == evaluate.drafts_kept(model, prompts, 16, 3).tolist() and 0 < kept.sum()
        assert (kept.bool() == (p.argmax(-1) == q.argmax(-1))).all() and set(who.tolist()) == {0, 1, 2}
        texts.cycles(1.0, rejection=True)


def test_tokens_per_cycle_and_what_each_prompt_moves():
    tokens, moves = coupling.per_cycle(torch.tensor([0, 1, 0, 0]), torch.tensor([3, 1, 0, 0]), 2)
    assert tokens == 2 and moves.tolist() == [0, 0]
    tokens, moves = coupling.per_cycle(torch.tensor([0, 1]), torch.tensor([3, 1]), 2)
    assert tokens == 3 and moves.tolist() == [1, -1]


# ---------------------------------------------------------------- the commands


def test_agent(tmp_path, capsys):
    """A pool that holds everything reuses 98 % of what an unlimited cache could, a quarter with a host tier 80 %."""
    file = tmp_path / "agent.json"
    args = ["--quick", "--conversations", "4", "--turns", "6", "--device", "cpu", "--json", str(file)]
    assert bench.main(["agent", "--model", str(DATA / "micro"), *args]) == 0
    result, table = json.loads(file.read_text()), capsys.readouterr().out
    assert {"commit", "versions", "command", "rows"} <= result.keys() and str(tmp_path) not in result["command"]
    whole, quarter = (r for r in result["rows"] if r["sweep"] == "pool")
    assert whole["theory"] > 0.85 and whole["of_theory"] >= 0.98 and not whole["evicted"]
    assert quarter["of_theory"] >= 0.8 and quarter["host_pages"] and quarter["pages"] <= whole["pages"] / 4
    assert quarter["evicted"] and quarter["restored"]
    assert 0 < whole["ttft_p50_ms"] <= whole["ttft_p90_ms"] <= whole["ttft_p99_ms"]
    assert 0 < whole["user_p10_tok_s"] <= whole["user_p50_tok_s"] and whole["total_tok_s"] > 0
    assert "hold everything" in table and f"{whole['of_theory']:.1%}" in table


def test_plot(tmp_path):
    plt = pytest.importorskip("matplotlib.pyplot")
    row = {f"ttft_p{p}_ms": 10.0 + p for p in (50, 90)} | {"user_p10_tok_s": 5.0, "total_tok_s": 9.0, "concurrency": 2}
    row |= {"reuse": 0.8, "theory": 0.9}
    rows = [{"sweep": "pool", "pages": n, "host_pages": host} | row for n in (10, 20) for host in (0, 99)]
    serving.plot_agent(plt, [*rows, {"sweep": "concurrency"} | row]).savefig(tmp_path / "agent.png")
    assert (tmp_path / "agent.png").stat().st_size > 1000


def test_host(tmp_path):
    file = tmp_path / "host.json"
    assert bench.main(["host", "--quick", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert all(r["value"] > 0 for r in rows) and {r["unit"] for r in rows} == {"ms", "%"}
    assert all(r["value"] < r["target"] for r in rows if r["unit"] == "%")


def test_cpu(tmp_path, capsys):
    """Against itself: both columns, one model, and as many operations."""
    file, root = tmp_path / "cpu.json", Path(bench.__file__).parent
    args = ["cpu", "--model", str(DATA / "micro"), "--quick", "--against", str(root), "--json", str(file)]
    assert bench.main(args) == 0
    rows, table = json.loads(file.read_text())["rows"], capsys.readouterr().out
    assert len(rows) == 6 and all(r["now"] > 0 and r["before"] > 0 and r["ratio"] > 0 for r in rows)
    called, nested = (r for r in rows if "operations" in r["what"])
    assert called["ratio"] == nested["ratio"] == 1 and called["now"] < nested["now"]
    assert all(r["what"] in table for r in rows)


def test_coupling(tmp_path, capsys):
    file, text = tmp_path / "coupling.json", Path(bench.__file__).parent / "LICENSE"
    assert bench.main(["coupling", "--val", str(text), "--quick", "--json", str(file)]) == 0
    result, table = json.loads(file.read_text()), capsys.readouterr().out
    assert str(tmp_path) not in result["command"] and "tokens per cycle" in table and "coupling measured" in table
    rows = [(r["temperature"], r["method"]) for r in result["rows"][:4]]
    assert rows == [(t, method) for t in (0.8, 1.0) for method in ("rejection", "coupling")]
    for r in result["rows"][:4]:
        assert 1 < r["tokens_per_cycle"] < 4 and r["error"] > 0 and 0 < r["draft_1"] < 1
    for r in result["rows"][4:]:
        assert r["coupling_bound"] < r["coupling"] < r["rejection"] < 1
        assert abs(r["coupling_measured"] - r["coupling"]) < 0.1


def test_spec(tmp_path, capsys):
    """tiny/ on a CPU: more tokens a cycle than one, and the same answers, which the command itself checks."""
    file, picture = tmp_path / "spec.json", tmp_path / "spec.png"
    pytest.importorskip("matplotlib")
    args = "spec --device cpu --batches 1 --depths 0 2 --tokens 9 --json".split()
    assert bench.main([*args, str(file), "--plot", str(picture)]) == 0
    rows, table = json.loads(file.read_text())["rows"], capsys.readouterr().out
    assert [(r["sampling"], r["depth"]) for r in rows] == [
        (f"temperature {t}", depth) for t in ("0", "0.8") for depth in (0, 2, "auto")
    ]
    assert all(r["tok_s"] > 0 for r in rows) and rows[1]["per_cycle"] > 1.2 and rows[0]["speedup"] == 1
    assert "at 93 layers" in table and picture.stat().st_size > 5000


def test_memory_of_the_tree_is_about_what_python_took():
    pool = PagePool(case("micro")[0].cfg, 200, device="meta")
    pages, state, draw = pool.allocate(100), pool.allocate(pool.groups), np.random.default_rng(0)
    text = draw.integers(0, 99, 128 * 100, dtype=np.int32)
    tracemalloc.start()
    cache = PrefixCache(pool)
    for end in [*range(100, 12800, 100), 50]:  # the last splits
        cache.insert(text[:end], pages, state, torch.zeros(1))
    cache.insert(np.append(text[:77], [100]).astype(np.int32), pages, state, torch.zeros(1))
    took = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert 0.7 < serving.tree_bytes(cache, 4) / took < 1.5


@pytest.mark.parametrize(
    "args, says",
    [
        (["agent", "--model", "no-such-folder"], "no-such-folder"),
        (["agent", "--model", str(DATA / "micro"), "--turns", "99"], "fewer --turns"),
        (["host", "--json", "no-such-folder/x.json"], "no such folder"),
        (["cpu", "--against", "no-such-folder"], "no-such-folder: there is no engine.py"),
        (["coupling", "--val", str(Path(bench.__file__).parent / "README.md"), "--model", str(DATA / "micro")], "MTP"),
        (["coupling", "--val", "no-such-file"], "no-such-file"),
        (["spec", "--model", "no-such-folder"], "no-such-folder"),
        (["spec", "--device", "cuda"], "measures a GPU, and PyTorch sees none"),
        (["kernels", "--only", "linear"], "measures a GPU, and PyTorch sees none"),
        (["step"], "measures a GPU, and PyTorch sees none"),
        (["all"], "measures a GPU, and PyTorch sees none"),
    ],
)
def test_errors(args, says, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main(args) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and says in error


def test_plots_of_a_gpu(tmp_path):
    plt = pytest.importorskip("matplotlib.pyplot")
    card = {"copy_bytes_s": 4.2e12, "matrix_flops_s": 7.8e14}
    rows = [
        {"op": op, "ms": ms, "GB": 0.8, "TFLOP": flops}
        for op, ms, flops in (("a", 0.3, 0.1), ("b", None, 1), ("b", 1.0, 0))
    ]
    ops.plot(plt, rows, card).savefig(tmp_path / "kernels.png")
    result = json.loads((Path(__file__).parent.parent / "results" / "step.json").read_text())
    assert {"commit", "command", "versions", "gpu", "card", "date"} <= result.keys()
    step.plot(plt, result["rows"], result["card"]).savefig(tmp_path / "step.png")
    assert all((tmp_path / name).stat().st_size > 1000 for name in ("kernels.png", "step.png"))


def test_sets_of_inputs_are_past_the_l2():
    for nbytes in (1 << 20, 50 << 20, 300 << 20, 10 << 30):
        assert timing.sets_for(nbytes) * nbytes >= 3 * timing.L2_BYTES
    assert timing.sets_for(1) == 1500
