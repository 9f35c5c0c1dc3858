"""What ranks agree on when a run starts (one root, one version, one policy, one name), and when an epoch begins."""

from __future__ import annotations

import os
import re
import secrets
import socket
from collections.abc import Callable

import msgspec

from stillframe import version
from stillframe.checkpoint.catalog import Catalog
from stillframe.checkpoint.epochs import next_epoch
from stillframe.errors import ConfigError
from stillframe.model import SaveId
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


class _Run(msgspec.Struct, frozen=True):
    run: str


class _Number(msgspec.Struct, frozen=True):
    number: int


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


def agree_on_run(group: Group, catalog: Catalog, keep: Keep | None) -> str:
    """A name for this start of the run, the same on every rank.  Blocks until all ranks are here.

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

    def judge(answers: list[Answer]) -> _Run:
        hellos = [msgspec.convert(each.value, _Hello, from_attributes=True) for each in answers]
        for name in _Hello.__struct_fields__:
            check_same(name, [getattr(each, name) for each in hellos])
        return _Run(secrets.token_hex(4))

    return group.decide(f"starting to use {catalog.root}", lambda: hello, judge, _Run).run


def agree_on_epoch(group: Group, catalog: Catalog, before: int = 0) -> int | None:
    """The number of the next epoch, where every rank has a root of its own; ``None`` where rank 0 claims one for all.

    ``before``: the one that this run has agreed on last.

    Blocks until every rank asks.
    """
    if catalog.rank is None:
        return None
    return group.decide("beginning an epoch", lambda: max(next_epoch(catalog), before + 1), _greatest, _Number).number


class _Chosen(msgspec.Struct, frozen=True):
    save: SaveId


def agree_on_step(group: Group, catalog: Catalog, step: int, settle: Callable[[], None]) -> SaveId:
    """The checkpoint of a step, the same on every rank.  ``settle`` runs before anyone looks.

    Raises: :class:`NotFoundError`; :class:`ConfigError` if the ranks differ.
    """

    def look() -> SaveId:
        settle()
        return catalog.find(step)

    def judge(answers: list[Answer]) -> _Chosen:
        for each in answers:
            if each.error is not None:
                raise each.error
        found = [msgspec.convert(each.value, SaveId, from_attributes=True) for each in answers]
        check_same("step", [each.step for each in found])
        check_same(f"step {step}", [str(each) for each in found])
        return _Chosen(found[0])

    return group.decide(f"going back to step {step}", look, judge, _Chosen).save


def _greatest(answers: list[Answer]) -> _Number:
    for each in answers:
        if each.error is not None:
            raise each.error
    return _Number(max(each.value for each in answers))
