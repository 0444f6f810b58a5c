"""What conftest.py promises: tests that run in a process beside count here as any other, and end with us."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("triton")

FILE = """
import os, time, pytest
@pytest.mark.interpreted
@pytest.mark.parametrize("name", ["a b", "c[d]"])
def test_fine(name):
    assert os.environ["TRITON_INTERPRET"] == "1"
def test_here():
    assert os.environ.get("TRITON_INTERPRET") != "1"
@pytest.mark.compiles
def test_compiled():
    assert os.environ["TRITON_INTERPRET"] == "0"
"""
WRONG = "\n@pytest.mark.interpreted\ndef test_wrong():\n    assert 6 * 7 == 41\n"
DIES = "\n@pytest.mark.interpreted\ndef test_dies():\n    os._exit(9)\n" + WRONG
WAITS = """
@pytest.mark.interpreted
def test_waits():
    with open("pid", "w") as file:
        file.write(str(os.getpid()))
    time.sleep(60)
"""


@pytest.fixture
def start(tmp_path):
    """Starts pytest in a folder with our conftest.py and one file of tests."""
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    interpreted\n    compiles\n    slow\n")

    def run(text, *options):
        (tmp_path / "test_it.py").write_text(text)
        env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "TRITON_INTERPRET"))}
        env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        command = [sys.executable, "-m", "pytest", "-q", *options]
        return subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True)

    return run


@pytest.mark.parametrize(
    "text, options, says",
    [
        (FILE, ["test_it.py::test_fine[c[d]]"], ["1 passed"]),
        (FILE, ["-k", "compiled or here"], ["2 passed, 2 deselected"]),
        (FILE + WRONG, [], ["assert (6 * 7) == 41", "1 failed, 4 passed"]),
        (FILE + DIES, [], ["ended with 9 before this test", "2 failed, 4 passed"]),
        (FILE + DIES, ["-x"], ["stopping after 1 failures", "1 failed, 3 passed"]),
    ],
)
def test_what_is_reported(start, text, options, says):
    output = start(text, *options).communicate(timeout=60)[0]
    assert all(words in output for words in says), output


def test_an_interrupt_ends_what_runs_beside(start, tmp_path):
    process, pid = start(FILE + WAITS), tmp_path / "pid"
    while not (pid.exists() and pid.read_text()) and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert "Interrupt" in process.communicate(timeout=30)[0]
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
