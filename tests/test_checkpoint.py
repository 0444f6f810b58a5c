"""Loading and saving: bit-equal round trips, all spellings met in the wild, one clear line for every kind of damage."""

import json
import shutil
import subprocess
import sys
import weakref

import pytest
import torch
from helpers import CASES, DATA, case, mxfp4_decode, rel, tiny_model
from safetensors import safe_open
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode

import checkpoint
from model import K3, K3Config
from moe import mxfp4_pack

INDEX = "model.safetensors.index.json"
P = "language_model.model.layers."
MTP = P + "9."
BF16 = torch.bfloat16
IDS = torch.arange(3, 33)[None]


def stored(folder):
    """All tensors of a folder's shards."""
    tensors = {}
    for file in sorted(folder.glob("model*.safetensors")):
        with safe_open(file, "pt") as f:
            tensors |= {name: f.get_tensor(name) for name in f.keys()}
    return tensors


def folder_with(path, tensors, name="micro", **text):
    """A folder with these tensors in one file and the configuration of a reference case, some text fields changed."""
    path.mkdir(exist_ok=True)
    top = json.loads((DATA / name / "config.json").read_text())
    top.get("text_config", top).update(text)
    (path / "config.json").write_text(json.dumps(top))
    save_file({n: t.clone().contiguous() for n, t in tensors.items()}, path / "model.safetensors")
    return path


def load(path, dtype=torch.float32):
    return K3.from_pretrained(path, dtype=dtype, progress=False)


def logits(model):
    """Main and MTP logits of some ids, in one tensor."""
    with torch.no_grad():
        main, hidden = model(IDS, return_hidden=True)
        return torch.cat([main, model.mtp_logits(IDS, hidden)], dim=1) if model.mtp else main


def identical(a, b):
    """Two folders' or dicts' tensors: the same names, dtypes, shapes and bytes."""
    a, b = (x if isinstance(x, dict) else stored(x) for x in (a, b))
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and a[name].shape == b[name].shape, name
        assert torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8)), name


def refused(path, *named, error=ValueError):
    """Loading raises one line that names the folder and all of `named`, and leaves the default dtype alone."""
    with pytest.raises(error) as e:
        load(path, BF16)
    assert all(part in str(e.value) for part in (str(path), *named)), str(e.value)
    assert "\n" not in str(e.value) and torch.get_default_dtype() == torch.float32


# ---------------------------------------------------------------- round trips


@pytest.mark.parametrize("name", CASES)
def test_bf16_save_writes_the_original_files(tmp_path, name):
    load(DATA / name, BF16).save_pretrained(tmp_path)
    identical(tmp_path, DATA / name)
    assert K3Config.from_json(tmp_path) == K3Config.from_json(DATA / name)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_save_and_load_is_bit_equal(tmp_path, name, dtype):
    model = load(DATA / name, dtype)
    model.save_pretrained(tmp_path)
    again = load(tmp_path, dtype)
    identical(again.state_dict(), model.state_dict())
    again.save_pretrained(tmp_path / "2")
    identical(tmp_path / "2", tmp_path)


def test_fresh_model_comes_back(tmp_path):
    model = tiny_model(num_nextn_predict_layers=1)
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    identical(again.state_dict(), model.state_dict())
    assert again.cfg == model.cfg


def test_weights_keep_their_dtypes():
    wide = ("conv_weight", "A_log", "dt_bias", "o_norm.weight", "e_score_correction_bias")
    for name, p in load(DATA / "micro", BF16).named_parameters():
        assert p.dtype == (torch.float32 if name.endswith(wide) else BF16), name
    assert not load(DATA / "micro").training


@pytest.mark.parametrize("limit", [1, 50_000, 1_000_000])
def test_shards_hold_the_same(tmp_path, limit):
    model = load(DATA / "micro-mtp", BF16)
    model.save_pretrained(tmp_path, max_shard_bytes=limit)
    identical(tmp_path, DATA / "micro-mtp")
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 2 and all(f"-of-{len(files):05d}." in f.name for f in files)
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in stored(tmp_path).values())
    for file in files:
        with safe_open(file, "pt") as f:
            names = list(f.keys())
            assert all(index["weight_map"][name] == file.name for name in names)
            assert len(names) == 1 or sum(f.get_tensor(name).nbytes for name in names) <= limit
    assert torch.equal(logits(load(tmp_path)), logits(case("micro-mtp")[0]))


def test_saving_over_older_files(tmp_path):
    """No stale shard or index survives; files of others do."""
    model = load(DATA / "micro", BF16)
    (tmp_path / "tokenizer.json").write_text("{}")
    for limit, count in ((300_000, 9), (1_000_000, 3), (5 << 30, 1), (1_000_000, 3)):
        model.save_pretrained(tmp_path, max_shard_bytes=limit)
        assert len(list(tmp_path.glob("*.safetensors"))) == count
        assert (tmp_path / INDEX).exists() == (count > 1)
        identical(tmp_path, DATA / "micro")
        load(tmp_path)
        assert not list(tmp_path.glob(".*"))
    assert (tmp_path / "tokenizer.json").exists()


def test_saving_over_the_files_it_came_from(tmp_path):
    shutil.copytree(DATA / "micro-mtp", tmp_path, dirs_exist_ok=True)
    tensors = stored(tmp_path)
    name = MTP + "embed_tokens.weight"
    tensors[name] = tensors[name] * 2
    folder_with(tmp_path, tensors, "micro-mtp")
    model = load(tmp_path, BF16)
    model.save_pretrained(tmp_path, max_shard_bytes=100_000)
    identical(tmp_path, tensors)


def test_mxfp4_true_packs_the_routed_experts(tmp_path):
    model = load(DATA / "micro")
    model.save_pretrained(tmp_path, mxfp4=True)
    before, after = model.published(), stored(tmp_path)
    experts = {n.removesuffix("_packed") for n in after if n.endswith("_packed")}
    assert experts == {f"language_model.{n}" for n in before if ".experts." in n}
    assert {n for n in after if n.endswith("_scale")} == {n + "_scale" for n in experts}
    for name in sorted(experts)[::50]:
        pair = after[name + "_packed"], after[name + "_scale"]
        assert all(map(torch.equal, pair, mxfp4_pack(before[name.removeprefix("language_model.")].detach())))
    top = json.loads((tmp_path / "config.json").read_text())
    assert top["quantization_config"]["format"] == "mxfp4-pack-quantized"
    again = load(tmp_path)
    assert all(e.is_packed(w) for _, e in again.expert_stacks() for w in ("w13", "w2"))
    assert not [name for name in before if ".experts." in name and name in again.published()]
    decoded = {n: t for n, t in after.items() if not n.endswith(("_packed", "_scale"))}
    decoded |= {n: mxfp4_decode(after[n + "_packed"], after[n + "_scale"]) for n in experts}
    assert rel(logits(again), logits(load(folder_with(tmp_path / "plain", decoded)))) < 1e-5
    assert rel(logits(again), logits(model)) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_mxfp4_false_unpacks(tmp_path, dtype):
    model = load(DATA / "micro-mxfp4", dtype)
    model.save_pretrained(tmp_path, mxfp4=False)
    before, after = stored(DATA / "micro-mxfp4"), stored(tmp_path)
    assert after.keys() == {n.removesuffix("_packed") for n in before if not n.endswith("_scale")}
    name = P + "1.block_sparse_moe.experts.3.w2.weight"
    assert after[name].dtype == dtype
    assert torch.equal(after[name].double(), mxfp4_decode(before[name + "_packed"], before[name + "_scale"]))
    assert "quantization" not in (tmp_path / "config.json").read_text()
    again = load(tmp_path, dtype)
    assert torch.equal(logits(again), logits(model))
    again.save_pretrained(tmp_path, mxfp4=True)
    back = load(tmp_path, dtype)
    assert torch.equal(logits(back), logits(model))


def test_failed_save_leaves_the_old_files(tmp_path):
    """Experts with NaN cannot be packed: nothing is replaced, nothing is left lying about."""
    model = load(DATA / "micro", BF16)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        model.layers[-1].ffn.experts.w2[0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match="finite"):
        model.save_pretrained(tmp_path, mxfp4=True, max_shard_bytes=100_000)
    identical(tmp_path, DATA / "micro")
    assert sorted(f.name for f in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


# ---------------------------------------------------------------- spellings and shapes

RES = ("self_attention_res", "mlp_res", "output_attn_res")


def rename(old, new):
    return lambda tensors: {name.replace(old, new): t for name, t in tensors.items()}


def reshape(suffix, shape_of):
    return lambda tensors: {n: t.reshape(shape_of(t)) if n.endswith(suffix) else t for n, t in tensors.items()}


def dotted_mixtures(tensors):
    for mix in RES:
        for part in ("norm", "proj"):
            tensors = rename(f"{mix}_{part}.weight", f"{mix}.{part}_weight")(tensors)
    return tensors


def refill_A_log(size, fill):
    """A_log of `size` entries: the first 4 as they are, the others `fill`."""

    def change(tensors):
        return {
            n: torch.cat([t.flatten()[:4], torch.full((size - 4,), fill)]) if n.endswith("A_log") else t
            for n, t in tensors.items()
        }

    return change


def A_log_of_rank_4(tensors):
    return {n: t.flatten()[:4].view(1, 1, 4, 1) if n.endswith("A_log") else t for n, t in tensors.items()}


SPELLINGS = {
    "AttnRes with dots": dotted_mixtures,
    "bias without gate.": rename("block_sparse_moe.gate.e_score", "block_sparse_moe.e_score"),
    "no language_model.": rename("language_model.", ""),
    "conv [C, 4]": reshape("conv1d.weight", lambda t: (t.shape[0], t.shape[-1])),
    "proj [H]": reshape("_res_proj.weight", lambda t: (-1,)),
    "A_log [heads]": refill_A_log(4, 0.0),
    "A_log [head_dim] padded": refill_A_log(32, 0.0),
    "A_log [head_dim] padded with garbage": refill_A_log(32, 77.0),
    "A_log [1, 1, heads, 1]": A_log_of_rank_4,
    "wide floats": lambda tensors: {n: t.float() if t.is_floating_point() else t for n, t in tensors.items()},
}


@pytest.mark.parametrize(
    "name", ["micro-mtp", "kimi-linear-micro", pytest.param("micro-mxfp4", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings(tmp_path, spelling, name):
    tensors = stored(DATA / name)
    changed = SPELLINGS[spelling](tensors)
    model = load(folder_with(tmp_path, changed, name))
    assert torch.equal(logits(model), logits(case(name)[0]))


def test_the_spellings_are_others():
    tensors = stored(DATA / "micro")
    for spelling, change in SPELLINGS.items():
        same = {n: (t.shape, t.dtype) for n, t in change(tensors).items()}
        padded = "padded" in spelling
        assert (same == {n: (t.shape, t.dtype) for n, t in tensors.items()}) == padded, spelling


def test_more_heads_than_channels(tmp_path):
    model = tiny_model(linear=dict(num_heads=7, head_dim=4))
    model.save_pretrained(tmp_path)
    assert stored(tmp_path)[P + "0.self_attn.A_log"].numel() == 7
    assert torch.equal(logits(load(tmp_path)), logits(model))


@pytest.mark.parametrize("at", ["text_config", None])
def test_place_of_the_quantization_config(tmp_path, at):
    path = folder_with(tmp_path, stored(DATA / "micro-mxfp4"), "micro-mxfp4")
    top = json.loads((path / "config.json").read_text())
    quant = top["text_config"].pop("quantization_config")
    (top[at] if at else top)["quantization_config"] = quant
    (path / "config.json").write_text(json.dumps(top))
    assert torch.equal(logits(load(path)), logits(case("micro-mxfp4")[0]))


def test_other_towers_are_skipped_with_one_line(tmp_path, capsys):
    towers = {"vision_tower.blocks.0.weight": torch.ones(3), "mm_projector.bias": torch.ones(2, dtype=torch.int8)}
    path = folder_with(tmp_path, stored(DATA / "micro") | towers)
    model = K3.from_pretrained(path, dtype=torch.float32)
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if "skipped" in line]  # a slow load shows a progress bar too
    assert out == "" and len(lines) == 1 and "skipped 2" in lines[0] and str(path) in lines[0]
    assert torch.equal(logits(model), logits(case("micro")[0]))
    load(path)
    K3.from_pretrained(DATA / "micro")
    assert "skipped" not in capsys.readouterr().err


# ---------------------------------------------------------------- quantized tensors


def quantize(tensors, chosen):
    """tensors with those whose name contains one of `chosen` as pairs; the same with these dequantized bit by bit."""
    pairs, plain = {}, {}
    for name, t in tensors.items():
        if not any(part in name for part in chosen):
            pairs[name] = plain[name] = t
            continue
        packed, scale = mxfp4_pack(t)
        pairs |= {name + "_packed": packed, name + "_scale": scale}
        plain[name] = mxfp4_decode(packed, scale).to(t.dtype)
    assert len(pairs) > len(plain) == len(tensors)
    return pairs, plain


LINEARS = ["2.self_attn.q_proj.weight", "3.self_attn.kv_b_proj.weight", "0.mlp.down_proj.weight", "lm_head.weight"]
LINEARS += ["4.block_sparse_moe.shared_experts.gate_proj.weight", "1.self_attn.b_proj.weight"]
LINEARS += ["5.block_sparse_moe.gate.weight", "9.eh_proj.weight", "9.shared_head.head.weight"]


@pytest.mark.parametrize("linear", LINEARS)
def test_any_linear_may_be_quantized(tmp_path, linear):
    pairs, plain = quantize(stored(DATA / "micro-mtp"), [linear])
    got = load(folder_with(tmp_path / "pairs", pairs, "micro-mtp"), BF16)
    want = load(folder_with(tmp_path / "plain", plain, "micro-mtp"), BF16)
    identical(got.state_dict(), want.state_dict())
    assert torch.equal(logits(got), logits(want)) and not torch.equal(
        logits(got), logits(load(DATA / "micro-mtp", BF16))
    )


@pytest.mark.parametrize("chosen", [[".experts.3."], ["w2.weight"], ["w1.weight"], ["2.block_sparse_moe.experts."]])
def test_partly_quantized_experts(tmp_path, chosen):
    pairs, plain = quantize(stored(DATA / "micro"), chosen)
    model = load(folder_with(tmp_path / "pairs", pairs))
    want = logits(load(folder_with(tmp_path / "plain", plain)))
    assert rel(logits(model), want) < 1e-6
    held = {w: [e.is_packed(w) for _, e in model.expert_stacks()] for w in ("w13", "w2")}
    whole = chosen[0].startswith("2.")  # a stack stays packed where all of its matrices are
    assert held["w13"] == [whole and n == 1 for n in range(8)]
    assert held["w2"] == [whole and n == 1 or chosen == ["w2.weight"] for n in range(8)]


# ---------------------------------------------------------------- MTP


def test_equal_copies_share_memory():
    model = load(DATA / "micro-mtp")
    assert model.mtp.embed_tokens is None and model.mtp.head is None
    names = dict(checkpoint.tensors_to_write(model))
    for copy, main in (
        (MTP + "embed_tokens", "language_model.model.embed_tokens"),
        (MTP + "shared_head.head", "language_model.lm_head"),
    ):
        assert names[copy + ".weight"].data_ptr() == names[main + ".weight"].data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("copy", ["embed_tokens.weight", "shared_head.head.weight"])
def test_copies_that_differ_are_used(tmp_path, copy, dtype):
    tensors = stored(DATA / "micro-mtp")
    tensors[MTP + copy] = tensors[MTP + copy] * -2
    model, plain = load(folder_with(tmp_path, tensors, "micro-mtp"), dtype), load(DATA / "micro-mtp", dtype)
    (main, draft), (main_before, draft_before) = (logits(m).split([30, 29], dim=1) for m in (model, plain))
    assert torch.equal(main, main_before)
    assert torch.equal(draft, -2 * draft_before) if "head" in copy else rel(draft, draft_before) > 0.1
    model.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(load(tmp_path / "again", dtype)), logits(model))
    model.save_pretrained(tmp_path / "fewer", mtp_copies=False)  # a copy of its own is never dropped
    assert torch.equal(logits(load(tmp_path / "fewer", dtype)), logits(model))


INERT = [f"{mix}_{part}.weight" for mix in RES[:2] for part in ("norm", "proj")]


@pytest.mark.parametrize(
    "without", [["embed_tokens.weight", "shared_head.head.weight"], ["embed_tokens.weight"], INERT]
)
def test_mtp_without_copies_or_inert_tensors(tmp_path, without):
    tensors = {
        n: t for n, t in stored(DATA / "micro-mtp").items() if n.removeprefix(MTP) not in without or MTP not in n
    }
    assert len(tensors) == 478 - len(without)
    model = load(folder_with(tmp_path, tensors, "micro-mtp"))
    assert torch.equal(logits(model), logits(case("micro-mtp")[0]))


def test_saving_without_mtp_copies(tmp_path):
    model = load(DATA / "micro-mtp", BF16)
    model.save_pretrained(tmp_path, mtp_copies=False)
    missing = stored(DATA / "micro-mtp").keys() - stored(tmp_path).keys()
    assert missing == {MTP + "embed_tokens.weight", MTP + "shared_head.head.weight"}
    assert torch.equal(logits(load(tmp_path)), logits(case("micro-mtp")[0]))


@pytest.mark.parametrize("changes", [dict(moe_layer_freq=2), dict(first_k_dense_replace=9)])
def test_the_mtp_layer_is_always_moe(tmp_path, changes):
    model = tiny_model(num_nextn_predict_layers=1, **changes)  # 5 layers: the MTP layer is number 5
    model.save_pretrained(tmp_path)
    assert any("layers.5.block_sparse_moe.experts.0.w1" in name for name in stored(tmp_path))
    assert not any("layers.3.block_sparse_moe" in name for name in stored(tmp_path))
    assert torch.equal(logits(load(tmp_path)), logits(model))


def test_mtp_of_a_model_without_attnres(tmp_path):
    """There its layer has no AttnRes tensors at all."""
    model = tiny_model(attn_res_block_size=None, num_nextn_predict_layers=1)
    model.save_pretrained(tmp_path)
    assert not any("_res_" in name for name in stored(tmp_path))
    assert torch.equal(logits(load(tmp_path)), logits(model))


def load_saying(capsys, path):
    """-> the model in float32, and the one line on standard error that says what was decided."""
    model = K3.from_pretrained(path, dtype=torch.float32)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "num_nextn_predict_layers" in line]
    assert line.startswith(f"{path}: ")
    return model, line


def test_mtp_that_config_does_not_name(tmp_path, capsys):
    path = folder_with(tmp_path, stored(DATA / "micro-mtp"), "micro-mtp", num_nextn_predict_layers=0)
    model, line = load_saying(capsys, path)
    count = sum(name.startswith(MTP) for name in stored(DATA / "micro-mtp"))
    assert f"skipped {count} tensors of the MTP layer" in line and model.mtp is None
    assert torch.equal(logits(model), case("micro-mtp")[0](IDS).detach())


def test_mtp_that_is_not_there(tmp_path, capsys):
    tensors = {n: t for n, t in stored(DATA / "micro-mtp").items() if not n.startswith(MTP)}
    model, line = load_saying(capsys, folder_with(tmp_path, tensors, "micro-mtp"))
    assert "without the MTP layer" in line and model.mtp is None and model.cfg.num_nextn_predict_layers == 0
    assert torch.equal(logits(model), case("micro-mtp")[0](IDS).detach())
    model.save_pretrained(tmp_path / "again")
    assert load(tmp_path / "again").mtp is None


@pytest.mark.parametrize("only", ["embed_tokens.weight", "eh_proj.weight", "mlp_res_norm.weight"])
def test_mtp_that_is_partly_there(tmp_path, only):
    tensors = {n: t for n, t in stored(DATA / "micro-mtp").items() if not n.startswith(MTP) or n == MTP + only}
    named = ["missing", "layers.9.enorm.weight", "layers.9.hnorm.weight"]
    refused(folder_with(tmp_path, tensors, "micro-mtp"), *named)


# ---------------------------------------------------------------- tied embeddings


def test_tied_embeddings(tmp_path):
    model = tiny_model(tie_word_embeddings=True, num_nextn_predict_layers=1)
    model.save_pretrained(tmp_path)
    assert "language_model.lm_head.weight" not in stored(tmp_path)
    again = load(tmp_path)
    assert again.lm_head.weight is again.embed_tokens.weight
    assert torch.equal(logits(again), logits(model))


def test_tied_embeddings_with_an_lm_head(tmp_path):
    """The same one may be shipped again, another one may not."""
    tensors = stored(DATA / "micro")
    tensors["language_model.lm_head.weight"] = tensors["language_model.model.embed_tokens.weight"]
    load(folder_with(tmp_path, tensors, tie_word_embeddings=True))
    tensors["language_model.lm_head.weight"] = tensors["language_model.lm_head.weight"] + 1
    refused(folder_with(tmp_path, tensors, tie_word_embeddings=True), "lm_head.weight", "tie_word_embeddings")


# ---------------------------------------------------------------- damage


def test_missing_folder(tmp_path):
    refused(tmp_path / "nowhere", "config.json", error=FileNotFoundError)


def test_missing_config(tmp_path):
    shutil.copy(DATA / "micro/model.safetensors", tmp_path)
    refused(tmp_path, "config.json", error=FileNotFoundError)


def test_missing_weights(tmp_path):
    shutil.copy(DATA / "micro/config.json", tmp_path)
    refused(tmp_path, "model.safetensors", INDEX, error=FileNotFoundError)


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 9, 1000, 60_000, 1_000_000, -1])
@pytest.mark.parametrize(
    "name, file", [("micro", "model.safetensors"), ("micro-mxfp4", "model-00002-of-00003.safetensors")]
)
def test_truncated_file(tmp_path, name, file, cut):
    shutil.copytree(DATA / name, tmp_path, dirs_exist_ok=True)
    data = (tmp_path / file).read_bytes()
    (tmp_path / file).write_bytes(data[:cut])
    refused(tmp_path, file, error=(ValueError, OSError))


@pytest.mark.parametrize(
    "data", [b"x" * 1000, b"\xff" * 8 + b"{}", b"\x02" + bytes(7) + b"[]", b"version https://git-lfs"]
)
def test_not_safetensors_at_all(tmp_path, data):
    shutil.copy(DATA / "micro/config.json", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(data)
    refused(tmp_path, "model.safetensors", error=(ValueError, OSError))


def test_file_with_something_after_its_end(tmp_path):
    shutil.copytree(DATA / "micro", tmp_path, dirs_exist_ok=True)
    with (tmp_path / "model.safetensors").open("ab") as f:
        f.write(b"tail")
    refused(tmp_path, "model.safetensors")


@pytest.fixture
def sharded(tmp_path):
    shutil.copytree(DATA / "micro-mxfp4", tmp_path, dirs_exist_ok=True)
    return tmp_path


NORM = "language_model.model.norm.weight"  # in the first shard
SECOND = "model-00002-of-00003.safetensors"


def change_index(path, change):
    index = json.loads((path / INDEX).read_text())
    change(index["weight_map"])
    (path / INDEX).write_text(json.dumps(index))


def test_missing_shard(sharded):
    (sharded / SECOND).unlink()
    refused(sharded, SECOND, error=OSError)


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "3", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', '{"weight_map": ["a"]}']
)
def test_bad_index(sharded, text):
    (sharded / INDEX).write_text(text)
    refused(sharded, INDEX)


def test_index_places_a_tensor_elsewhere(sharded):
    change_index(sharded, lambda weights: weights.update({NORM: SECOND}))
    refused(sharded, NORM, SECOND)


def test_index_lacks_a_tensor(sharded):
    change_index(sharded, lambda weights: weights.pop(NORM))
    refused(sharded, "missing: model.norm.weight", f"does not name them: {NORM} in model-00001-of-00003.safetensors")


def test_index_names_a_tensor_too_many(sharded):
    change_index(sharded, lambda weights: weights.update({"language_model.model.extra": SECOND}))
    refused(sharded, "language_model.model.extra")


def add_to_second(path, **tensors):
    with safe_open(path / SECOND, "pt") as f:
        held = {name: f.get_tensor(name).clone() for name in f.keys()}
    save_file(held | tensors, path / SECOND)


def test_the_index_decides(sharded, capsys):
    """A stale copy in another shard, a tensor that is named nowhere, another file: skipped, in one line."""
    add_to_second(sharded, **{NORM: torch.ones(96, dtype=BF16), P + "0.rotary_emb.inv_freq": torch.ones(4)})
    (sharded / "reference.safetensors").unlink()
    save_file({NORM: torch.zeros(96)}, sharded / "overlay.safetensors")
    model = K3.from_pretrained(sharded, dtype=torch.float32)
    lines = [line for line in capsys.readouterr().err.splitlines() if "skipped" in line]
    assert len(lines) == 1 and lines[0].startswith(f"{sharded}: skipped 3 tensors or files that {INDEX} does not name")
    assert all(part in lines[0] for part in (f"{NORM} in {SECOND}", "inv_freq", "overlay.safetensors"))
    assert torch.equal(logits(model), logits(case("micro-mxfp4")[0]))


def test_numbered_shards_without_an_index(sharded):
    (sharded / INDEX).unlink()
    assert torch.equal(logits(load(sharded)), logits(case("micro-mxfp4")[0]))


def test_tensor_in_two_shards(sharded):
    (sharded / INDEX).unlink()
    add_to_second(sharded, **{NORM: torch.ones(96, dtype=BF16)})
    refused(sharded, "1 in two shards", NORM, SECOND)


THIRD = "model-00003-of-00003.safetensors"


@pytest.mark.parametrize(
    "old, new, error",
    [
        (SECOND, None, FileNotFoundError),
        (THIRD, None, FileNotFoundError),
        (SECOND, "model-00004-of-00003.safetensors", ValueError),
        (SECOND, "model-00002-of-00004.safetensors", ValueError),
        (SECOND, "model.safetensors", ValueError),
    ],
)
def test_numbered_shards_that_do_not_fit(sharded, old, new, error):
    (sharded / INDEX).unlink()
    (sharded / old).rename(sharded / (new or "other"))
    refused(sharded, new or old, error=error)


def without(name):
    return lambda tensors: {n: t for n, t in tensors.items() if n != name}


def with_(name, tensor):
    return lambda tensors: tensors | {name: tensor}


Q, A_LOG, ROUTER = P + "0.self_attn.q_proj.weight", P + "0.self_attn.A_log", P + "1.block_sparse_moe.gate.weight"
Q_B = P + "3.self_attn.q_b_proj.weight"  # of 48 inputs, not a multiple of 32
EXPERT = P + "3.block_sparse_moe.experts.5.w1.weight"
FAULTS = {
    "missing": (without(Q), ["missing", Q.removeprefix("language_model.")]),
    "missing expert": (without(EXPERT), ["missing", EXPERT.removeprefix("language_model.")]),
    "unexpected": (with_(P + "0.self_attn.rotary.inv_freq", torch.ones(4)), ["unexpected", "rotary.inv_freq"]),
    "unexpected layer": (with_(P + "9.input_layernorm.weight", torch.ones(96)), ["unexpected", "layers.9.input"]),
    "unexpected tower": (with_("audio_tower.weight", torch.ones(4)), ["unexpected", "audio_tower"]),
    "bias": (with_(P + "0.self_attn.q_proj.bias", torch.ones(128)), ["unexpected", "q_proj.bias"]),
    "transposed": (with_(Q, torch.ones(96, 128, dtype=BF16)), [Q, "[96, 128]", "[128, 96]"]),
    "too wide": (with_(Q, torch.ones(128, 97)), [Q, "[128, 97]"]),
    "scalar": (with_(NORM, torch.tensor(1.0)), [NORM, "[]"]),
    "integers": (with_(Q, torch.ones(128, 96, dtype=torch.int32)), [Q, "I32"]),
    "bytes": (with_(NORM, torch.ones(96, dtype=torch.uint8)), [NORM, "U8"]),
    "float8": (with_(Q, torch.ones(128, 96).to(torch.float8_e4m3fn)), [Q, "F8_E4M3"]),
    "two spellings": (
        with_(Q.removeprefix("language_model."), torch.ones(128, 96)),
        ["two spellings", "layers.0.self_attn.q_proj.weight"],
    ),
    "two spellings of AttnRes": (with_(P + "0.mlp_res.norm_weight", torch.ones(96)), ["two spellings", "mlp_res"]),
    "short A_log": (with_(A_LOG, torch.ones(3)), [A_LOG, "[3]"]),
    "A_log of one": (with_(A_LOG, torch.ones(1)), [A_LOG, "[1]"]),
    "square A_log": (with_(A_LOG, torch.ones(4, 32)), [A_LOG, "[4, 32]"]),
    "empty A_log": (with_(A_LOG, torch.ones(0)), [A_LOG, "[0]"]),
    "plain and packed": (with_(EXPERT + "_packed", torch.ones(32, 32, dtype=torch.uint8)), ["unexpected", EXPERT]),
    "quantized norm": (
        lambda t: (
            without(NORM)(t)
            | {NORM + "_packed": torch.ones(48, dtype=torch.uint8), NORM + "_scale": torch.ones(3, dtype=torch.uint8)}
        ),
        [NORM],
    ),
    "quantized in groups of 16": (
        lambda t: (
            without(Q)(t)
            | {
                Q + "_packed": torch.ones(128, 48, dtype=torch.uint8),
                Q + "_scale": torch.ones(128, 6, dtype=torch.uint8),
            }
        ),
        [Q + "_scale", "[128, 6]"],
    ),
    "quantized rows of 48": (
        lambda t: (
            without(Q_B)(t)
            | {
                Q_B + "_packed": torch.ones(192, 24, dtype=torch.uint8),
                Q_B + "_scale": torch.ones(192, 1, dtype=torch.uint8),
            }
        ),
        [Q_B],
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(tmp_path, fault):
    change, named = FAULTS[fault]
    refused(folder_with(tmp_path, change(stored(DATA / "micro"))), *named)


@pytest.mark.parametrize("part", ["_packed", "_scale"])
def test_renamed_expert_tensors(tmp_path, part):
    """A rename makes every packed expert miss its parameter while the scales load: the error names and counts them."""
    tensors = rename(f".weight{part}", f".qweight{part}")(stored(DATA / "micro-mxfp4"))
    path = folder_with(tmp_path, tensors, "micro-mxfp4")
    refused(
        path, "missing", "unexpected", f"experts.0.w1.qweight{part}", "layers.1.block_sparse_moe.experts.0.w1", "192"
    )


@pytest.mark.parametrize("part", ["_packed", "_scale"])
def test_half_a_pair(tmp_path, part):
    name = P + "2.block_sparse_moe.experts.1.w3.weight"
    path = folder_with(tmp_path, without(name + part)(stored(DATA / "micro-mxfp4")), "micro-mxfp4")
    refused(path, "missing", name.removeprefix("language_model."))


@pytest.mark.parametrize("name", [EXPERT, Q])
def test_scale_255(tmp_path, name):
    tensors = stored(DATA / "micro-mxfp4")
    tensors = tensors if name == EXPERT else quantize(tensors, [name])[0]
    tensors[name + "_scale"][1, 1] = 255
    refused(folder_with(tmp_path, tensors, "micro-mxfp4"), name + "_scale", "255")


@pytest.mark.parametrize("suffix, wrong", [("_packed", torch.int8), ("_scale", torch.float32)])
def test_packed_of_another_dtype(tmp_path, suffix, wrong):
    tensors = stored(DATA / "micro-mxfp4")
    tensors[EXPERT + suffix] = tensors[EXPERT + suffix].to(wrong)
    refused(folder_with(tmp_path, tensors, "micro-mxfp4"), EXPERT + suffix)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_scales_of_fp8_rows(tmp_path, dtype):
    """Numbers of any float dtype, 255 too: they are no scales of MXFP4."""
    scales = {P + f"3.self_attn.{name}_scale": torch.tensor([255.0], dtype=dtype) for name in ("latent", "key")}
    model = load(folder_with(tmp_path, stored(DATA / "micro") | scales))
    assert model.layers[3].self_attn.latent_scale.item() == model.layers[3].self_attn.key_scale.item() == 255
    model.save_pretrained(tmp_path / "again", mxfp4=False)
    assert stored(tmp_path / "again").keys() >= scales.keys()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there():
    with pytest.raises(ValueError, match="sees no GPU here"):
        K3.from_pretrained(DATA / "micro", device="cuda", progress=False)


def test_packed_experts_with_rows_of_48(tmp_path):
    """MXFP4 needs rows of a multiple of 32: what has others is no MXFP4, whatever the shapes."""
    tiny_model(moe_intermediate_size=48).save_pretrained(tmp_path)
    tensors = stored(tmp_path)
    for name in [name for name in tensors if name.endswith("w2.weight")]:
        tensors |= {
            name + "_packed": torch.ones(32, 24, dtype=torch.uint8),
            name + "_scale": torch.ones(32, 1, dtype=torch.uint8),
        }
        del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    refused(tmp_path, "w2.weight")


def test_config_of_another_size(tmp_path):
    refused(folder_with(tmp_path, stored(DATA / "micro"), num_experts=9), "missing", "experts.8.w1", "gate.weight")
    refused(folder_with(tmp_path, stored(DATA / "micro"), attn_res_block_size=None), "unexpected", "mlp_res_norm")


def test_many_faults_are_listed_once_and_counted(tmp_path):
    tensors = stored(DATA / "micro")
    tensors = {n: t for n, t in tensors.items() if ".experts." not in n} | {"a.b": torch.ones(1), NORM: torch.ones(95)}
    refused(folder_with(tmp_path, tensors), "192 missing", "184 more", "1 unexpected: a.b", "1 misshaped", NORM)


def test_one_tensor_at_a_time(monkeypatch):
    """Loading holds the model and a few stored tensors, never the file's contents."""
    alive, most = set(), []

    class Handle:
        def __init__(self, *args, **kwargs):
            self.file = safe_open(*args, **kwargs)

        def __getattr__(self, name):
            return getattr(self.file, name)

        def get_tensor(self, name):
            tensor = self.file.get_tensor(name)
            alive.add(name)
            weakref.finalize(tensor, alive.discard, name)
            most.append(len(alive))
            return tensor

    monkeypatch.setattr(checkpoint, "safe_open", Handle)
    load(DATA / "micro-mxfp4")
    assert len(most) == 618 and max(most) <= 4


def test_a_load_is_planned_without_views(monkeypatch):
    """K3's headers hold half a million tensors: names and shapes are compared, and no view is made of each."""
    linear = K3Config.k3().linear_attn_config | dict(kda_layers=[1, 2, 3], full_attn_layers=[4])
    cfg = K3Config(num_hidden_layers=4, linear_attn_config=linear)
    with torch.device("meta"):
        held = {f"language_model.{n}": (shape, "BF16") for n, shape in K3(cfg).published().shapes().items()}
        model = K3(cfg)
    for name in [name for name in held if ".experts." in name]:
        (rows, width), _ = held.pop(name)
        held |= {f"{name}_packed": ((rows, width // 2), "U8"), f"{name}_scale": ((rows, width // 32), "U8")}

    class Header:
        keys = held.keys

        def __init__(self, shape="", dtype=""):
            self.get_shape, self.get_dtype = lambda: list(shape), lambda: dtype

        def get_slice(self, name):
            return Header(*held[name])

    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.calls += 1
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr(checkpoint, "open_shards", lambda path: (dict.fromkeys(held, Header()), []))
    with Count() as count:
        plan = checkpoint.plan_load(model, "somewhere", progress=False)
    assert len(plan) == len(held) > 16_000 and count.calls < 500
    assert all(experts.is_packed("w13") and experts.is_packed("w2") for _, experts in model.expert_stacks())


def test_loading_imports_no_compiler():
    """In a process of its own: PyTorch's compiler takes 3 s to import, and some operations on meta tensors do that."""
    code = "import sys; from model import K3; K3.from_pretrained('tiny'); print(sys.modules.keys() & {*sys.argv[1:]})"
    command = [sys.executable, "-c", code, "torch._dynamo", "torch._inductor", "sympy"]
    run = subprocess.run(command, cwd=DATA.parent.parent, capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stdout) == (0, "set()\n"), run.stderr
