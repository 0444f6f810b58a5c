"""Measures the engine and its kernels; each command prints a table, and can write it as JSON that says how it was made.

python bench.py agent     replays conversations of agents: prefix reuse, latency, speed, by pool and by concurrency
python bench.py host      the cost on the host beside the model: a step, a look-up in the prefix cache, its memory
python bench.py cpu       one core of a CPU: decode, prompts, operations a token, start-up; beside another checkout
python bench.py coupling  what drafter-invariant sampling costs in acceptance, against rejection sampling
python bench.py kernels   each kernel at the sizes of K3 against the floor of this GPU
python bench.py spec      speculative decoding by depth and batch: tiny/, and a slice of K3
python bench.py step      whole decode steps of a slice of K3 at full width
python bench.py all       kernels and step, a bundle with its picture in one folder: for someone with a GPU
"""

import argparse
import json
import sys
from datetime import date
from pathlib import Path

import torch

from benchmarks import ops, spec, step, timing
from benchmarks.coupling import coupling
from benchmarks.cpu import cpu
from benchmarks.report import about
from benchmarks.serving import agent, host, plot_agent
from draft import DEPTHS
from engine import TINY

ROOFLINES = "kernels", "step"  # their pictures need to know the card


def _pyplot(file):
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        raise ValueError(f"--plot {file} needs matplotlib: pip install -e '.[plots]', or leave it out") from None
    return plt


def _arguments():
    p = argparse.ArgumentParser("python bench.py", description="Measure the engine: COMMAND --help says more.")
    commands = p.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(run, plot=None, name=None):
        about = run.__doc__.replace("%", "%%").replace("\n    ", "\n")
        form = argparse.RawDescriptionHelpFormatter
        c = commands.add_parser(
            name or run.__name__, help=about.split("\n")[0], description=about, formatter_class=form
        )
        c.set_defaults(run=run, draw=plot, plot=None, gpu=False)
        c.add_argument("--seed", type=int, default=0, metavar="S", help="of all that is drawn (default %(default)s)")
        c.add_argument("--quick", action="store_true", help="a small run, to see that it works")
        c.add_argument("--json", metavar="FILE", help="write commit, versions, command and rows there")
        if plot:
            c.add_argument("--plot", metavar="FILE", help=f"{plot.__doc__.split('.')[0]} (needs the extra: plots)")
        return c

    c = command(agent, plot_agent)
    c.add_argument("--model", default=TINY, metavar="FOLDER", help="checkpoint folder (default: the tiny model)")
    c.add_argument("--conversations", type=int, metavar="N", help="conversations in all (default 16)")
    c.add_argument("--turns", type=int, metavar="N", help="turns of each (default 8)")
    c.add_argument("--concurrency", type=int, metavar="N", help="how many at a time, when pools change (default 8)")
    c.add_argument("--device", choices=("cpu", "cuda"), help="where to run (default: the GPU where there is one)")
    c.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: bfloat16 on a GPU, float32 on a CPU")

    for c in (command(ops.ops, ops.plot, "kernels"), command(step.step, step.plot)):
        c.set_defaults(gpu=True)
    commands.choices["kernels"].add_argument("--only", metavar="OPS", help="ops to measure, by commas (default: all)")

    c = command(spec.spec, spec.plot)
    c.add_argument("--batches", type=int, nargs="+", metavar="N", help="sequences (default: 1 and more)")
    c.add_argument("--tokens", type=int, default=256, metavar="N", help="of each story (default %(default)s)")
    text = "drafts a cycle, 0 first (default: %(default)s)"
    c.add_argument("--depths", type=int, nargs="+", default=list(DEPTHS), metavar="M", help=text)
    c.add_argument("--model", default=TINY, metavar="FOLDER", help="checkpoint folder (default: the tiny model)")
    c.add_argument("--device", choices=("cpu", "cuda"), help="where to run (default: the GPU where there is one)")

    c = command(everything, name="all")
    c.set_defaults(gpu=True, only=None)
    c.add_argument("--out", default="results", metavar="FOLDER", help="where the bundle goes (default %(default)s)")

    c = command(cpu)
    c.add_argument("--model", default=TINY, metavar="FOLDER", help="checkpoint folder (default: the tiny model)")
    c.add_argument("--against", metavar="FOLDER", help="another checkout of this repository, to be compared with")

    c = command(coupling)
    c.add_argument("--model", default=TINY, metavar="FOLDER", help="checkpoint folder (default: the tiny model)")
    c.add_argument("--val", nargs="+", required=True, metavar="FILE", help="held-out text")

    c = command(host)
    c.add_argument("--requests", type=int, metavar="N", help="requests that run at once (default 64)")
    c.add_argument("--tokens", type=int, metavar="N", help="prompt tokens of each (default 100000)")
    return p


def everything(args):
    """The kernels and the steps on this GPU: kernels.json, step.json and their pictures in FOLDER, to be passed on."""
    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    plt = _pyplot(folder / "kernels.png")
    for name, measure, plot in (("kernels", ops.ops, ops.plot), ("step", step.step, step.plot)):
        rows = measure(args)
        _write(folder / f"{name}.json", args, rows)
        plot(plt, rows, args.card).savefig(folder / f"{name}.png", dpi=150)
        torch.cuda.empty_cache()
    args.json = None


def _write(file, args, rows):
    bundle = about(args.argv) | {"date": date.today().isoformat()}
    bundle |= {"card": args.card} if args.gpu else {}
    Path(file).write_text(json.dumps(bundle | {"rows": rows}, indent=1) + "\n", encoding="utf-8")


def main(argv=None):
    """Runs the command line: tables to standard output, all else to standard error; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    args = _arguments().parse_args(argv)
    args.argv, args.log = argv, sys.stderr
    try:
        for file in filter(None, (args.json, args.plot)):  # before the work, not after it
            if not Path(file).resolve().parent.is_dir():
                raise FileNotFoundError(f"{file}: there is no such folder to write to")
        plt = _pyplot(args.plot) if args.plot else None
        if args.command == "spec":
            args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
            args.gpu = args.device == "cuda"
        if args.gpu:
            if not torch.cuda.is_available():
                raise ValueError(f"{args.command} measures a GPU, and PyTorch sees none here")
            args.card = timing.card()
            rates = args.card["copy_bytes_s"] / 1e12, args.card["matrix_flops_s"] / 1e12
            print(f"{torch.cuda.get_device_name()}: copy {rates[0]:.2f} TB/s, bf16 products {rates[1]:.0f} TFLOP/s")
        rows = args.run(args)
        if args.json:
            _write(args.json, args, rows)
        if plt:
            args.draw(plt, rows, *([args.card] if args.command in ROOFLINES else [])).savefig(args.plot, dpi=150)
    except (ValueError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
