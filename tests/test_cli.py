"""The command line: text on standard output and nothing else there, one line and exit code 2 for what cannot work."""

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import DATA
from test_engine import byte_tokenizer

import cli as command_line
from cli import main
from engine import Engine, SamplingParams

ROOT = Path(__file__).resolve().parent.parent
torch.set_num_threads(1)


def copy(name, to, but=()):
    """The checkpoint folder tests/data/NAME without its reference, and without the files `but`."""
    to.mkdir()
    for file in (DATA / name).iterdir():
        if file.name not in ("reference.safetensors", *but):
            shutil.copy(file, to)
    return to


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """tests/data/micro with a byte-level tokenizer."""
    path = copy("micro", tmp_path_factory.mktemp("models") / "micro")
    byte_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def wanted(folder):
    """What the library answers to the same prompt and parameters."""
    eng = Engine(folder, num_pages=20)
    return lambda prompt, **params: eng.generate(prompt, SamplingParams(**params))[0].text


@pytest.fixture
def cli(folder, capsys, monkeypatch):
    """Runs main in this process -> (exit code, standard output, standard error)."""

    def run(*args, model=folder, stdin=b""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = main(["--model", str(model), *map(str, args)])
        return code, *capsys.readouterr()

    return run


def process(*args, encoding="utf-8", **options):
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": encoding}
    command = [sys.executable, ROOT / "engine.py", *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, **options)


# ---------------------------------------------------------------- what works


def test_a_process(folder, wanted, tmp_path):
    """From another folder: two prompts, statistics, and nothing on standard output but the two texts."""
    args = ["--model", folder, "--prompt", "abc", "--prompt", "Once upon", "--max-tokens", 8, "--temperature", 0]
    run = process(*args, "--stats", cwd=tmp_path)
    out, err = (text.decode() for text in run.communicate(timeout=120))
    assert run.returncode == 0, err
    texts = [wanted(p, max_tokens=8) for p in ("abc", "Once upon")]
    assert out == "".join(text + "\n" for text in texts)
    assert "Traceback" not in err and "Warning" not in err
    for op in ("attnres", "experts", "kda_prefill", "kda_decode", "mla_decode", "mla_prefill", "router"):
        assert any(line.split()[:2] == ["op", op] for line in err.splitlines()), err
    for part in (
        "prompt          12 tokens",
        "decode          14 tokens",
        "tokens/s",
        "MiB of the process",
        "pages of 128",
    ):
        assert part in err


def test_a_reader_that_leaves(folder):
    run = process("--model", folder, "--prompt", "abc", "--max-tokens", 300, "--temperature", 0)
    run.stdout.read(1)
    run.stdout.close()
    err = run.stderr.read().decode()
    assert (run.wait(timeout=120), err) == (0, "")


def test_an_output_that_is_not_utf8(folder, wanted, tmp_path):
    """What it cannot write becomes a question mark."""
    path = copy("micro", tmp_path / "größe")
    byte_tokenizer(path)
    (path / "generation_config.json").write_text('{"top_k": 50}')
    flags = ["--model", path, "--prompt", "Grüße", "--max-tokens", 30, "--temperature", 0, "--top-k", 0]
    run = process(*flags, encoding="ascii:strict")
    out, err = run.communicate(timeout=120)
    want = wanted("Grüße", max_tokens=30) + "\n"
    assert not want.isascii()
    assert (run.returncode, out, err) == (0, want.encode("ascii", "replace"), b"")


def test_one_prompt(cli, wanted):
    assert cli("--prompt", "abc", "--max-tokens", 9, "--temperature", 0) == (0, wanted("abc", max_tokens=9) + "\n", "")
    code, out, err = cli("--prompt", "abc", "--max-tokens", 9, "--temperature", 0, "--stats")
    assert (code, out) == (0, wanted("abc", max_tokens=9) + "\n")
    assert "first text" in err and "op kda" in err


def test_flags_reach_the_sampler(cli, wanted):
    flags = ["--prompt", "abc", "--max-tokens", 12, "--temperature", 1.5, "--top-k", 40, "--top-p", 0.9]
    texts = [cli(*flags, "--seed", seed)[1] for seed in (5, 5, 6)]
    options = dict(max_tokens=12, temperature=1.5, top_k=40, top_p=0.9)
    assert texts == [wanted("abc", **options, seed=seed) + "\n" for seed in (5, 5, 6)] and texts[0] != texts[2]


def test_the_default_is_sampled_anew(cli):
    assert cli("--prompt", "abc", "--max-tokens", 12)[1] != cli("--prompt", "abc", "--max-tokens", 12)[1]


def test_several_prompts_and_a_seed(cli):
    flags = ["--prompt", "abc", "--prompt", "abc", "--max-tokens", 8, "--seed", 3]
    code, out, err = cli(*flags)
    assert (code, err) == (0, "[1]\n[2]\n") and cli(*flags)[1] == out
    alone = cli(*flags[2:])[1]
    assert out == alone * 2, "a seed gives the same text in company"


def test_standard_input(cli, wanted):
    """Any UTF-8, to the last line end."""
    text = "naïve 中文 🙂\n"
    for prompt in ("-", text):
        got = cli("--prompt", prompt, "--max-tokens", 5, "--temperature", 0, stdin=text.encode())
        assert got == (0, wanted(text, max_tokens=5) + "\n", "")


@pytest.fixture
def engines(monkeypatch):
    """The engines that the command line makes."""
    made = []
    monkeypatch.setattr(command_line, "Engine", lambda *args, **more: made.append(Engine(*args, **more)) or made[-1])
    return made


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_dtypes(cli, dtype, engines):
    code, out, err = cli("--prompt", "abc", "--max-tokens", 3, "--dtype", dtype)
    assert (code, err) == (0, "") and out
    assert engines[0].dtype == getattr(torch, dtype) == engines[0].pool.rows(0).dtype


def test_flags_reach_the_engine(cli, engines):
    flags = ["--kernels", "torch", "--kv-dtype", "fp8", "--num-pages", 30, "--host-pages", 5, "--max-batch", 3]
    assert cli("--prompt", "abc", "--max-tokens", 3, *flags, "--prefill-chunk", 7)[0] == 0
    (eng,) = engines
    assert (eng.kernels, eng.pool.num_pages, eng.cache.host.num_pages) == ("torch", 30, 5)
    assert (eng.scheduler.max_batch, eng.scheduler.prefill_chunk) == (3, 7)
    assert eng.pool.rows(0).dtype == torch.float8_e4m3fn


def test_sampling_of_the_checkpoint(cli, folder, tmp_path, engines, monkeypatch):  # field note 20
    """generation_config.json gives the defaults, which is said; flags are stronger; its end ids end the answer."""
    path = tmp_path / "model"
    shutil.copytree(folder, path)
    file = path / "generation_config.json"
    file.write_text('{"temperature": 0.6, "top_p": 0.9, "top_k": null, "max_length": 20, "eos_token_id": [2, 7]}')
    used, check = [], Engine._checked
    monkeypatch.setattr(Engine, "_checked", lambda self, *args: used.append(args[1]) or check(self, *args))
    for flags, wanted, said in (
        ([], (0.6, 0, 0.9), "temperature 0.6, top_p 0.9"),
        (["--temperature", 1, "--top-k", 3], (1.0, 3, 0.9), "top_p 0.9"),
        (["--temperature", 0, "--top-p", 1], (0.0, 0, 1.0), ""),
    ):
        code, _, err = cli("--prompt", "abc", "--max-tokens", 2, *flags, model=path)
        assert (code, err) == (0, f"{file} sets {said}\n" if said else "")
        assert (used[-1].temperature, used[-1].top_k, used[-1].top_p) == wanted
    assert engines[-1].cfg.eos_ids == {2, 7}
    for text, part in (
        ("{", "not valid JSON"),
        ("[1]", "holds a list"),
        ('{"temperature": -1}', "temperature is -1"),
        ('{"top_p": "much"}', "top_p is 'much'"),
        ('{"eos_token_id": "end"}', "eos_token_id is 'end'"),
    ):
        file.write_text(text)
        assert_error(cli("--prompt", "abc", model=path), str(file), part)


def test_one_engine_module():
    """`python engine.py` is the module that the command line imports, not a second one beside it."""
    command = [sys.executable, "-X", "importtime", "engine.py", "--help"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    imported = [line.split("|")[-1].strip() for line in run.stderr.splitlines()]
    assert run.returncode == 0 and imported.count("cli") == 1 and "engine" not in imported


def test_an_argument_that_is_no_utf8(cli, wanted):
    """Python hands it over with surrogates; each is read as U+FFFD."""
    flags = ["--max-tokens", 3, "--temperature", 0]
    assert cli("--prompt", "a\udcff", *flags) == (0, wanted("a\ufffd", max_tokens=3) + "\n", "")


def test_a_prompt_that_ends_inside_a_character(folder):
    """The engine's text starts from there: the answer's first byte completes it."""
    eng = Engine(folder, num_pages=20)
    first, second, last = eng.tokenizer.encode("中")
    for prompt in ([first, second], np.array([last, last, first, second])):
        eng.add(prompt)
        assert eng.waiting[-1].text.push(last) == ("中", False)


def test_no_tokens(cli):
    assert cli("--prompt", "abc", "--max-tokens", 0) == (0, "\n", "")


def test_help(capsys):
    with pytest.raises(SystemExit) as e:
        main(["--help"])
    out, err = capsys.readouterr()
    assert (e.value.code, err) == (0, "")
    flags = ["prompt", "model", "max-tokens", "temperature", "top-k", "top-p", "seed", "device", "dtype", "stats"]
    assert all(f"--{flag}" in out for flag in flags)


def test_ctrl_c(cli, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "_advance", interrupt)
    assert cli("--prompt", "abc") == (130, "", "")


# ---------------------------------------------------------------- what does not


def assert_error(result, *parts):
    code, out, err = result
    assert (code, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1 and err.endswith("\n"), err
    for part in parts:
        assert part in err


@pytest.mark.parametrize(
    "flags, part",
    [
        (["--temperature", -1], "temperature is -1.0"),
        (["--temperature", "nan"], "temperature is nan"),
        (["--max-tokens", -1], "max_tokens is -1"),
        (["--top-k", -1], "top_k is -1"),
        (["--top-p", 0], "top_p is 0.0"),
        (["--top-p", 1.5], "top_p is 1.5"),
        (["--prompt", ""], "prompt is empty"),
        (["--prompt", "-"], "prompt is empty"),
        (["--prompt", "x" * 5000], "5000 tokens; the model reads at most 4096"),
        pytest.param(
            *(["--device", "cuda"], "no GPU here; use --device cpu"),
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
    ids=lambda x: " ".join(map(str, x))[:20] if isinstance(x, list) else "",
)
def test_bad_flags(cli, flags, part):
    assert_error(cli("--prompt", "abc", *flags), part)


@pytest.mark.parametrize("flags", [["--max-tokens", "many"], ["--device", "tpu"], ["--dtype", "int4"], ["--nonsense"]])
def test_flags_that_cannot_be_parsed(cli, capsys, flags):
    with pytest.raises(SystemExit) as e:
        cli("--prompt", "abc", *flags)
    out, err = capsys.readouterr()
    assert (e.value.code, out) == (2, "") and "error: " in err.splitlines()[-1] and flags[0] in err.splitlines()[-1]


def test_a_prompt_is_needed(cli, capsys):
    with pytest.raises(SystemExit) as e:
        cli()
    assert e.value.code == 2 and "--prompt" in capsys.readouterr().err


def test_standard_input_that_is_no_utf8(folder):
    run = process("--model", folder, "--prompt", "-", stdin=subprocess.PIPE)
    out, err = run.communicate(b"abc\xff\xfe", timeout=120)
    assert_error((run.returncode, out.decode(), err.decode()), "standard input is not UTF-8: byte 0xff at offset 3")


def test_standard_input_names_the_byte(cli):
    assert_error(cli("--prompt", "-", stdin="中".encode()[:2]), "byte 0xe4 at offset 0")


def test_folders_that_are_not_there(cli, tmp_path):
    assert_error(cli("--prompt", "abc", model=tmp_path / "nowhere"), "nowhere", "no such folder")
    assert_error(cli("--prompt", "abc", model=tmp_path), str(tmp_path), "config.json")
    (tmp_path / "file").write_text("")
    assert_error(cli("--prompt", "abc", model=tmp_path / "file"), "file", "folder")


def test_no_tokenizer(cli):
    assert_error(cli("--prompt", "abc", model=DATA / "micro"), "tokenizer")


def break_config(path, **changes):
    data = json.loads((path / "config.json").read_text())
    data["text_config"] |= changes
    (path / "config.json").write_text(json.dumps(data))


BROKEN = {
    "half a config.json": (lambda p: (p / "config.json").write_text('{"text_config": {'), "config.json"),
    "another model": (lambda p: (p / "config.json").write_text('{"model_type": "llama"}'), "config.json"),
    "another size": (lambda p: break_config(p, hidden_size=64), "hidden|expected"),
    "half a header": (lambda p: os.truncate(p / "model.safetensors", 1000), "model.safetensors"),
    "half the tensors": (lambda p: os.truncate(p / "model.safetensors", 1_000_000), "model.safetensors"),
    "an empty file": (lambda p: os.truncate(p / "model.safetensors", 0), "model.safetensors"),
    "no tensors": (lambda p: (p / "model.safetensors").unlink(), "model.safetensors"),
    "half a tokenizer.json": (lambda p: (p / "tokenizer.json").write_text('{"model": '), "tokenizer.json"),
}


@pytest.mark.parametrize("damage, part", BROKEN.values(), ids=BROKEN)
def test_broken_checkpoints(cli, tmp_path, damage, part):
    path = copy("micro", tmp_path / "model")
    byte_tokenizer(path)
    damage(path)
    result = cli("--prompt", "abc", model=path)
    assert_error(result, str(path))
    assert any(p in result[2] for p in part.split("|"))


def test_a_missing_shard(cli, tmp_path):
    shard = "model-00002-of-00003.safetensors"
    assert_error(cli("--prompt", "abc", model=copy("micro-mxfp4", tmp_path / "model", but=[shard])), shard)


def test_drafts(cli, tmp_path):
    """The same text with drafts, who made them and how they did; what cannot draft says so."""
    path = copy("micro-mtp", tmp_path / "mtp")
    byte_tokenizer(path)
    args = "--prompt", "abab", "--max-tokens", 30, "--temperature", 0.7, "--seed", 3
    code, want, _ = cli(*args, model=path)
    for more, says in (
        (("--draft", "mtp", "--draft-tokens", 3), "drafts        MTP, 3; "),
        (("--draft-tokens", 2), "drafts        MTP, 2; "),
        (("--draft", "lookup"), "drafts        Lookup, auto; "),
    ):
        code, out, err = cli(*args, *more, "--stats", model=path)
        assert code == 0 and out == want and says in err and " tokens a cycle" in err and "drafts: " in err
    for more, says in (
        (("--draft", "mtp"), "no MTP layer"),
        (("--draft-tokens", 8), "draft_tokens is 8; it must be 0 to 7"),
    ):
        code, out, err = cli(*args, *more)
        assert code == 2 and out == "" and says in err and len(err.splitlines()) == 1
