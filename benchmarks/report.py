"""What the benchmarks print and write: tables, and bundles of rows with what a reader needs to run them again."""

import os
import platform
import re
import shlex
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

PACKAGES = ("torch", "triton", "numpy", "fla-core")


def print_table(rows, names):
    """Prints the named columns of rows; units stay out of the head."""

    def show(name, x):
        if name in ("theory", "reuse", "of_theory"):
            return f"{x:.1%}"
        if not isinstance(x, float):
            return "" if x is None else str(x)
        return f"{x:.0f}" if x >= 1e3 else f"{x:.3g}"

    cells = [[re.sub("_(ms|tok_s)$", "", name).replace("_", " ") for name in names]]
    cells += [[show(name, row[name]) for name in names] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    text = [isinstance(rows[0][name], str) for name in names]
    for line in cells:
        print("  ".join(c.ljust(w) if t else c.rjust(w) for c, w, t in zip(line, widths, text)).rstrip())


def about(argv):
    """What a reader needs to trust a result and to run it again; no folders of this machine."""
    git = ["git", "-C", str(Path(__file__).resolve().parent.parent)]
    ask = lambda *words: subprocess.run([*git, *words], capture_output=True, text=True).stdout.strip()
    try:
        commit = ask("rev-parse", "HEAD") + (" with changes" if ask("status", "--porcelain", "-uno") else "")
    except OSError:  # no git
        commit = ""
    shown = [Path(a).name if os.path.isabs(a) or os.path.exists(a) else a for a in argv]
    about = {"commit": commit or None, "command": shlex.join(["python", "bench.py", *shown])}
    about |= {"versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES}}
    return about | {"gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None, "cpus": os.cpu_count()}


def _version(package):
    try:
        return version(package)
    except PackageNotFoundError:
        return None
