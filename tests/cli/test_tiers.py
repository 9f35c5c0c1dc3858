"""Tiers, seen by the commands: what each holds, what is half there, how far each is behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from stillframe import Catalog, Checkpointer, KeepLast, Tier, spi
from stillframe.checkpoint.promote import promote
from stillframe.checkpoint.survey import survey
from stillframe.checkpoint.tiers import look_at_tiers
from stillframe.format.epochs import TierNotes, decode_tiers, encode_tiers
from stillframe.observe.history import histories
from stillframe.tiers import check_tiers
from tests import layout
from tests.cli.roots import answer, flip, stillframe
from tests.support import pause, until


class Run(NamedTuple):
    """What a run has left: the two newest steps in its root, every second in a tier, every fifth in another."""

    root: Path
    near: Path
    far: Path


def make(directory: Path) -> Run:
    run = Run(directory / "root", directory / "near", directory / "far")
    tiers = [Tier(run.near, every=2, keep=KeepLast(2), limit="50MB/s"), Tier(run.far, every=5)]
    with Checkpointer(run.root, keep=KeepLast(2), tiers=tiers, arena="64MiB") as checkpointer:
        for step in range(1, 9):
            checkpointer.save(step, {"w": torch.full((1000,), float(step))}, metadata={"loss": 1 / step}).wait()
            for tier in tiers:
                checkpointer.wait(tier=tier)
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Not to be changed."""
    return make(tmp_path_factory.mktemp("tiers"))


@pytest.fixture
def copy(run: Run, tmp_path: Path) -> Run:
    """To be changed; its root knows the copies of the tiers."""
    made = Run(*(Path(shutil.copytree(each, tmp_path / each.name)) for each in run))
    layout.say_tiers(made.root, Tier(made.near, every=2, keep=KeepLast(2)), Tier(made.far, every=5))
    return made


class Pair(NamedTuple):
    """A root of two ranks with steps 1 and 2, and a tier that has both."""

    root: Path
    tier: Path


@pytest.fixture
def pair(sharded: Path, tmp_path: Path) -> Pair:
    made = Pair(*(Path(shutil.copytree(sharded, tmp_path / name)) for name in ("root", "tier")))
    layout.say_tiers(made.root, Tier(made.tier))
    return made


def interrupt(tier: Path, step: int, *lost: int) -> None:
    """As if the promotion had been killed before it had carried these ranks."""
    layout.uncommit(tier, step)
    for rank in lost:
        layout.seal(tier, step, rank).unlink()
        layout.segment(tier, step, rank).unlink()


# --- the record ------------------------------------------------------------------------------


def read_record(root: Path) -> TierNotes:
    return decode_tiers(layout.tiers_record(root).read_bytes(), file="")


def test_a_run_says_which_tiers_it_has_and_one_without_says_no_more(run: Run, tmp_path: Path) -> None:
    near, far = read_record(run.root).tiers
    assert (near.root, near.every, near.keep, near.limit) == (
        str(run.near), "2 steps", '{"keep":"last","count":2}', 50_000_000,
    )  # fmt: skip
    assert (far.root, far.every, far.keep, far.limit) == (str(run.far), "5 steps", "null", 0)
    root = Path(shutil.copytree(run.root, tmp_path / "root"))
    with Checkpointer(root, arena="64MiB") as checkpointer:
        checkpointer.save(9, {"w": torch.zeros(3)}).wait()
    assert not layout.tiers_record(root).exists()


def test_the_record_holds_nothing_secret() -> None:
    options = {"access_key_id": "open", "secret_access_key": "sesame"}
    (config,) = check_tiers([Tier("s3://bucket/gpt", storage_options=options)], "/root")
    assert config.storage_options == options
    said = encode_tiers(TierNotes("0123abcd", [config.note()]))
    assert b"s3://bucket/gpt" in said
    assert b"open" not in said
    assert b"sesame" not in said


def test_a_root_that_does_not_take_the_record_takes_checkpoints(tmp_path: Path) -> None:
    layout.tiers_record(tmp_path / "root").mkdir(parents=True)
    tier = Tier(tmp_path / "tier")
    with Checkpointer(tmp_path / "root", tiers=[tier], arena="64MiB") as checkpointer:
        checkpointer.save(1, {"w": torch.ones(3)}).wait(tier=tier)
    assert Catalog(tmp_path / "tier").steps() == [1]
    assert answer("list", tmp_path / "root")["tiers"] == []


# --- list ------------------------------------------------------------------------------------


def held(found: dict[str, Any]) -> dict[int, list[Any]]:
    return {each["step"]: [(tier or {}).get("state") for tier in each["tiers"].values()] for each in found["steps"]}


def test_list_shows_what_each_tier_holds_also_of_steps_that_the_root_has_not(run: Run) -> None:
    found = answer("list", run.root)
    assert held(found) == {5: [None, "whole"], 6: ["whole", None], 7: [None, None], 8: ["whole", None]}
    assert [each["state"] for each in found["steps"]] == ["not in the root"] * 2 + ["committed"] * 2
    assert found["steps"][0]["metadata"] == {"loss": 0.2}
    assert (found["latest"], [tier["newest"] for tier in found["tiers"]]) == (8, [8, 5])
    text = stillframe("list", run.root)
    lines = [line.split() for line in text.splitlines()]
    assert lines[0][-4::2] == ["in", "in"]
    assert [Path(each).name for each in lines[0][-3::2]] == ["near", "far"]
    assert [line[-2:] for line in lines[1:5]] == [["–", "whole"], ["whole", "–"], ["–", "–"], ["whole", "–"]]
    assert f"tier {run.near} (every 2 steps, KeepLast(count=2), at most 47.7 MiB/s)" in text
    assert "tiers" not in stillframe("list", run.near), "a tier is a root like any other"


def test_list_counts_the_parts_of_a_step_that_is_half_there(pair: Pair) -> None:
    interrupt(pair.tier, 2, 1)
    assert answer("list", pair.root)["steps"][1]["tiers"] == {
        str(pair.tier): {"state": "partial", "parts": 1, "of": 2}
    }  # fmt: skip
    assert stillframe("list", pair.root).splitlines()[2].endswith("1 of 2 parts")
    layout.seal(pair.tier, 1, 1).unlink()
    assert stillframe("list", pair.root).splitlines()[1].endswith("damaged, 1 of 2 parts")
    shutil.rmtree(layout.step_dir(pair.root, 2))  # now nothing but a seal in the tier tells how many there should be
    assert held(answer("list", pair.root)) == {1: ["damaged"], 2: ["partial"]}


def test_a_tier_that_cannot_be_looked_at_is_a_question_mark(copy: Run) -> None:
    shutil.rmtree(copy.near)
    copy.near.write_text("in its place")
    text = stillframe("list", copy.root)
    assert [line.split()[-2] for line in text.splitlines()[1:4]] == ["?", "?", "?"]
    (why,) = [line for line in text.splitlines() if line.startswith(f"tier {copy.near} ")]
    assert "cannot be read" in why
    found = answer("list", copy.root)
    assert str(copy.near) in found["tiers"][0]["trouble"]
    assert held(found)[5] == [None, "whole"]


@pytest.mark.parametrize("said", ["", "{}", "damaged", "elsewhere"])
def test_a_record_that_says_nothing_is_no_record(copy: Run, said: str) -> None:
    record = layout.tiers_record(copy.root)
    if said == "damaged":
        record.write_bytes(record.read_bytes().replace(b"2 steps", b"3 steps"))
    elif said == "elsewhere":
        note = read_record(copy.root).tiers[0]
        odd = type(note)("../near", note.every, "none", 0)
        record.write_bytes(encode_tiers(TierNotes("0123abcd", [odd])))
    else:
        record.write_text(said)
    found = answer("list", copy.root)
    assert [each["step"] for each in found["steps"]] == [7, 8]
    assert len(found["tiers"]) == (said == "elsewhere")


def test_two_tiers_of_one_name_are_told_apart(copy: Run) -> None:
    other = copy.root.parent / "other" / "near"
    layout.say_tiers(copy.root, Tier(copy.near), Tier(other))
    heads = stillframe("list", copy.root).splitlines()[0].split()[-3::2]
    assert heads[0] != heads[1]
    assert all(str(root).endswith(head.lstrip("…")) for root, head in zip((copy.near, other), heads, strict=True))


def test_list_tells_what_a_living_run_is_carrying(tmp_path: Path) -> None:
    tier = Tier(tmp_path / "tier", limit="12MB/s")
    with Checkpointer(tmp_path / "root", tiers=[tier]) as checkpointer:
        last = checkpointer.save(1, {"w": torch.ones(10_000_000)})
        last.wait()
        until(lambda: list(tmp_path.glob("tier/step-*/*.partial")), "the first of three chunks is carried")
        keeper = spi.keeper_pid(checkpointer)
        assert keeper is not None
        pause(keeper)
        try:
            assert held(answer("list", tmp_path / "root")) == {1: ["carrying"]}
            assert "carrying, 0 of 1 parts" in stillframe("list", tmp_path / "root")
        finally:
            os.kill(keeper, signal.SIGCONT)
        last.wait(tier=tier)
        assert held(answer("list", tmp_path / "root")) == {1: ["whole"]}


def test_of_several_that_are_half_there_the_one_is_carried_that_rank_0_names(pair: Pair) -> None:
    for step in (1, 2):
        interrupt(pair.tier, step, 1)
    layout.say_target(pair.tier, pair.root, 1)
    assert held(answer("list", pair.root)) == {1: ["partial"], 2: ["partial"]}, "nobody lives"
    with Checkpointer(pair.root, tiers=[Tier(pair.tier)], arena="64MiB"):
        until(lambda: answer("list", pair.root)["writers"], "the run")
        layout.say_target(pair.tier, pair.root, 1)
        assert held(answer("list", pair.root)) == {1: ["carrying"], 2: ["partial"]}
        (pair.tier / layout.RUN / "target.json").unlink()
        assert held(answer("list", pair.root)) == {1: ["partial"], 2: ["carrying"]}


# --- doctor ----------------------------------------------------------------------------------


def findings_of_tiers(root: Path, *options: str, code: int = 0) -> list[tuple[str, str, str]]:
    """(level, what, advice) of those that name a tier."""
    names = [each.root for each in read_record(root).tiers]
    found = answer("doctor", root, *options, code=code)["findings"]
    return [
        (each["level"], each["what"], each["advice"]) for each in found if any(name in each["what"] for name in names)
    ]


def test_doctor_finds_nothing_wrong_with_whole_tiers(run: Run) -> None:
    near, far = [what for level, what, _ in findings_of_tiers(run.root) if level == "fine"]
    assert near == f"the tier {run.near} has 2 checkpoints; the newest is step 8"
    assert far == f"the tier {run.far} has 1 checkpoint; the newest is step 5, 3 steps behind"


@pytest.mark.parametrize("lost", [(), (1,), (0, 1)])
def test_doctor_finishes_what_is_half_there(pair: Pair, lost: tuple[int, ...]) -> None:
    before = {path.name: path.read_bytes() for path in layout.step_dir(pair.root, 2).iterdir()}
    interrupt(pair.tier, 2, *lost)
    if len(lost) == 2:  # nothing but a segment that was not sealed
        layout.stray_segment(layout.step_dir(pair.tier, 2)).write_bytes(b"torn")
    (_, (level, what, advice)) = findings_of_tiers(pair.root, code=11)
    assert (level, what) == (
        "problem", f"step 2 in {pair.tier} has {2 - len(lost)} of 2 parts, and nobody carries it"
    )  # fmt: skip
    assert f"stillframe doctor {pair.root} --finish" in advice
    assert Catalog(pair.tier).steps() == [1], "it only looks"
    found = findings_of_tiers(pair.root, "--finish")
    assert found[0] == ("fine", f"step 2 in {pair.tier} is finished: it is a checkpoint there", "")
    assert Catalog(pair.tier).steps() == [1, 2]
    assert {path.name: path.read_bytes() for path in layout.step_dir(pair.tier, 2).iterdir()} == before
    stillframe("verify", pair.tier, 2)
    assert "no step in the tiers is incomplete" in stillframe("doctor", pair.root, "--finish")


def test_doctor_finishes_from_the_tier_alone_what_the_root_has_removed(pair: Pair) -> None:
    interrupt(pair.tier, 1)
    shutil.rmtree(layout.step_dir(pair.root, 1))
    stillframe("doctor", pair.root, "--finish")
    stillframe("verify", pair.tier, 1)


def test_doctor_says_what_is_missing_if_nobody_has_it(pair: Pair) -> None:
    interrupt(pair.tier, 1, 1)
    shutil.rmtree(layout.step_dir(pair.root, 1))
    told, _, (level, what, advice) = findings_of_tiers(pair.root, "--finish", code=11)
    assert told[0] == "note"
    assert f"step 1 in {pair.tier} is not finished: the parts of rank 1 are missing" in told[1]
    assert (level, what) == ("problem", f"step 1 in {pair.tier} has 1 of 2 parts, and nobody carries it")
    assert advice == "the root does not have it: retention of the next run with this tier removes it"
    assert Catalog(pair.tier).steps() == [2]


def test_doctor_carries_no_damage_to_a_tier(pair: Pair) -> None:
    interrupt(pair.tier, 2, 1)
    flip(layout.segment(pair.root, 2, 1), 5000)
    assert "is not finished" in stillframe("doctor", pair.root, "--finish", code=11)
    assert Catalog(pair.tier).steps() == [1]


def test_doctor_leaves_to_a_living_run_what_is_half_there(copy: Run) -> None:
    layout.uncommit(copy.near, 8)
    with Checkpointer(copy.root, tiers=[Tier(copy.near, every=1000), Tier(copy.far, every=1000)], arena="64MiB"):
        until(lambda: answer("list", copy.root)["writers"], "the run")
        told = findings_of_tiers(copy.root)
        assert not [each for each in told if each[0] in ("problem", "damage")]
        assert any("step 8" in what for level, what, _ in told if level == "note"), told
        stillframe("doctor", copy.root, "--finish", code=7)
        assert Catalog(copy.near).steps() == [6]


def test_a_tier_that_cannot_be_looked_at_is_told_and_no_problem(copy: Run) -> None:
    shutil.rmtree(copy.near)
    copy.near.write_text("in its place")
    (level, what, _), _ = findings_of_tiers(copy.root)
    assert level == "note"
    assert "cannot be read" in what


# --- what happened ---------------------------------------------------------------------------


def test_the_journal_tells_what_was_carried_and_what_failed(tmp_path: Path) -> None:
    root, good, bad = tmp_path / "root", tmp_path / "good", tmp_path / "bad"
    bad.write_text("in its place")
    tiers = [Tier(good, every=2), Tier(bad)]
    with Checkpointer(root, tiers=tiers, arena="64MiB") as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, {"w": torch.ones(1000)}).wait()
        checkpointer.wait(tier=good)
        until(lambda: answer("watch", root)["tiers"][1]["trouble"], "the failure in the journal")
        first, second = answer("watch", root)["tiers"]
        assert (first["root"], first["step"], first["behind_steps"], first["carried"]) == (str(good), 2, 1, 1)
        assert (first["failures"], first["trouble"]) == (0, "")
        assert 0 < first["behind_s"] < 60
        assert first["bytes"] == layout.segment(good, 2).stat().st_size
        assert (second["step"], second["behind_steps"], second["failures"]) == (None, None, 1)
        text = stillframe("watch", root)
        assert f"tier         {good}: step 2, 1 step behind (" in text
        assert f"tier         {bad}: nothing is there yet, as far as is known; fails: " in text
        stillframe("report", root, "-o", tmp_path / "failing.html")
        (problem,) = [each for each in findings_of_tiers(root, code=11) if each[0] == "problem"]
        assert problem[1].startswith(f"nothing gets to the tier {bad}: ")
        assert "use another place" in problem[1]
        assert problem[2] == "fix the cause: the run tries it again by itself"
        bad.unlink()
        checkpointer.wait(tier=bad)
    (history,) = histories(root)
    assert [(event.root, event.step) for event in history.carried if event.root == str(good)] == [(str(good), 2)]
    assert [bool(event.error) for event in history.tier_trouble] == [True, False]
    assert all(event.seconds > 0 for event in history.carried)
    assert not [each for each in findings_of_tiers(root) if each[0] == "problem"]
    (tier,) = [each for each in answer("watch", root)["tiers"] if each["root"] == str(bad)]
    assert (tier["step"], tier["behind_steps"], tier["behind_s"], tier["failures"], tier["trouble"]) == (3, 0, 0, 1, "")
    assert "as new as the root; has failed 1 time" in stillframe("watch", root)
    page = (tmp_path / "failing.html").read_text()
    assert "<h2>Tiers" in page
    assert f'<td class="t">{bad}</td>' in page


def test_a_run_without_tiers_shows_none(single: Path, tmp_path: Path) -> None:
    assert answer("watch", single)["tiers"] == []
    assert "tier" not in stillframe("watch", single)
    stillframe("report", single, "-o", tmp_path / "page.html")
    assert "<h2>Tiers" not in (tmp_path / "page.html").read_text()


def test_a_tier_of_another_run_is_over(tmp_path: Path) -> None:
    for place in ("tier", "root"):
        tiers = [Tier(tmp_path / "tier")] if place == "root" else []
        with Checkpointer(tmp_path / place, tiers=tiers, arena="64MiB") as checkpointer:
            checkpointer.save(1, {"w": torch.ones(3)}).wait()
    (history,) = histories(tmp_path / "root")
    assert [event.is_over for event in history.tier_trouble] == [True]
    assert "another run" in history.tier_trouble[0].error
    assert history.carried == []
    (problem,) = [each for each in findings_of_tiers(tmp_path / "root", code=11) if each[0] == "problem"]
    assert problem[1].startswith(f"the last run could not write to the tier {tmp_path / 'tier'}: ")
    assert problem[2] == "give the run a tier of its own"


def test_doctor_and_list_tell_that_another_run_has_gone_on_in_a_tier(tmp_path: Path) -> None:
    tier = Tier(tmp_path / "tier")
    with Checkpointer(tmp_path / "root", tiers=[tier], arena="64MiB", on_error="warn") as checkpointer:
        checkpointer.save(1, {"w": torch.ones(3)}).wait(tier=tier)
        with Checkpointer(tmp_path / "other", tiers=[tier], arena="64MiB") as other:
            assert other.restore({"w": torch.ones(3)}).step == 1
            other.save(2, {"w": torch.ones(3)}).wait(tier=tier)
        checkpointer.save(2, {"w": torch.ones(3)}).wait()
        checkpointer.save(3, {"w": torch.ones(3)}).wait()
    where = f"steps 2-3 of {tmp_path / 'root'} do not count: in {tmp_path / 'tier'}"
    said = f"{where}, another run has gone on from an older one"
    assert said in stillframe("list", tmp_path / "root")
    assert answer("list", tmp_path / "root")["tiers"][0]["left"] == [2, 3]
    assert ("problem", said) in [each[:2] for each in findings_of_tiers(tmp_path / "root", code=11)]
    assert "do not count" not in stillframe("list", tmp_path / "other")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system needs root")
def test_doctor_tells_of_a_tier_without_room(copy: Run, tmp_path: Path) -> None:
    (small := tmp_path / "small").mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "none", str(small)], capture_output=True)
    if done.returncode:
        pytest.skip("mounting is not permitted here")
    try:
        layout.say_tiers(copy.root, Tier(small / "tier"))
        (small / "tier").mkdir()
        (small / "all").write_bytes(bytes(4096))
        (problem,) = [each for each in findings_of_tiers(copy.root, code=11) if each[0] == "problem"]
        assert problem[1].startswith(f"the tier {small / 'tier'} has 0 bytes free, but a checkpoint takes ")
        assert f"stillframe prune {small / 'tier'}" in problem[2]
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_prune_leaves_what_is_being_carried(tmp_path: Path) -> None:
    """Beside the run, and when its keeper was killed."""
    tier = Tier(tmp_path / "tier", limit="1MB/s")
    root = tmp_path / "root"
    with Checkpointer(root, tiers=[tier], arena="64MiB", on_error="warn") as checkpointer:
        for last in (3, 6, 9):
            for step in range(last - 2, last + 1):
                checkpointer.save(step, {"w": torch.full((1_000_000,), float(step))}).wait()
            until(lambda: checkpointer.stats().tiers[0].target_step, "something is being carried")
            target = checkpointer.stats().tiers[0].target_step
            shown = stillframe("prune", root, "--keep-last", 1)
            left = Catalog(root).steps()
            if checkpointer.stats().tiers[0].target_step == target:  # else it was carried meanwhile: a slow machine
                break
        else:
            pytest.fail("whatever was carried was there before prune was done")
        assert target in left
        assert target == last or "it is being carried to a tier" in shown
        checkpointer.wait(tier=tier)
        stillframe("prune", root, "--keep-last", 1)
        assert Catalog(root).steps() == [last]


def test_prune_leaves_what_may_be_the_only_copy_of_a_part(pair: Pair, tmp_path: Path) -> None:
    """In a tier, until a later step is whole there.  What is left over in a root goes."""
    root, tier = Catalog(pair.root), tmp_path / "carried"
    for step in (1, 2):
        promote(root, Catalog(tier), root.find(step))
        interrupt(tier, step, 0)
    for _ in range(2):
        assert "step" not in stillframe("prune", tier, "--leftovers", "--dry-run")
        stillframe("prune", tier, "--leftovers")
    assert layout.segment(tier, 1, 1).exists()
    assert promote(root, Catalog(tier), root.find(2)) == []
    assert Catalog(tier).steps() == [2]
    assert "step 1" in stillframe("prune", tier, "--leftovers", "--dry-run")
    assert "step 1" in stillframe("prune", tier, "--leftovers")
    assert not list(tier.glob("step-000000000001-*/rank-*"))
    assert Catalog(tier).steps() == [2]
    interrupt(pair.root, 2, 0)
    assert "step 2" in stillframe("prune", pair.root, "--leftovers")
    assert not list(pair.root.glob("step-000000000002-*/rank-*"))


def test_a_server_that_is_down_is_not_taken_for_missing_credentials(copy: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    layout.say_tiers(copy.root, Tier("s3://bucket/run"))
    found = survey(copy.root)
    monkeypatch.setattr("stillframe.checkpoint.tiers.PATIENCE_S", 1.0)
    for name, value in {"ENDPOINT_URL": "http://127.0.0.1:1", "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    (view,) = look_at_tiers(found)
    silence = "nobody has answered at http://127.0.0.1:1 for 1 s"
    assert view.why == f"{silence}: does it run, and can it be reached from here?"
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    assert view.why.endswith("address and credentials come from the environment")


# --- prune -----------------------------------------------------------------------------------


def test_a_dry_run_says_what_the_policy_of_each_tier_would_let_go(copy: Run) -> None:
    layout.say_tiers(copy.root, Tier(copy.near, keep=KeepLast(1)), Tier(copy.far))
    wanted = answer("prune", copy.root, "--keep-last", 1, "--dry-run")
    assert [each["step"] for each in wanted["removed"]] == [7]
    (near,) = wanted["tiers"]
    assert (near["root"], near["policy"], near["trouble"]) == (str(copy.near), "KeepLast(count=1)", None)
    assert [(each["step"], each["why"]) for each in near["removed"]] == [(6, "older than the newest")]
    text = stillframe("prune", copy.root, "--keep-last", 1, "--dry-run")
    assert f"{copy.near}: KeepLast(count=1) would let go step 6, " in text
    assert "tiers" not in answer("prune", copy.root, "--keep-last", 1)
    assert Catalog(copy.near).steps() == [6, 8], "only the root is pruned"
    shutil.rmtree(copy.near)
    assert f"{copy.near}: cannot be read" in stillframe("prune", copy.root, "--keep-last", 1, "--dry-run")
