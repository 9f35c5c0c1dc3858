"""Plain values: exactly back, or refused."""

from __future__ import annotations

import enum
import math
import pathlib
import re
import struct
import sys
import types
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stillframe.errors import FormatError, IntegrityError, UnsupportedStateError
from stillframe.format import values
from stillframe.format.values import Unencodable
from stillframe.state import dtypes as leaves
from tests.property.exact import exact

assert leaves.DTYPES  # importing it registers torch's own values


class Color(enum.Enum):
    RED = "red"
    CRIMSON = "red"  # noqa: PIE796 - an alias
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Holder:
    class Inner(enum.Enum):
        X = 1


class Plain:
    pass


class MyInt(int):
    pass


class MyStr(str):
    pass


def nan(bits: int) -> float:
    (value,) = struct.unpack(">d", bits.to_bytes(8, "big"))
    assert math.isnan(value)
    return float(value)


def through_json(value: Any) -> Any:
    return values.decode(msgspec.json.decode(msgspec.json.encode(values.encode(value))))


EXAMPLES = [
    None, True, False,
    0, -1, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64, 10**100, -(10**100), 2**8192 - 1, -(2**8192) + 1,
    0.0, -0.0, 0.1, 1e308, -1e-308, 5e-324, sys.float_info.min, sys.float_info.max, 1.0, 1e22, 123456789.123456789,
    math.inf, -math.inf, nan(0x7FF8000000000000), nan(0xFFF8000000000000), nan(0x7FF8DEADBEEF0001),
    nan(0x7FF0000000000001),
    "", "text", "emoji 🎉 é \x00 \n \"\\/ \u2028", "$", "𝕏" * 100,
    b"", b"\x00\xff", bytes(range(256)), bytearray(), bytearray(b"\x80abc"),
    0j, complex(1.5, -0.0), complex(math.inf, nan(0x7FF8000000000005)),
    (), (1,), ((1, (2, ())), [3]), [], [1, [2, (3,)]], [1.5, math.nan], [2**70],
    set(), {1, 2, 3}, {"a", 1, 2.5, None, (1, 2)}, frozenset(), frozenset({b"x", frozenset({1})}),
    pathlib.Path("/a/b c/é"), pathlib.Path(), pathlib.Path("relative"),
    range(0), range(10), range(10, -5, -3), range(2**70, 2**71, 2**65),
    Color.RED, Color.CRIMSON, Color.BLUE, Level.HIGH, Access.READ, Holder.Inner.X,
    torch.float32, torch.bfloat16, torch.float8_e5m2, torch.complex128, torch.int64, torch.bool,
    torch.Size([]), torch.Size([2, 0, 3]), torch.device("cpu"), torch.device("cuda", 3), torch.device("meta"),
]  # fmt: skip

NUMPY = [
    np.bool_(True), np.int8(-5), np.uint8(200), np.int16(-300), np.uint16(65535), np.int32(-1), np.uint32(2**32 - 1),
    np.int64(-(2**63)), np.uint64(2**64 - 1), np.float16(0.1), np.float32(0.1), np.float64(0.1), np.float64(-0.0),
    np.float32("nan"), np.float64("inf"), np.longdouble("0.1"), np.complex64(1 + 2j), np.complex128(1 - 2j),
    np.datetime64("2024-02-29T12:00", "us"), np.datetime64("NaT"), np.timedelta64(5, "ms"),
    np.str_("emoji 🎉"), np.bytes_(b"\x00\xffx"),
]  # fmt: skip


def label(value: object) -> str:
    """The same in every process: no addresses, no order of a set."""
    text = f"{sorted(map(repr, value))}" if isinstance(value, set | frozenset) else re.sub(" at 0x.*", "", repr(value))
    return f"{type(value).__name__}:{text}"[:40]


@pytest.mark.parametrize("value", EXAMPLES, ids=label)
def test_a_value_comes_back_with_its_type_and_bits(value: Any) -> None:
    assert exact(through_json(value)) == exact(value)


@pytest.mark.parametrize("value", NUMPY, ids=label)
def test_a_numpy_scalar_comes_back_with_its_dtype_and_bits(value: Any) -> None:
    assert exact(through_json(value)) == exact(value)


@pytest.mark.parametrize("value", [np.str_(""), np.str_("a\x00"), np.bytes_(b""), np.bytes_(b"a\x00")], ids=label)
def test_empty_and_nul_ended_numpy_strings_come_back_whole(value: Any) -> None:
    back = through_json(value)
    assert type(back) is type(value)
    assert len(back) == len(value)
    assert back == value


@pytest.mark.parametrize("value", [*EXAMPLES, *NUMPY], ids=label)
def test_every_type_that_is_stored_is_known_as_a_value_or_a_container(value: Any) -> None:
    assert values.is_value(type(value)) or type(value) in (list, tuple)


scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=True), st.text(), st.binary(), st.complex_numbers(),
)  # fmt: skip
hashables = st.recursive(
    scalars, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=6
)
anything = st.recursive(
    hashables, lambda inner: st.lists(inner, max_size=4) | st.sets(hashables, max_size=4), max_leaves=10
)


@given(anything)
def test_any_nesting_of_plain_values_comes_back_exactly(value: Any) -> None:
    assert exact(through_json(value)) == exact(value)


@given(st.integers(0, 2**64 - 1))
def test_any_eight_bytes_seen_as_a_float_come_back(bits: int) -> None:
    (value,) = struct.unpack(">d", bits.to_bytes(8, "big"))
    assert exact(through_json(value)) == exact(value)


ITEMS: list[Any] = ["a", "b", 1, 2.5, None, (1, 2), b"x", -7, frozenset({"c"})]


@given(st.permutations(ITEMS))
def test_equal_sets_have_one_encoding(items: list[Any]) -> None:
    assert values.encode(set(items)) == values.encode(set(ITEMS))


@given(st.lists(scalars))
def test_a_list_called_plain_stands_in_json_for_itself(items: list[Any]) -> None:
    if values.is_plain_list(items):
        assert exact(msgspec.json.decode(msgspec.json.encode(items))) == exact(items)


@pytest.mark.parametrize("items", [[1, 2**63], [math.nan], [b"x"], [[1]], [(1,)], [np.float64(1.0)], [Level.LOW]])
def test_a_list_that_needs_tags_is_not_called_plain(items: list[Any]) -> None:
    assert not values.is_plain_list(items)


def test_a_list_with_a_lone_surrogate_is_not_called_plain() -> None:
    assert not values.is_plain_list(["fine", "\ud800"])


# --- refusals ------------------------------------------------------------------------------


def local_enum() -> enum.Enum:
    class Local(enum.Enum):
        A = 1

    return Local.A


@pytest.mark.parametrize(
    "value",
    [
        "\ud800", "a\udfffb", ["x", "\udc00"], ("\ud800",), pathlib.Path("/\udcff"),
        lambda: None, Plain(), Plain, len, math, object(), slice(1), iter([]), ..., NotImplemented,
        Access.READ | Access.WRITE, Access(0), local_enum(), MyInt(1), MyStr("x"),
        2**8192, -(2**8192), [2**9000], pathlib.PurePosixPath("/a"), memoryview(b"x"), {"a": 1},
        np.void(b"\x00\x01"),
    ],
    ids=label,
)  # fmt: skip
def test_what_cannot_come_back_exactly_is_refused(value: Any) -> None:
    with pytest.raises(Unencodable):
        values.encode(value)


def test_a_range_of_huge_numbers_is_refused_as_the_numbers_are() -> None:
    with pytest.raises(Unencodable):
        values.encode(range(2**20_000))


def test_an_enum_that_its_module_does_not_hold_is_refused() -> None:
    # Made by a call, it claims to be tests.unit.test_values:Unbound, which nobody could find again.
    make: Any = enum.Enum
    unbound = make("Unbound", "A", module=__name__)
    with pytest.raises(Unencodable):
        values.encode(unbound["A"])


def test_an_enum_hidden_by_another_class_of_its_name_is_refused() -> None:
    make: Any = enum.Enum
    impostor = make("Color", {"RED": "red"}, module=__name__)
    with pytest.raises(Unencodable):
        values.encode(impostor["RED"])


def test_a_list_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append((loop,))
    with pytest.raises(Unencodable, match="nested deeper"):
        values.encode(loop)


def test_a_refusal_names_the_type() -> None:
    with pytest.raises(Unencodable, match=r"tests\.unit\.test_values\.Plain"):
        values.encode(Plain())


# --- reading what somebody else wrote ------------------------------------------------------


def test_an_enum_of_a_module_not_loaded_is_refused_and_nothing_is_imported() -> None:
    module = "wave"  # of the standard library, and rarely loaded
    sys.modules.pop(module, None)
    with pytest.raises(UnsupportedStateError, match="wave:Kind"):
        values.decode({"$": "enum", "type": "wave:Kind", "name": "A"})
    assert module not in sys.modules


def test_looking_for_an_enum_never_runs_code_of_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    # Modules with a __getattr__ import their parts when asked for them: torch and stillframe itself do.
    asked: list[str] = []
    lazy = types.ModuleType("lazy_module")
    lazy.__getattr__ = asked.append  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "lazy_module", lazy)
    with pytest.raises(UnsupportedStateError):
        values.decode({"$": "enum", "type": "lazy_module:part.Kind", "name": "A"})
    assert asked == []


@pytest.mark.parametrize(
    "where", ["math:pi", "math:floor", "os:path.join", "builtins:int", "nowhere:", ":", "", "math", "enum:Enum"]
)
def test_a_name_that_is_no_enum_is_refused(where: str) -> None:
    with pytest.raises(UnsupportedStateError):
        values.decode({"$": "enum", "type": where, "name": "real"})


def test_a_member_that_the_enum_no_longer_has_is_the_programs_fault_not_damage() -> None:
    # An IntegrityError would let restore() un-publish a sound checkpoint.
    with pytest.raises(UnsupportedStateError) as caught:
        values.decode({"$": "enum", "type": f"{__name__}:Color", "name": "GREEN"})
    assert not isinstance(caught.value, IntegrityError)


@pytest.mark.parametrize(
    "data",
    [
        {}, {"$": "no such"}, {"$": None}, {"$": 1}, {"$": []}, {"a": 1},
        {"$": "float"}, {"$": "float", "bits": "00"}, {"$": "float", "bits": "zz"}, {"$": "float", "bits": 1},
        {"$": "tuple"}, {"$": "tuple", "items": 1}, {"$": "tuple", "items": {"a": 1}}, {"$": "tuple", "items": [{}]},
        {"$": "set", "items": [[1]]}, {"$": "frozenset", "items": None},
        {"$": "bytes"}, {"$": "bytes", "data": "*"}, {"$": "bytes", "data": 5}, {"$": "bytearray", "data": "A"},
        {"$": "complex", "bits": "00"}, {"$": "path"}, {"$": "path", "data": 1},
        {"$": "range", "items": [1, 2, 0]}, {"$": "range", "items": ["a"]}, {"$": "range", "items": []},
        {"$": "enum"}, {"$": "enum", "type": 5, "name": "A"}, {"$": "enum", "type": "a:b"},
        {"$": "numpy", "dtype": "<f8", "data": "AAAA"}, {"$": "numpy", "dtype": "O", "data": "AAAAAAAAAAA="},
        {"$": "numpy", "dtype": "nonsense", "data": ""}, {"$": "numpy", "dtype": "V8", "data": "AAAAAAAAAAA="},
        {"$": "torch.dtype", "name": "nn"}, {"$": "torch.dtype", "name": 3}, {"$": "torch.dtype"},
        {"$": "torch.Size", "items": ["a"]}, {"$": "torch.Size"},
        {"$": "torch.device", "name": "nonsense"}, {"$": "torch.device", "name": []}, {"$": "torch.device"},
    ],
    ids=repr,
)  # fmt: skip
def test_a_malformed_value_is_a_format_error(data: Any) -> None:
    with pytest.raises((FormatError, UnsupportedStateError) if data.get("$") == "enum" else FormatError):
        values.decode(data)


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.fixed_dictionaries(
            {"$": st.sampled_from(sorted(values._decoders))},
            optional=dict.fromkeys(("items", "data", "bits", "name", "type", "dtype"), inner),
        )
    ),
)


@given(json_like)
def test_decoding_anything_gives_a_value_or_a_refusal(data: Any) -> None:
    try:
        values.decode(data)
    except (FormatError, UnsupportedStateError):
        pass
