"""To an object store and back, beside others, on the same server in the same run: part of :mod:`benchmarks.tiers`.

Ours carries a checkpoint from a directory and verifies each byte; the others put the same bytes from memory, and get
them into memory.  Of obstore's own ways to put, plain and multipart, the best of each turn counts.  What a promotion and
a restore cost whatever their size is measured with a checkpoint of one page, and told apart.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import resource
import secrets
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import obstore
import torch
from obstore.store import S3Store
from rich.console import Console
from tests.servers.ceph import Ceph
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import stillframe
from stillframe import Catalog, Checkpointer
from stillframe.checkpoint.promote import promote
from stillframe.latch import later
from stillframe.model import CHUNK_BYTES
from stillframe.units import GIB

AT_ONCE = 5
"""As many chunks are under way as a promotion has."""
_BUCKET = "bench"
_DISK_GIB = 24
_BEST = "obstore, the best"

Timing = tuple[float, float]
"""Seconds, and seconds of CPU of this process."""


def timed(work: Callable[[], object]) -> Timing:
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    work()
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@contextlib.contextmanager
def server(is_prompt: bool) -> Iterator[Ceph]:
    home = Path(tempfile.mkdtemp(prefix="sf-ceph-"))
    ceph = Ceph(home, _DISK_GIB, is_prompt)
    try:
        ceph.start()
        ceph.make_place(_BUCKET)
        yield ceph
    finally:
        ceph.stop()
        shutil.rmtree(home, ignore_errors=True)


class Contender:
    """``prefix``: of this turn's objects, without a slash at its end."""

    name = ""

    def put(self, prefix: str) -> None:
        raise NotImplementedError

    def get(self, prefix: str) -> None:
        raise NotImplementedError


class Ours(Contender):
    """Puts as a keeper does from the second step on: to a tier that is open and knows of the run, and not on the main
    thread, where each request has a thread of its own for the sake of Ctrl-C."""

    def __init__(self, name: str, root: Path, live: dict[str, Any], options: dict[str, str]) -> None:
        self.name = name
        self._source, self._live, self._options = Catalog(root), live, options
        save = self._source.newest()
        assert save is not None
        self._save = save
        self._target = Catalog(f"s3://{_BUCKET}/{secrets.token_hex(4)}", storage_options=options)

    def put(self, prefix: str) -> None:
        later(lambda: promote(self._source, self._target, self._save)).get()

    def get(self, prefix: str) -> None:
        stillframe.restore(self._target.root, self._live, storage_options=self._options)


class Plain(Contender):
    name = f"obstore, plain, {AT_ONCE} at once"

    def __init__(self, store: S3Store, data: memoryview) -> None:
        self._store, self._data = store, data

    def put(self, prefix: str) -> None:
        def one(start: int) -> None:
            chunk = self._data[start : start + CHUNK_BYTES]
            obstore.put(self._store, f"{prefix}/{start}", chunk, use_multipart=False)

        self._each(one)

    def get(self, prefix: str) -> None:
        def one(start: int) -> None:  # what is got is let go: it would take fresh memory for all of it
            obstore.get(self._store, f"{prefix}/{start}").bytes()

        self._each(one)

    def _each(self, work: Callable[[int], object]) -> None:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(work, range(0, len(self._data), CHUNK_BYTES)))


class Multipart(Plain):
    """One object; its ranges are got several at once."""

    name = "obstore, multipart and ranges"

    def put(self, prefix: str) -> None:
        obstore.put(self._store, f"{prefix}/all", self._data, use_multipart=True, chunk_size=CHUNK_BYTES)

    def get(self, prefix: str) -> None:
        def one(start: int) -> None:
            end = min(start + CHUNK_BYTES, len(self._data))
            obstore.get_range(self._store, f"{prefix}/all", start=start, end=end)

        self._each(one)


class Boto3(Contender):
    """Its own transfer manager, as it is set up by default; without the trailing checksums, which Ceph refuses."""

    name = "boto3"

    def __init__(self, data: memoryview, options: dict[str, str]) -> None:
        import boto3
        from botocore.config import Config

        config = Config(
            request_checksum_calculation="when_required", response_checksum_validation="when_required",
            s3={"addressing_style": "path"},
        )  # fmt: skip
        self._client = boto3.client(
            "s3", endpoint_url=options["endpoint"], aws_access_key_id=options["access_key_id"],
            aws_secret_access_key=options["secret_access_key"], region_name=options["region"], config=config,
        )  # fmt: skip
        self._source = io.BytesIO(data)

    def put(self, prefix: str) -> None:
        self._source.seek(0)
        held = io.BufferedReader(_NotClosed(self._source))  # it closes what it is given
        self._client.upload_fileobj(held, _BUCKET, f"{prefix}/all")

    def get(self, prefix: str) -> None:
        self._client.download_fileobj(_BUCKET, f"{prefix}/all", io.BytesIO())


class _NotClosed(io.RawIOBase):
    def __init__(self, source: io.BytesIO) -> None:
        self._source = source

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._source.seek(offset, whence)

    def tell(self) -> int:
        return self._source.tell()

    def readinto(self, into: Any) -> int:
        return self._source.readinto(into)


class Connector(Contender):
    """torch.distributed.checkpoint with s3torchconnector.  What its writer cannot finish, obstore puts."""

    name = "s3torchconnector, DCP"

    def __init__(self, state: dict[str, Any], live: dict[str, Any], store: S3Store, options: dict[str, str]) -> None:
        from s3torchconnector import S3ClientConfig

        os.environ["AWS_ACCESS_KEY_ID"] = options["access_key_id"]
        os.environ["AWS_SECRET_ACCESS_KEY"] = options["secret_access_key"]
        self._state, self._live, self._store, self._options = state, live, store, options
        self._config = S3ClientConfig(force_path_style=True)
        self._files: Path | None = None

    def put(self, prefix: str) -> None:
        from s3torchconnector.dcp import S3StorageWriter

        self._save(self._aimed(S3StorageWriter, prefix))

    def put_otherwise(self, prefix: str) -> None:
        """What its reader reads."""
        with tempfile.TemporaryDirectory() as home:
            self._save(FileSystemWriter(home))
            for file in Path(home).iterdir():
                obstore.put(self._store, f"{prefix}/{file.name}", file)

    def get(self, prefix: str) -> None:
        from s3torchconnector.dcp import S3StorageReader

        with warnings.catch_warnings(action="ignore"):
            dcp_load(self._live, storage_reader=self._aimed(S3StorageReader, prefix), no_dist=True)

    def _save(self, writer: Any) -> None:
        with warnings.catch_warnings(action="ignore"):
            dcp_save(self._state, storage_writer=writer, no_dist=True)

    def _aimed(self, kind: Any, prefix: str) -> Any:
        path = f"s3://{_BUCKET}/{prefix}/"
        made = kind(region=self._options["region"], path=path, s3client_config=self._config)
        made.fs._client._endpoint = self._options["endpoint"]  # it has no argument for it
        return made


@dataclass
class Found:
    puts: dict[str, list[Timing]] = field(default_factory=dict)
    gets: dict[str, list[Timing]] = field(default_factory=dict)
    cannot: dict[str, str] = field(default_factory=dict)


def compare(console: Console, ceph: Ceph, home: Path, state: dict[str, Any], turns: int) -> None:
    """One turn warms up, and does not count."""
    live = {"w": torch.zeros_like(state["w"])}
    data = memoryview(state["w"].numpy()).cast("B")
    store = S3Store(
        _BUCKET, **ceph.options, unsigned_payload=True, client_options={"allow_http": True}  # type: ignore[arg-type]
    )  # fmt: skip
    with Checkpointer(home / "page") as checkpointer:
        checkpointer.save(1, {"w": torch.zeros(1024)}).wait()
    ours = Ours("stillframe", home / "root", live, ceph.options)
    page = Ours("stillframe, one page", home / "page", {"w": torch.ones(1024)}, ceph.options)
    contenders: list[Contender] = [ours, page, Plain(store, data), Multipart(store, data)]
    for package, make in (
        ("boto3", lambda: Boto3(data, ceph.options)),
        ("s3torchconnector", lambda: Connector(state, live, store, ceph.options)),
    ):
        if importlib.util.find_spec(package) is None:
            console.print(f"{package}: not installed", highlight=False)
        else:
            contenders.append(make())
    found = Found()
    for turn in range(turns + 1):
        if turn == 1:
            found = Found()
        for at in range(len(contenders)):
            _turn(contenders[(at + turn) % len(contenders)], found, live)
            if contenders[(at + turn) % len(contenders)] is ours:
                assert torch.equal(live["w"], state["w"])
        paths = [each["path"] for batch in obstore.list(store) for each in batch]
        obstore.delete(store, [path for path in paths if "/run/" not in path])
        ceph.collect()
    _say(console, "put", found.puts, data.nbytes, found.cannot)
    _say(console, "get", found.gets, data.nbytes, {})


def _turn(contender: Contender, found: Found, live: dict[str, Any]) -> None:
    prefix = secrets.token_hex(4)
    try:
        found.puts.setdefault(contender.name, []).append(timed(lambda: contender.put(prefix)))
    except CheckpointException as error:
        if not isinstance(contender, Connector):
            raise
        found.puts.pop(contender.name)
        found.cannot[contender.name] = str(error).strip().splitlines()[-1]
        contender.put_otherwise(prefix)
    live["w"].zero_()
    found.gets.setdefault(contender.name, []).append(timed(lambda: contender.get(prefix)))


def _say(console: Console, what: str, timings: dict[str, list[Timing]], nbytes: int, cannot: dict[str, str]) -> None:
    raw = [rows for name, rows in timings.items() if name.startswith("obstore")]
    timings[_BEST] = [min(each) for each in zip(*raw, strict=True)]
    fixed_s = statistics.median(seconds for seconds, _ in timings["stillframe, one page"])
    for name, rows in timings.items():
        middle = statistics.median(seconds for seconds, _ in rows)
        cpu = statistics.median(seconds for _, seconds in rows)
        if name == "stillframe, one page":
            console.print(f"{what}: {name}: {middle:.3f} s; {cpu:.3f} CPU s", highlight=False)
            continue
        ratios = sorted(best / one for (one, _), (best, _) in zip(rows, timings[_BEST], strict=True))
        console.print(
            f"{what}: {name}: {nbytes / GIB / middle:.3f} GiB/s; {statistics.median(ratios):.2f} of the best "
            f"({ratios[0]:.2f} to {ratios[-1]:.2f}, {len(rows)} turns); {cpu / (nbytes / GIB):.2f} CPU s per GiB",
            highlight=False,
        )
        if name == "stillframe":
            later = statistics.median(
                best / (one - fixed_s) for (one, _), (best, _) in zip(rows, timings[_BEST], strict=True)
            )
            console.print(f"{what}: {name}, without the fixed {fixed_s:.3f} s: {later:.2f}", highlight=False)
    for name, why in cannot.items():
        console.print(f"{what}: {name}: cannot: {why}", highlight=False)
