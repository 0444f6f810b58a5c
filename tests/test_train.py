"""train.py on a micro model: it learns, resumes exactly, stores what it trained, measures what it says."""

import copy
import itertools
import json
import math
import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch.nn.utils import parametrize

import evaluate
import moe
import optim
import train
from model import K3
from tokenizer import Tokenizer

SIZES = "--hidden-size 32 --num-hidden-layers 4 --attn-res-block-size 2 --intermediate-size 64 --num-attention-heads 2 "
SIZES += "--q-lora-rank 16 --kv-lora-rank 16 --qk-nope-head-dim 8 --qk-rope-head-dim 8 --v-head-dim 8 --num-experts 6 "
SIZES += "--num-experts-per-token 2 --num-shared-experts 1 --moe-intermediate-size 32 --routed-expert-hidden-size 32 "
SIZES += "--num-heads 2 --head-dim 8 --bpe-size 300 --batch 4 --seq 48 --warmup 5 --lr 0.01 "
SIZES += "--mtp-lr 0.04 --adam-lr 0.01 --log-every 5 --eval-every 20 --eval-prompts 2 --device cpu"


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """--data and --val: sentences of a little grammar."""
    draw, folder = random.Random(0), tmp_path_factory.mktemp("texts")
    who, did, what = (["the fox", "a king", "her cat"], ["saw", "ate", "sold"], ["the moon.", "a fish.", "gold."])
    for name, count in (("train", 1500), ("val", 300)):
        lines = [" ".join(map(draw.choice, (who, did, what))) + draw.choice(" \n\n") for _ in range(count)]
        (folder / f"{name}.txt").write_text("".join(lines), encoding="utf-8")
    return ["--data", str(folder / "train.txt"), "--val", str(folder / "val.txt")]


def settings(texts, out, **changes):
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in changes.items()]
    return train.settings([*texts, "--out", str(out), *SIZES.split(), *flags])


@pytest.fixture(scope="module")
def trained(texts, tmp_path_factory):
    """A trained micro model, still with fake quantization, and its history, settings and (exported) folder."""
    out = tmp_path_factory.mktemp("trained")
    opt = settings(texts, out, steps=50, mtp_only=0.4)
    model, history, finished = train.train(opt)
    assert finished
    ids = train.encode(Tokenizer.from_pretrained(out), train.read(opt.val), "cpu").long()
    with torch.no_grad():
        before = model.eval()(ids[None, :100])
    assert all(parametrize.is_parametrized(experts, "w13") for _, experts in model.expert_stacks())
    train.export(model, out)
    with torch.no_grad():
        assert torch.equal(model(ids[None, :100]), before), "taking the fake quantization off changed the model"
    return model, history, opt, out, ids


def test_loss_falls(trained):
    _, history, opt, _, _ = trained
    assert history[0]["loss"] > 3.5 and history[-1]["loss"] < 2.5
    drafts = [row["mtp_loss"] for row in history]
    assert not any(drafts[:6]) and 0 < drafts[-1] < drafts[6] - 1, "the MTP layer waits, then learns"
    assert [row["step"] for row in history] == list(range(5, 51, 5))
    assert [row["step"] for row in history if "val" in row] == [20, 40, 50]
    assert history[-1]["val"] < history[3]["val"]


def test_main_model_rests_while_mtp_alone_trains(texts, tmp_path):
    opt = settings(texts, tmp_path, steps=4, mtp_only=0.5, quant_from=0.0)
    assert opt.main_steps == 2
    train.train(settings(texts, tmp_path, steps=2, mtp_only=0, quant_from=0.0, decay=0))
    two = torch.load(tmp_path / "train.pt")["model"]
    train.train(settings(texts, tmp_path, steps=4, mtp_only=0.5, quant_from=0.0, decay=0))
    four = torch.load(tmp_path / "train.pt")["model"]
    moved = {name for name in two if not torch.equal(two[name], four[name])}
    assert moved and all(name.startswith("mtp.") for name in moved)
    assert "mtp.layer.ffn.gate.e_score_correction_bias" in moved and "mtp.eh_proj.weight" in moved


def test_init_goes_on_from_a_checkpoint(trained, texts, tmp_path):
    """The MTP layer alone, longer: the main model is stored as it was, to the bit, and drafts get better."""
    _, history, _, folder, _ = trained
    flags = ["--init", str(folder), "--out", str(tmp_path), *SIZES[SIZES.index("--batch") :].split()]
    opt = train.settings([*texts, *flags, "--steps=10", "--mtp-only=1", "--quant-from=0"])
    model, more, _ = train.train(opt)
    train.export(model, tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    with safe_open(folder / "model.safetensors", "pt") as old, safe_open(tmp_path / "model.safetensors", "pt") as new:
        assert set(old.keys()) == set(new.keys())
        moved = {name for name in old.keys() if not torch.equal(old.get_tensor(name), new.get_tensor(name))}
    assert moved and all(".layers.4." in name for name in moved)
    assert more[-1]["mtp_loss"] < history[-1]["mtp_loss"]
    with pytest.raises(ValueError, match="those it has"):
        train.settings([*texts, *flags, "--hidden-size=64"])
    with pytest.raises(FileNotFoundError):
        train.train(train.settings([*texts, *flags, "--init", str(tmp_path / "none")]))


def test_own_text_is_what_the_checkpoint_writes(trained, texts):
    """Each passage goes on greedily; the MTP layer reads them in every other step."""
    folder = trained[3]
    opt = train.settings([*texts, "--init", str(folder), "--own-text", "3", "--device", "cpu"])
    model, data = train.K3.from_pretrained(folder, torch.float32, progress=False), torch.arange(300, dtype=torch.int32)
    own = train.own_text(data, opt).view(3, 224).long()
    assert (own[:, 1:128] == own[:, :127] + 1).all() and len(set(own[:, 0].tolist())) == 3
    with torch.no_grad():
        assert torch.equal(model(own).argmax(-1)[:, 127:-1], own[:, 128:])
    with pytest.raises(ValueError, match="give one"):
        train.settings([*texts, "--own-text", "3"])


def test_own_text_is_read_once_the_main_model_is_frozen(trained, texts, tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(train, "own_text", lambda data, opt: -data - 1)
    monkeypatch.setattr(train, "batch", lambda data, step, opt, usual=train.batch: read.append(int(data[0]) < 0) or
                        usual(data.abs(), step, opt))  # fmt: skip
    flags = ["--init", str(trained[3]), "--out", str(tmp_path), *SIZES[SIZES.index("--batch") :].split()]
    train.train(train.settings([*texts, *flags, "--steps=6", "--mtp-only=0.5", "--own-text=3"]))
    assert read == [False, False, False, True, False, True]


def test_stopped_at_every_step_equals_never_stopped(texts, tmp_path):
    plan = {"steps": 9, "quant_from": 0.4, "mtp_only": 0.3, "log_every": 2, "eval_every": 5}
    _, whole, _ = train.train(settings(texts, tmp_path / "whole", **plan))
    _, history, finished = train.train(settings(texts, tmp_path / "cut", **plan, minutes=1e-9))
    stops = 1
    while not finished:
        assert torch.load(tmp_path / "cut" / "train.pt")["step"] == stops
        again = train.settings(["--resume", "--out", str(tmp_path / "cut"), "--minutes", "1e-9"])
        _, history, finished = train.train(again)
        stops += 1
    assert stops == 9
    for a, b in zip(whole, history, strict=True):
        assert {**a, "tokens_per_second": 0} == {**b, "tokens_per_second": 0}
    a, b = (torch.load(tmp_path / name / "train.pt") for name in ("whole", "cut"))
    assert all(torch.equal(a["model"][name], b["model"][name]) for name in a["model"])
    for mine, others in zip(a["optimizers"], b["optimizers"], strict=True):
        for one, other in zip(mine["state"].values(), others["state"].values(), strict=True):
            assert one and all(torch.equal(one[name], other[name]) for name in one)


def test_orthogonal_is_u_vt():
    """Newton-Schulz brings singular values near 1, whatever they are, and keeps singular vectors; each matrix alone."""
    for shape in ((3, 20, 8), (3, 8, 20), (2, 16, 16)):
        size = torch.tensor([1e-3, 1, 50])[: shape[0], None, None]
        g = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * size
        u, _, vt = torch.linalg.svd(g, full_matrices=False)
        got = optim.orthogonal(g)
        assert ((u.mT @ got @ vt.mT).diagonal(dim1=-2, dim2=-1) - 0.95).abs().max() < 0.35
        assert torch.allclose(got[:1], optim.orthogonal(g[:1]), atol=1e-5)
        rest = u.mT @ got @ vt.mT
        assert (rest - torch.diag_embed(rest.diagonal(dim1=-2, dim2=-1))).abs().max() < 1e-3


def test_muon_moves_each_part_of_a_fused_matrix_alone():
    torch.manual_seed(0)
    whole, parts = torch.nn.Parameter(torch.randn(12, 5)), None
    parts = [torch.nn.Parameter(whole.detach()[:8].clone()), torch.nn.Parameter(whole.detach()[8:].clone())]
    whole.parts = [8, 4]
    whole.grad = torch.randn(12, 5)
    parts[0].grad, parts[1].grad = whole.grad[:8].clone(), whole.grad[8:].clone()
    before = whole.detach().clone()
    for params in ([whole], parts):
        optim.Muon(params, 0.1, 0.1).step()
    assert torch.allclose(whole, torch.cat(list(parts)), atol=1e-6)
    moved = (whole - 0.99 * before).detach()[:8]
    assert torch.allclose(moved, -0.02 * 8**0.5 * optim.orthogonal(whole.grad[None, :8])[0], atol=1e-5)


def test_grouped_experts_are_the_op():
    torch.manual_seed(0)
    cfg = train.config(train.settings(SIZES.split()), 600)
    experts, z = moe.Experts(6, 32, 32), torch.randn(17, 32)
    ids, weights = torch.stack([torch.randperm(6)[:2] for _ in range(17)]), torch.rand(17, 2)
    want = moe.routed_experts.torch_path(z, ids, weights, experts, cfg)
    got = optim.grouped_experts(z, ids, weights, experts, cfg)
    assert (got - want).norm() < 2e-2 * want.norm()


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e30])
def test_fake_mxfp4_is_pack_and_unpack(scale):
    draw = torch.Generator().manual_seed(0)
    w = torch.randn(7, 33, 96, generator=draw) * torch.exp2(torch.randint(-20, 20, (7, 33, 1), generator=draw))
    w[0] = 0
    w[1] = torch.randint(-48, 49, (33, 96), generator=draw) / 8  # every tie between two FP4 values
    w[2, :, 0] = 6 * torch.exp2(torch.arange(-16.0, 17.0))  # exactly the largest value, and the next float above it
    w[3, :, 0] = torch.nextafter(w[2, :, 0], torch.tensor(torch.inf))
    w = (w * scale).requires_grad_()
    fake = optim.FakeMXFP4()(w)
    assert torch.equal(fake, moe.mxfp4_unpack(*moe.mxfp4_pack(w.detach()), torch.float32))
    assert torch.equal(optim.FakeMXFP4()(fake), fake)
    upstream = torch.randn(w.shape, generator=draw)
    fake.backward(upstream)
    assert torch.equal(w.grad, upstream)


def test_export_is_the_trained_model(trained):
    model, _, _, out, ids = trained
    loaded = K3.from_pretrained(out, dtype=torch.float32, progress=False)
    assert all(experts.is_packed("w13") and experts.is_packed("w2") for _, experts in loaded.expert_stacks())
    with safe_open(out / "model.safetensors", framework="pt") as file:
        kinds = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    assert not [name for name in kinds if name.endswith(("mtp.head.weight", "4.embed_tokens.weight"))], "stored twice"
    assert {kind for name, kind in kinds.items() if ".experts." in name} == {"U8"}
    assert {kind for name, kind in kinds.items() if "_proj.weight" in name and ".experts." not in name} == {"BF16"}

    views = model.published()
    for (prefix, mine), (_, stored) in zip(model.expert_stacks(), loaded.expert_stacks(), strict=True):
        for name in ("w13", "w2"):
            packed = getattr(stored, f"{name}_packed"), getattr(stored, f"{name}_scale")
            assert torch.equal(moe.mxfp4_unpack(*packed, torch.float32), getattr(mine, name)), f"{prefix}{name}"
    before = model(ids[None, :100])
    with torch.no_grad():
        for name, stored in loaded.published().items():
            if name in views:
                assert (views[name] - stored).abs().max() <= stored.abs().max() * 2**-8
                views[name].copy_(stored)
        after, got = model(ids[None, :100]), loaded(ids[None, :100])
    assert (after - got).abs().max() < 1e-5
    assert (before - got).norm() < 0.05 * got.norm()


def test_tokenizer(trained):
    _, _, _, out, _ = trained
    added = json.loads((out / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    tokenizer, config = Tokenizer.from_pretrained(out), json.loads((out / "config.json").read_text(encoding="utf-8"))
    size = tokenizer.vocab_size - 256
    assert [entry["id"] for entry in added] == list(range(size, size + 256)) and all(e["special"] for e in added)
    names = [entry["content"] for entry in added]
    assert names[:3] == ["[BOS]", "[EOS]", "<|end_of_msg|>"] and names[254:] == ["[UNK]", "[PAD]"]
    assert names[8] == f"<|reserved_token_{size + 8}|>" and len(set(names)) == 256
    text = config["text_config"]
    assert text["vocab_size"] == tokenizer.vocab_size
    assert [text[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [size, size + 2, size + 255]
    odd = "A [BOS] \u00e9\u4e2d\U0001f600\r\n\n\n  tail \n\n next"
    assert tokenizer.decode(tokenizer.encode(odd)) == odd and max(tokenizer.encode(odd)) < size
    assert train.encode(tokenizer, odd, "cpu").tolist() == tokenizer.encode(odd)


def test_balance_evens_the_loads():
    torch.manual_seed(0)
    cfg = train.config(train.settings(SIZES.split()), 600)
    layers = [moe.MoE(cfg), moe.MoE(cfg)]
    routers = [layer.gate for layer in layers]
    with torch.no_grad():
        layers[0].in_proj.weight[2] += 0.5  # inputs have a common part, so one expert is everyone's favourite

    def choose(x):
        for layer in layers:
            layer.gate(moe.in_projection(x, layer.in_proj.weight, 6)[0])

    for router in routers:
        router.load = torch.zeros(6)
        router.register_forward_hook(train.count_load)
    worst = []
    for step in range(200):
        choose(torch.randn(256, 32) + 0.5)
        assert all(router.load.sum() == 512 for router in routers)
        worst.append(train.balance(layers, 0.01 if step < 150 else 0.001).item())
        assert all((router.load == 0).all() for router in routers)
    assert worst[0] > 2.5 and max(worst[-20:]) < 1.3
    layers[0].in_proj.weight.requires_grad_(False)
    kept, moved = (router.e_score_correction_bias.clone() for router in routers)
    choose(torch.randn(256, 32) + 0.5)
    train.balance(layers, 0.01)
    assert torch.equal(routers[0].e_score_correction_bias, kept)
    assert not torch.equal(routers[1].e_score_correction_bias, moved)
    routers[0].eval()
    choose(torch.randn(256, 32) + 0.5)
    assert routers[0].load.sum() == 0, "measuring must not count"


@torch.no_grad()
def one_by_one(model, prompt, new, drafts):
    """How many drafts each cycle keeps. One sequence, a token at a time, drafts through the public mtp_logits."""
    truth = list(prompt)
    for _ in range(new + drafts + 1):
        truth.append(int(model(torch.tensor([truth]))[0, -1].argmax()))
    n, kept = len(prompt) + 1, []
    while n < len(prompt) + new:
        known = truth[:n]
        _, hidden = model(torch.tensor([known[:-1]]), return_hidden=True)
        for _ in range(drafts):
            rows = F.pad(hidden, (0, 0, 0, 1))  # mtp_logits does not read the last row
            logits, x = model.mtp_logits(torch.tensor([known]), rows, return_hidden=True)
            known.append(int(logits[0, -1].argmax()))
            hidden = torch.cat([hidden, x[:, -1:]], dim=1)
        agree = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(known[n:], truth[n:]))
        kept.append(len(list(agree)))
        n += kept[-1] + 1
    return kept


def test_drafts_kept_are_those_of_one_by_one_decoding(trained):
    model, _, _, _, ids = trained
    model = copy.deepcopy(model)
    with torch.no_grad():  # a worse drafter, so that some drafts are kept and some are not
        noise = torch.randn(model.mtp.eh_proj.weight.shape, generator=torch.Generator().manual_seed(0))
        model.mtp.eh_proj.weight += 0.05 * noise
    prompts = torch.stack([ids[i : i + 20] for i in (0, 33, 101, 170)])
    for drafts in (3, 1):
        kept = [k for prompt in prompts.tolist() for k in one_by_one(model, prompt, 16, drafts)]
        assert sorted(kept) == sorted(evaluate.drafts_kept(model, prompts, 16, drafts).tolist())
        assert {0, drafts} <= set(kept), "the case says little: all or no drafts were kept"


@torch.no_grad()
def test_bits_per_byte_reads_each_token_once_with_half_a_window_before_it(trained):
    model, _, _, _, ids = trained
    ids, seq = ids[:150], 32  # the last window is not full
    nats = math.log(model.cfg.vocab_size)
    for start in range(0, len(ids), seq):
        window = ids[max(0, start - seq // 2) : start + seq]
        loss = F.cross_entropy(model(window[None, :-1])[0], window[1:], reduction="none")
        nats += loss[-len(ids[max(1, start) : start + seq]) :].sum().item()
    assert evaluate.bits_per_byte(model, ids, 400, seq) == pytest.approx(nats / math.log(2) / 400, rel=1e-5)


@torch.no_grad()
def test_bits_per_byte_through_the_pool_are_the_same(trained):
    model, _, _, _, ids = trained
    whole, paged = (f(model, ids[:150], 400, 32) for f in (evaluate.bits_per_byte, evaluate.bits_per_byte_paged))
    assert paged == pytest.approx(whole, rel=1e-5)
    fp8 = evaluate.bits_per_byte_paged(model, ids[:150], 400, 32, torch.float8_e4m3fn)
    assert fp8 != paged and fp8 == pytest.approx(paged, rel=0.02)


def test_learning_rate(texts):
    opt = settings(texts, "out", steps=1000, warmup=100, decay=0.5, mtp_only=0.2, lr=1.0, mtp_lr=0.5)
    rates = [train.learning_rate(step, opt) for step in range(1000)]
    assert rates[0] == 0.01 and rates[99:401] == [1.0] * 302 and rates[600] == 0.5 and rates[799] == 1 / 400
    assert rates[800] == 0.5 and rates[900] == 0.25 and 0 < rates[999] < 0.01


def test_command_line(texts, tmp_path, capsys):
    out = str(tmp_path / "out")
    (tmp_path / "sources.md").write_text("# Sources\n\nMade up.\n", encoding="utf-8")
    extra = ["--sources", str(tmp_path / "sources.md"), "--card-data", "Foxes and kings.", "--steps", "6"]
    train.main([*texts, "--out", out, *SIZES.split(), *extra])
    printed = capsys.readouterr().out
    card = (Path(out) / "README.md").read_text(encoding="utf-8")
    for wanted in ("apache-2.0", "Made up.", "Foxes and kings.", "--data train.txt", "tokens per cycle", "bits per"):
        assert wanted in card
    assert str(tmp_path) not in card
    assert {"config.json", "model.safetensors", "tokenizer.json", "history.json", "train.pt"} <= {
        file.name for file in Path(out).iterdir()
    }
    evaluate.main([out, *texts[2:], "--seq", "48", "--prompts", "2", "--device", "cpu"])
    assert capsys.readouterr().out.splitlines() == [line for line in printed.splitlines() if ":" in line][-2:]


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--data", "a.txt"], "--val FILE"),
        (["--data", "no-such.txt", "--val", "no-such.txt"], "no-such.txt"),
        (["--resume", "--out", "no-such-folder"], "nothing to resume"),
        (["--init", "tiny", "--bpe-size", "300"], "the sizes of the model"),
        (["--own-text", "9"], "give one"),
    ],
)
def test_errors_are_one_line(flags, words, capsys):
    with pytest.raises(SystemExit) as stop:
        train.main(flags)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and words in error and len(error.splitlines()) == 1


def test_bad_sizes_and_texts_are_told(texts, tmp_path):
    with pytest.raises(ValueError, match="MXFP4 needs a multiple of 32"):
        train.config(settings(texts, tmp_path, moe_intermediate_size=40), 600)
    with pytest.raises(ValueError, match="a sequence takes 100001"):
        train.train(settings(texts, tmp_path, seq=100000))
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"latin.txt: not UTF-8 text"):
        train.read([str(tmp_path / "latin.txt")])


def test_help_names_every_setting(capsys):
    with pytest.raises(SystemExit):
        train.settings(["--help"])
    shown = capsys.readouterr().out
    for flag in ("--data", "--quant-from", "--no-mtp-distill", "--hidden-size", "--short-conv-kernel-size"):
        assert flag in shown
