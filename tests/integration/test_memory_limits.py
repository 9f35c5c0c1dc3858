"""Real limits on memory: of a control group, and of a process (``ulimit``)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from stillframe.units import MIB
from tests.support import run_fresh, until

LIMIT = 192 * MIB
TOP = Path("/sys/fs/cgroup")


def own_group() -> tuple[Path, str]:
    """The directory of this process's group, and the name of the file that limits its memory."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for _, controllers, path in lines:
        if "memory" in controllers.split(","):
            return TOP / "memory" / path.lstrip("/"), "memory.limit_in_bytes"
    return TOP / lines[0][2].lstrip("/"), "memory.max"


@pytest.fixture
def group() -> Iterator[Path]:
    """A group below this process's own, which is limited, and one below that, which is not: the latter."""
    above, limit = own_group()
    outer = above / f"stillframe-test-{os.getpid()}"
    inner = outer / "inner"
    with contextlib.ExitStack() as stack:
        try:
            for each in (outer, inner):
                each.mkdir()
                stack.callback(until, partial(_is_removed, each), f"the end of {each}")
                if limit == "memory.max" and each is outer:
                    (outer / "cgroup.subtree_control").write_text("+memory")
            (outer / limit).write_text(str(LIMIT))
        except OSError as error:
            pytest.skip(f"no control group of memory can be made here: {error}")
        yield inner


def _is_removed(group: Path) -> bool:
    """A group is busy for a moment after its last process has ended."""
    with contextlib.suppress(FileNotFoundError):
        try:
            group.rmdir()
        except OSError:
            return False
    return True


INSIDE = """
import os, sys, time
from pathlib import Path
group, file = Path(sys.argv[1]), Path(sys.argv[2])
(group / "cgroup.procs").write_text(str(os.getpid()))
from stillframe.link import memory
from stillframe.units import MIB
before = memory.shared_room()
file.write_bytes(bytes(64 * MIB))
with file.open("rb") as opened:
    os.fsync(opened)
    opened.read()
cached, end = memory.shared_room(), time.monotonic() + 10
while cached.nbytes < before.nbytes - 24 * MIB and time.monotonic() < end:  # memory.stat lags behind for seconds
    time.sleep(0.1)
    cached = memory.shared_room()
taken = b"1" * (64 * MIB)
print(before.nbytes // MIB, cached.nbytes // MIB, memory.shared_room().nbytes // MIB, before.of)
"""


def test_the_limit_of_a_group_above_is_seen_and_page_cache_counts_as_free(tmp_path: Path, group: Path) -> None:
    before, cached, taken, of = run_fresh(INSIDE, group, tmp_path / "file").split(" ", 3)
    assert 100 < int(before) <= LIMIT // MIB
    assert int(cached) >= int(before) - 24  # 64 MiB went through the page cache
    assert int(taken) <= int(before) - 60
    assert group.parent.name in of


ULIMITS = """
import os, resource, sys
from pathlib import Path
import torch, stillframe
from stillframe.units import GIB, MIB

def arenas_open():
    links = [each for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    return sum("stillframe-arena" in os.readlink(each) for each in links if each.is_symlink())

for name in ("RLIMIT_AS", "RLIMIT_FSIZE"):
    which, root = getattr(resource, name), f"{sys.argv[1]}/{name}"
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(which)
    resource.setrlimit(which, (used + GIB if name == "RLIMIT_AS" else 300 * MIB, before[1]))
    try:
        stillframe.Checkpointer(root, arena="1.5GiB")
    except stillframe.ConfigError as error:
        print(arenas_open(), error)
    with stillframe.Checkpointer(root) as checkpointer:
        checkpointer.save(1, {"weights": torch.zeros(200 * MIB // 4)}).wait()
        print(checkpointer.stats().arena_bytes // MIB)
    resource.setrlimit(which, before)
"""


def test_an_arena_beyond_the_limits_of_the_process_is_refused_and_an_automatic_one_stays_below(tmp_path: Path) -> None:
    by_space, space, by_file, file = run_fresh(ULIMITS, tmp_path).splitlines()
    for said, limit in ((by_space, "ulimit -v"), (by_file, "ulimit -f")):
        assert said.startswith("0 arena=1.5 GiB exceeds")
        assert limit in said
        assert "give it a smaller size" in said
    assert 32 <= int(space) <= 512
    assert int(file) == 144
