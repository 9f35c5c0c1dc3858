"""The systems that are compared, in the order of the tables: those that block first, stillframe last."""

from __future__ import annotations

from benchmarks.systems.base import System
from benchmarks.systems.dcp import DcpAsync, DcpAsyncProcess, DcpAsyncThread, DcpSave
from benchmarks.systems.deepspeed import DeepSpeedDecoupled, DeepSpeedFast
from benchmarks.systems.managed import TorchCheckpointing
from benchmarks.systems.nvrx import NvrxAsync
from benchmarks.systems.ours import Stillframe
from benchmarks.systems.plain import CloneAndThread, NoSaving, SafetensorsSave, TorchSave
from benchmarks.systems.snapshot import TorchSnapshot

SYSTEMS: dict[str, type[System]] = {
    system.name: system
    for system in (
        NoSaving, TorchSave, SafetensorsSave, DcpSave, DeepSpeedFast, CloneAndThread, DcpAsync, DcpAsyncThread,
        DcpAsyncProcess, TorchSnapshot, TorchCheckpointing, DeepSpeedDecoupled, NvrxAsync, Stillframe,
    )
}  # fmt: skip
