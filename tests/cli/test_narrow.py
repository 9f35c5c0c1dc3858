"""On a narrow terminal the less important columns go, words move to the next line, and no number is cut."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from stillframe import Checkpointer, Tier
from tests.cli.roots import stillframe

NUMBER = re.compile(r"\d[\d.]*(?:e[-+]\d+)?")
STEP = 123_456


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With long names, long values, a tier."""
    home = tmp_path_factory.mktemp("narrow")
    metrics: dict[str, Any] = {}
    names = [f"transformer.blocks.{index}.attention.projection.weight" for index in range(4)]
    state = {"model": {name: torch.zeros(8, 16) for name in names}, "metrics": metrics}
    with Checkpointer(home / "gpt", tiers=[Tier(home / "shared", every=2)]) as checkpointer:
        for number in range(4):
            checkpointer.fence()
            for index, name in enumerate(names):
                state["model"][name] += number * 10.0 ** -(3 * index)
            metrics |= {"loss": 1 / (number + 3), "note": f"an experiment with a long description, number {number}"}
            checkpointer.save(STEP + number, state, metadata={"loss": 1 / (number + 3)}).wait()
        checkpointer.wait(tier=str(home / "shared"))
    return home / "gpt"


COMMANDS = {
    "list": ["list"],
    "values": ["list", "--last", "3", "--value", "metrics/loss", "--value", "metrics/note"],
    "show": ["show"],
    "tensors": ["show", "latest", "--tensor", "model"],
    "statistics": ["show", "-2", "--tensor", "model", "--stats"],
    "diff": ["diff", "-3", "-1"],
    "doctor": ["doctor"],
    "watch": ["watch", "--once"],
    "verify": ["verify", "--all"],
}


@pytest.mark.parametrize("columns", ["60", "80"])
@pytest.mark.parametrize("name", COMMANDS)
def test_no_line_is_longer_than_the_terminal_and_no_number_is_cut(name: str, columns: str, root: Path) -> None:
    command, *more = COMMANDS[name]
    code = 10 if command == "diff" else 0
    narrow = stillframe(command, root, *more, code=code, COLUMNS=columns)
    wide = stillframe(command, root, *more, code=code, COLUMNS="300")
    paths = {str(root), str(root.parent / "shared")}
    for line in narrow.splitlines():
        has_path = any(path in line for path in paths)  # a path is a word: it is not broken, so that it can be copied
        assert has_path or len(line) <= int(columns), line
    if command not in ("doctor", "watch", "verify"):  # these tell how long ago, how much is free, how fast
        whole = re.sub(r"\S*…\S*", "", narrow)  # a name that is cut
        assert set(NUMBER.findall(whole)) <= set(NUMBER.findall(wide))


def test_a_changed_value_is_shown_with_both_sides(root: Path) -> None:
    told = stillframe("diff", root, "-3", "-1", code=10, COLUMNS="60")
    assert "0.25 → 0.166667" in told
    assert "e-" in told  # the exponent of a small difference


def test_a_number_stays_with_its_unit(root: Path) -> None:
    for columns in range(40, 80):
        for line in stillframe("watch", root, "--once", COLUMNS=str(columns)).splitlines():
            assert not re.match(r"\s*(KiB|MiB|GiB|bytes|ms|s|%)\b", line), line
