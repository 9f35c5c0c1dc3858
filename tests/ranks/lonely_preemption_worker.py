"""Run for test_preemption.py: ``lonely_preemption_worker.py ROOT``: ranks that do not wait for one another."""

from __future__ import annotations

import os
import sys
import time
from unittest import mock

import torch

import stillframe
from stillframe.ranks import meeting
from tests.ranks import saying

state = {"weights": torch.zeros(1000)}
with (
    mock.patch.object(meeting, "_ANSWER_S", 2.0),
    stillframe.Checkpointer(sys.argv[1]) as checkpointer,
    stillframe.on_preemption(checkpointer, state, deadline_s=2) as preemption,
):
    for step in range(100_000):
        saying.say(f"[{os.environ['RANK']}] step {step}")
        time.sleep(0.02)
        preemption.check(step)
