"""How much memory there is, read from trees that look like /proc and /sys/fs/cgroup; and the size of an arena by it."""

from __future__ import annotations

import errno
import os
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch._C._distributed_c10d import HashStore

from stillframe.checkpoint.catalog import Catalog
from stillframe.errors import ConfigError
from stillframe.link import memory, sizing
from stillframe.link.arena import Arena
from stillframe.model import CHUNK_BYTES
from stillframe.ranks import agreement
from stillframe.ranks.agreement import agree_on_run
from stillframe.ranks.group import Group
from stillframe.units import GIB

V2_MOUNT = "30 23 0:26 {top} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = "35 31 0:32 {top} /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"
UNLIMITED = 9223372036854771712


def build(root: Path, files: dict[str, str], available: int = 256 * GIB) -> int:
    """A machine with so much memory and these files; returns the bytes that are left on it."""
    for name, text in {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {available // 1024} kB\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return memory.shared_room(root).nbytes


def v2(path: str, limit: float | str, used: float, cache: float = 0, high: float | str = "max") -> dict[str, str]:
    """The files of one group; sizes in GiB."""
    at = f"sys/fs/cgroup{path.rstrip('/')}"
    stat = f"anon 1\ninactive_file {int(cache * GIB / 4)}\nactive_file {int(cache * GIB * 3 / 4)}\n"
    return {
        f"{at}/memory.max": f"{_bytes(limit)}\n",
        f"{at}/memory.high": f"{_bytes(high)}\n",
        f"{at}/memory.current": f"{_bytes(used)}\n",
        f"{at}/memory.stat": stat,
    }


def v1(path: str, limit: float, used: float, cache: float = 0, inherited: float = 0) -> dict[str, str]:
    at = f"sys/fs/cgroup/memory{path.rstrip('/')}"
    stat = f"inactive_file 7\nactive_file 7\ntotal_inactive_file {_bytes(cache)}\ntotal_active_file 0\n"
    return {
        f"{at}/memory.limit_in_bytes": f"{_bytes(limit) if limit else UNLIMITED}\n",
        f"{at}/memory.usage_in_bytes": f"{_bytes(used)}\n",
        f"{at}/memory.stat": stat + f"hierarchical_memory_limit {_bytes(inherited) if inherited else UNLIMITED}\n",
    }


def _bytes(gib: float | str) -> str:
    return gib if isinstance(gib, str) else str(int(gib * GIB))


def test_without_control_groups_it_is_what_the_machine_has(tmp_path: Path) -> None:
    assert build(tmp_path, {}) == 256 * GIB
    assert build(tmp_path, {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": V2_MOUNT.format(top="/")}) == 256 * GIB


def test_a_machine_that_does_not_tell_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give arena= a size"):
        memory.shared_room(tmp_path)


def test_a_group_leaves_its_limit_less_what_is_used_and_is_not_page_cache(tmp_path: Path) -> None:
    for version, name, files in (
        (2, "0::/", {"proc/self/mountinfo": V2_MOUNT.format(top="/"), **v2("/", 64, 63, 59)}),
        (1, "4:memory:/", {"proc/self/mountinfo": V1_MOUNT.format(top="/"), **v1("/", 64, 63, 59)}),
    ):
        assert build(tmp_path / str(version), {"proc/self/cgroup": f"{name}\n", **files}) == 60 * GIB


def test_every_group_above_counts_and_the_error_names_the_one_that_binds(tmp_path: Path) -> None:
    """A step of SLURM in version 2: the step and the task are not limited, the job is."""
    step = "/system.slice/slurmstepd.scope/job_7/step_0/user/task_0"
    files = {
        "proc/self/cgroup": f"0::{step}\n",
        "proc/self/mountinfo": V2_MOUNT.format(top="/"),
        **v2("/system.slice/slurmstepd.scope/job_7", 100, 40, 10),
        **v2("/system.slice/slurmstepd.scope/job_7/step_0/user", 200, 30),
        **v2(step, "max", 5),
    }
    assert build(tmp_path, files) == 70 * GIB
    assert "memory.max in" in memory.shared_room(tmp_path).of
    assert "job_7)" in memory.shared_room(tmp_path).of


def test_the_groups_of_slurm_in_version_1(tmp_path: Path) -> None:
    """Also where systemd's version 2 is mounted beside it, without the controller of memory."""
    unified = "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
    step = "/slurm/uid_1000/job_7/step_0"
    files = {
        "proc/self/cgroup": f"9:name=systemd:/\n5:cpu,cpuacct:/x\n4:memory:{step}\n0::/\n",
        "proc/self/mountinfo": unified + V1_MOUNT.format(top="/"),
        **v1("/", 0, 180),
        **v1("/slurm/uid_1000/job_7", 32, 12, 2),
        **v1(step, 40, 10),
    }
    assert build(tmp_path, files) == 22 * GIB


def test_another_jobs_group_does_not_count(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/a\n",
        "proc/self/mountinfo": V2_MOUNT.format(top="/"),
        **v2("/a", 64, 4),
        **v2("/b", 8, 8),
    }
    assert build(tmp_path, files) == 60 * GIB


def test_the_limit_that_slows_a_process_down_counts_like_the_other(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/a\n", "proc/self/mountinfo": V2_MOUNT.format(top="/"), **v2("/a", 64, 4, 0, 20)}
    assert build(tmp_path, files) == 16 * GIB


@pytest.mark.parametrize(
    ("own", "top", "seen"),
    [
        ("/docker/abc", "/docker/abc", "/"),  # the mount shows the container's own group only
        ("/docker/abc/inner", "/docker/abc", "/inner"),
        ("/", "/", "/"),  # a namespace of its own
        ("/", "/../..", "/"),  # its own namespace, but a mount from outside
        ("/../other", "/", "/"),  # moved out of its namespace
        ("/kubepods/pod1/c", "/elsewhere", "/"),
        ("/docker/abc", "/", "/"),  # a path that is not there
    ],
)
def test_what_a_container_sees_of_its_groups(tmp_path: Path, own: str, top: str, seen: str) -> None:
    one = {"proc/self/cgroup": f"0::{own}\n", "proc/self/mountinfo": V2_MOUNT.format(top=top), **v2(seen, 8, 2, 1)}
    assert build(tmp_path / "2", one) == 7 * GIB
    other = {"proc/self/cgroup": f"3:memory:{own}\n", "proc/self/mountinfo": V1_MOUNT.format(top=top)}
    assert build(tmp_path / "1", {**other, **v1(seen, 8, 2, 1)}) == 7 * GIB


def test_a_limit_above_what_the_mount_shows_is_known_in_version_1(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "3:memory:/pod/c\n", "proc/self/mountinfo": V1_MOUNT.format(top="/pod/c")}
    assert build(tmp_path, {**files, **v1("/", 0, 2, 0, inherited=16)}) == 14 * GIB


def test_a_mount_that_shows_our_group_is_preferred_and_odd_lines_are_passed_over(tmp_path: Path) -> None:
    elsewhere = "77 23 0:26 /other /mnt/other\\040place rw - cgroup2 cgroup2 rw\n"
    files = {
        "proc/self/cgroup": "0::/a b\nodd\n\n",
        "proc/self/mountinfo": "odd\n - cgroup2\n" + elsewhere + V2_MOUNT.format(top="/"),
        "mnt/other place/memory.current": "1",
        "mnt/other place/memory.max": "1",
        **v2("/a b", 64, 4),
    }
    assert build(tmp_path, files) == 60 * GIB
    (tmp_path / "proc/self/cgroup").write_text("0::/other/deep\n")
    (tmp_path / "mnt/other place/memory.max").write_text(f"{3 * GIB + 1}")
    assert memory.shared_room(tmp_path).nbytes == 3 * GIB


def test_a_group_that_is_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/a\n", "proc/self/mountinfo": V2_MOUNT.format(top="/"), **v2("/a", 4, 5)}
    assert build(tmp_path, files) == 0


# --- the arena by it ---------------------------------------------------------------------------


def given(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr(memory, "shared_room", lambda: memory.Room(nbytes, "the machine's memory"))


def test_the_ranks_of_a_node_take_half_of_its_memory_together(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given(monkeypatch, 400 * GIB)
    assert 8 * sizing.auto_bytes(90 * GIB, ranks_on_node=8) == 200 * GIB
    assert "divided among 8 ranks" in caplog.text
    assert sizing.auto_bytes(90 * GIB) == 90 * GIB + 2 * CHUNK_BYTES


def test_the_limits_of_the_process_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, 400 * GIB)
    monkeypatch.setattr(memory, "own_rooms", lambda: [memory.Room(8 * GIB, "address space (ulimit -v)")])
    assert sizing.auto_bytes(90 * GIB, ranks_on_node=8) == 4 * GIB
    with pytest.raises(ConfigError, match=r"ulimit -v.*smaller size, or raise that limit"):
        sizing.fixed_arena(9 * GIB)


def test_ranks_agree_on_how_many_share_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five ranks on two nodes: the most on one of them, whatever the world's size."""
    nodes = iter("aabab")
    monkeypatch.setattr(agreement, "_node", lambda: next(nodes))
    store = HashStore()
    ranks = [Group(rank, 5, store, deadline_s=20.0) for rank in range(5)]
    for each in ranks:
        each._prefix = "stillframe/1"
    assert [each.ranks_on_node for each in ranks] == [5] * 5
    with ThreadPoolExecutor(5) as pool:
        names = list(pool.map(lambda each: agree_on_run(each, Catalog(str(tmp_path)), None), ranks))
    assert len(set(names)) == 1
    assert [each.ranks_on_node for each in ranks] == [3] * 5


@pytest.mark.parametrize(("said", "expected"), [("4", 4), ("9", 6), ("0", 1), ("four", 6), (None, 6)])
def test_ranks_that_never_talk_go_by_torchruns_word(
    monkeypatch: pytest.MonkeyPatch, said: str | None, expected: int
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if said is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", said)
    assert Group(0, 6, None, 1.0, talks=False).ranks_on_node == expected


@pytest.mark.parametrize(
    ("limit", "code", "advice"),
    [
        (resource.RLIMIT_FSIZE, errno.EFBIG, "ulimit -f.*smaller size"),
        (resource.RLIMIT_NOFILE, errno.EMFILE, "ulimit -n"),
    ],
)
def test_an_arena_that_cannot_be_had_leaves_nothing_open(limit: int, code: int, advice: str) -> None:
    before = os.listdir("/proc/self/fd")
    soft, hard = resource.getrlimit(limit)
    resource.setrlimit(limit, (3 if limit == resource.RLIMIT_NOFILE else CHUNK_BYTES, hard))
    try:
        with pytest.raises(ConfigError, match=advice) as caught:
            Arena(2 * CHUNK_BYTES)
    finally:
        resource.setrlimit(limit, (soft, hard))
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == code
    assert os.listdir("/proc/self/fd") == before
