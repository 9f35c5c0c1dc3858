"""The structure of a state as a flat list of tokens, and the paths and the tree that these stand for.

A walk appends tokens at every save, because that is quick.  Paths and tree are made of them only when they are new.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from stillframe.errors import UnsupportedStateError
from stillframe.format import values
from stillframe.format.tree import (
    ArrayNode,
    DictNode,
    LeafNode,
    ListNode,
    Node,
    ObjectNode,
    PartOf,
    ShardedNode,
    TensorNode,
    TupleNode,
    ValueNode,
    WrapperNode,
    render,
)
from stillframe.format.values import Unencodable
from stillframe.state.dtypes import refusal

# A token is a tuple that starts with one of these.  What tells two structures apart follows: of a dict its keys and
# their exact types, of a list its length, of an object its class, of a sharded tensor where its boxes lie, of a wrapper
# its form, its names and its context.  The tokens of what is in a container come behind its own.
DICT, ORDERED, LIST, TUPLE, OBJECT, LEAF, ARRAY, TENSOR, VALUE, SHARDED, WRAPPER = range(11)
TENSORS = (TENSOR, ARRAY, SHARDED)
TENSOR_TOKEN = (TENSOR,)
VALUE_TOKEN = (VALUE,)
ELSEWHERE_TOKEN = (VALUE, "elsewhere")
"""Of a value that stands for an item of another rank: trees of ranks are merged by these."""


class Outline:
    """The paths and the tree that the tokens of a walk stand for; used only when the structure is new."""

    def __init__(self, tokens: Sequence[tuple[Any, ...]]) -> None:
        self._keys: dict[tuple[Any, ...], tuple[list[str], list[Any]]] = {}
        self.names: list[str | None] = []
        """The path of every tensor as text, in the order of the walk; ``None`` for a state that is a tensor itself."""
        self.elsewhere: set[int] = set()
        """The numbers of the values that stand for items of other ranks; known once the tree is made."""
        self._tokens = tokens
        self._parts: Iterator[PartOf] = iter(())
        rest = iter(tokens)
        self._name(next(rest), rest, None)

    def _name(self, token: tuple[Any, ...], rest: Iterator[tuple[Any, ...]], path: str | None) -> None:
        """Name the tensors of the node that begins with this token."""
        kind = token[0]
        if kind in TENSORS:
            self.names.append(path)
        elif kind in (OBJECT, LEAF):
            self._name(next(rest), rest, path)
        elif kind != VALUE:
            start = "" if path is None else path + "/"
            for key in self._names_of(token, path):
                child = next(rest)
                if child is TENSOR_TOKEN:
                    self.names.append(start + key)
                elif child is not VALUE_TOKEN:
                    self._name(child, rest, start + key)

    def _names_of(self, token: tuple[Any, ...], path: str | None) -> Iterable[str]:
        if token[0] in (LIST, TUPLE):
            return map(str, range(token[1]))
        return [render((name,)) for name in token[1]] if token[0] == WRAPPER else self._keys_of(token, path)[0]

    def _keys_of(self, token: tuple[Any, ...], path: str | None = None) -> tuple[list[str], list[Any]]:
        """The keys of a dict, as text and encoded.  An optimizer has the same ones for every parameter."""
        found = self._keys.get(token)
        if found is None:
            try:
                found = [render((key,)) for key in token[1]], [values.encode(key) for key in token[1]]
            except Unencodable as reason:
                raise UnsupportedStateError(refusal(Unencodable(f"a dict with {reason} as a key"), path)) from None
            self._keys[token] = found
        return found

    def tree(self, leaves: Sequence[TensorNode | ShardedNode], parts: Iterable[PartOf] = ()) -> Node:
        """``leaves[i]`` says where the i-th tensor of the walk is stored; ``parts`` says of each wrapper that is the
        local tensor of a DTensor which boxes of that it is."""
        rest = iter(self._tokens)
        self._parts = iter(parts)
        return self._build(next(rest), rest, iter(leaves), itertools.count())

    def _build(
        self,
        token: tuple[Any, ...],
        rest: Iterator[tuple[Any, ...]],
        leaves: Iterator[TensorNode | ShardedNode],
        numbers: Iterator[int],
    ) -> Node:
        kind = token[0]
        if kind in (TENSOR, SHARDED):
            return next(leaves)
        if kind == VALUE:
            number = next(numbers)
            if token is not VALUE_TOKEN:
                self.elsewhere.add(number)
            return ValueNode(number)
        if kind == ARRAY:
            leaf = next(leaves)
            return ArrayNode(leaf.shard, token[1]) if isinstance(leaf, TensorNode) else leaf
        if kind == OBJECT:
            return ObjectNode(token[1], self._build(next(rest), rest, leaves, numbers))
        if kind == LEAF:
            return LeafNode(token[1], self._build(next(rest), rest, leaves, numbers))
        if kind == WRAPPER:
            _, names, kind_name, dtype, shape, context, _, layout = token
            part = None if layout is None else next(self._parts)
            items = [self._build(next(rest), rest, leaves, numbers) for _ in names]
            return WrapperNode(kind_name, dtype, shape, list(names), items, context, part)
        count = token[1] if kind in (LIST, TUPLE) else len(token[1])
        items = [
            next(leaves) if child is TENSOR_TOKEN else self._build(child, rest, leaves, numbers)
            for child in itertools.islice(rest, count)
        ]
        if kind in (LIST, TUPLE):
            return ListNode(items) if kind == LIST else TupleNode(items)
        return DictNode(self._keys_of(token)[1], items, is_ordered=kind == ORDERED)
