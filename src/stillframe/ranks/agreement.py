"""What ranks agree on when a run starts: one root, one version, one policy, and the attempt that names their files."""

from __future__ import annotations

import os
import re
import secrets
import socket
from collections.abc import Callable

import msgspec

from stillframe import version
from stillframe.checkpoint.catalog import Catalog
from stillframe.errors import ConfigError
from stillframe.ranks.group import Answer, Group, check_same
from stillframe.retention import Keep
from stillframe.store import files

NODE = "{node}"


class _Hello(msgspec.Struct, frozen=True):
    root: str
    shared: bool
    version: str
    world_size: int
    keep: str
    deadline_s: float


class _Attempt(msgspec.Struct, frozen=True):
    attempt: str


class _Newest(msgspec.Struct, frozen=True):
    step: int


def resolve_root(root: str | os.PathLike[str], shared: bool | None, group: Group) -> Catalog:
    """The root of this rank; ``rank`` in it is None if all ranks see the same one.  Raises :class:`ConfigError`."""
    if shared is not None and not isinstance(shared, bool):
        raise ConfigError(f"shared={shared!r}: give True, False or None")
    text = os.fspath(root)
    if not isinstance(text, str):
        raise ConfigError(f"root={root!r}: give a str or a path")
    if NODE in text:
        if shared:
            raise ConfigError(f"root={text!r} is another one on each node, so shared=True cannot be")
        shared = False
        text = text.replace(NODE, os.environ.get("STILLFRAME_NODE") or socket.gethostname())
    if re.search(r"\{\w*\}", text):
        raise ConfigError(f"root={text!r}: {NODE} is the only thing in braces that is replaced")
    is_shared = shared is not False or group.world_size == 1
    catalog = Catalog(text, None if is_shared else group.rank)
    if files.kind_of(text) not in ("directory", "nothing"):
        raise ConfigError(f"root={str(catalog.root)!r} is a file; give a directory")
    return catalog


def agree_on_attempt(group: Group, catalog: Catalog, keep: Keep) -> str:
    """The id of this attempt, the same on every rank.  Blocks until all ranks are here.

    Raises: :class:`ConfigError` naming the ranks that differ; :class:`DeadlineError` naming those that did not come.
    """
    is_shared = catalog.rank is None
    hello = _Hello(
        root=str(catalog.root) if is_shared else "",
        shared=is_shared,
        version=version.VERSION,
        world_size=group.world_size,
        keep=repr(keep),
        deadline_s=group.deadline_s,
    )

    def judge(answers: list[Answer]) -> _Attempt:
        hellos = [msgspec.convert(each.value, _Hello, from_attributes=True) for each in answers]
        for name in _Hello.__struct_fields__:
            check_same(name, [getattr(each, name) for each in hellos])
        return _Attempt(secrets.token_hex(4))

    return group.decide(f"starting to use {catalog.root}", lambda: hello, judge, _Attempt).attempt


def agree_on_next(group: Group, catalog: Catalog, settle: Callable[[], None]) -> int:
    """One more than the greatest step that any rank has a directory of.  ``settle`` runs before anyone looks."""

    def look() -> int:
        settle()
        return max(catalog.step_dirs(), default=-1)

    def judge(answers: list[Answer]) -> _Newest:
        for each in answers:
            if each.error is not None:
                raise each.error
        return _Newest(max(each.value for each in answers))

    return group.decide(f"looking for the newest step in {catalog.root}", look, judge, _Newest).step + 1
