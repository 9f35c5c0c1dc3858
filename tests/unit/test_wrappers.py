"""Tensors that wrap others: taking them apart, comparing their contexts, and refusing what cannot be determined."""

from __future__ import annotations

import enum
import functools
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from stillframe.errors import FormatError, UnsupportedStateError
from stillframe.format.segment import Shard
from stillframe.format.tree import PartBox, PartOf, TensorNode, ValueNode, WrapperNode, check_tree
from stillframe.format.values import Unencodable
from stillframe.state.walk import Walk, storable
from stillframe.state.wrappers import is_same_context, is_wrapper, plain_tensors, put_together, take_apart
from tests.wrapping import NEAREST, Closed, Recipe, Rounding, Scaled, Shifted

CODES, SCALE = torch.zeros(4, 6, dtype=torch.int8), torch.ones(())
KIND = "tests.wrapping.Scaled"


class Colour(enum.Enum):
    RED = 1


def context_of(value: Any) -> Any:
    return take_apart(Scaled(CODES, SCALE, value)).context


def test_a_wrapper_is_known_by_its_methods() -> None:
    assert is_wrapper(Scaled(CODES, SCALE))
    assert is_wrapper(torch.nn.Parameter(Scaled(CODES, SCALE)))
    for other in (CODES, torch.nn.Parameter(SCALE), Closed(SCALE), 3, Scaled):
        assert not is_wrapper(other), other


def test_it_is_taken_apart() -> None:
    found = take_apart(Scaled(CODES, SCALE))
    assert (found.kind, found.dtype, found.shape, found.names) == (KIND, "float32", (4, 6), ("codes", "scale"))
    assert found.tensors[0] is CODES
    nested = Shifted(Scaled(CODES, SCALE), CODES)
    assert [id(each) for each in plain_tensors(nested)] == [id(CODES), id(SCALE), id(CODES)]


@pytest.mark.parametrize(
    "context",
    [None, [True, torch.float32], (1, 2.5, "a"), {"b": {"c": torch.Size([3])}}, NEAREST, Colour.RED, torch.strided],
    ids=str,
)
def test_a_context_of_plain_data_is_recorded(context: Any) -> None:
    encoded = context_of(context)
    assert is_same_context(msgspec.json.decode(msgspec.json.encode(encoded)), context_of(context))
    assert not is_same_context(encoded, context_of([context, context]))


def test_a_malformed_context_from_a_file_is_just_another() -> None:
    found: list[Any] = [{"$": "dict"}, {"$": "record", "items": 3}, {"$": "dict", "items": [1]}, {"$": []}, {}]
    for data in found:
        assert is_same_context(data, data)
        assert not is_same_context(data, context_of(NEAREST))


def test_what_is_no_content_is_no_difference() -> None:
    elsewhere = Recipe(NEAREST.rounding, torch.device("meta"), requires_grad=True)
    assert is_same_context(context_of(NEAREST), context_of(elsewhere))
    assert is_same_context(context_of([3, 4]), context_of(torch.Size([3, 4])))
    assert is_same_context(context_of({"a": 1, "b": 2}), context_of({"b": 2, "a": 1, "requires_grad": True}))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (NEAREST, Recipe(Rounding("nearest", 4))),
        (NEAREST, Recipe(Rounding("up", 8))),
        (Rounding("a", 1), ("a", 1)),
        (True, 1), (1, 1.0), (0.0, -0.0), ([1, 2], [2, 1]), (torch.float32, torch.float64), ({"a": 1}, {"a": 2}),
        (None, []),
    ],
    ids=str,
)  # fmt: skip
def test_other_contexts_are_told_apart(one: Any, other: Any) -> None:
    assert not is_same_context(context_of(one), context_of(other))


@pytest.mark.parametrize(
    "context",
    [lambda: 1, functools.partial(int), object(), [object()], {"a": print}],
    ids=["function", "partial", "object", "list", "dict"],
)
def test_a_context_that_could_hide_a_difference_is_refused(context: Any) -> None:
    with pytest.raises(
        UnsupportedStateError, match=r"state\['w'\] is a tensor of class tests.wrapping.Scaled, whose fl"
    ):
        Walk({"w": Scaled(CODES, SCALE, context)})


@pytest.mark.parametrize(
    "answer",
    [lambda _self: 1 / 0, lambda _self: (["codes", "nothing"], None), lambda _self: (["context"], None),
     lambda _self: (["codes", "codes"], None), lambda _self: ([], None), lambda _self: None],
)  # fmt: skip
def test_a_broken_flatten_is_a_refusal(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    monkeypatch.setattr(Scaled, "__tensor_flatten__", answer)
    with pytest.raises(Unencodable, match=r"tests.wrapping.Scaled, whose __tensor_flatten__"):
        take_apart(Scaled(CODES, SCALE))
    assert list(plain_tensors(Scaled(CODES, SCALE))) == []


def test_an_inner_tensor_that_cannot_be_stored_is_named() -> None:
    with pytest.raises(UnsupportedStateError, match=r"state\['w/shift'\] is a tensor of layout torch.sparse_coo"):
        Walk({"w": Shifted(CODES, torch.eye(3).to_sparse())})
    with pytest.raises(
        UnsupportedStateError, match=r"state\['w/base/scale'\] is a tensor of class tests.wrapping.Closed"
    ):
        Walk({"w": Shifted(Scaled(CODES, Closed(SCALE)), SCALE)})


def test_what_does_not_flatten_is_refused() -> None:
    with pytest.raises(UnsupportedStateError, match=r"state\['w'\] is a tensor of class tests.wrapping.Closed"):
        Walk({"w": Closed(SCALE)})


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused_by_name(layout: torch.layout) -> None:
    from stillframe.save.device import DeviceTable
    from stillframe.save.plan import make_plan

    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=layout)
    with pytest.raises(
        UnsupportedStateError, match=r"state\['n'\] is a (nested tensor|tensor of class .*NestedTensor)"
    ):
        make_plan(Walk({"n": nested}), DeviceTable())


def test_a_wrapper_does_not_come_back_without_a_live_one() -> None:
    assert not storable({"w": Scaled(CODES, SCALE)})


# --- made anew ------------------------------------------------------------------------------


def put(kind: str = KIND, context: Any = None, dtype: str = "float32", **inner: torch.Tensor) -> torch.Tensor | None:
    return put_together(kind, context, inner or {"codes": CODES, "scale": SCALE}, dtype, CODES.shape)


def test_one_is_made_of_the_tensors_that_are_given() -> None:
    made = put(context=context_of(["a", 1]))
    assert type(made) is Scaled
    assert made.codes is CODES
    assert made.context == ["a", 1]


def test_none_is_made_that_could_be_another() -> None:
    assert put(context=context_of(NEAREST)) is None, "only its class could make the context"
    assert put(dtype="float64") is None
    assert put(codes=CODES) is None
    assert put(codes=CODES, scale=SCALE, more=SCALE) is None
    for kind in (
        "tests.wrapping.Closed",
        "tests.wrapping.Layer",
        "torch.Tensor",
        "os.system",
        "nowhere.Scaled",
        "",
        ".",
    ):
        assert put(kind) is None, kind


def test_none_is_made_by_a_class_that_does_not_give_back_what_it_got(monkeypatch: pytest.MonkeyPatch) -> None:
    for unflatten in (
        lambda inner, context, size, stride: Scaled(inner["codes"], inner["scale"], 7),
        lambda inner, context, size, stride: Scaled(inner["codes"].clone(), inner["scale"], context),
        lambda inner, context, size, stride: inner["codes"],
        lambda inner, context, size, stride: 1 / 0,
    ):
        monkeypatch.setattr(Scaled, "__tensor_unflatten__", staticmethod(unflatten))
        assert put(context=context_of(["a", 1])) is None


def test_a_name_in_a_file_imports_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "not_loaded.py").write_text("from tests.wrapping import Scaled as Scaled\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert put("not_loaded.Scaled") is None
    assert "not_loaded" not in sys.modules


# --- from a hostile file --------------------------------------------------------------------

SHARDS = [Shard("w/codes", "I8", (4, 6), 0, 24)]


DEEP: list[Any] = []
for _ in range(300):
    DEEP = [DEEP]


def node(**changes: Any) -> WrapperNode:
    plain: dict[str, Any] = {
        "type": KIND, "dtype": "float32", "shape": (4, 6), "names": ["codes"], "items": [TensorNode(0)],
    }  # fmt: skip
    return WrapperNode(**{**plain, **changes})


def test_a_sound_node_passes() -> None:
    box = PartBox((2, 0), (4, 6), (0, 0))
    check_tree(node(part_of=PartOf((8, 6), [box])), SHARDS, [])
    check_tree(node(items=[node()]), SHARDS, [])


@pytest.mark.parametrize(
    "changes",
    [
        {"names": []}, {"names": ["a", "a"], "items": [TensorNode(0)] * 2}, {"items": [TensorNode(1)]},
        {"items": [ValueNode(0)]}, {"shape": (-1, 4)}, {"shape": (1,) * 65},
        {"part_of": PartOf((8, 6), [PartBox((6, 0), (4, 6), (0, 0))])},
        {"part_of": PartOf((8, 6), [PartBox((0, 0), (4, 6), (1, 0))])},
        {"context": DEEP},
    ],
)  # fmt: skip
def test_a_malformed_node_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(FormatError):
        check_tree(node(**changes), SHARDS, [1])


@pytest.mark.parametrize(("kind", "shape"), [(KIND, (2**61, 2**61)), ("." * 200_000, (4, 6)), (KIND, (-1,))])
def test_what_a_file_may_ask_for_is_not_made_and_costs_nothing(kind: str, shape: tuple[int, ...]) -> None:
    assert put_together(kind, None, {"codes": CODES, "scale": SCALE}, "float32", shape) is None
