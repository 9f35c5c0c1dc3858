"""The replay can fail: each of these breaks the protocol on purpose, and is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stillframe.checkpoint import removal
from stillframe.checkpoint.catalog import Catalog, Checkpoint
from stillframe.checkpoint.promote import Pace, carry_part
from stillframe.errors import StorageError
from stillframe.format import names
from stillframe.keeper import mover, retention
from stillframe.keeper.commit import Member
from stillframe.keeper.epochs import CurrentEpoch
from stillframe.keeper.follower import Follower
from stillframe.keeper.mover import Mover
from stillframe.keeper.segment import SegmentWriter
from stillframe.model import SaveId
from tests.protocol.scenarios import SCENES, new_judge, play
from tests.protocol.test_replay import plans
from tests.protocol.truth import Broken

Patch = Callable[[Any], None]


def is_found(*scenes: str, claims_late: bool = False) -> bool:
    try:
        for name in scenes:
            judge = new_judge()
            for plan in plans(SCENES[name], 3 if SCENES[name].is_long else 1, is_brief=True):
                play(SCENES[name], plan, judge, claims_late=claims_late)
    except Broken:
        return True
    return False


def no_look(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SegmentWriter, "check_newest", lambda _self: None)


def look_before(patch: pytest.MonkeyPatch) -> None:
    commit = SegmentWriter.commit

    def early(self: SegmentWriter, seals: Any) -> None:
        CurrentEpoch.check_newest(self._epoch, self.identify().epoch)
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(SegmentWriter, "check_newest", lambda _self: None)
            commit(self, seals)

    patch.setattr(SegmentWriter, "commit", early)


def seals_first(patch: pytest.MonkeyPatch) -> None:
    set_aside = removal.set_aside

    def early(catalog: Catalog, save: SaveId, *arguments: Any) -> str:
        catalog.store.delete([names.key(save, names.seal(0))])
        return set_aside(catalog, save, *arguments)

    patch.setattr(retention, "set_aside", early)


def nothing_withdrawn(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(removal, "_withdraw", lambda *_arguments: None)
    patch.setattr(Catalog, "is_void", lambda *_arguments: False)


def no_look_after_a_tombstone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("stillframe.checkpoint.epochs.is_newest", lambda *_arguments: True)


def reported_in_doubt(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SegmentWriter, "_make_sure", lambda *_arguments: True)


def taken_back_in_doubt(patch: pytest.MonkeyPatch) -> None:
    commit = SegmentWriter.commit

    def hasty(self: SegmentWriter, seals: Any) -> None:
        try:
            commit(self, seals)
        except StorageError:
            self.is_promised = False
            raise

    patch.setattr(SegmentWriter, "commit", hasty)


def taken_back_on_any_word(patch: pytest.MonkeyPatch) -> None:
    """Also where the manifest is there, which is looked for first."""
    heed, is_published = SegmentWriter.heed, Member._is_published

    def hasty(self: SegmentWriter) -> None:
        self.is_promised = self.is_promised and self.word is None
        heed(self)

    def blind(self: Member, is_overdue: bool) -> bool:
        return self.save.word is None and is_published(self, is_overdue)

    patch.setattr(SegmentWriter, "heed", hasty)
    patch.setattr(Member, "_is_published", blind)


def leftovers_forgotten(patch: pytest.MonkeyPatch) -> None:
    def at_once(catalog: Catalog, save: SaveId, keeps_tombstone: bool = False) -> None:
        removal.remove_all(catalog, save)

    patch.setattr(retention, "remove_all", at_once)


def any_parent(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("stillframe.lineage.Branch.has", lambda _self, _save: True)


def no_look_in_the_tier(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Mover, "_check_newest", lambda *_arguments: None)


def members_believe_the_tier(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Follower, "_found", Follower._done)


def seals_first_in_the_tier(patch: pytest.MonkeyPatch) -> None:
    def early(checkpoint: Checkpoint, target: Catalog, rank: int, *_arguments: Any) -> int:
        target.store.put(names.key(checkpoint.save, names.seal(rank)), checkpoint.seal_bytes(rank))
        return carry_part(checkpoint, target, rank, Pace())

    patch.setattr(mover, "carry_part", early)


@pytest.mark.parametrize(
    ("break_it", "scenes"),
    [
        (no_look, ["one rank"]),
        (no_look_after_a_tombstone, ["goes back"]),
        (look_before, ["one rank"]),
        (seals_first, ["one rank"]),
        (nothing_withdrawn, ["goes back and stays"]),
        (reported_in_doubt, ["one rank"]),
        (taken_back_in_doubt, ["one rank"]),
        (taken_back_on_any_word, ["two ranks"]),
        (leftovers_forgotten, ["one rank, nothing restored"]),
        (any_parent, ["rewound"]),
        (no_look_in_the_tier, ["a tier, the root lost"]),
        (members_believe_the_tier, ["a tier, the root lost, two ranks"]),
        (seals_first_in_the_tier, ["a tier"]),
    ],
)
def test_what_is_broken_is_found(break_it: Patch, scenes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    break_it(monkeypatch)
    assert is_found(*scenes)


def test_a_claim_after_the_choice_is_found() -> None:
    assert is_found("one rank", claims_late=True)
