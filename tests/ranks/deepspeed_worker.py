"""Real DeepSpeed ranks on stillframe: ``deepspeed_worker.py ROOT CASE[:ARGUMENT…] …``, each a function of this file."""

from __future__ import annotations

import argparse
import contextlib
import copy
import enum
import functools
import gc
import io
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

warnings.simplefilter("ignore")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import stillframe  # noqa: E402
from stillframe import spi  # noqa: E402
from stillframe.integrations import deepspeed as ours  # noqa: E402
from stillframe.integrations.deepspeed.engine import CheckpointEngine  # noqa: E402
from stillframe.open_roots import Admission, close_root, find_root  # noqa: E402
from tests import layout  # noqa: E402
from tests.ranks.saying import say  # noqa: E402
from tests.support import assert_same, until  # noqa: E402

logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
deepspeed.ops.__compatible_ops__.clear()  # compile nothing
SIZE = 24


class Net(torch.nn.Module):
    """Tied weights, a buffer that changes in forward, and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(SIZE, SIZE)
        self.second = torch.nn.Linear(SIZE, SIZE)
        self.second.weight = self.first.weight
        self.frozen = torch.nn.Linear(SIZE, SIZE)
        self.frozen.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(100_000))
        self.seen: torch.Tensor

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        found: torch.Tensor = self.second(torch.relu(self.first(batch)) + self.frozen(batch))
        return found.float().square().mean()


def config(stage: int, dtype: str, **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "zero_optimization": {"stage": stage},
        "datastates_ckpt": {"host_cache_size": 16},
    }
    if dtype == "bf16":
        found["bf16"] = {"enabled": True}
    if dtype == "offload":
        found["bf16"] = {"enabled": True}
        found["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        found["zero_force_ds_cpu_optimizer"] = False
    return {**found, **more}


def build(settings: dict[str, Any], seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = Net()
    parameters = [each for each in model.parameters() if each.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=copy.deepcopy(settings))
    return engine


def update(engine: Any, step: int, count: int = 1) -> None:
    for at in range(step, step + count):
        generator = torch.Generator().manual_seed(100 * at + dist.get_rank())
        dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.float32
        loss = engine(torch.randn(2, SIZE, generator=generator).to(dtype))
        engine.backward(loss)
        engine.step()


def frozen(node: Any) -> Any:
    if isinstance(node, torch.Tensor):
        return node.detach().clone()
    if isinstance(node, dict):
        return {key: frozen(item) for key, item in node.items()}
    if isinstance(node, list | tuple):
        return [frozen(item) for item in node]
    return copy.deepcopy(vars(node)) if hasattr(node, "__dict__") and not isinstance(node, enum.Enum | type) else node


def state_of(engine: Any) -> Any:
    """Everything that must come back: weights, buffers, optimizer, schedule, counters."""
    if engine.zero_optimization_stage() == 3:
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            weights = frozen(dict(engine.module.state_dict()))
    else:
        weights = frozen(dict(engine.module.state_dict()))
    optimizer = engine.optimizer.state_dict() if engine.optimizer is not None else None
    return frozen([weights, optimizer, engine.lr_scheduler.state_dict(), engine.global_steps])


def stages(root: Path) -> None:
    """Save at every step while training goes on; load into an engine that was built otherwise; train on, the same."""
    for stage, dtype in ((0, "fp32"), (0, "bf16"), (1, "bf16"), (2, "fp32"), (2, "offload"), (3, "bf16")):
        settings = config(stage, dtype)
        where = str(root / f"{stage}-{dtype}")
        engine = build(settings)
        expected = {}
        for step in range(4):
            update(engine, step)
            expected[step] = state_of(engine)
            engine.save_checkpoint(where, client_state={"at": step, "note": "mine"})
        update(engine, 4, 2)
        final = state_of(engine)
        engine.destroy()
        engine.destroy()
        for step, tag in ((3, None), (1, "global_step2")):
            other = build(settings, seed=1)
            path, client = other.load_checkpoint(where, tag)
            assert path is not None
            assert (client["at"], client["note"]) == (step, "mine")
            assert_same(state_of(other), expected[step], f"stage {stage} {dtype}")
            if step == 3:
                update(other, 4, 2)
                assert_same(state_of(other), final, f"stage {stage} {dtype}, trained on")
            other.destroy()
        if dist.get_rank() == 0:
            assert Path(where, "latest").read_text() == "global_step4"
            assert stillframe.Catalog(where).steps() == [1, 2, 3, 4]


class Odd:
    """Only pickle can hold it."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Odd) and other.value == self.value

    __hash__ = None  # type: ignore[assignment]


def fails(work: Any, *parts: str) -> None:
    try:
        work()
    except Exception as error:
        for part in parts:
            assert part in f"{type(error).__name__}: {error}", (part, error)  # noqa: PT017
    else:
        raise AssertionError(f"no error with {parts}")


def objects(root: Path) -> None:
    """What DeepSpeed's users put into client_state."""
    where = str(root / "objects")
    client = {
        "args": argparse.Namespace(lr=0.1, name="x", betas=(0.9, 0.95), shape=torch.Size([2, 3])),
        "kind": signal.SIGTERM,
        "mixed": [1, (2.5, None), {"x": {3, 4}}, torch.arange(3), b"raw", torch.bfloat16],
        "scaler": deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler(
            init_scale=4096.0, scale_window=10, min_scale=1.0, delayed_shift=2,
            consecutive_hysteresis=False, raise_error_at_min_scale=False, dtype=torch.half,
        ),
    }  # fmt: skip
    engine = build(config(1, "bf16"))
    update(engine, 0)
    engine.save_checkpoint(where, "plain", client_state=client)
    _, got = engine.load_checkpoint(where)
    for key in ("args", "kind"):
        assert got[key] == client[key], key
    assert vars(got["scaler"]) == vars(client["scaler"])
    assert_same(frozen(got["mixed"]), frozen(client["mixed"]))
    fails(
        lambda: engine.save_checkpoint(where, "odd", client_state={"deep": {"x": Odd(5)}}),
        "UnsupportedStateError", "mp_rank_00_model_states.pt/deep/x", "Odd", '"allow_pickle": true',
    )  # fmt: skip
    engine.destroy()
    assert not Path(where, "odd").exists()

    settings = config(1, "bf16", datastates_ckpt={"allow_pickle": True})
    engine = build(settings)
    update(engine, 0)
    engine.save_checkpoint(where, "odd", client_state={"deep": {"x": Odd(5)}})
    _, got = engine.load_checkpoint(where, "odd")
    assert got["deep"] == {"x": Odd(5)}
    engine.destroy()
    engine = build(config(1, "bf16"))
    fails(lambda: engine.load_checkpoint(where, "odd"), "UnsupportedStateError", "deep/x", "Odd", "allow_pickle")
    engine.destroy()


def choices(root: Path) -> None:
    """save_latest, exclude_frozen_parameters, save_16bit_model, a tag of every kind, loading right after saving."""
    where = root / "choices"
    engine = build(config(2, "bf16"))
    update(engine, 0)
    engine.save_checkpoint(str(where), "first")
    engine.save_checkpoint(str(where), "second", save_latest=False, exclude_frozen_parameters=True)
    expected = state_of(engine)
    update(engine, 1)
    engine.save_16bit_model(str(where), "weights.bin")
    path, _ = engine.load_checkpoint(str(where))
    assert "first" in path
    assert_same(state_of(engine), expected)
    assert (where / "latest").read_text() == "first"
    full = engine.checkpoint_engine.load(str(where / "second" / "mp_rank_00_model_states.pt"))
    assert "first.weight" in full["module"]
    assert "frozen.weight" not in full["module"]
    assert full["module"]["first.weight"].data_ptr() == full["module"]["second.weight"].data_ptr()  # still tied
    if dist.get_rank() == 0:
        weights = torch.load(where / "weights.bin", weights_only=True)
        assert weights["first.weight"].dtype == torch.bfloat16
    fails(lambda: engine.save_checkpoint(str(where), "a/b"), "ConfigError", "a/b")
    fails(lambda: engine.save_checkpoint("s3://bucket/run"), "ConfigError", "stillframe copy")
    assert not Path("s3:").exists(), "DeepSpeed has made a directory of a URL"
    (where / "theirs").mkdir(exist_ok=True)
    fails(lambda: engine.save_checkpoint(str(where), "theirs"), "ExistsError", "theirs", "choose another")

    # A tag that is saved again is the later save's; another engine of this process waits for it.
    before = alias(where / "first")
    update(engine, 2)
    engine.save_checkpoint(str(where), "first")
    engine.save_checkpoint(str(where), "first")
    expected = state_of(engine)
    other = build(config(2, "bf16"), seed=5)
    path, _ = other.load_checkpoint(str(where))
    assert path is not None
    assert "first" in path
    assert_same(state_of(other), expected)
    assert alias(where / "first").step == stillframe.Catalog(where).steps()[-1] > before.step
    other.destroy()
    engine.destroy()
    engine = build(config(1, "bf16", datastates_ckpt={"keep_last": 2}))
    for step in range(4):
        update(engine, step)
        engine.save_checkpoint(str(root / "few"))
    engine.destroy()
    engine.checkpoint_engine.cleanup()

    def tags() -> list[str]:
        return sorted(path.parent.name for path in (root / "few").glob("*/mp_rank_00_model_states.pt"))

    until(lambda: tags() == ["global_step3", "global_step4"], "rank 0's keeper shows and removes tags")
    dist.barrier()
    for wrong in ({"host_cache_size": -1}, {"keep_last": True}, {"host_cache": 1}, {"allow_pickle": "yes"}):
        settings = config(1, "bf16", datastates_ckpt=wrong)
        fails(functools.partial(build, settings), "datastates_ckpt", "give")


def alias(tag: Path) -> Any:
    """The save that a tag stands for; every file of it says the same."""
    aliases = [spi.read_alias(path.read_bytes()) for path in tag.glob("*.pt")]
    found = {each[0] for each in aliases if each is not None}
    assert len(found) == 1, aliases
    return found.pop()


def tags_and_steps(where: Path) -> tuple[dict[str, int], list[int]]:
    """The step that each tag stands for; and all steps that are there."""
    found = {path.parent.name: alias(path.parent).step for path in where.glob("*/mp_rank_00_model_states.pt")}
    return found, stillframe.Catalog(where).steps()


def second(root: Path) -> None:
    """Any engine of this process sees what another has saved, in a root that is new, and also of one that is gone."""
    for each, tag in enumerate((None, "named", None)):
        where = str(root / f"second-{each}")
        first, other = build(config(2, "bf16")), build(config(2, "bf16"), seed=9)
        update(first, 0, 2)
        first.save_checkpoint(where, tag)
        expected = state_of(first)
        if each == 2:
            del first
            gc.collect()
        path, _ = other.load_checkpoint(where, tag)
        assert path is not None, f"nothing was loaded, {tag}"
        assert_same(state_of(other), expected)
    fails(lambda: other.load_checkpoint(where, "typo"), "NotFoundError", "typo")
    dist.barrier()
    if dist.get_rank() == 0:  # a tag alone, copied to another root: that has a save of the same name, or none
        for at in (1, 2):
            shutil.copytree(root / "second-0" / "global_step2", root / f"second-{at}" / "copied")
    dist.barrier()
    fails(lambda: other.load_checkpoint(str(root / "second-1"), "copied"), "NotFoundError", "copy a whole save_dir")
    fails(lambda: other.load_checkpoint(where, "copied"), "FormatError", "copy a whole save_dir")
    assert other.load_checkpoint(str(root / "nowhere")) == (None, None)  # as DeepSpeed
    other.destroy()


def again(root: Path) -> None:
    """Tags that are saved again, going back, and tags that are removed: the data of a tag go with it."""
    where = root / "again"
    engine = build(config(1, "bf16", datastates_ckpt={"keep_last": 4}))
    states = {}
    for step in range(1, 5):
        update(engine, step)
        states[step] = state_of(engine)
        engine.save_checkpoint(str(where))
    engine.load_checkpoint(str(where), "global_step2")
    update(engine, 30)
    engine.save_checkpoint(str(where))  # global_step3, another one
    expected = state_of(engine)
    engine.load_checkpoint(str(where))
    assert_same(state_of(engine), expected, "went on from an earlier tag")
    wanted = {"global_step1": 1, "global_step2": 2, "global_step3": 5, "global_step4": 4}
    until(lambda: tags_and_steps(where) == (wanted, [1, 2, 4, 5]), "the data of global_step3 go with it")
    engine.load_checkpoint(str(where), "global_step4")
    assert_same(state_of(engine), states[4], "a tag that nobody saved again")
    dist.barrier()
    engine.destroy()

    where = root / "best"
    engine = build(config(1, "bf16"))
    for step in range(4):
        update(engine, step)
        engine.save_checkpoint(str(where), "best", save_latest=False)
        engine.save_checkpoint(str(where), "last" if step < 3 else "end")
    expected = state_of(engine)
    engine.checkpoint_engine.cleanup()
    until(lambda: tags_and_steps(where) == ({"best": 6, "last": 5, "end": 7}, [5, 6, 7]), "one save for each tag")
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(where / "last")
    dist.barrier()
    engine.save_checkpoint(str(where), "end")
    engine.checkpoint_engine.cleanup()
    until(lambda: tags_and_steps(where) == ({"best": 6, "end": 8}, [6, 8]), "a tag that was removed by hand")
    update(engine, 9)
    engine.load_checkpoint(str(where), "best")
    assert_same(state_of(engine), expected)
    dist.barrier()
    engine.destroy()


def opened(root: Path) -> None:
    """What opens a tag's files itself: DeepSpeed without optimizer states in stage 3, and its tools."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    where = root / "opened"
    engine = build(config(3, "bf16"))
    weights = {}
    for tag in ("old", "new"):
        update(engine, 0)
        engine.save_checkpoint(str(where), tag, client_state={"note": argparse.Namespace(x=1)})
        weights[tag] = state_of(engine)[0]
    engine.destroy()
    for tag, options in (("old", {"load_optimizer_states": False}), ("new", {"load_module_only": True})):
        other = build(config(3, "bf16"), seed=1)
        assert other.load_checkpoint(str(where), tag, **options)[0] is not None
        if "load_optimizer_states" in options:
            assert_same(state_of(other)[0], weights[tag], f"weights of {tag}")
        other.destroy()
    if dist.get_rank() == 0:
        found = get_fp32_state_dict_from_zero_checkpoint(str(where), "old")
        assert torch.equal(found["first.bias"].bfloat16(), weights["old"]["first.bias"])
        name = next((where / "new").glob("*_optim_states.pt"))
        with name.open("rb") as file:
            assert torch.load(file, weights_only=False, mmap=False)["optimizer_state_dict"]["zero_stage"] == 3
        fails(lambda: torch.load(io.BytesIO(name.read_bytes()), weights_only=False), "FormatError", "export(")
        fails(lambda: torch.load(name, weights_only=True), "UnpicklingError", "stillframe")
    dist.barrier()


def weights(root: Path) -> None:
    """In stage 2: without optimizer states, the module only, and without what is frozen."""
    where = str(root / "weights")
    engine = build(config(2, "bf16"))
    update(engine, 0, 2)
    expected = state_of(engine)[0]
    engine.save_checkpoint(where, "all")
    engine.save_checkpoint(where, "some", exclude_frozen_parameters=True)
    engine.destroy()
    for tag, options in (
        ("all", {"load_optimizer_states": False, "load_lr_scheduler_states": False}),
        ("all", {"load_module_only": True}),
        ("some", {"load_module_strict": False}),
    ):
        other = build(config(2, "bf16"), seed=1)
        own = state_of(other)[0]
        assert other.load_checkpoint(where, tag, **options)[0] is not None
        wanted = {name: own[name] if tag == "some" and "frozen" in name else expected[name] for name in expected}
        assert_same(state_of(other)[0], wanted, f"{tag} {options}")
        other.destroy()


def way_in(root: Path) -> None:
    """From DeepSpeed's own checkpoints to ours, in the same directory; and through universal ones."""
    where, settings = root / "in", config(2, "bf16", datastates_ckpt={"allow_pickle": True})
    default = {key: value for key, value in settings.items() if key != "datastates_ckpt"}
    engine = build(default)
    update(engine, 0, 2)
    engine.save_checkpoint(str(where), client_state={"odd": Odd(3)})
    expected = state_of(engine)
    engine.destroy()
    engine = build(config(2, "bf16"), seed=1)
    fails(lambda: engine.load_checkpoint(str(where)), "FormatError", "not written by stillframe", '"allow_pickle"')
    engine.destroy()
    engine = build(settings, seed=1)
    path, client = engine.load_checkpoint(str(where))
    assert path is not None
    assert client["odd"] == Odd(3)
    assert_same(state_of(engine), expected, "DeepSpeed's own")
    update(engine, 2)
    engine.save_checkpoint(str(where))
    expected = state_of(engine)
    engine.checkpoint_engine.cleanup()
    dist.barrier()
    assert (where / "latest").read_text() == "global_step3"
    assert (where / "global_step2").is_dir()
    if dist.get_rank() == 0:
        universal(where / "global_step3", where / "universal")
        (where / "latest_universal").write_text("universal")
    dist.barrier()
    engine.destroy()
    one_way_in(root, expected)


def one_way_in(root: Path, expected: Any = None) -> None:
    """Load the universal checkpoint, on any number of ranks, and save on with stillframe."""
    settings = config(2, "bf16", datastates_ckpt={"allow_pickle": True}, checkpoint={"load_universal": True})
    engine = build(settings, seed=2)
    path, _ = engine.load_checkpoint(str(root / "in"))
    assert path is not None
    assert engine.global_steps == 3
    if expected is None:
        assert find_root(root / "in") is None, "who only loads keeps nobody from saving there"
    else:
        for name in ("first.weight", "first.bias", "second.bias"):  # DeepSpeed leaves out buffers and what is frozen
            assert torch.equal(engine.module.state_dict()[name], expected[0][name]), name
    update(engine, 3)
    to = root / f"in-{dist.get_world_size()}"
    engine.save_checkpoint(str(to))
    expected = state_of(engine)
    engine.destroy()
    engine = build(config(2, "bf16"), seed=3)
    assert engine.load_checkpoint(str(to))[0] is not None
    assert_same(state_of(engine), expected, "saved after the way in")
    engine.destroy()


def rewound(root: Path) -> None:
    """A tag means exactly one save, also when another save of its step is on the branch."""
    where = root / "rewound"
    engine = build(config(1, "bf16"))
    states = {}
    for step in range(1, 4):
        update(engine, step)
        states[step] = state_of(engine)
        engine.save_checkpoint(str(where))
    engine.destroy()
    close_root(str(where))
    dist.barrier()
    old = alias(where / "global_step3")
    with stillframe.Checkpointer(where) as checkpointer:
        checkpointer.rewind(2)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.copytree(where / "global_step3", where / "kept")
    dist.barrier()
    engine = build(config(1, "bf16"), seed=3)
    path, _ = engine.load_checkpoint(str(where))
    assert path is not None
    assert "global_step2" in path
    assert_same(state_of(engine), states[2])
    update(engine, 9)
    again = state_of(engine)
    engine.save_checkpoint(str(where))
    engine.load_checkpoint(str(where), "global_step3")
    assert_same(state_of(engine), again)
    assert alias(where / "global_step3").epoch > old.epoch
    engine.load_checkpoint(str(where), "kept")
    assert_same(state_of(engine), states[3])
    engine.destroy()


def strangers(root: Path) -> None:
    """Directories of the other engine, files that are gone or damaged, another number of ranks."""
    theirs, mine = root / "theirs", root / "mine"
    settings = config(1, "bf16")
    default = {key: value for key, value in settings.items() if key != "datastates_ckpt"}
    engine = build(default)
    update(engine, 0)
    engine.save_checkpoint(str(theirs), "tag")
    engine.destroy()
    engine = build(settings)
    update(engine, 0)
    engine.save_checkpoint(str(mine), "tag")
    engine.save_checkpoint(str(mine), "torn")
    engine.load_checkpoint(str(mine), "tag")
    fails(lambda: engine.load_checkpoint(str(theirs)), "FormatError", "not written by stillframe", "datastates_ckpt")
    dist.barrier()
    if dist.get_rank() == 0:
        for segment in layout.segments(mine, stillframe.Catalog(mine).steps()[-1]):
            os.truncate(segment, segment.stat().st_size - 5000)
    dist.barrier()
    fails(lambda: engine.load_checkpoint(str(mine), "torn"), "IntegrityError", "bytes instead of")
    dist.barrier()
    if dist.get_rank() == 0:
        for missing in (mine / "tag").glob("*_optim_states.pt"):
            missing.unlink()
    dist.barrier()
    fails(lambda: engine.load_checkpoint(str(mine), "tag"), "NotFoundError", "optim_states.pt")
    engine.destroy()
    engine = build(default)
    fails(lambda: engine.load_checkpoint(str(mine), "torn"), "IntegrityError", "bytes instead of")
    engine.destroy()
    no_pickle_is_run(root / "foreign")


class Runs:
    """Code of somebody else's, in a file that is unpickled."""

    has_run = False

    @classmethod
    def run(cls) -> None:
        cls.has_run = True

    def __reduce__(self) -> Any:
        return Runs.run, ()


def no_pickle_is_run(where: Path) -> None:
    """Nor by DeepSpeed itself, which reads some files without the engine."""
    engine = build(config(3, "bf16"))
    update(engine, 0)
    engine.save_checkpoint(str(where), "tag")
    engine.destroy()
    dist.barrier()
    if dist.get_rank() == 0:
        for file in (where / "tag").glob("*_optim_states.pt"):
            torch.save(Runs(), file)
    dist.barrier()
    for options in ({}, {"load_optimizer_states": False}, {"load_module_only": True, "load_optimizer_states": False}):
        engine = build(config(3, "bf16"), seed=1)
        fails(lambda: engine.load_checkpoint(str(where), "tag", **options), "FormatError", "not written by stillframe")  # noqa: B023
        engine.destroy()
    engine = build(config(3, "bf16", checkpoint={"load_universal": True}), seed=1)
    fails(lambda: engine.load_checkpoint(str(where), "tag"), "FormatError", "universal", '"allow_pickle"')
    engine.destroy()
    assert not Runs.has_run


def exported(root: Path) -> None:
    """DeepSpeed's own tools read what is exported."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    for stage in (2, 3):
        where, to = root / f"export-{stage}", root / f"plain-{stage}"
        settings = config(stage, "bf16")
        engine = build(settings)
        update(engine, 0, 2)
        engine.save_checkpoint(str(where), "here", client_state={"note": argparse.Namespace(x=1)})
        expected = state_of(engine)
        engine.destroy()
        dist.barrier()
        if dist.get_rank() == 0:
            assert ours.export(where, None, to) == "here"
            weights = get_fp32_state_dict_from_zero_checkpoint(str(to), "here")
            assert torch.equal(weights["first.bias"].bfloat16(), expected[0]["first.bias"])
        dist.barrier()
        other = build({key: value for key, value in settings.items() if key != "datastates_ckpt"}, seed=1)
        path, client = other.load_checkpoint(str(to))
        assert path is not None
        assert client["note"] == argparse.Namespace(x=1)
        assert_same(state_of(other), expected, f"stage {stage}, exported")
        other.destroy()


def broken(root: Path) -> None:
    """A save that breaks off leaves nothing; one that failed is told once, and keeps nobody from loading or saving."""
    where = root / "broken"
    engine = build(config(1, "bf16"))
    update(engine, 0)
    engine.save_checkpoint(str(where), "good")
    expected = state_of(engine)
    update(engine, 1)
    optimizer_state = engine.optimizer.state_dict
    engine.optimizer.state_dict = lambda: 1 / 0
    fails(lambda: engine.save_checkpoint(str(where), "torn"), "ZeroDivisionError")
    engine.optimizer.state_dict = optimizer_state
    update(engine, 2)
    engine.load_checkpoint(str(where))
    assert_same(state_of(engine), expected)
    assert (where / "latest").read_text() == "good"
    assert not (where / "torn").exists()
    odd = {"x": {signal.SIGTERM: 1, Odd(1).__class__: 2}}  # keys that cannot be stored, on rank 0's file only
    fails(lambda: engine.save_checkpoint(str(where), "keys", client_state=odd), "UnsupportedStateError", "/x", "dict")
    dist.barrier()
    blocked = layout.next_dir(where, 5, is_running=True)
    if dist.get_rank() == 0:
        blocked.write_text("in the way")
    dist.barrier()
    engine.save_checkpoint(str(where), "tag5")
    time.sleep(1)
    engine.load_checkpoint(str(where))  # warns
    assert_same(state_of(engine), expected)
    dist.barrier()
    if dist.get_rank() == 0:
        blocked.unlink()
    dist.barrier()
    engine.save_checkpoint(str(where), "tag5")
    engine.save_checkpoint(str(where), "tag6")
    engine.destroy()
    dist.barrier()
    assert (where / "latest").read_text() == "tag6"
    assert (where / "tag5").is_dir()


def every_stage(root: Path) -> None:
    """Something fails at each stage on each rank: all are told, with its number, and the next save works."""
    engine = build(config(2, "bf16"))
    where = root / "stages"
    good: list[str] = []

    def breaks(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("on purpose")

    kinds = [
        (CheckpointEngine, "create", (0, 1)),
        (CheckpointEngine, "save", (0, 1)),
        (spi, "issue", (0,)),
        (Admission, "enter", (0, 1)),
        (spi.LiveState, "state", (0, 1)),
        (spi, "save", (0, 1)),
    ]
    for owner, name, ranks in kinds:
        for rank in ranks:
            began = time.monotonic()
            update(engine, len(good))
            place = mock.patch.object(owner, name, breaks) if dist.get_rank() == rank else contextlib.nullcontext()
            words = ["on purpose"] if dist.get_rank() == rank else [f"rank {rank} could not save", "on purpose"]
            with place:
                fails(lambda: engine.save_checkpoint(str(where), "broken"), *words)
            good.append(f"{name}{rank}")
            engine.save_checkpoint(str(where), good[-1])
            assert time.monotonic() - began < 60, (name, rank)
    update(engine, len(good))
    engine.save_checkpoint(str(where), "last")
    expected = state_of(engine)
    engine.destroy()
    dist.barrier()
    assert not (where / "broken").exists()
    assert all((where / tag).is_dir() for tag in good), good
    other = build(config(2, "bf16"), seed=4)
    path, _ = other.load_checkpoint(str(where))
    assert path is not None
    assert_same(state_of(other), expected)
    other.destroy()


def universal(source: Path, to: Path) -> None:
    alone = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    command = [sys.executable, "-W", "ignore", "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    subprocess.run(
        [*command, "--input_folder", str(source), "--output_folder", str(to)],
        env=alone,
        check=True,
        capture_output=True,
    )
    assert (to / "zero" / "first.bias" / "fp32.pt").exists()


def left(root: Path) -> None:
    """The interpreter ends with a save under way, without destroy()."""
    engine = build(config(2, "bf16"))
    update(engine, 0)
    engine.save_checkpoint(str(root / "left"), "tag")
    globals()["alive_at_the_end"] = engine


def moe(root: Path) -> None:
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    class Mixture(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(SIZE, SIZE)
            self.mixed = MoE(SIZE, torch.nn.Linear(SIZE, SIZE), num_experts=4, ep_size=2, k=1, min_capacity=0)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            found, *_ = self.mixed(self.first(batch))
            loss: torch.Tensor = found.float().square().mean()
            return loss

    def made(seed: int) -> Any:
        torch.manual_seed(seed)
        model = Mixture()
        groups = split_params_into_different_moe_groups_for_optimizer(
            {"params": list(model.parameters()), "name": "all"}
        )
        optimizer = torch.optim.Adam(groups, lr=0.01)
        settings = config(0, "fp32")
        del settings["optimizer"]
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
        return engine

    where = str(root / "moe")
    engine = made(0)
    update(engine, 0, 2)
    expected = state_of(engine)
    engine.save_checkpoint(where)
    update(engine, 2)
    engine.destroy()
    other = made(1)
    assert other.load_checkpoint(where)[0] is not None
    assert_same(state_of(other), expected, "moe")
    other.destroy()


def pipeline(root: Path) -> None:
    from deepspeed.pipe import PipelineModule

    def made(seed: int) -> Any:
        torch.manual_seed(seed)
        layers = [torch.nn.Linear(SIZE, SIZE), torch.nn.BatchNorm1d(SIZE), torch.nn.Linear(SIZE, SIZE), torch.nn.Tanh()]
        model = PipelineModule(layers=layers, num_stages=2, loss_fn=torch.nn.MSELoss())
        settings = {**config(1, "fp32"), "train_batch_size": 4, "gradient_accumulation_steps": 2}
        engine, *_ = deepspeed.initialize(model=model, config=settings)
        return engine

    def batches() -> Any:
        generator = torch.Generator().manual_seed(0)
        while True:
            yield torch.randn(2, SIZE, generator=generator), torch.randn(2, SIZE, generator=generator)

    where = str(root / "pipeline")
    engine, data = made(0), batches()
    engine.train_batch(data)
    expected = frozen(dict(engine.module.state_dict()))
    engine.save_checkpoint(where)
    engine.train_batch(data)
    engine.destroy()
    other = made(1)
    assert other.load_checkpoint(where)[0] is not None
    assert_same(frozen(dict(other.module.state_dict())), expected, "pipeline")
    other.destroy()


def train(root: Path, name: str, die_at: str = "-1", until: str = "8", stage: str = "2") -> None:
    """Save at every step; go on from ``latest``."""
    where = str(root / f"run-{name}")
    engine = build(config(int(stage), "bf16"))
    path, client = engine.load_checkpoint(where)
    at = 0 if path is None else client["at"]
    say(f"resumed at {at}")
    for step in range(at, int(until)):
        update(engine, step)
        engine.save_checkpoint(where, client_state={"at": step + 1})
        say(f"at {step + 1}")
        if step == int(die_at) and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
    (root / name).mkdir(exist_ok=True)
    torch.save(state_of(engine), root / name / f"{dist.get_rank()}.pt")
    say(f"trained {name}")
    engine.destroy()


def fewer(root: Path) -> None:
    """Another number of ranks is DeepSpeed's to refuse."""
    engine = build(config(2, "bf16"))
    try:
        engine.load_checkpoint(str(root / "run-calm"))
    except Exception as error:
        say(str(error))
    engine.destroy()


def main() -> None:
    root = Path(sys.argv[1])
    deepspeed.init_distributed("gloo")
    ours.install()
    for case in sys.argv[2:]:
        name, *arguments = case.split(":")
        globals()[name](root, *arguments)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
