"""The options of the training scripts of the demos, and the record that each writes at its end."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec
from demo.record import Record


def parser(description: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--root", type=Path, required=True, help="directory of the checkpoints")
    made.add_argument("--steps", type=int, required=True, help="train up to this step")
    made.add_argument("--no-save", action="store_true", help="save nothing and restore nothing, for comparison")
    made.add_argument("--record", type=Path, help="write timings and the fingerprint of the final state here")
    return made


def write(given: argparse.Namespace, record: Record) -> None:
    if given.record is not None:
        given.record.write_bytes(msgspec.json.encode(record))
