"""Where a root is: a directory, or a URL of an object store."""

from __future__ import annotations

import os
import re
from typing import Final

from stillframe.errors import ConfigError
from stillframe.store.clouds import CLOUDS

_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(/?)|.*://", re.DOTALL)
"""Of ``s3://bucket``, ``pathlib`` makes ``s3:/bucket``."""
_PLACE: Final = re.compile(r"[A-Za-z0-9._=+,~-]+(/[A-Za-z0-9._=+,~-]+)*")
"""What is written the same way everywhere: of ``run#1`` and ``run?2`` a URL's parser would make one ``run``."""
_SECRET: Final = re.compile(r"(?<=:/).*@|\?.*", re.DOTALL)
"""What of a URL is not told: there may be keys in it, or a signature."""


def root_text(root: object, what: str = "root") -> str:
    """What was given as the name of a place, as it stands.  ``what``: the argument, for the error.

    Raises :class:`ConfigError` for what names none: of ``""`` the working directory would be made.
    """
    text = os.fspath(root) if isinstance(root, os.PathLike) else root
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise ConfigError(
            f"{what}={root!r}: give a directory, as a str or a path, or a URL such as s3://BUCKET/DIRECTORY"
        )
    return text


def without_secrets(text: str) -> str:
    """A place as it may be told, whatever was given for it."""
    return _SECRET.sub("…", text) if _URL.match(text) else text


def root_address(root: str | os.PathLike[str], what: str = "root") -> str:
    """An absolute path, or a URL.  Every root that anybody names comes through here.

    ``what``: the argument, for the error.

    Raises :class:`ConfigError` for a URL of any other kind: it would become a directory of that name on the local disk.
    """
    text = root_text(root, what)
    found = _URL.match(text)
    if found is None:
        return os.path.abspath(text)
    shown = without_secrets(text)
    if found[1] not in CLOUDS:
        known = ", ".join(f"{scheme}://" for scheme in CLOUDS)
        raise ConfigError(f"{shown!r} is a URL that stillframe cannot write to: it knows {known}; or mount it")
    if not found[2]:
        raise ConfigError(f"{shown!r} looks like a URL that went through pathlib: give it as a str, {found[1]}://…")
    form = f"{found[1]}://{CLOUDS[found[1]].place.upper()}/DIRECTORY"
    place = text[found.end() :].strip("/")
    if "@" in place:
        raise ConfigError(f"a URL with keys in it: give {form}, and keys by storage_options=")
    if not _PLACE.fullmatch(place) or any(part in (".", "..") for part in place.split("/")):
        raise ConfigError(f"{shown!r}: give {form}, of letters, digits and ._=+,~-")
    return f"{found[1]}://{place}"


def is_url(address: str) -> bool:
    """Of an address that :func:`root_address` has given."""
    return address.partition("://")[0] in CLOUDS


def directory_address(root: str | os.PathLike[str]) -> str:
    """As :func:`root_address`, for what works in directories only.  Raises :class:`ConfigError`."""
    address = root_address(root)
    if is_url(address):
        raise ConfigError(
            f"{address} is a URL: DeepSpeed makes a directory of it, and reads `latest` there; give a directory, "
            "and carry checkpoints on with `stillframe copy`"
        )
    return address
