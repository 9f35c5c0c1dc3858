"""The keeper's process: what a trainer starts."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

from stillframe.format import names
from stillframe.keeper.main import Keeper
from stillframe.keeper.trainer import Trainer
from stillframe.link import messages
from stillframe.link.messages import KeeperConfig
from stillframe.store.activity import Activity, WatchedCalls
from stillframe.store.address import is_url
from stillframe.store.posix import PosixStore
from stillframe.store.protocol import Store
from stillframe.tiers import TierConfig

_NICE = 10
_REQUEST_THREADS = "2"
"""Of obstore: by default as many as there are cores, in each rank's keeper."""
_PR_SET_NAME = 15


def main(*, sock: int, trainer: int, build: str, **given: Any) -> int:
    """``build``: the trainer's; ``given``: the fields of its :class:`KeeperConfig`.

    In every version a trainer of another build is refused before anything else: what it says may mean something else.
    """
    if build != (ours := messages.build()):
        text = f"the package on disk has changed from {build} to {ours} since this process was started: restart the job"
        Trainer(sock, trainer).tell(messages.Refused("KeeperError", text))
        return 1
    config = KeeperConfig(**{**given, "tiers": tuple(TierConfig(**each) for each in given.get("tiers", ()))})
    os.nice(_NICE)
    ctypes.CDLL(None).prctl(_PR_SET_NAME, b"stillframe-keep", 0, 0, 0)
    activity = Activity()
    store: Store
    if any(map(is_url, [config.root, *(tier.root for tier in config.tiers)])):
        os.environ.setdefault("TOKIO_WORKER_THREADS", _REQUEST_THREADS)
    if is_url(config.root):
        from stillframe.store.objects import open_objects

        store = open_objects(config.root, config.storage_options, activity)
    else:
        store = PosixStore(config.root, spare=names.spare(config.rank), calls=WatchedCalls(activity))
    code = Keeper(config, store, sock, trainer, activity).run()
    sys.stderr.flush()
    os._exit(code)  # the interpreter's own end might wait for a thread that hangs in a tier
