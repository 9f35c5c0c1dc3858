"""Storage that hangs in one system call of a real keeper, for as long as a file of the test exists."""

from __future__ import annotations

from pathlib import Path

from stillframe.save import keeper_process

_START = "from stillframe.keeper.process import main\n"
BEAT_S = 0.2
_FAST = f"""
from stillframe.checkpoint import lock
from stillframe.link import liveness
liveness.BEAT_S, lock.GRACE_S, lock._TELL_FIRST_S, lock._TELL_S = {BEAT_S}, 0.5, 0.0, {BEAT_S}
"""
_HELD = """
import os, time
from stillframe.store.calls import Calls
real = Calls.{verb}
def held(self, *arguments):
    while os.path.exists({gate!r}):
        time.sleep(0.01)
    return real(self, *arguments)
Calls.{verb} = held
"""


def bootstrap(verb: str = "", gate: Path | None = None, more: str = "") -> str:
    """What a keeper is started with: it beats fast, and the call waits while the file exists."""
    held = _HELD.format(verb=verb, gate=str(gate)) if verb else ""
    assert _START in keeper_process._BOOTSTRAP
    return keeper_process._BOOTSTRAP.replace(_START, _FAST + held + more + _START)
