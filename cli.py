"""The command line: `python engine.py --prompt "Once upon a time"`. Text goes to standard output, all else to standard
error."""

import argparse
import os
import resource
import sys
import time

import torch

from engine import TINY, Engine
from sampling import SamplingParams

SMALL = 1024  # models narrower than this run on one CPU thread


def _arguments():
    p = argparse.ArgumentParser(
        prog="python engine.py",
        description="Continue a text with Kimi K3. With --prompt alone, a small K3 trained on fairy tales tells one.",
    )
    p.add_argument(
        "--prompt",
        action="append",
        required=True,
        metavar="TEXT",
        help="text to continue; repeat it to run several at once; - reads standard input",
    )
    p.add_argument(
        "--model",
        default=TINY,
        metavar="FOLDER",
        help="checkpoint folder: config.json, safetensors, tokenizer (default: the tiny model that is included)",
    )
    p.add_argument(
        "--max-tokens", type=int, default=256, metavar="N", help="write at most N tokens (default %(default)s)"
    )
    p.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="T",
        help="0 always takes the likeliest token; higher is more varied (default %(default)s)",
    )
    p.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="choose among the K likeliest tokens only (default 0: all)"
    )
    p.add_argument(
        "--top-p",
        type=float,
        default=0.95,
        metavar="P",
        help="choose among the likeliest tokens that make up P of the probability (default %(default)s)",
    )
    p.add_argument(
        "--seed", type=int, metavar="S", help="the same seed gives the same text (default: a new one each time)"
    )
    p.add_argument("--device", choices=("cpu", "cuda"), help="where to run (default: the GPU where there is one)")
    p.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float64"),
        help="of weights and cache (default: bfloat16 on a GPU, float32 on a CPU)",
    )
    p.add_argument(
        "--stats",
        action="store_true",
        help="afterwards print speed, peak memory and which backend each op ran, on standard error",
    )
    return p


def main(argv=None):
    """Runs the command line. Text goes to standard output, all else to standard error; returns the exit code."""
    args = _arguments().parse_args(argv)
    started = time.perf_counter()
    try:
        prompts = [_read_stdin() if p == "-" else p for p in args.prompt]
        params = SamplingParams(args.max_tokens, args.temperature, args.top_k, args.top_p, seed=args.seed)
        engine = Engine(args.model, args.device, args.dtype and getattr(torch, args.dtype))
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
            for n, out in enumerate(
                engine.generate(prompts, params, progress=bool(sys.stderr) and sys.stderr.isatty()), 1
            ):
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


def _read_stdin():
    if sys.stdin is None:
        raise ValueError("--prompt - reads standard input, which is closed")
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as e:
        raise ValueError(f"standard input is not UTF-8: byte {e.object[e.start]:#04x} at offset {e.start}") from None


def _print_stats(engine, first):
    stats = engine.stats
    if first is not None:
        print(f"first text    {first:.2f} s after start-up (imports not counted)", file=sys.stderr)
    for kind in ("prompt", "decode"):
        print(
            f"{kind:<9} {stats[f'{kind}_tokens']:>8} tokens {stats[f'{kind}_tokens_per_s']:>10.1f} tokens/s",
            file=sys.stderr,
        )
    if engine.device.type == "cuda":
        print(
            f"peak memory   {torch.cuda.max_memory_allocated(engine.device) / 2**20:.0f} MiB on the GPU",
            file=sys.stderr,
        )
    print(
        f"peak memory   {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10:.0f} MiB of the process",
        file=sys.stderr,
    )
    print(
        f"pool          {stats['pages']} pages of {stats['page_tokens']} tokens, {stats['pages_free']} free",
        file=sys.stderr,
    )
    for name, ran in stats["backends"].items():
        print(f"op {name:<12} {ran}", file=sys.stderr)

