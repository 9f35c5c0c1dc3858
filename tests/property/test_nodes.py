"""Walking a tree of nodes: every node is seen once, in the order of the state, and one too deep is refused."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillframe.errors import FormatError
from stillframe.format import limits, tree
from tests.property.states import examples

leaves = st.one_of(
    st.builds(tree.TensorNode, st.integers(0, 99)),
    st.builds(tree.ArrayNode, st.integers(0, 99), st.just("<f4")),
    st.builds(tree.ValueNode, st.integers(0, 99)),
    st.builds(tree.ShardedNode, st.text(max_size=3), st.just("F32"), st.just((2,)), st.just([])),
)


def containers(inner: st.SearchStrategy[tree.Node]) -> st.SearchStrategy[tree.Node]:
    items = st.lists(inner, max_size=4)
    return st.one_of(
        st.builds(tree.ListNode, items),
        st.builds(tree.TupleNode, items),
        st.builds(lambda items: tree.DictNode(list(range(len(items))), items), items),
        st.builds(tree.ObjectNode, st.just("a.B"), inner),
        st.builds(tree.LeafNode, st.just("c"), inner),
    )


trees = st.recursive(leaves, containers, max_leaves=20)


def in_text(data: object) -> Iterator[str]:
    """The kinds of the nodes in an encoded tree, in the order of the text."""
    if isinstance(data, dict):
        yield data["kind"]
        data = data.get("items", data.get("item"))
    for each in data if isinstance(data, list) else [data] if isinstance(data, dict) else []:
        yield from in_text(each)


@examples(200)
@given(top=trees)
def test_every_node_is_seen_once_in_the_order_of_the_state(top: tree.Node) -> None:
    seen = list(tree.nodes(top, msgspec.Struct))
    assert [type(node).__struct_config__.tag for node in seen] == list(in_text(msgspec.to_builtins(top)))
    assert list(tree.nodes(top, tree.ShardedNode)) == [node for node in seen if isinstance(node, tree.ShardedNode)]


@examples(200)
@given(top=trees)
def test_a_leaf_has_no_children_and_a_container_has_those_it_was_made_of(top: tree.Node) -> None:
    for node in tree.nodes(top, msgspec.Struct):
        made_of = getattr(node, "items", None) or [each for each in [getattr(node, "item", None)] if each is not None]
        assert list(tree.children(node)) == made_of  # type: ignore[arg-type]
        assert not (tree.is_leaf(node) and made_of)  # type: ignore[arg-type]


@pytest.mark.parametrize("depth", [limits.MAX_DEPTH + 1, 100_000])
@pytest.mark.parametrize("wrap", [lambda node: tree.ListNode([node]), lambda node: tree.ObjectNode("a.B", node)])
def test_a_tree_that_is_too_deep_is_refused_however_deep_it_is(depth: int, wrap: object) -> None:
    assert callable(wrap)
    top: tree.Node = tree.ValueNode(0)
    for _ in range(depth):
        top = wrap(top)
    assert sum(1 for _ in tree.nodes(top, tree.ValueNode)) == 1
    with pytest.raises(FormatError, match="nested deeper"):
        tree.check_tree(top, [], [1])
