"""What is promised about the code itself: layers, names, sizes, and a keeper without torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import stillframe
from stillframe import spi

SOURCE = Path(stillframe.__file__).parent

# From the top down; a module imports only from its own part or from parts below.  Parts on one line are
# siblings that never import one another.
LAYERS = [
    {"__main__"},
    {"cli", "integrations", "testing"},
    {"convert", "observe", "selftest", "open_roots"},
    {"preemption", "spi"},
    {"checkpointer"},
    {"save", "restoring"},
    {"keeper", "ranks"},
    {"checkpoint", "state"},
    {"link"},
    {"tiers"},
    {"format", "store"},
    {"lineage", "retention", "schedule"},
    {"model", "waits"},
    {"latch", "units", "untrusted"},
    {"errors", "version"},
]
CLIENTS = {"integrations"}
"""Parts that use stillframe as its users do, by its public names."""
TORCH = {
    "preemption", "spi", "open_roots", "checkpointer", "convert", "save", "restoring", "ranks", "state",
    "integrations", "testing", "selftest",
}  # fmt: skip


def part_of(module: str) -> str:
    return module.split(".")[1] if "." in module else "stillframe"


def imports() -> list[tuple[str, str, str]]:
    """Every import of every file, as (importing module, its part, imported module)."""
    found = []
    for path in SOURCE.rglob("*.py"):
        module = ".".join(["stillframe", *path.relative_to(SOURCE).with_suffix("").parts]).removesuffix(".__init__")
        if module == "stillframe":
            continue  # the table of public names
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found += [(module, part_of(module), alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "stillframe" else []
                found += [(module, part_of(module), name) for name in names or [node.module]]
    return found


def test_imports_go_downward_only() -> None:
    level = {part: number for number, parts in enumerate(LAYERS) for part in parts}
    for module, part, imported in imports():
        target = part_of(imported)
        if imported == "stillframe" or (imported.startswith("stillframe.") and target not in level):
            assert part in CLIENTS, f"{module} imports the package that it is part of"
            assert imported == "stillframe" or target in stillframe.__all__, f"{imported} is in no layer"
        elif imported.startswith("stillframe."):
            assert part in level, f"{module} is in no layer"
            assert target == part or level[target] > level[part], f"{module} imports {imported}"


def test_only_the_parts_that_need_torch_import_it() -> None:
    for module, part, imported in imports():
        if imported.split(".")[0] == "torch":
            assert part in TORCH, f"{module} imports torch"


PRIVATE_ATTRIBUTES = {
    "_base", "_buffers", "_cdata", "_comm_hooks", "_is_param", "_local_tensor", "_modules", "_parameters", "_spec",
    "_split_tensor", "_version",
}  # fmt: skip
"""Of torch's objects; our own objects use none of these names but as ``self._parameters``."""


def private_names(tree: ast.AST) -> list[str]:
    """Torch's private names that a module uses: imported, reached from an imported name, or known attributes."""

    def is_private(dotted: str) -> bool:
        return any(part.startswith("_") and not part.startswith("__") for part in dotted.split("."))

    found, torch_names = [], {"torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported = [(alias.name, alias.asname) for alias in node.names if alias.name.split(".")[0] == "torch"]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            imported = [(f"{node.module}.{alias.name}", alias.asname or alias.name) for alias in node.names]
        else:
            continue
        found += [name for name, _ in imported if is_private(name)]
        torch_names |= {alias for _, alias in imported if alias}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            root: ast.expr = node
            while isinstance(root, ast.Attribute):
                root = root.value
            is_of_torch = isinstance(root, ast.Name) and root.id in torch_names and is_private(ast.unparse(node))
            if is_of_torch or (node.attr in PRIVATE_ATTRIBUTES and ast.unparse(node.value) != "self"):
                found.append(ast.unparse(node))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and name.value in PRIVATE_ATTRIBUTES:
                found.append(ast.unparse(node))
    return found


def test_torchs_private_names_stand_in_one_module() -> None:
    for path in SOURCE.rglob("*.py"):
        if path.name != "torch_internals.py":
            assert not private_names(ast.parse(path.read_text())), path


def test_private_names_are_found_however_they_are_used() -> None:
    for code in (
        "from torch._subclasses import fake_tensor",
        "from torch.distributed.checkpoint import _nested_dict",
        "from torch.distributed.checkpoint.state_dict_loader import _load_state_dict as load",
        "import torch.distributed.tensor._utils",
        "import torch.distributed as dist\ndist.distributed_c10d._get_default_store()",
        "torch._neg_view(x)",
        "x._local_tensor",
        "getattr(x, '_local_tensor', x)",
    ):
        assert private_names(ast.parse(code)), code
    for code in (
        "self._parameters",
        "save._phase",
        "torch.nn.Module.__init__",
        "torch.cat(self._rows)",
        "self._torch._x",
        "os._exit(1)",
    ):
        assert not private_names(ast.parse(code)), code


def foreign_names(source: str) -> list[str]:
    """What an integration takes of stillframe and of its spi that is not public, and of any object that is private."""
    public = {"stillframe": {*stillframe.__all__, "errors", "integrations", "spi"}, "spi": set(spi.__all__)}
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module in ("stillframe", "stillframe.spi"):
            known = public[node.module.split(".")[-1]]
            found += [alias.name for alias in node.names if alias.name not in known]
        elif isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            is_private = (
                node.attr.startswith("_")
                and not node.attr.startswith("__")
                and owner not in ("self", "super()", "_thread")
            )
            if is_private or (owner in public and node.attr not in public[owner]):
                found.append(ast.unparse(node))
    return found


def test_a_foreign_name_is_noticed() -> None:
    for line in ("opened.run._keeper", "spi.Checkpointer", "stillframe.spy", "from stillframe.spi import os"):
        assert foreign_names(line), line
    assert not foreign_names("from stillframe import KeepLast, spi\nspi.save(self._run, stillframe.load(1))")


def test_integrations_use_public_names_only() -> None:
    public = {
        f"stillframe.{name}" for name in (*stillframe.__all__, "errors", "spi", "open_roots", "store", "store.files")
    } | {"stillframe.state.torch_internals"}
    for module, part, imported in imports():
        if part == "integrations" and imported.startswith("stillframe.") and part_of(imported) != part:
            assert imported in public, f"{module} imports {imported}"
        if part == "integrations":
            assert imported.split(".")[0] not in {"socket", "mmap", "concurrent.futures.thread"}, module
    for path in (SOURCE / "integrations").rglob("*.py"):
        assert foreign_names(path.read_text()) == [], path
        for call in ("Thread(", "open(", "os.write", "os.pread"):
            assert call not in path.read_text().replace("open_root(", ""), f"{path.name} calls {call}"


PATH_FUNCTIONS = {
    "access", "chdir", "chmod", "chown", "fsync", "fdatasync", "link", "listdir", "lstat", "makedirs", "mkdir",
    "mkfifo", "mknod", "open", "readlink", "remove", "removedirs", "rename", "renames", "replace", "rmdir", "scandir",
    "stat", "statvfs", "symlink", "sync", "truncate", "unlink", "utime", "walk", "posix_fallocate", "sendfile",
}  # fmt: skip
"""Of ``os``: what takes a path, or makes something durable.  Descriptors of memory and sockets are nobody's files."""
PATH_QUESTIONS = {"exists", "lexists", "isdir", "isfile", "islink", "ismount", "getsize", "getmtime", "samefile"}
PATH_METHODS = {
    "read_text", "read_bytes", "write_text", "write_bytes", "iterdir", "glob", "rglob", "exists", "is_dir", "is_file",
    "is_symlink", "is_mount", "is_fifo", "lstat", "mkdir", "rmdir", "unlink", "symlink_to", "hardlink_to",
    "readlink", "resolve", "samefile", "expanduser", "owner",
}  # fmt: skip
"""Of ``pathlib``; and, called as only a path's are, ``stat()``, ``touch()``, ``open("rb")`` and ``rename(to)``."""
FILE_MODULES = {"fcntl", "shutil", "glob", "tempfile", "fileinput", "pathlib2", "aiofiles"}


def file_calls(source: str) -> list[str]:
    """The calls in a module that touch a file by its path."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found += [name for name in names if name.split(".")[0] in FILE_MODULES]
            if isinstance(node, ast.ImportFrom) and node.module in ("os", "os.path", "io"):
                known = PATH_FUNCTIONS | PATH_QUESTIONS
                found += [alias.name for alias in node.names if alias.name in known]
        if not isinstance(node, ast.Call):
            continue
        owner, _, name = ast.unparse(node.func).rpartition(".")
        is_mode = bool(node.args) and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str)
        if (
            (owner in ("", "io") and name == "open")
            or (owner == "os" and name in PATH_FUNCTIONS)
            or (owner == "os.path" and name in PATH_QUESTIONS)
            or (owner and name in PATH_METHODS)
            or (owner and name in ("stat", "touch") and not node.args)
            or (owner and name == "open" and (is_mode or not node.args))
            or (name == "rename" and len(node.args) == 1)
        ):
            found.append(ast.unparse(node))
    return found


OWN_CALLS = {"self.open()", "self._desk.open()"}
"""Of objects of the keeper: a save's, and that of the requests it takes."""


def test_only_the_store_touches_files() -> None:
    for path in SOURCE.rglob("*.py"):
        if path.parent.name != "store":
            calls = [call for call in file_calls(path.read_text()) if call not in OWN_CALLS]
            assert calls == [], f"{path.relative_to(SOURCE)} touches files: {calls}"


@pytest.mark.parametrize(
    "line",
    [
        "open(path)", "os.open(path, 0)", "os.path.exists(path)", "path.exists()", "Path(a).read_text()", "path.stat()",
        "path.open('rb')", "path.rename(other)", "import fcntl", "from os import listdir", "import shutil",
        "os.replace(a, b)", "[each for each in path.iterdir()]", "io.open(path)", "os.statvfs(path)",
    ],
)  # fmt: skip
def test_a_file_call_is_noticed(line: str) -> None:
    assert file_calls(line)


def test_nothing_reads_pickle() -> None:
    for module, part, imported in imports():
        is_error_only = (part, imported) == ("convert", "pickle")  # what torch raises when it refuses to unpickle
        in_dicts = module == "stillframe.integrations.pickled"  # what users of DeepSpeed and DCP may ask for
        is_allowed = is_error_only or in_dicts
        assert is_allowed or imported.split(".")[0] not in {"pickle", "cloudpickle", "dill", "marshal", "shelve"}, (
            module
        )
    for path in SOURCE.rglob("*.py"):
        asks = "if advice is not None:" in path.read_text()  # how to allow pickle, where it is not
        assert "pickle.load" not in path.read_text() or (path.name == "pickled.py" and asks), path
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                assert path.parent.name == "convert" or (path.name == "pickled.py" and asks), path
                assert path.name == "pickled.py" or "weights_only=True" in ast.unparse(node), path


def test_a_public_name_is_not_hidden_by_a_part_of_the_same_name() -> None:
    code = (
        "import stillframe, stillframe.restoring.load; stillframe.Checkpointer; import stillframe.restoring.match\n"
        "from stillframe.spi import BoxReader; from stillframe import restore\n"
        "assert callable(restore) and stillframe.restore is restore, restore"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(SOURCE.parent)})


def test_the_version_is_the_one_of_the_distribution() -> None:
    project = (SOURCE.parent.parent / "pyproject.toml").read_text()
    assert re.search(r'^version = "(.*)"$', project, re.MULTILINE)[1] == stillframe.__version__  # type: ignore[index]


def test_the_catalog_and_the_keeper_run_without_torch() -> None:
    code = (
        "import sys, stillframe; stillframe.Catalog; import stillframe.keeper.process;"
        "assert not {'torch', 'numpy'} & set(sys.modules), 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(SOURCE.parent)})


def printing(source: str) -> list[str]:
    """The calls in a module that write to its output in pieces, or may."""
    calls = [ast.unparse(node.func) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [call for call in calls if call == "print" or call.endswith(("stdout.write", "stdout.writelines"))]


def test_workers_say_whole_lines() -> None:
    """Those of several ranks share one output, where the pieces of two lines would mix."""
    assert printing("print('a', 1)")
    assert printing("sys.stdout.write('a')")
    assert not printing("say('print()')")
    tests = Path(__file__).resolve().parent.parent
    workers = [path for name in ("*worker*.py", "*trainee*.py") for path in tests.rglob(name)]
    assert len(workers) >= 9
    for path in workers:
        assert printing(path.read_text()) == [], f"{path.name} prints; saying.say() writes a line in one piece"


def test_files_and_functions_stay_readable() -> None:
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        assert len(text.splitlines()) <= 400, f"{path.name} is too long"
        tree = ast.parse(text)
        assert ast.get_docstring(tree), f"{path.name} does not say what it owns"
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                assert (node.end_lineno or 0) - node.lineno < 70, f"{path.name}: {node.name} is too long"


def test_no_thread_is_asked_in_a_way_that_a_signal_can_break() -> None:
    """``Thread.is_alive`` and ``join`` (:func:`stillframe.latch.is_running` says why), where signals are handled."""
    for part in ("save", "ranks", "restoring", "checkpointer.py", "spi.py"):
        paths = [SOURCE / part] if part.endswith(".py") else (SOURCE / part).rglob("*.py")
        for path in paths:
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute) and node.attr in ("is_alive", "join"):
                    is_text = isinstance(node.value, ast.Constant | ast.JoinedStr) or "path" in ast.unparse(node.value)
                    assert is_text, f"{path}:{node.lineno}: {ast.unparse(node)}"


FROM_OUR_OWN = {"stillframe.ranks.group", "stillframe.keeper.segment"}
"""They read what another process of the same run has just sent."""


def test_json_that_may_be_damaged_is_read_in_one_way() -> None:
    """What is nested deeply, and what is no UTF-8, raise errors of their own, which were forgotten again and again."""
    for path in SOURCE.rglob("*.py"):
        module = ".".join(["stillframe", *path.relative_to(SOURCE).with_suffix("").parts])
        if module not in FROM_OUR_OWN | {"stillframe.untrusted"}:
            text = path.read_text()
            assert "json.decode(" not in text, path
            assert "json.loads(" not in text, path
