"""Server to an object store, by obstore: opened with what the user has, and errors that say what to do."""

from __future__ import annotations

import contextlib
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from stillframe.errors import ConfigError, StorageError
from stillframe.store.activity import Activity
from stillframe.store.answers import first_line, is_denied, is_unanswered, trouble
from stillframe.store.clouds import AGAIN, again_s, cloud_of, endpoint_of
from stillframe.store.profile import with_profile
from stillframe.store.protocol import Data, Missing
from stillframe.waits import Wait, waited

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Backend

_T = TypeVar("_T")
_INSTALL = "install it with: pip install 'stillframe[objects]'"
_RETRIES = 1000
_REQUEST_S = "120s"
"""Of one request; a part has 16 MiB."""
_PIECE_BYTES = 256 << 10
_CLIENT_OPTIONS = {
    "allow_http", "allow_invalid_certificates", "connect_timeout", "timeout", "pool_idle_timeout", "proxy_url",
    "proxy_ca_certificate", "proxy_excludes", "user_agent", "default_headers", "http1_only", "http2_only",
    "pool_max_idle_per_host", "root_certificate",
}  # fmt: skip
_CONFLICTS, _CONFLICT_S, _LONGEST_PAUSE_S = 8, 0.05, 5.0
_AT_ONCE = 16
_PAST_END = re.compile("status code: 416|range", re.IGNORECASE)
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "bucket does not exist", "container does not exist")
_PLACES = re.compile(r"((aws|google)_)?bucket(_name)?|(azure_)?container_name", re.IGNORECASE)
"""Options that would lead elsewhere than the URL says."""
_OPENING = {
    "Account must be specified": "account_name in storage_options=, or AZURE_STORAGE_ACCOUNT_NAME in the environment, "
    "names it",
    "service account file": "give the file of a service account's key, or that of `gcloud auth application-default "
    "login`; for anything else bearer_token in storage_options=",
}
"""What to do, by what obstore says of options that it cannot use."""
_ABSENT = "run/no-such-object"
_BUCKET_S = 30.0


def open_backend(url: str, options: Mapping[str, Any] | None, is_patient: bool = False) -> Backend:
    """``options``: as obstore takes them, for the back end, its HTTP client and its retries, in one mapping.

    What is not given comes from the environment, as with the vendor's own tools.  Raises :class:`ConfigError`.
    """
    try:
        from obstore.exceptions import BaseError
        from obstore.store import from_url
    except ImportError:
        raise ConfigError(f"{url}: object stores need obstore; {_INSTALL}") from None
    _check_process(url)
    given = dict(options or {})
    for name in filter(_PLACES.fullmatch, given):
        raise ConfigError(f"storage_options[{name!r}]: the {cloud_of(url).place} is named by the URL, {url}")
    given.pop(AGAIN, None)
    client = {name: given.pop(name) for name in [*given] if name in _CLIENT_OPTIONS}
    client.setdefault("timeout", _REQUEST_S)
    retry = {
        "max_retries": _RETRIES,
        "retry_timeout": timedelta(seconds=again_s(options, is_patient)),
        "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=5), "base": 2},
    }
    endpoint = endpoint_of(url, given)
    if endpoint.startswith("http://"):
        client.setdefault("allow_http", True)  # whoever names it wants it
    if url.startswith("s3://") and _is_private(endpoint):
        given.setdefault("unsigned_payload", True)  # nobody changes it on its way, and we check every byte anyway
    beside = with_profile(url, given)
    try:
        return from_url(url, config=given or None, client_options=client, retry_config=retry, **beside)  # type: ignore[call-overload, no-any-return]
    except (BaseError, ValueError, TypeError) as error:
        advice = next((each for sign, each in _OPENING.items() if sign in str(error)), "see storage_options=")
        raise ConfigError(f"{url}: {first_line(error)}; {advice}") from None


def _check_process(url: str) -> None:
    """obstore's threads serve the whole process, and are not there after a fork: whoever asks them waits for ever."""
    if _first_use.setdefault("pid", os.getpid()) != os.getpid():
        raise ConfigError(
            f"{url}: object stores cannot be used in a forked child of a process that has used one; start it with "
            "'spawn' or 'forkserver'"
        )


_first_use: dict[str, int] = {}
"""Which process was the first to use obstore, once one has."""


def _is_private(endpoint: str) -> bool:
    """By TLS, or because it does not leave this machine."""
    return not endpoint.startswith("http://") or urlsplit(endpoint).hostname in ("127.0.0.1", "localhost", "::1")


class Found(NamedTuple):
    """An object, or a range of it."""

    data: memoryview
    attributes: Mapping[str, Any]
    size: int
    """Of the whole object."""
    tag: str


class Server:
    """Every method blocks, and raises :class:`Missing` or :class:`StorageError`.  Thread: safe from any.

    ``at``: the address, for messages.  ``hasty``: of a keeper, another client that gives up sooner, and when.
    """

    def __init__(
        self,
        backend: Backend,
        url: str,
        activity: Activity | None = None,
        again_s: float = 0.0,
        at: str = "",
        hasty: tuple[Backend, float] | None = None,
    ) -> None:
        import obstore

        self._obstore = obstore
        self._patient = backend, again_s
        self._hasty = hasty or self._patient
        self._haste = threading.local()
        self._url = url
        self._activity = activity or Activity()
        self.at = at
        self._whom = f"{url} at {at}" if at else url
        self._bucket_s = -math.inf

    @contextlib.contextmanager
    def hastily(self) -> Iterator[None]:
        """What this thread asks in here somebody waits for: it is given up as soon as for anybody else."""
        self._haste.is_on = True
        try:
            yield
        finally:
            self._haste.is_on = False

    @property
    def _is_hasty(self) -> bool:
        """On this thread."""
        return getattr(self._haste, "is_on", False)

    @property
    def _backend(self) -> Backend:
        return (self._hasty if self._is_hasty else self._patient)[0]

    @property
    def _again_s(self) -> float:
        return (self._hasty if self._is_hasty else self._patient)[1]

    def put(self, path: str, data: Data, attributes: dict[str, str] | None = None) -> None:
        """One plain PUT."""
        self._try(
            "writing",
            path,
            lambda: self._obstore.put(self._backend, path, data, attributes=attributes, use_multipart=False),
        )

    def put_if_free(self, path: str, data: Data, attributes: dict[str, str] | None = None) -> bool:
        """Whether it was free.  ``False`` may be the answer to a request of this very call that was repeated."""
        from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

        until_s = time.monotonic() + self._again_s
        for turn in range(_CONFLICTS):
            if turn:
                time.sleep(min(_CONFLICT_S * 2**turn, _LONGEST_PAUSE_S))
            try:
                self._until_answered(
                    "writing",
                    path,
                    lambda: self._obstore.put(self._backend, path, data, mode="create", attributes=attributes),
                    until_s,
                )
                return True
            except AlreadyExistsError:
                return False
            except PreconditionError:  # of several who come at the same time a server may refuse all, once
                pass
            except BaseError as error:
                raise trouble(f"writing {self._url}/{path}", error, self._url) from None
        raise StorageError(f"writing {self._url}/{path}: other clients keep writing the same object")

    def get(
        self, path: str, start: int = 0, end: int | None = None, unless: str = "", limit: int | None = None
    ) -> Found | None:
        """The bytes from ``start`` to ``end``, or as many as there are.  ``None`` if its tag is still ``unless``.

        ``limit``: of an object that is larger, no bytes are read.
        """
        from obstore.exceptions import BaseError, NotModifiedError

        options: dict[str, Any] = {} if end is None else {"range": (start, end)}
        options |= {"if_none_match": unless} if unless else {}

        def work() -> Found:
            found = self._obstore.get(self._backend, path, options=options or None)
            is_wanted = limit is None or found.meta["size"] <= limit
            data = memoryview(found.bytes()).cast("B") if is_wanted else memoryview(b"")
            return Found(data, found.attributes, found.meta["size"], found.meta["e_tag"] or "")

        try:
            return self._try("reading", path, work, (BaseError,))
        except NotModifiedError:
            return None
        except BaseError as error:
            if end is None:
                raise trouble(f"reading {self._url}/{path}", error, self._url) from None
            return self._past_end(path, start, error)

    def _past_end(self, path: str, start: int, error: Exception) -> Found:
        """What is there, if that is why reading from ``start`` on has failed; servers say so in different ways."""
        there = self.head(path) if _PAST_END.search(str(error)) else None
        if there is None or start < there.size:
            raise trouble(f"reading {self._url}/{path}", error, self._url) from None
        return there

    def read(self, path: str, start: int, into: memoryview) -> int:
        """Fill ``into`` as the bytes come, a piece at a time: it is copied while the cache has it.

        Returns how many there were.
        """
        from obstore.exceptions import BaseError

        def work() -> int:
            options: Any = {"range": (start, start + len(into))}
            done = 0
            for piece in self._obstore.get(self._backend, path, options=options).stream(min_chunk_size=_PIECE_BYTES):
                data = memoryview(piece).cast("B")
                into[done : done + len(data)] = data
                done += len(data)
            return done

        try:
            return self._try("reading", path, work, (BaseError,), is_direct=True)
        except BaseError as error:
            self._past_end(path, start, error)
            return 0

    def head(self, path: str) -> Found | None:
        """Without its bytes; ``None`` if it is not there."""
        from obstore.exceptions import BaseError

        def work() -> Found:
            found = self._obstore.get(self._backend, path, options={"head": True})
            return Found(memoryview(b""), found.attributes, found.meta["size"], found.meta["e_tag"] or "")

        try:
            return self._try("looking at", path, work, (BaseError,))
        except Missing:
            self._check_bucket()
            return None
        except BaseError as error:
            if is_denied(error):
                self._bucket_s = -math.inf
                self._check_bucket()
            raise trouble(f"looking at {self._url}/{path}", error, self._url) from None

    def _check_bucket(self) -> None:
        """It may not be there, or be refused, for a reason: the answer to a HEAD has no text that tells.

        Asked again once in a while.  Raises :class:`StorageError`.
        """
        if time.monotonic() - self._bucket_s > _BUCKET_S:
            with contextlib.suppress(Missing):
                self._try("looking at", "", lambda: self._obstore.get(self._backend, _ABSENT))
            self._bucket_s = time.monotonic()

    def list(self, prefix: str) -> tuple[dict[str, int], Sequence[str]]:
        """(objects directly below, with their sizes; directories); by their last names."""
        found = self._try("listing", prefix, lambda: self._obstore.list_with_delimiter(self._backend, prefix or None))
        # Consoles make an object "a/" to show an empty directory; here its name is that of the directory.
        objects = {_last(each["path"]): each["size"] for each in found["objects"] if each["path"] != prefix}
        return objects, [*map(_last, found["common_prefixes"])]

    def list_below(self, prefix: str) -> Sequence[str]:
        """The paths of all objects below, however deep."""
        pages = self._try("listing", prefix, lambda: [*self._obstore.list(self._backend, prefix)])
        return [each["path"] for page in pages for each in page]

    def delete(self, paths: Sequence[str]) -> None:
        """Those that are gone already are no error."""
        if not paths:
            return
        try:
            self._remove(paths)
        except Missing:  # some servers remove one by one, and then it ended there

            def remove(path: str) -> None:
                with contextlib.suppress(Missing):
                    self._remove([path])

            with ThreadPoolExecutor(min(_AT_ONCE, len(paths)), "stillframe-remove") as pool:
                for _ in pool.map(remove, paths):
                    pass

    def _remove(self, paths: Sequence[str]) -> None:
        from obstore.exceptions import BaseError

        until_s = time.monotonic() + self._again_s
        try:
            self._until_answered("removing", paths[0], lambda: self._obstore.delete(self._backend, [*paths]), until_s)
        except BaseError as error:
            raise trouble(f"removing {self._url}/{paths[0]}", error, self._url) from None

    def _until_answered(self, verb: str, path: str, work: Callable[[], object], until_s: float) -> None:
        """What obstore does not repeat, because it may have been done, and what may be done twice.

        ``until_s``: how long, by the monotonic clock.  Also raises obstore's errors.
        """
        from obstore.exceptions import BaseError

        pause_s = _CONFLICT_S
        wait = Wait(self._whom, self._again_s)
        while True:
            try:
                self._try(verb, path, work, (BaseError,))
                return
            except BaseError as error:
                if not is_unanswered(error) or time.monotonic() > until_s:
                    raise
            if _is_main():
                wait.turn()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _try(
        self,
        verb: str,
        path: str,
        work: Callable[[], _T],
        through: tuple[type[Exception], ...] = (),
        is_direct: bool = False,
    ) -> _T:
        """Also raises ``through``, which the caller looks at itself.

        ``is_direct``: it fills memory of the caller's, and must not go on when that has left.
        """
        from obstore import exceptions

        _check_process(self._url)
        doing = f"{verb} {self._url}/{path}".rstrip("/")
        self._activity.begin(verb, path)
        try:
            # obstore does not notice signals: on the main thread, Ctrl-C would wait until the server is given up.
            is_told = _is_main() and not is_direct and not self._is_hasty
            return waited(work, Wait(self._whom, self._again_s)) if is_told else work()
        except FileNotFoundError as error:
            if any(word in str(error) for word in _NO_BUCKET):
                raise self._no_bucket(doing) from None
            raise Missing(f"{doing}: it is not there") from None
        except (exceptions.BaseError, OSError, ValueError) as error:
            if any(word in str(error) for word in _NO_BUCKET):
                raise self._no_bucket(doing) from None
            if isinstance(error, through):
                raise
            raise trouble(doing, error, self._url) from None
        finally:
            self._activity.end()

    def _no_bucket(self, doing: str) -> StorageError:
        return StorageError(f"{doing}: there is no such {cloud_of(self._url).place}: make it first, or fix the URL")


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]
