"""On a CUDA GPU, by hand: `pytest -m gpu`. The checks of the CPU, and what only a GPU has: copies beside the loop."""

import numpy as np
import pytest
import torch
from helpers import CASES, DATA, case, rel

from engine import Engine, SamplingParams, Snapshots
from model import K3

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")]
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)


def on_gpu(name, dtype=torch.float32):
    return K3.from_pretrained(DATA / name, dtype=dtype, device="cuda", progress=False)


@pytest.mark.parametrize("name", CASES)
def test_reference(name):
    model, reference = on_gpu(name), case(name)[1]
    with torch.no_grad():
        logits, hidden = model(reference["input_ids"][None].cuda(), return_hidden=True)
    assert rel(logits[0].cpu(), reference["logits"]) < 1e-5
    assert rel(hidden[0].cpu(), reference["hidden_before_final_norm"]) < 1e-5
    ids = reference["greedy_from_20"].tolist()
    for chunk in (1, 7, 64):
        outs = Engine(model, num_pages=60, prefill_chunk=chunk).generate([ids[:20], ids[:33], ids[:20]], GREEDY)
        assert outs[0].token_ids == ids[20:] == outs[2].token_ids
        assert outs[1].token_ids[:27] == ids[33:]


def test_prefixes_move_to_pinned_memory_and_back_while_the_loop_goes_on():
    model = on_gpu("micro")
    texts = [np.random.default_rng(i).integers(3, 257, 200).tolist() for i in range(12)]
    want = [o.token_ids for o in Engine(model, num_pages=200, prefix_cache=False).generate(texts, GREEDY)]
    engine = Engine(model, num_pages=14, host_pages=120, snapshots=Snapshots(every=64), max_batch=3)
    assert engine.cache.host.memory.is_pinned()
    for _ in range(3):
        outs = engine.generate(texts, GREEDY)
        assert [o.token_ids for o in outs] == want
    assert all(o.cached_tokens == 200 for o in outs)
    stats = engine.stats
    assert stats["offloaded"] > 20 and stats["restored"] > 20
    assert stats["pages_free"] + stats["pages_cached"] == stats["pages"]


def test_fp8_rows():
    engine = Engine(on_gpu("micro", torch.bfloat16), num_pages=60, kv_dtype="fp8")
    out = engine.generate([list(range(3, 200))], GREEDY)[0]
    assert len(out.token_ids) == 40 and out.finish_reason == "length"


def test_a_nan_stays_home():
    model = on_gpu("micro")
    texts = [np.random.default_rng(i).integers(3, 257, 90).tolist() for i in range(3)]
    want = [o.token_ids for o in Engine(model, num_pages=60).generate(texts, GREEDY)]
    engine = Engine(model, num_pages=60)
    outs = [engine._enqueue(t, GREEDY) for t in texts]
    for _ in range(4):
        engine.step()
    engine.pool.state(0)[0][int(engine.running[1].state[0])] = float("nan")
    while engine.running or engine.waiting:
        engine.step()
    assert [o.finish_reason for o in outs] == ["length", "error", "length"]
    assert [outs[0].token_ids, outs[2].token_ids] == [want[0], want[2]]
