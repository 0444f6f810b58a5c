"""The command line: `python engine.py --prompt "Once upon a time"`. Text goes to standard output, all else to standard
error."""

import argparse
import os
import resource
import sys
import time

import torch

from config import generation_config
from engine import TINY, Engine
from sampling import SamplingParams

SMALL = 1024  # models narrower than this run on one CPU thread


def number_or_auto(word):
    return word if word == "auto" else int(word)


def _arguments():
    about = "Continue a text with Kimi K3. With --prompt alone, a small K3 trained on fairy tales tells one."
    p = argparse.ArgumentParser(prog="python engine.py", description=about)

    def flag(name, metavar, help, type=str, **more):
        p.add_argument(f"--{name}", metavar=metavar, help=help, type=type, **more)

    text = "text to continue; repeat it to run several at once; - reads standard input"
    flag("prompt", "TEXT", text, action="append", required=True)
    text = "checkpoint folder: config.json, safetensors, tokenizer (default: the tiny model that is included)"
    flag("model", "FOLDER", text, default=TINY)
    flag("max-tokens", "N", "write at most N tokens (default %(default)s)", int, default=256)
    own = "or what the checkpoint's generation_config.json says"
    flag("temperature", "T", f"0 always takes the likeliest token; higher is more varied (default 0.8, {own})", float)
    flag("top-k", "K", f"choose among the K likeliest tokens only (default 0: all, {own})", int)
    flag("top-p", "P", f"choose among the likeliest tokens with P of the probability (default 0.95, {own})", float)
    flag("seed", "S", "the same seed gives the same text (default: a new one each time)", int)
    flag("device", None, "where to run (default: the GPU where there is one)", choices=("cpu", "cuda"))
    text = "of weights and cache (default: bfloat16 on a GPU, float32 on a CPU)"
    flag("dtype", None, text, choices=("float32", "bfloat16", "float64"))
    flag("kv-dtype", None, "fp8 stores attention history in 8 bits (default: as the weights)", choices=("fp8",))
    flag("kernels", "CHOICE", "auto, torch, triton or op=backend,... (default %(default)s)", default="auto")
    flag("num-pages", "N", "pages of the pool that holds the running texts (default: what memory allows)", int)
    flag("host-pages", "N", "pages of host memory for what was evicted (default %(default)s)", int, default=0)
    flag("max-batch", "N", "prompts that run at once (default %(default)s)", int, default=64)
    flag("prefill-chunk", "N", "prompt tokens read per step (default: 512 on a CPU, 8192 on a GPU)", int)
    text = "draft tokens, verified together: mtp, the checkpoint's layer, or lookup, what the text has said before"
    flag("draft", None, text, choices=("mtp", "lookup"))
    text = "drafts a cycle, 0 to 7 or auto (default: auto with --draft, else 0; without --draft mtp's or else lookup's)"
    flag("draft-tokens", "N", text, number_or_auto)
    text = "afterwards print speed, peak memory and which backend each op ran, on standard error"
    p.add_argument("--stats", action="store_true", help=text)
    return p


ENGINE = ("device", "dtype", "kv_dtype", "kernels", "num_pages", "host_pages", "max_batch", "prefill_chunk",
          "draft", "draft_tokens")  # fmt: skip
SAMPLING = {"temperature": 0.8, "top_k": 0, "top_p": 0.95}


def main(argv=None):
    """Runs the command line. Text goes to standard output, all else to standard error; returns the exit code."""
    for stream in (sys.stdout, sys.stderr):  # what its encoding lacks becomes "?"
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    args = _arguments().parse_args(argv)
    started = time.perf_counter()
    try:
        prompts = [_read_stdin() if p == "-" else p for p in args.prompt]
        params = SamplingParams(args.max_tokens, seed=args.seed, **_sampling(args))
        engine = Engine(args.model, **{name: getattr(args, name) for name in ENGINE})
        if engine.cfg.hidden_size < SMALL:  # threads that wait for each other cost more than they bring
            torch.set_num_threads(1)
        first = None
        if len(prompts) == 1:
            for piece in engine.stream(prompts[0], params):
                first = first or time.perf_counter() - started
                print(piece, end="", flush=True)
            print()
            if engine.faults:
                raise ValueError("the model's output was not finite (NaN); is the checkpoint damaged?")
        else:
            outs = engine.generate(prompts, params, progress=bool(sys.stderr) and sys.stderr.isatty())
            for n, out in enumerate(outs, 1):
                print(f"[{n}]", file=sys.stderr, flush=True)
                print(out.text, flush=True)
            if engine.faults:
                raise ValueError(f"{engine.faults} answers ended because the model's output was not finite (NaN)")
        if args.stats:
            _print_stats(engine, first)
    except BrokenPipeError:  # the reader has left, as in `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError, RecursionError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _sampling(args):
    """The flags' temperature, top_k and top_p; where there is no flag, those of the checkpoint, which is said."""
    given = {name: getattr(args, name) for name in SAMPLING if getattr(args, name) is not None}
    found = generation_config(args.model)
    found = {name: found[name] for name in SAMPLING if name not in given and found.get(name) is not None}
    file = f"{args.model}/generation_config.json"
    try:
        SamplingParams(**found)
    except ValueError as e:
        raise ValueError(f"{file}: {e}") from None
    if found:
        print(f"{file} sets {', '.join(f'{name} {value}' for name, value in found.items())}", file=sys.stderr)
    return SAMPLING | found | given


def _read_stdin():
    if sys.stdin is None:
        raise ValueError("--prompt - reads standard input, which is closed")
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as e:
        raise ValueError(f"standard input is not UTF-8: byte {e.object[e.start]:#04x} at offset {e.start}") from None


def _print_stats(engine, first):
    def say(line):
        print(line, file=sys.stderr)

    stats = engine.stats
    if first is not None:
        say(f"first text    {first:.2f} s after start-up (imports not counted)")
    for kind in ("prompt", "decode"):
        say(f"{kind:<9} {stats[f'{kind}_tokens']:>8} tokens {stats[f'{kind}_tokens_per_s']:>10.1f} tokens/s")
    if stats["draft"]:
        say(f"drafts        {stats['draft']}, {stats['draft_tokens']}; {stats['tokens_per_cycle']:.2f} tokens a cycle")
        kept = ", ".join(f"{share:.0%}" for share in stats["acceptance"])
        say(f"  right       {stats['drafts_kept']} of {stats['drafted']}; by position {kept or 'none'}")
        say(f"  steps       {'; '.join(f'{m} drafts: {took}' for m, took in stats['depths'].items())}")
    if engine.device.type == "cuda":
        say(f"peak memory   {torch.cuda.max_memory_allocated(engine.device) / 2**20:.0f} MiB on the GPU")
    say(f"peak memory   {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10:.0f} MiB of the process")
    say(f"pool          {stats['pages']} pages of {stats['page_tokens']} tokens, {stats['pages_free']} free")
    for name, ran in stats["backends"].items():
        say(f"op {name:<12} {ran}")
