"""The device is built once, whoever asks, and a build that is killed is nobody's trouble."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from tests.device.running import environment
from tests.support import kill, until

COMPILER = """#!{python}
import pathlib, sys, time
if "--version" in sys.argv:
    sys.exit()
with open({log!r}, "a") as log:
    log.write("called\\n")
if pathlib.Path({slow!r}).exists():
    time.sleep(60)
pathlib.Path(sys.argv[sys.argv.index("-o") + 1]).write_text("built")
"""


def asking(home: Path, compiler: Path) -> subprocess.Popen[str]:
    code = "import tests.device.build as b; print(b.build().read_text())"
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True,
        env={**environment(), "XDG_CACHE_HOME": str(home), "CXX": str(compiler)},
    )  # fmt: skip


def test_a_killed_build_holds_nobody_up_and_two_at_once_build_once(tmp_path: Path) -> None:
    log, slow, compiler = tmp_path / "log", tmp_path / "slow", tmp_path / "compiler"
    compiler.write_text(COMPILER.format(python=sys.executable, log=str(log), slow=str(slow)))
    compiler.chmod(0o755)
    slow.touch()
    killed = asking(tmp_path / "home", compiler)
    until(lambda: log.exists() and len(log.read_text().split()) == 2, "both sources being compiled")
    kill(killed.pid)
    killed.communicate()
    children = [each for each in os.listdir("/proc") if each.isdigit() and _group(each) == killed.pid]
    slow.unlink()
    log.unlink()
    began = time.monotonic()
    both = [asking(tmp_path / "home", compiler) for _ in range(2)]
    assert [each.communicate(timeout=60)[0].strip() for each in both] == ["built", "built"]
    assert time.monotonic() - began < 50
    assert len(log.read_text().split()) == 3  # two sources, one library
    for child in children:
        kill(int(child))
    left = [path.name for path in (tmp_path / "home" / "stillframe-tests").iterdir()]
    assert sorted(name.split("-")[0] for name in left) == ["lock", "queued"], left


def _group(pid: str) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[2])
    except (FileNotFoundError, ProcessLookupError):
        return -1
