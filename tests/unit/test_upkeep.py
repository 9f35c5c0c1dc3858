"""Removal is waited for, but never by those who remove."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from stillframe.checkpoint.catalog import Catalog
from stillframe.keeper import upkeep as upkeep_module
from stillframe.keeper.epochs import CurrentEpoch
from stillframe.keeper.terms import Terms
from stillframe.keeper.upkeep import Upkeep
from stillframe.model import SaveId

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def upkeep(tmp_path: Path) -> Upkeep:
    catalog = Catalog(tmp_path)
    terms = Terms(catalog.store, "run", 1, 60.0)
    return Upkeep(catalog, terms, 0, None, CurrentEpoch(catalog, terms, 0), lambda _: None)


def ends(work: Any) -> bool:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(5)
    return not thread.is_alive()


def remove(upkeep: Upkeep) -> None:
    with upkeep.after_commit(SaveId(1)):
        pass


def test_a_removal_under_way_is_waited_for_but_not_long(upkeep: Upkeep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep_module, "_REMOVAL_S", 0.2)
    with upkeep.after_commit(SaveId(1)):
        assert ends(upkeep.wait_for_removal)
    assert ends(upkeep.wait_for_removal)


def test_an_error_at_any_line_of_a_wait_holds_up_no_removal(upkeep: Upkeep) -> None:
    """Found by raising at every line of the keeper: a lock that was taken for the wait stayed taken."""
    lines: set[int] = set()

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code is not Upkeep.wait_for_removal.__code__:
            return None
        if event == "line" and frame.f_lineno not in lines:
            lines.add(frame.f_lineno)
            raise RuntimeError("on purpose")
        return trace

    before, is_over = sys.gettrace(), False
    while not is_over:
        sys.settrace(trace)
        try:
            upkeep.wait_for_removal()
            is_over = True
        except RuntimeError:
            pass
        finally:
            sys.settrace(before)
        assert ends(lambda: remove(upkeep))
    assert lines


def test_a_removal_that_was_left_by_an_error_is_over(upkeep: Upkeep) -> None:
    with pytest.raises(ArithmeticError), upkeep.after_commit(SaveId(1)):
        raise ArithmeticError
    assert ends(lambda: remove(upkeep))
    assert upkeep._removal.is_open
