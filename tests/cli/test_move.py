"""export and import: read by those they are meant for, and back again bit for bit."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from stillframe import Checkpointer, load
from tests.cli.roots import COMMAND, Net, answer, environment, flip, make_state, stillframe
from tests.layout import segment
from tests.support import assert_same


def dcp_loaded(path: Path, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    into = {name: torch.zeros_like(each) for name, each in like.items()}
    with pytest.warns(UserWarning, match="single process"):
        dcp_load(into, checkpoint_id=path, no_dist=True)
    return into


@pytest.fixture(scope="module")
def weights(made: tuple[Path, dict[str, Any]]) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = made[1]["model"].state_dict()
    return dict(state)


def test_a_safetensors_file_has_the_weights(single: Path, weights: dict[str, Any], tmp_path: Path) -> None:
    made = answer("export", single, tmp_path / "net.safetensors")
    assert (made["step"], made["format"], made["tensors"]) == (30, "safetensors", len(weights))
    found = load_file(tmp_path / "net.safetensors")
    assert_same({name: found[name] for name in weights}, {name: each.detach() for name, each in weights.items()})
    Net().load_state_dict(found)


def test_a_step_can_be_chosen(single: Path, tmp_path: Path) -> None:
    stillframe("export", single, 10, tmp_path / "net.safetensors")
    assert_same(load_file(tmp_path / "net.safetensors")["body.weight"], load(single, 10)["model"]["body.weight"])


def test_a_large_set_is_split_with_an_index(single: Path, weights: dict[str, Any], tmp_path: Path) -> None:
    made = answer("export", single, tmp_path / "hf", "--max-file", "2kB")
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(weights)
    assert index["metadata"]["total_size"] == made["bytes"]
    assert len(made["files"]) > 2
    for name, file in index["weight_map"].items():
        assert_same(load_file(tmp_path / "hf" / file)[name], weights[name].detach())


def test_transformers_opens_an_exported_directory(tmp_path: Path) -> None:
    """A real model of theirs, tied weights and all: trained, saved, exported, and opened again with from_pretrained."""
    import transformers

    theirs: Any = transformers
    torch.manual_seed(0)
    config = theirs.GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    model = theirs.GPT2LMHeadModel(config)
    with Checkpointer(tmp_path / "root", arena="64MiB") as checkpointer:
        checkpointer.save(1, {"model": model})
    for size in ("5GB", "20kB"):
        hf = tmp_path / f"hf-{size}"
        stillframe("export", tmp_path / "root", hf, "--max-file", size)
        config.save_pretrained(hf)
        opened, about = theirs.GPT2LMHeadModel.from_pretrained(hf, output_loading_info=True)
        assert not about["missing_keys"]
        assert not about["mismatched_keys"]
        for (name, one), other in zip(model.state_dict().items(), opened.state_dict().values(), strict=True):
            assert torch.equal(one, other), name
        tokens = torch.arange(8)[None]
        assert torch.equal(model.eval()(tokens).logits, opened.eval()(tokens).logits)


@pytest.mark.parametrize("everything", [False, True])
def test_torch_loads_an_exported_file(single: Path, weights: dict[str, Any], tmp_path: Path, everything: bool) -> None:
    stillframe("export", single, tmp_path / "net.pt", *(["--all"] if everything else []))
    found = torch.load(tmp_path / "net.pt", weights_only=True)
    state = found["model"] if everything else found
    assert_same(dict(state), {name: each.detach() for name, each in weights.items()})
    storages = {state[name].untyped_storage().data_ptr() for name in ("embed.weight", "head.weight")}
    assert len(storages) == 1, "tied weights stay tied"
    if everything:
        fresh = make_state()
        fresh["optimizer"].load_state_dict(found["optimizer"])
        assert found["config"] == {"lr": 1e-3, "betas": (0.9, 0.95), "name": "net"}
        assert torch.equal(found["array"], torch.arange(12, dtype=torch.int32).view(3, 4))


def test_dcp_loads_an_exported_directory(single: Path, weights: dict[str, Any], tmp_path: Path) -> None:
    stillframe("export", single, tmp_path / "d", "--format", "dcp")
    assert_same(dcp_loaded(tmp_path / "d", weights), {name: each.detach() for name, each in weights.items()})


def test_sharded_tensors_are_assembled(sharded: Path, tmp_path: Path) -> None:
    whole = load(sharded)["model"]
    stillframe("export", sharded, tmp_path / "a.safetensors")
    stillframe("export", sharded, tmp_path / "a.pt")
    stillframe("export", sharded, tmp_path / "a", "--format", "dcp")
    assert_same(dict(sorted(load_file(tmp_path / "a.safetensors").items())), dict(sorted(whole.items())))
    assert_same(torch.load(tmp_path / "a.pt", weights_only=True), dict(whole))
    assert_same(dcp_loaded(tmp_path / "a", whole), dict(whole))
    torch.nn.Sequential(torch.nn.Linear(24, 32), torch.nn.Linear(32, 24, bias=False)).load_state_dict(whole)


@pytest.mark.parametrize("to", ["x.safetensors", "x.pt", "x"])
def test_there_and_back_again_is_the_same(to: str, sharded: Path, tmp_path: Path) -> None:
    root = sharded
    more = ["--format", "dcp"] if to == "x" else []
    stillframe("export", root, tmp_path / to, *more)
    stillframe("import", tmp_path / to, tmp_path / "back", "--step", 7)
    assert_same(
        dict(sorted(load(tmp_path / "back", 7)["model"].items())),
        dict(sorted(load(root)["model"].items())),
    )


def test_everything_there_and_back_restores_a_run(made: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    root, state = made
    stillframe("export", root, tmp_path / "all.pt", "--all")
    stillframe("export", root, tmp_path / "all", "--all", "--format", "dcp")
    stillframe("import", tmp_path / "all.pt", tmp_path / "back", "--step", 1)
    stillframe("import", tmp_path / "all", tmp_path / "back", "--step", 2)
    for step in (1, 2):
        fresh = make_state()
        for parameter in fresh["model"].parameters():
            parameter.data.zero_()
        with Checkpointer(tmp_path / "back", arena="64MiB") as checkpointer, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # DCP unties weights, and a numpy array goes out as a tensor
            checkpointer.restore(fresh, step=step, strict=False, exclude="array")
        assert_same(dict(fresh["model"].state_dict()), dict(state["model"].state_dict()))
        restored, saved = (each["optimizer"].state_dict()["state"] for each in (fresh, state))
        assert restored.keys() == saved.keys()
        for number in saved:  # DCP keeps no order of keys
            assert_same(dict(sorted(restored[number].items())), dict(sorted(saved[number].items())))
        assert (fresh["step"], fresh["config"]) == (30, state["config"])


def test_what_is_there_is_left_alone(single: Path, tmp_path: Path) -> None:
    for name, more in (("a.safetensors", []), ("a.pt", []), ("a", []), ("d", ["--format", "dcp"])):
        (tmp_path / name).write_text("mine")
        stillframe("export", single, tmp_path / name, *more, code=9)
        assert (tmp_path / name).read_text() == "mine"
    stillframe("import", tmp_path / "a.pt", single, code=8)
    torch.save({"w": torch.ones(3)}, tmp_path / "b.pt")
    stillframe("import", tmp_path / "b.pt", single, "--step", 30, code=9)


def test_the_weights_have_to_be_found(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "r", arena="64MiB") as checkpointer:
        checkpointer.save(1, {"net": {"w": torch.ones(3)}, "other": {"w": torch.ones(2)}, "n": 1})
    assert "--key" in stillframe("export", tmp_path / "r", tmp_path / "o.pt", code=2)
    stillframe("export", tmp_path / "r", tmp_path / "o.pt", "--key", "net")
    assert_same(torch.load(tmp_path / "o.pt", weights_only=True), {"w": torch.ones(3)})
    stillframe("export", tmp_path / "r", tmp_path / "p.pt", "--key", "nothing", code=3)
    stillframe("export", tmp_path / "r", tmp_path / "p.pt", "--key", "net", "--all", code=2)
    stillframe("export", tmp_path / "r", "one", "two", "three", code=2)
    assert sorted(os.listdir(tmp_path)) == ["o.pt", "r"]


@pytest.mark.parametrize("to", ["x.safetensors", "x.pt"])
def test_weights_at_the_top_of_a_trainers_state_are_found(tmp_path: Path, to: str) -> None:
    weights = {"a.weight": torch.rand(3), "b.weight": torch.rand(2, 2)}
    with Checkpointer(tmp_path / "r", arena="64MiB") as checkpointer:
        checkpointer.save(1, {**weights, "trainer": {"state": "{}", "optimizer": {"0": torch.rand(3)}}})
    stillframe("export", tmp_path / "r", tmp_path / to)
    found = load_file(tmp_path / to) if to != "x.pt" else torch.load(tmp_path / to)
    assert_same(dict(found), weights)
    with Checkpointer(tmp_path / "s", arena="64MiB") as checkpointer:
        checkpointer.save(1, {"one": torch.rand(3), "net": {"w": torch.rand(3)}})
    assert "--key" in stillframe("export", tmp_path / "s", tmp_path / "y.pt", code=2)


@pytest.mark.parametrize("to", ["x.safetensors", "x.pt", "x", "d"])
def test_a_damaged_checkpoint_leaves_no_file(copy: Path, tmp_path: Path, to: str) -> None:
    flip(segment(copy, 30), 4096 + 100)
    out = tmp_path / "out"
    out.mkdir()
    more = ["--format", "dcp"] if to == "d" else []
    stillframe("export", copy, out / to, *more, code=4)
    assert os.listdir(out) == []


def test_ctrl_c_leaves_no_half_file(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "r", arena="512MiB") as checkpointer:
        checkpointer.save(1, {"model": {f"w{at}": torch.full((1 << 24,), float(at)) for at in range(16)}})
    out = tmp_path / "out"
    out.mkdir()
    child = subprocess.Popen(
        [*COMMAND, "export", str(tmp_path / "r"), str(out / "x.safetensors")], env=environment(), stderr=subprocess.PIPE
    )
    while child.poll() is None and not os.listdir(out):
        time.sleep(0.005)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 130, err
    assert os.listdir(out) == []


def test_ctrl_c_ends_verify(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "r", arena="512MiB") as checkpointer:
        checkpointer.save(1, {"model": {f"w{at}": torch.full((1 << 24,), float(at)) for at in range(16)}})
    code = "import sys, signal, os; sys.argv[1:] = ['verify', sys.argv[1]]\n"
    code += "import stillframe.checkpoint.read as read; read_chunk = read.read_chunk\n"
    code += "def interrupted(*a):\n    read.read_chunk = read_chunk; os.kill(os.getpid(), signal.SIGINT)\n"
    code += "    return read_chunk(*a)\n"
    code += "read.read_chunk = interrupted\nfrom stillframe.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "r")], env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr


class Surprise:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("surprise",)


def test_import_runs_no_code(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "evil": Surprise()}, tmp_path / "evil.pt")
    assert "weights_only=False" in stillframe("import", tmp_path / "evil.pt", tmp_path / "r", code=8, cwd=tmp_path)
    (tmp_path / "evil2.pt").write_bytes(pickle.dumps(Surprise()))
    stillframe("import", tmp_path / "evil2.pt", tmp_path / "r", code=8, cwd=tmp_path)
    assert not (tmp_path / "surprise").exists()
    assert not (tmp_path / "r").exists()


def test_import_runs_no_code_of_a_dcp_value(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

    with pytest.warns(UserWarning, match="single process"):
        dcp_save({"w": torch.ones(2), "evil": Surprise()}, checkpoint_id=tmp_path / "d", no_dist=True)
    stillframe("import", tmp_path / "d", tmp_path / "r", code=8, cwd=tmp_path)
    assert not (tmp_path / "surprise").exists()


def test_what_cannot_be_imported_says_why(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.pt").write_text("hello")
    (tmp_path / "cut.safetensors").write_bytes(b"\xff" * 20)
    assert "no *.safetensors" in stillframe("import", tmp_path / "empty", tmp_path / "r", code=3)
    stillframe("import", tmp_path / "nowhere.pt", tmp_path / "r", code=3)
    stillframe("import", tmp_path / "cut.safetensors", tmp_path / "r", code=4)
    assert not (tmp_path / "r").exists()


def test_a_damaged_file_of_torch_is_refused(tmp_path: Path) -> None:
    """Whatever torch trips over in it."""
    from stillframe.convert.importing import read_state
    from stillframe.errors import StillframeError

    for is_zip in (True, False):
        torch.save({"w": torch.arange(9.0), "n": [1, "x"]}, tmp_path / "w.pt", _use_new_zipfile_serialization=is_zip)
        whole = (tmp_path / "w.pt").read_bytes()
        chance = random.Random(0)
        for _ in range(150):
            data = bytearray(whole[: chance.randrange(len(whole))] if chance.random() < 0.3 else whole)
            for _ in range(chance.choice((1, 3, 30))):
                if data:
                    data[chance.randrange(min(len(data), 700))] = chance.randrange(256)
            (tmp_path / "bad.pt").write_bytes(data)
            with contextlib.suppress(StillframeError):
                read_state(tmp_path / "bad.pt")


@pytest.mark.parametrize("index", ["null", '{"weight_map": []}', '{"weight_map": {"w": 3}}', '{"weight_map": {}}'])
def test_a_malformed_index_is_refused(tmp_path: Path, index: str) -> None:
    from stillframe.convert.importing import read_state
    from stillframe.errors import FormatError

    save_file({"w": torch.ones(1)}, tmp_path / "w.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(FormatError):
        read_state(tmp_path)


def test_what_is_no_file_is_not_waited_for(tmp_path: Path, single: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pt")
    stillframe("import", tmp_path / "pipe.pt", tmp_path / "r", code=3)
    assert "copy the directory" in stillframe("import", single, tmp_path / "r", code=3)


def test_a_full_disk_is_said_to_be_full(single: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4k", "none", str(small)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        for name, more in (("a.safetensors", []), ("a.pt", []), ("a", ["--format", "dcp"])):
            stillframe("export", single, small / name, *more, code=6)
            assert os.listdir(small) == []
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_keys_that_read_alike_are_not_guessed_at(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "r", arena="64MiB") as checkpointer:
        checkpointer.save(1, {"odd": {0: torch.ones(1), "0": torch.zeros(1)}})
    stillframe("export", tmp_path / "r", tmp_path / "x.pt", "--key", "odd/0", code=2)
    stillframe("export", tmp_path / "r", tmp_path / "x", "--all", "--format", "dcp", code=2)


def test_import_puts_tensors_where_they_are_wanted(tmp_path: Path) -> None:
    save_file({"a.w": torch.ones(3)}, tmp_path / "w.safetensors")
    stillframe("import", tmp_path / "w.safetensors", tmp_path / "r", "--step", 1)
    stillframe("import", tmp_path / "w.safetensors", tmp_path / "r", "--step", 2, "--under", "net")
    assert_same(load(tmp_path / "r", 1), {"model": {"a.w": torch.ones(3)}})
    assert_same(load(tmp_path / "r", 2), {"net": {"a.w": torch.ones(3)}})


def test_a_hugging_face_directory_is_read_by_its_index(single: Path, weights: dict[str, Any], tmp_path: Path) -> None:
    hf = tmp_path / "hf"
    stillframe("export", single, hf, "--max-file", "2kB")
    save_file({"stale": torch.ones(1)}, hf / "stale.safetensors")
    stillframe("import", hf, tmp_path / "r", "--step", 1)
    assert set(load(tmp_path / "r")["model"]) == set(weights)
    first = min(hf.glob("model-*"))
    first.rename(tmp_path / "away")
    assert first.name in stillframe("import", hf, tmp_path / "r", "--step", 2, code=3)
    (hf / "model.safetensors.index.json").unlink()
    assert "files" in stillframe("import", hf, tmp_path / "r", "--step", 2, code=3)


def test_the_same_name_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file({"w": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    stillframe("import", tmp_path, tmp_path / "r", code=4)


def test_names_that_collide_are_refused(tmp_path: Path) -> None:
    state = {"model": {"a": {"b": torch.ones(1)}, "a.b": torch.zeros(1)}}
    with Checkpointer(tmp_path / "r", arena="64MiB") as checkpointer:
        checkpointer.save(1, state)
    assert "'a.b'" in stillframe("export", tmp_path / "r", tmp_path / "x.safetensors", code=2)
    stillframe("export", tmp_path / "r", tmp_path / "x.pt")
    assert_same(torch.load(tmp_path / "x.pt", weights_only=True), state["model"])


def test_values_that_torch_would_not_read_are_turned_or_refused(tmp_path: Path) -> None:
    import numpy as np

    with Checkpointer(tmp_path / "r", arena="64MiB") as checkpointer:
        checkpointer.save(1, {"best": np.float64(0.5), "path": Path("/data"), "w": torch.ones(2)})
        checkpointer.save(2, {"w": torch.ones(2), "odd": range(3)})
    stillframe("export", tmp_path / "r", 1, tmp_path / "x.pt", "--all")
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    assert (found["best"], found["path"]) == (0.5, "/data")
    stillframe("export", tmp_path / "r", 2, tmp_path / "y.pt", "--all", code=8)
    assert sorted(os.listdir(tmp_path)) == ["r", "x.pt"]


def test_views_of_one_memory_stay_views(tmp_path: Path) -> None:
    base = torch.arange(24.0)
    state = {"a": base[:12].view(3, 4), "t": base[:12].view(3, 4).t(), "all": base}
    with Checkpointer(tmp_path / "r", arena="64MiB") as checkpointer:
        checkpointer.save(1, state)
    stillframe("export", tmp_path / "r", tmp_path / "x.pt", "--all")
    stillframe("export", tmp_path / "r", tmp_path / "x.safetensors")
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    for name, tensor in state.items():
        assert torch.equal(found[name], tensor), name
        assert torch.equal(load_file(tmp_path / "x.safetensors")[name], tensor), name
    assert len({each.untyped_storage().data_ptr() for each in found.values()}) == 1


def test_what_is_each_ranks_own_is_not_exported_as_the_whole(sharded: Path, tmp_path: Path) -> None:
    assert "--rank" in stillframe("export", sharded, tmp_path / "x.safetensors", "--key", "mine", code=2)
    stillframe("export", sharded, tmp_path / "x.safetensors", "--key", "mine", "--rank", 1)
    assert_same(load_file(tmp_path / "x.safetensors"), {"noise": torch.full((3,), 1)})


def test_a_step_alone_is_no_place(single: Path, tmp_path: Path) -> None:
    stillframe("export", single, 30, code=2, cwd=tmp_path)
    assert os.listdir(tmp_path) == []
