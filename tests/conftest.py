"""Kernel tests run beside the others, in processes of their own: first those marked `interpreted`, where Triton
interprets, then `compiles`, where it compiles for GPUs that are not here. A pipe brings their reports, a line each.

Workers of `pytest -m gpu -n 12` share one GPU: its memory goes back after every test, and `large` ones take turns.
"""

import contextlib
import fcntl
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

KINDS = "interpreted", "compiles"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
PIPE = int(os.environ.pop("TESTS_REPORT_TO", 0))  # only in such a process
running = {}  # kind -> Beside


@pytest.fixture(autouse=True)
def gpu_memory(request):
    """What a GPU test leaves in PyTorch's cache goes back to the device; who needs much of it waits for a turn."""
    if not request.node.get_closest_marker("gpu"):
        yield
        return
    with contextlib.ExitStack() as stack:
        if request.node.get_closest_marker("large"):
            turn = stack.enter_context(open(Path(tempfile.gettempdir(), f"k3-tests-{os.getuid()}.lock"), "w"))
            fcntl.flock(turn, fcntl.LOCK_EX)
        yield
        torch.cuda.empty_cache()


class Beside:
    """A pytest over `items`, in the background; then the one of the next kind, so that two cores are enough."""

    def __init__(self, config, kind, items):
        self.config, self.kind, self.items, self.then = config, kind, items, None
        self.lines, self.waiting, self.output = queue.SimpleQueue(), {}, tempfile.TemporaryFile("w+")
        self.process = self.thread = None

    def start(self):
        read, write = os.pipe()
        interpret = str(int(self.kind == "interpreted"))
        env = dict(TRITON_INTERPRET=interpret, OMP_NUM_THREADS="1", TESTS_REPORT_TO=str(write))
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts="]
        command += [item.nodeid for item in self.items]
        where = dict(cwd=self.config.rootpath, env=os.environ | env, pass_fds=[write], stdin=subprocess.DEVNULL)
        self.process = subprocess.Popen(command, stdout=self.output, stderr=subprocess.STDOUT, **where)
        os.close(write)
        self.thread = threading.Thread(target=self.read, args=[read], daemon=True)
        self.thread.start()

    def read(self, pipe):
        """A thread that empties the pipe, so that the tests never wait for us."""
        with open(pipe) as lines:
            for line in lines:
                self.lines.put(line)
        self.lines.put("")
        if self.then:
            self.then.start()

    def reports(self, item):
        """The reports of an item, waited for; a failure if the process ended before it came to the item."""
        while not any(report.when == "teardown" for report in self.waiting.get(item.nodeid, [])):
            line = self.lines.get()
            if not line:
                self.lines.put("")  # for the items to come
                return [self.lost(item)]
            report = self.config.hook.pytest_report_from_serializable(config=self.config, data=json.loads(line))
            self.waiting.setdefault(report.nodeid, []).append(report)
        return self.waiting.pop(item.nodeid)

    def lost(self, item):
        code = self.process.wait()
        self.output.seek(0)
        text = f"{' '.join(self.process.args[:3])} ended with {code} before this test:\n{self.output.read()[-6000:]}"
        return pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")

    def stop(self):
        self.then = None
        if self.process:
            self.process.terminate()
            self.process.wait()
            self.thread.join()
        self.output.close()


def beside(item):
    """The kind of process that an item is for, None if it runs in this one."""
    here = PIPE or INTERPRETED or item.get_closest_marker("skip")
    return None if here else next((kind for kind in KINDS if item.get_closest_marker(kind)), None)


def pytest_collection_modifyitems(config, items):
    """What runs beside comes last; where it cannot run, it says so."""
    kinds, why = KINDS, None
    if INTERPRETED:
        kinds, why = ["compiles"], "the interpreter has no compiler"
    elif hasattr(config, "workerinput"):
        why = "runs in a process of its own: without -n"
    elif not find_spec("triton"):
        why = "there is no Triton here"
    for item in items if why else []:
        if any(item.get_closest_marker(kind) for kind in kinds):
            item.add_marker(pytest.mark.skip(reason=why))
    items.sort(key=lambda item: (None, *KINDS).index(beside(item)))


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session):
    for kind in KINDS:
        items = [item for item in session.items if beside(item) == kind]
        if items and not session.config.option.collectonly:
            running[kind] = Beside(session.config, kind, items)
    first, *rest = running.values() or [None]
    try:
        if first:
            first.then = (rest or [None])[0]
            first.start()
        return (yield)
    finally:  # also when interrupted
        for process in running.values():
            process.stop()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):
    if beside(item) is None:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in running[beside(item)].reports(item):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


class Sender:
    """In a process beside: writes each report into the pipe; that fails, and ends the process, once nobody reads."""

    def __init__(self, config):
        self.config = config

    def pytest_runtest_logreport(self, report):
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        with open(PIPE, "w", closefd=False) as pipe:
            pipe.write(json.dumps(data) + "\n")


def pytest_configure(config):
    if PIPE:
        config.pluginmanager.register(Sender(config))
