"""Every fsync, rename and link of the store is needed: without it, or with something weaker, the tests find a fault.

The calls are found in the source, so that a new one is covered when it is written.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import os
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import stillframe.store
from stillframe.errors import StorageError
from stillframe.testing.store_contract import check_store
from tests.store.crash import Judge
from tests.store.recording import Op, record
from tests.store.scenarios import scenarios
from tests.store.support import SPARE, posix_clients, small_blobs_reused

MODULES = ("root", "blob", "posix")
"""In the order of their imports."""
PLACE = Path(stillframe.store.__file__).parent
SOURCES = {module: (PLACE / f"{module}.py").read_text() for module in MODULES}
WEAKER = {
    "fsync": {"nothing": "None"},
    "sync": {"nothing": "None"},
    "rename": {"nothing": "None", "a copy": "copy_bytes({calls}, {args})"},
    "link": {"nothing": "None", "a rename": "{calls}.rename({args}, {last})"},
    "link_to": {"nothing": "None", "a rename": "{calls}.rename({args})"},
    "rename_new": {"nothing": "None", "a rename": "{calls}.rename({args}, {last})"},
}


@dataclass(frozen=True)
class Mutation:
    module: str
    line: int
    column: int
    call: str
    instead: str

    def __str__(self) -> str:
        return f"{self.module}.py:{self.line} {self.call} → {self.instead}"


def mutations() -> list[Mutation]:
    return [
        Mutation(module, node.lineno, node.col_offset, node.func.attr, instead)
        for module, source in SOURCES.items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WEAKER
        for instead in WEAKER[node.func.attr]
    ]


class Weaken(ast.NodeTransformer):
    def __init__(self, mutation: Mutation) -> None:
        self._mutation = mutation
        self.count = 0

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        wanted = self._mutation
        if not isinstance(node.func, ast.Attribute) or node.func.attr != wanted.call:
            return node
        if (node.lineno, node.col_offset) != (wanted.line, wanted.column):
            return node
        self.count += 1
        args = [ast.unparse(each) for each in node.args]
        text = WEAKER[wanted.call][wanted.instead].format(
            calls=ast.unparse(node.func.value), args=", ".join(args), last=args[-1]
        )
        return ast.copy_location(ast.parse(text, mode="eval").body, node)


def copy_bytes(calls: Any, old: str, new: str, old_fd: int, new_fd: int) -> None:
    """What a rename is not: the new name is there before its bytes are."""
    source = os.open(old, os.O_RDONLY, dir_fd=old_fd)
    data = os.pread(source, os.fstat(source).st_size, 0)
    os.close(source)
    target = calls.open(new, os.O_WRONLY | os.O_CREAT, new_fd)
    calls.truncate(target, 0)
    if data:
        calls.pwrite(target, memoryview(data), 0)
    calls.fsync(target)
    calls.close(target)
    calls.unlink(old, old_fd)


@contextlib.contextmanager
def mutant(trees: dict[str, ast.Module]) -> Iterator[dict[str, Any]]:
    """The modules of the store, made of these trees, which import one another and not the originals."""
    package = "stillframe_mutant"
    sys.modules[package] = types.ModuleType(package)
    try:
        for module, tree in trees.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom) and node.module in {f"stillframe.store.{each}" for each in MODULES}:
                    node.module = f"{package}.{node.module.rpartition('.')[2]}"
            made = types.ModuleType(f"{package}.{module}")
            made.__dict__["copy_bytes"] = copy_bytes
            sys.modules[made.__name__] = made
            exec(compile(ast.fix_missing_locations(tree), f"{module}.py", "exec"), made.__dict__)
        yield {module: sys.modules[f"{package}.{module}"] for module in MODULES}
    finally:
        for name in [package, *(f"{package}.{module}" for module in MODULES)]:
            sys.modules.pop(name, None)


def check(modules: dict[str, Any]) -> None:
    """Raises if something is wrong with a store."""
    store = modules["posix"].PosixStore
    with small_blobs_reused((modules["blob"],)):
        check_spare(store)
        for name in ("listing", "put_new", "deleting", "writers"):
            check_store(lambda: posix_clients(store=store), only=name)
        check_store(lambda: posix_clients(store=store, has_links=False), only="put_new")
        judge = Judge()
        try:
            for scenario in scenarios(seeds=2, step=10).values():
                judge.judge(record(scenario, store), limit=16)
        finally:
            judge.close()


def check_spare(kind: Any) -> None:
    """A removed blob is written over by the next one, and is never lost or left."""
    clients = posix_clients(spare=SPARE, store=kind)
    store = clients.stores[0]
    try:
        Op(0, "write", "d/x", b"x" * 9000).perform(store)
        assert store.head("d/x")
        inode = os.stat(store.where("d/x")).st_ino
        store.delete(["d/x"])
        assert set(store.list()) == {SPARE}
        Op(0, "write", "d/y", b"y" * 5000).perform(store)
        assert os.stat(store.where("d/y")).st_ino == inode
        assert set(store.list()) == {"d/"}
        assert set(store.list("d")) == {"y"}
    finally:
        clients.close()


def test_the_store_itself_passes() -> None:
    with mutant({module: ast.parse(source) for module, source in SOURCES.items()}) as modules:
        check(modules)


@pytest.mark.parametrize("mutation", mutations(), ids=str)
def test_a_weaker_call_is_found(mutation: Mutation) -> None:
    weaken = Weaken(mutation)
    trees = {module: ast.parse(source) for module, source in SOURCES.items()}
    trees[mutation.module] = weaken.visit(copy.deepcopy(trees[mutation.module]))
    assert weaken.count == 1
    is_sync = mutation.call in ("fsync", "sync")
    with mutant(trees) as modules, pytest.raises(AssertionError if is_sync else (AssertionError, StorageError)):
        check(modules)
