"""The walk: structure as tokens, what may change, what is refused and where."""

from __future__ import annotations

import collections
import dataclasses
import enum
import sys
import types
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from stillframe.errors import ConfigError, UnsupportedStateError
from stillframe.format import limits
from stillframe.format.tree import LeafNode, Node, ObjectNode, TensorNode, TupleNode, ValueNode, render
from stillframe.save.device import DeviceTable
from stillframe.save.plan import make_plan
from stillframe.state.codecs import codec_named, codec_of, register_attributes, register_leaf
from stillframe.state.outline import Outline
from stillframe.state.walk import Walk


class Level(enum.IntEnum):
    LOW = 1


class Pair(NamedTuple):
    left: int
    right: int


class Loader:
    """Neither module nor optimizer."""

    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class OtherLoader(Loader):
    pass


class Point:
    def __init__(self, x: float, at: torch.Tensor) -> None:
        self.x = x
        self.at = at


class SpecialPoint(Point):
    pass


register_leaf(Point, "tests.Point", lambda point: (point.x, point.at), lambda parts: Point(*parts))


def tokens(state: Any) -> list[tuple[Any, ...]]:
    return Walk(state).tokens


def refused(state: Any) -> str:
    """The message with which ``save`` would refuse the state."""
    with pytest.raises(UnsupportedStateError) as caught:
        make_plan(Walk(state), DeviceTable())
    return str(caught.value)


# --- structure -----------------------------------------------------------------------------

T = torch.zeros(3)
LOOK_ALIKES: list[Any] = [
    {1: T}, {True: T}, {1.0: T}, {"1": T}, {np.int64(1): T}, {Level.LOW: T}, {(1,): T}, {(True,): T}, {b"1": T},
    {0: T}, {False: T}, {0.0: T}, {-0.0: T}, {None: T}, {"None": T}, {"": T}, {1 + 0j: T},
    {"1": T, "2": T}, {"2": T, "1": T}, OrderedDict({"1": T}), {"1": 1}, {"1": {}}, {},
    {1: T, "1": T}, {"1": T, 1: T}, {1: T, 2: T}, {1: T, True + 1.0: T},
    [T], (T,), [T, T], [[T]], [(T,)], T, 1, (), (1,), ((),), [{}], [1, T], [T, 1],
    {0: {"a": T, "b": T}, 1: {"a": T, "b": T}}, {0: {"a": T, "b": T}, 1: {"b": T, "a": T}},
    {0: {"a": T, "b": T}, 1: {"a": T}, 2: {"b": T}}, {0: {"a": T, "b": T}, 1: OrderedDict(a=T, b=T)},
    {0: {"a": T, "b": T}, 1: {"a": T, "b": 1}}, {0: {1: T}, 1: {1: T}}, {0: {1: T}, 1: {True: T}}, {0: {}, 1: {}},
    np.zeros(3), np.zeros(3, np.float32), Loader(a=T), OtherLoader(a=T), Loader(b=T), Point(1.0, T),
]  # fmt: skip


@pytest.mark.parametrize("index", range(len(LOOK_ALIKES)), ids=lambda index: repr(LOOK_ALIKES[index])[:30])
def test_another_structure_has_other_tokens(index: int) -> None:
    mine = tokens(LOOK_ALIKES[index])
    assert [other for other, state in enumerate(LOOK_ALIKES) if tokens(state) == mine] == [index]


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ({"a": 1, "b": [1, 2]}, {"a": "one", "b": []}),
        ({"a": T}, {"a": torch.ones(5, dtype=torch.int8)}),
        ({1: T, "x": None}, {1: T, "x": 2.5}),
        ({(1, "a"): T}, {(1, "a"): T}),
        ([T, {"b": (1, T)}], [T, {"b": (2, T)}]),
        (np.zeros(3), np.ones((2, 2))),
        (Loader(a=T), Loader(a=T)),
        (Point(1.0, T), Point(2.0, T)),
    ],
)
def test_the_same_structure_with_other_content_has_the_same_tokens(left: Any, right: Any) -> None:
    assert tokens(left) == tokens(right)


def test_tensors_and_values_are_found_in_order() -> None:
    a, b, c = torch.zeros(1), torch.ones(1), torch.ones(2)
    walk = Walk({"x": [a, {"y": 1, "z": b}], "w": (c, "text")})
    assert [id(tensor) for tensor in walk.tensors] == [id(a), id(b), id(c)]
    assert walk.values == [1, "text"]


def test_values_are_copied_when_they_are_met() -> None:
    numbers = [1, 2, 3]
    walk = Walk({"numbers": numbers})
    numbers.append(4)
    assert walk.values == [[1, 2, 3]]


def built(state: Any) -> Node:
    walk = Walk(state)
    return Outline(walk.tokens).tree([TensorNode(index) for index in range(len(walk.tensors))])


def test_the_tree_names_objects_by_their_class_and_leaves_by_their_name() -> None:
    node = built(Loader(a=T))
    assert isinstance(node, ObjectNode)
    assert node.type == f"{__name__}.Loader"
    assert built(Point(1.0, T)) == LeafNode("tests.Point", TupleNode([ValueNode(0), TensorNode(0)]))


def test_the_path_of_a_tensor_leads_to_it() -> None:
    walk = Walk({"m": [1, {"w": T}], 7: (T,), "o": Loader(a={"b": T})})
    assert Outline(walk.tokens).names == ["m/1/w", "7/0", "o/a/b"]


def test_a_path_is_shown_as_a_json_pointer() -> None:
    assert render(("optimizer", "state", 0, "exp_avg")) == "optimizer/state/0/exp_avg"
    assert render(("a/b", "~", "")) == "a~1b/~0/"


# --- what may change before the next update ------------------------------------------------


def volatile(state: Any) -> list[bool]:
    return Walk(state).is_volatile


def test_tensors_that_stand_by_themselves_are_lazy() -> None:
    assert volatile({"a": T, "b": [torch.ones(2), torch.nn.Parameter(torch.ones(2))]}) == [False, False, False]


def test_dicts_with_the_same_keys_are_as_volatile_as_what_they_are_in() -> None:
    moments = {index: {"a": torch.ones(2), "b": torch.nn.Parameter(torch.ones(2))} for index in range(3)}
    assert volatile(moments) == [False] * 6
    assert volatile([Loader(state=moments), moments]) == [True] * 6 + [False] * 6


@pytest.mark.parametrize("leaf", [{"a": T}, {0: {"a": T}, 1: {"a": T}}], ids=["tensors", "dicts of tensors"])
def test_dicts_of_tensors_are_refused_below_the_deepest_level(leaf: dict[Any, Any]) -> None:
    def nested(depth: int) -> Any:
        state: Any = leaf
        for _ in range(depth - (1 if T is leaf.get("a") else 2)):
            state = [state]
        return state

    Walk(nested(limits.MAX_DEPTH))
    assert "nested deeper" in refused(nested(limits.MAX_DEPTH + 1))


def test_parameters_are_lazy_and_buffers_are_not() -> None:
    model = torch.nn.BatchNorm1d(4)
    names = [name for name, is_volatile in zip(model.state_dict(), volatile(model), strict=True) if is_volatile]
    assert names == ["running_mean", "running_var", "num_batches_tracked"]


def test_parameters_stay_lazy_in_a_module_that_gives_its_own_state_dict() -> None:
    class Wrapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.BatchNorm1d(4)

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return {f"wrapped.{name}": tensor for name, tensor in self.inner.state_dict().items()}

    assert volatile(Wrapped()) == [False, False, True, True, True]


def test_a_new_tensor_made_by_a_state_dict_hook_is_captured() -> None:
    model = torch.nn.Linear(2, 2)
    model.register_state_dict_post_hook(lambda module, state, prefix, local: state.update(extra=torch.ones(3)))
    assert volatile(model) == [False, False, True]


def test_optimizer_state_is_lazy() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert volatile(optimizer) == [False] * 6


def test_tensors_of_other_objects_are_captured() -> None:
    assert volatile(Loader(a=T, b=[T])) == [True, True]


def test_tensors_of_a_registered_leaf_are_captured() -> None:
    assert volatile(Point(1.0, T)) == [True]


def test_numpy_arrays_are_captured() -> None:
    assert volatile({"a": np.zeros(3), "b": T}) == [True, False]


def test_what_an_object_holds_says_nothing_about_what_stands_beside_it() -> None:
    model = torch.nn.BatchNorm1d(2, affine=False)
    state = [T, Loader(a=T, m=Loader(b=T)), T, model, T, Loader(model=model, c=T), T]
    assert volatile(state) == [False, True, True, False, True, True, True, False, True, True, True, True, False]


def test_a_parameter_given_to_another_object_is_lazy_only_in_its_module() -> None:
    model = torch.nn.Linear(2, 2, bias=False)
    assert volatile({"model": model, "loader": Loader(weight=model.weight)}) == [False, True]


# --- refusals ------------------------------------------------------------------------------


def test_a_refusal_names_the_path() -> None:
    assert "state['a/1/b~1c/3']" in refused({"a": [1, {"b/c": {3: object()}}]})


def test_a_refusal_inside_an_object_names_the_path() -> None:
    assert "state['loader/worker/0']" in refused({"loader": Loader(worker=[object()])})


def test_a_refusal_of_the_whole_state_says_so() -> None:
    assert refused(object()).startswith("the state is an object of type builtins.object")


def test_a_refusal_says_what_to_do() -> None:
    message = refused({"a": lambda: None})
    assert "register_leaf" in message
    assert "does not pickle" in message
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(1)))
    assert "DataLoader; put stillframe.Batches(loader) into the state" in refused({"data": loader})


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (Pair(1, 2), "tuple(…)"),
        (collections.defaultdict(int), "dict(…)"),
        (type("MyDict", (dict,), {})(), "dict(…)"),
        (type("MyOrdered", (OrderedDict,), {})(), "dict(…)"),
        (type("MyList", (list,), {})(), "list(…)"),
        (type("MyTuple", (tuple,), {})(), "tuple(…)"),
        (torch.ones(2, 2).max(dim=0), "tuple(…)"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_subclass_of_a_container_is_refused_with_a_hint(value: Any, hint: str) -> None:
    assert hint in refused({"a": value})


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(3).to_sparse(),
        torch.zeros(3, device="meta"),
        torch.zeros(3, dtype=torch.complex128),
        torch.zeros(3).as_subclass(type("MyTensor", (torch.Tensor,), {})),
        torch.nn.UninitializedParameter(),
        torch.zeros([1] * (limits.MAX_DIMENSIONS + 1)),
    ],
    ids=["sparse", "meta", "complex128", "subclass", "uninitialized", "too many dimensions"],
)
def test_a_tensor_that_cannot_be_stored_is_refused(value: torch.Tensor) -> None:
    assert "state['a/0']" in refused({"a": [value]})


@pytest.mark.parametrize(
    "value",
    [
        np.zeros(3, dtype=">f4"),
        np.array(["a"]),
        np.array([object()]),
        np.zeros(3, dtype="M8[s]"),
        np.zeros(3, dtype=np.complex128),
        np.zeros(3, dtype=np.longdouble),
        np.zeros(3, dtype=[("a", "f4")]),
        np.ma.masked_array([1, 2]),
    ],
    ids=lambda array: f"{type(array).__name__}-{array.dtype}",
)
def test_an_array_that_cannot_be_stored_is_refused(value: Any) -> None:
    assert "state['a']" in refused({"a": value})


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(4, dtype=[("a", "u1"), ("b", "f4")])["b"],
        np.arange(6)[::-1],
        np.arange(6.0).reshape(2, 3).T,
        np.broadcast_to(np.arange(3), (2, 3)),
        np.frombuffer(b"12345678"),
        np.array(5),
        np.zeros((0, 3)),
    ],
    ids=["field of a record", "reversed", "transposed", "repeated", "read-only", "0-dim", "empty"],
)
def test_an_array_of_any_layout_is_taken(array: Any) -> None:
    (tensor,) = Walk({"a": array}).tensors
    assert tensor.numpy().tolist() == array.tolist()


def test_a_sparse_buffer_of_a_module_is_refused() -> None:
    model = torch.nn.Module()
    model.register_buffer("adjacency", torch.eye(3).to_sparse())
    assert "model/adjacency" in refused({"model": model})


@pytest.mark.parametrize("kind", [torch.nn.Linear, torch.optim.Adam, Loader])
def test_a_class_is_refused_although_its_instances_are_not(kind: type) -> None:
    assert "state['kind']" in refused({"kind": kind})


@pytest.mark.parametrize(
    "key", ["\ud800", 2**9000, object(), (1, object()), "ok\udc00"], ids=lambda key: repr(key)[:17]
)
def test_a_key_that_cannot_be_stored_is_refused(key: Any) -> None:
    assert "state['a" in refused({"a": {key: 1}})


@pytest.mark.parametrize("value", ["\ud800", ["\ud800"], [1, "\ud800"], ("\ud800",), [T, "\ud800"]], ids=repr)
def test_a_string_with_lone_surrogates_is_refused(value: Any) -> None:
    assert "surrogates" in refused({"a": value})


def test_a_dict_that_contains_itself_is_refused() -> None:
    loop: dict[str, Any] = {}
    loop["again"] = loop
    assert "contain itself" in refused({"loop": loop})


def test_a_list_that_contains_itself_is_refused() -> None:
    loop: list[Any] = [T]
    loop += [loop, loop]
    assert "contain itself" in refused(loop)


def test_an_object_that_contains_itself_is_refused() -> None:
    loader = Loader()
    loader.state["me"] = loader
    assert "contain itself" in refused(loader)


def test_a_leaf_that_is_encoded_as_itself_is_refused() -> None:
    class Ouroboros:
        pass

    register_leaf(Ouroboros, "tests.Ouroboros", lambda value: value, lambda value: value)
    assert "contain itself" in refused({"a": Ouroboros()})


def nested(depth: int) -> Any:
    state: Any = {"leaf": 1}
    for _ in range(depth - 1):
        state = {"a": state}
    return state


def test_nesting_far_beyond_the_limit_is_refused() -> None:
    assert "nested deeper" in refused(nested(limits.MAX_DEPTH + 2))
    Walk(nested(limits.MAX_DEPTH - 2))


def test_a_state_may_be_walked_again_after_a_refusal() -> None:
    state: dict[str, Any] = {"a": object()}
    refused(state)
    state["a"] = 1
    assert Walk(state).values == [1]


# --- registered leaves ---------------------------------------------------------------------


def test_a_subclass_of_a_registered_leaf_is_refused() -> None:
    assert "SpecialPoint" in refused({"a": SpecialPoint(1.0, T)})


def test_registering_again_replaces_the_functions() -> None:
    class Angle:
        pass

    register_leaf(Angle, "tests.Angle", lambda angle: 1, lambda value: Angle())
    register_leaf(Angle, "tests.Angle", lambda angle: 2, lambda value: Angle())
    assert Walk(Angle()).values == [2]


def test_a_class_that_its_module_has_made_anew_takes_the_name_of_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a notebook: a cell that is run again."""
    notebook = types.ModuleType("notebook")
    monkeypatch.setitem(sys.modules, "notebook", notebook)

    def run_cell() -> Any:
        exec("class Config: pass", vars(notebook))
        kind = vars(notebook)["Config"]
        register_leaf(kind, "tests.Config", lambda config: 0.5, lambda value: kind())
        return kind

    first, second = run_cell(), run_cell()
    assert Walk(second()).values == [0.5]
    found = codec_named("tests.Config")
    assert found is not None
    assert type(found.decode(0.5)) is second
    assert "Config" in refused({"left": first()})


def test_two_classes_that_only_have_the_same_name_are_two() -> None:
    one, other = dataclasses.make_dataclass("Rates", ["a"]), dataclasses.make_dataclass("Rates", ["b"])
    assert f"{one.__module__}.{one.__qualname__}" == f"{other.__module__}.{other.__qualname__}"
    register_leaf(one, "tests.Rates", dataclasses.asdict, lambda value: one(**value))
    with pytest.raises(ConfigError, match=r"'tests.Rates' is registered already, for .*Rates: give another"):
        register_leaf(other, "tests.Rates", dataclasses.asdict, lambda value: other(**value))
    assert codec_of(other) is None


@pytest.mark.parametrize(
    ("kind", "name"), [(Loader, "tests.Point"), (Point, "tests.another"), (Loader, ""), ("Loader", "x"), (Loader, 5)]
)
def test_a_name_belongs_to_one_class_and_a_class_to_one_name(kind: Any, name: Any) -> None:
    with pytest.raises(ConfigError, match="register_leaf"):
        register_leaf(kind, name, lambda value: value, lambda value: value)


def test_functions_that_cannot_be_called_are_refused() -> None:
    nothing: Any = None
    with pytest.raises(ConfigError, match="callable"):
        register_leaf(Loader, "tests.Loader", nothing, nothing)


def test_a_class_that_is_its_attributes() -> None:
    """Also one that cannot be made without arguments, or counts how many were made."""

    class Scaler:
        made = 0

        def __init__(self, rate: float, weight: torch.Tensor) -> None:
            Scaler.made += 1
            self.rate, self.weight = rate, weight

    register_attributes(Scaler, "tests.Scaler")
    walk = Walk(Scaler(0.5, T))
    assert (walk.values, walk.tensors) == ([0.5], [T])
    codec = codec_of(Scaler)
    assert codec is not None
    back = codec.decode({"rate": 0.25, "weight": T})
    assert (type(back), vars(back), Scaler.made) == (Scaler, {"rate": 0.25, "weight": T}, 1)
