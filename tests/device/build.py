"""Builds the library of :mod:`tests.device.queued`, once per machine.

What is built is kept under a name that says what it was built from, and appears there by a rename: whole or not at all.
Who builds holds a lock of the kernel's, which is gone when the builder is, however it ended.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

SOURCES = ("queued_device.cpp", "queued_torch.cpp")
HERE = Path(__file__).parent
BUILD_S = 600.0
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter", "-fvisibility=hidden")
_KEPT = 3
"""Libraries of earlier sources, for who goes back and forth between them."""


class CannotBuild(Exception):
    """There is no compiler here; its text says so."""


def compiler() -> str:
    """Raises :class:`CannotBuild`."""
    named = os.environ.get("CXX", "").split()
    for name in named[:1] or ["g++", "c++", "clang++"]:
        if path := shutil.which(name):
            return path
    raise CannotBuild("no C++ compiler: the device that the tests bring along cannot be built")


def _home() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "stillframe-tests"


def _key(builder: str) -> str:
    spec = importlib.util.find_spec("torch")  # not imported: that takes longer than all the rest
    torch = importlib.metadata.version("torch"), str(spec and spec.origin)
    said = hashlib.sha256()
    version = subprocess.run([builder, "--version"], capture_output=True, check=True).stdout
    for part in (*torch, sys.version, sysconfig.get_platform(), builder, *_FLAGS):
        said.update(f"{part}\0".encode())
    for data in (version, *(path.read_bytes() for path in sorted(HERE.glob("queued*.?pp")))):
        said.update(hashlib.sha256(data).digest())
    return said.hexdigest()[:20]


@functools.cache
def build() -> Path:
    """The library; made if there is none of these sources yet.  Blocks while another process makes it.

    Raises: :class:`CannotBuild`; :class:`RuntimeError` with what the compiler says.
    """
    builder, home = compiler(), _home()
    library = home / f"queued-{_key(builder)}.so"
    if library.exists():
        return library
    home.mkdir(parents=True, exist_ok=True)
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if library.exists():
            return library
        for old in sorted(home.glob("queued-*.so"), key=lambda path: path.stat().st_mtime)[:-_KEPT]:
            old.unlink(missing_ok=True)
        for left in home.glob("making-*"):  # by one that was killed: we have the lock
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix="making-", dir=home) as making:
            os.rename(_make(builder, Path(making)), library)
    return library


def _make(builder: str, making: Path) -> Path:
    import torch
    from torch.utils import cpp_extension

    command = [builder, *_FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    for path in cpp_extension.include_paths():
        command += ["-isystem", path]
    objects = [making / f"{source}.o" for source in SOURCES]
    compiling = [
        subprocess.Popen(
            [*command, "-c", HERE / source, "-o", made], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for source, made in zip(SOURCES, objects, strict=True)
    ]
    try:
        said = [each.communicate(timeout=BUILD_S)[0] for each in compiling]
    finally:
        for each in compiling:
            each.kill()
            each.wait()
    if any(each.returncode for each in compiling):
        raise RuntimeError("the device of the tests does not compile:\n" + "\n".join(said)[-8000:])
    made = making / "queued.so"
    command = [builder, "-shared", *map(str, objects), "-o", str(made)]
    for path in cpp_extension.library_paths():
        command += [f"-L{path}", f"-Wl,-rpath,{path}"]
    linked = subprocess.run([*command, "-ltorch_cpu", "-lc10"], capture_output=True, text=True, timeout=BUILD_S)
    if linked.returncode:
        raise RuntimeError(f"the device of the tests does not link:\n{linked.stderr[-8000:]}")
    return made
