"""Boxes of tensors given by hand, readers with a plan of their own, holds, labels, and steps that nobody numbers."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from stillframe import Checkpointer, ConfigError, FormatError, load, spi
from stillframe.spi import BoxReader, TensorBox, storable

WHOLE = torch.arange(60, dtype=torch.float32).view(6, 10)


def save(root: Path, step: int = 1, **state: object) -> None:
    with Checkpointer(root) as checkpointer:
        checkpointer.save(step, state)


def test_a_part_is_stored_where_it_lies_in_the_whole(tmp_path: Path) -> None:
    save(tmp_path, w=TensorBox(WHOLE[2:5, 3:9], WHOLE.shape, (2, 3)), n=7)
    with BoxReader(tmp_path) as reader:
        w = reader.outline["w"]
        assert (w.shape, w.device.type, reader.outline["n"]) == (WHOLE.shape, "meta", 7)
        assert reader.boxes(w) == [((2, 3), (3, 6))]
        into = torch.zeros(2, 4)
        reader.want(w, (3, 4), into)
        reader.read()
    assert torch.equal(into, WHOLE[3:5, 4:8])


def test_what_nobody_wrote_of_a_tensor_is_missed(tmp_path: Path) -> None:
    save(tmp_path, w=TensorBox(WHOLE[2:5], WHOLE.shape, (2, 0)))
    with pytest.raises(FormatError, match="in no segment"):
        load(tmp_path)


def test_boxes_that_overlap_do_not_hide_a_hole(tmp_path: Path) -> None:
    """Together they have as many items as the tensor."""
    save(tmp_path, w=TensorBox.joined([TensorBox(WHOLE[at : at + 3], WHOLE.shape, (at, 0)) for at in (0, 2)]))
    with pytest.raises(FormatError, match="overlap"):
        load(tmp_path)
    with BoxReader(tmp_path) as reader:
        with pytest.raises(FormatError, match="overlap"):
            reader.want(reader.outline["w"], (0, 0), torch.zeros(6, 10))
        with pytest.raises(FormatError, match="overlap"):
            reader.check_filled(reader.outline["w"])


@pytest.mark.parametrize(("shape", "offset"), [((6, 10), (4, 0)), ((6, 10), (-1, 0)), ((6,), (0,)), ((2, 10), (0, 0))])
def test_a_part_outside_of_its_whole_is_refused(shape: tuple[int, ...], offset: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="does not lie within"):
        TensorBox(WHOLE[:3], shape, offset)


def test_an_empty_part_holds_nothing(tmp_path: Path) -> None:
    save(tmp_path, w=TensorBox(WHOLE[:0], WHOLE.shape, (6, 0)), x=torch.ones(3))
    assert torch.equal(load(tmp_path, only="x")["x"], torch.ones(3))


def test_several_parts_of_one_tensor(tmp_path: Path) -> None:
    places = [(0, 0, 2, 10), (2, 0, 4, 3), (2, 3, 0, 7), (2, 3, 4, 7)]
    parts = [TensorBox(WHOLE[y : y + h, x : x + w], WHOLE.shape, (y, x)) for y, x, h, w in places]
    save(tmp_path, w=TensorBox.joined(parts), x=TensorBox.joined(parts[2:3]))
    assert torch.equal(load(tmp_path, only="w")["w"], WHOLE)
    for others in (TensorBox(WHOLE[:1].double(), WHOLE.shape, (0, 0)), TensorBox(WHOLE[:1], (9, 10), (0, 0))):
        with pytest.raises(ConfigError, match="not boxes of one tensor"):
            TensorBox.joined([*parts, others])


def test_parts_that_lie_one_behind_the_other_are_not_copied(tmp_path: Path) -> None:
    """The halves of a parameter, which are rows of the whole that are far from one another."""
    parameter = torch.cat([WHOLE[:2], WHOLE[4:]])
    halves = [TensorBox(each, WHOLE.shape, (at, 0)) for at, each in zip((0, 4), parameter.chunk(2), strict=True)]
    joined = TensorBox.joined(halves)
    assert joined.tensor.data_ptr() == parameter.data_ptr()
    for others in (halves[::-1], [halves[0], TensorBox(WHOLE[4:], WHOLE.shape, (4, 0))]):
        assert TensorBox.joined(others).tensor.data_ptr() not in (parameter.data_ptr(), WHOLE.data_ptr())
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"w": joined})
    with BoxReader(tmp_path) as reader:
        w = reader.outline["w"]
        into = torch.zeros(2, 10)
        for at in (0, 4):
            reader.want(w, (at, 0), into)
            reader.read()
            assert torch.equal(into, WHOLE[at : at + 2])


def test_boxes_move_from_save_to_save(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"w": TensorBox(WHOLE[:3], WHOLE.shape, (0, 0))})
        checkpointer.save(2, {"w": TensorBox(WHOLE[:3], WHOLE.shape, (3, 0))})
    for step, at in ((1, 0), (2, 3)):
        with BoxReader(tmp_path, step) as reader:
            assert reader.boxes(reader.outline["w"]) == [((at, 0), (3, 10))]


def test_a_reader_knows_only_its_own_tensors(tmp_path: Path) -> None:
    save(tmp_path, w=WHOLE, a=[1, (2, {"x": WHOLE.clone()})])
    with BoxReader(tmp_path) as reader:
        assert reader.outline["a"][0] == 1
        assert reader.outline["a"][1][1]["x"].shape == WHOLE.shape
        with pytest.raises(ConfigError, match="no tensor of this reader"):
            reader.boxes(WHOLE)
        with pytest.raises(ConfigError, match="not as"):
            reader.want(reader.outline["w"], (0, 0), torch.zeros(6, 10, dtype=torch.float64))


def test_a_hold_keeps_updates_back_until_it_is_released(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.zeros(1000))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.ones(1000)
    with Checkpointer(tmp_path) as checkpointer:
        release = spi.UpdateGate(checkpointer.fence).hold("")

        def later() -> None:
            time.sleep(0.3)
            checkpointer.save(1, {"w": weight})
            release()

        thread = threading.Thread(target=later)
        thread.start()
        optimizer.step()
        thread.join()
        checkpointer.wait()
    assert torch.equal(load(tmp_path)["w"], torch.zeros(1000))
    assert torch.equal(weight.detach(), -torch.ones(1000))


def test_storable() -> None:
    assert storable({"a": [1, (2.5, torch.ones(2))], "b": torch.float32})
    assert not storable({"a": object()})
    assert not storable(lambda: 1)
    assert not storable({"a": torch.nn.Linear(1, 1)})  # it would come back as a dict
    assert not storable(TensorBox(WHOLE[:1], WHOLE.shape, (0, 0)))


def test_only_takes_empty_dicts_and_lists_too(tmp_path: Path) -> None:
    save(tmp_path, a={"x": {}, "y": [], "z": 1}, b={})
    assert load(tmp_path, only="a") == {"a": {"x": {}, "y": [], "z": 1}}
    assert load(tmp_path, only="a/x") == {"a": {"x": {}}}
