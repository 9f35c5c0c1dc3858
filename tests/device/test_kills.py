"""A training on a device that is killed, with copies under way, goes on as if nothing had happened."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

from tests.device.running import REPOSITORY, environment, need_device
from tests.support import kill

STEPS = 12
KILLS = 2


def test_killed_and_resumed_bit_for_bit(tmp_path: Path) -> None:
    need_device()
    begun: list[int] = []
    for number in range(KILLS + 1):
        child = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tests.device.trainee", str(tmp_path), str(STEPS)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), cwd=REPOSITORY,
        )  # fmt: skip
        assert child.stdout is not None
        said = []
        for line in child.stdout:
            said.append(line.strip())
            if number < KILLS and len(said) == 5:
                time.sleep(random.uniform(0, 0.1))
                kill(child.pid)
                break
        errors = child.communicate(timeout=60)[1]
        assert said, errors
        begun.append(int(said[0].removeprefix("from ")))
    assert child.returncode == 0, errors[-5000:]
    assert said[-1] == "the same", errors[-5000:]
    assert begun[0] == 0
    assert sorted(set(begun)) == begun, f"none of the saves between two kills was committed: {begun}"
