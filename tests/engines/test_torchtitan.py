"""torchtitan's Trainer on stillframe: real processes with gloo, FSDP2, a tiny Llama."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import signal
import socket
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import stillframe
from stillframe import Catalog, ConfigError
from tests.loops.conformance import Conformance, assert_goes_on
from tests.loops.driving import LIFE_S, Result, Wish, digest_of

pytestmark = [pytest.mark.timeout(1800), pytest.mark.filterwarnings("ignore")]
_RESULT = "RESULT "
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["tests.engines.titan"])  # to import torchtitan takes ten seconds


def _life(wish: Wish, seat: dict[str, str], said: str) -> None:
    """What a process does, in a session of its own: all that it says goes to a file."""
    os.setsid()
    file = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(seat)
    from tests.engines import titan
    from tests.loops.driving import Life

    titan.live(Life(wish))


class Living:
    """A life under way; as that of :mod:`tests.loops.driving`."""

    def __init__(self, wish: Wish, ranks: int = 1) -> None:
        self.wish = wish
        self._said = tempfile.TemporaryDirectory(prefix="sf-titan-")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        common = {
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        self.processes: list[ForkServerProcess] = []
        for rank in range(ranks):
            seat = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = _forks.Process(target=_life, args=(wish, seat, f"{self._said.name}/{rank}"))
            process.start()
            self.processes.append(process)

    def __enter__(self) -> Living:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid or 0, signal.SIGKILL)  # workers of its loaders
        self._said.cleanup()

    @property
    def is_over(self) -> bool:
        return self.processes[-1].exitcode is not None

    def said(self, rank: int) -> str:
        path = Path(self._said.name, str(rank))
        return path.read_text() if path.exists() else ""

    def errors(self) -> str:
        """What each rank said of its errors; a rank may have found no more than that another one had gone."""
        found = [self.said(rank).partition("Traceback")[2] for rank in range(len(self.processes))]
        return "\n".join(each[:5000] for each in found)

    def wait(self) -> tuple[Result | None, str]:
        """What came of it, ``None`` if it was to be killed; and what rank 0 said."""
        for rank in reversed(range(len(self.processes))):
            process = self.processes[rank]
            process.join(LIFE_S)
            expected = -signal.SIGKILL if self.wish.kill_at else 0
            assert process.exitcode == expected, self.errors()
            if self.wish.kill_at:
                return None, self.said(0)
        (line,) = [each for each in self.said(0).splitlines() if each.startswith(_RESULT)]
        return Result(**json.loads(line.removeprefix(_RESULT))), self.said(0)


def kind(**more: Any) -> str:
    return json.dumps(more)


class TestTorchtitan(Conformance):
    kinds = ("", kind(workers=2))
    kind_on_full_disk = kind(full=True)

    def living(self, wish: Wish, ranks: int = 1) -> Any:
        return Living(wish, ranks)

    @staticmethod
    def root(place: Path) -> Path:
        return place / "checkpoint/_stillframe"

    @staticmethod
    def checkpoints(place: Path) -> dict[int, Path]:
        root = TestTorchtitan.root(place)
        return {step: root / str(step) for step in Catalog(root).steps()}

    @staticmethod
    def read(path: Path) -> str:
        return digest_of(stillframe.load(path.parent, int(path.name), only="model")["model"].values())

    def test_two_ranks_that_are_killed_again_and_again_end_alike(self, tmp_path: Path) -> None:
        for seed, kill_at in enumerate((2, 6, 9), 1):
            self.die(Wish(str(tmp_path / "run"), kill_at=kill_at, seed=seed, delay_s=0.05 * seed), 2)
        assert_goes_on(self.live(Wish(str(tmp_path / "run"), seed=9), 2), self.calm("", 2))

    def test_another_number_of_ranks_goes_on(self, tmp_path: Path) -> None:
        """Two that shared each tensor become one: it reads the same data, where they were."""
        split = kind(parallelism={"tensor_parallel_degree": 2})
        first = self.live(Wish(str(tmp_path / "run"), steps=5, kind=split), 2)
        again = self.live(Wish(str(tmp_path / "run"), steps=5, seed=2))
        assert (again.parameters, again.optimizer, again.more) == (first.parameters, first.optimizer, first.more)
        on = self.live(Wish(str(tmp_path / "run"), steps=6, seed=2))
        assert on.order == [[(each + 2) % 64 for each in first.order[-1][:2]]]
        back = self.live(Wish(str(tmp_path / "run"), steps=6, kind=split), 2)
        assert (back.parameters, back.optimizer) == (on.parameters, on.optimizer)

    def test_ranks_in_another_order_find_their_data(self, tmp_path: Path) -> None:
        first = self.live(Wish(str(tmp_path / "run"), steps=4), 2)
        again = self.live(Wish(str(tmp_path / "run"), steps=5, kind=kind(reversed=True)), 2)
        following = [each + 4 for each in first.order[-1]]
        assert again.order == [[*following[2:], *following[:2]]]

    def test_data_is_not_divided_anew_unless_it_is_asked_for(self, tmp_path: Path) -> None:
        first = self.live(Wish(str(tmp_path / "run"), steps=5), 2)
        with pytest.raises(AssertionError, match=r"MismatchError(.|\n)*exclude_from_loading"):
            self.live(Wish(str(tmp_path / "run"), steps=5))
        apart = kind(exclude_from_loading=["dataloader"])
        again = self.live(Wish(str(tmp_path / "run"), steps=5, kind=apart))
        assert (again.parameters, again.optimizer) == (first.parameters, first.optimizer)
        self.live(Wish(str(tmp_path / "run"), steps=6, kind=apart))
        with pytest.raises(AssertionError, match=r"MismatchError(.|\n)*exclude_from_loading"):
            self.live(Wish(str(tmp_path / "run"), steps=7), 2)
        assert self.live(Wish(str(tmp_path / "run"), steps=7, kind=apart), 2).more["step"] == 7


# --- the fields of the configuration, in this process ------------------------------------------


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Runs a Trainer of one rank in this process; gives it back."""
    from tests.engines import titan

    def run(steps: int = 4, place: Path = tmp_path, seed: int = 1, **fields: Any) -> Any:
        assert not dist.is_initialized()
        titan.seat()
        trainer = None
        try:
            trainer = titan.configured(Wish(str(place), steps=steps, kind=json.dumps(fields))).build()
            torch.manual_seed(seed)
            if fields.get("create_seed_checkpoint"):
                trainer.checkpointer.save(0, last_step=True)
            else:
                trainer.train()
        finally:
            if trainer is not None:
                trainer.close()
            dist.destroy_process_group()
        return trainer

    # What is said of the rank must not reach the processes of other tests.
    with pytest.MonkeyPatch.context() as patch, mock.patch.dict(os.environ):
        patch.setattr(
            "torchtitan.trainer.time", types.SimpleNamespace(sleep=lambda _: None, perf_counter=time.perf_counter)
        )
        yield run
    gc.enable()  # torchtitan has turned it off


def steps_in(place: Path) -> list[int]:
    return Catalog(place / "checkpoint/_stillframe").steps()


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    found = trainer.model_parts[0].named_parameters()
    return {
        name.replace("_checkpoint_wrapped_module.", ""): getattr(each, "full_tensor", lambda each=each: each)().detach()
        for name, each in found
    }


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def test_which_steps_are_saved(train: Any, tmp_path: Path) -> None:
    train(7, tmp_path / "interval", interval=3)
    assert steps_in(tmp_path / "interval") == [3, 6, 7]
    train(4, tmp_path / "first", interval=3, enable_first_step_checkpoint=True)
    assert steps_in(tmp_path / "first") == [1, 3, 4]
    train(6, tmp_path / "kept", keep_latest_k=2)
    assert steps_in(tmp_path / "kept") == [5, 6]
    train(2, tmp_path / "disabled", enable=False)
    assert not (tmp_path / "disabled/checkpoint").exists()


def test_an_older_step_can_be_gone_back_to(train: Any, tmp_path: Path) -> None:
    train(6)
    again = train(8, load_step=4, seed=2)
    assert again.step == 8
    assert steps_in(tmp_path) == [1, 2, 3, 4, 5, 6, 7, 8]
    with pytest.raises(FileNotFoundError, match="load_step=77"):
        train(8, load_step=77)


def test_load_only_writes_nothing(train: Any, tmp_path: Path) -> None:
    first = train(3)
    before = sorted(map(str, tmp_path.rglob("*")))
    reader = train(3, load_only=True, seed=2)
    assert_equal(weights(reader), weights(first))
    assert train(5, load_only=True, seed=2).step == 5
    assert sorted(map(str, tmp_path.rglob("*"))) == before
    fresh = train(1, tmp_path / "fresh", load_only=True)
    assert fresh.step == 1
    assert not (tmp_path / "fresh/checkpoint").exists()


def test_what_is_excluded_stays_as_it_is(train: Any, tmp_path: Path) -> None:
    train(3)
    again = train(4, exclude_from_loading=["dataloader", "train_state", "lr_scheduler", "rng"], load_only=True)
    assert again.step == 4
    assert again.ntokens_seen == 4 * 16  # counted from 0
    with pytest.raises(ConfigError, match="exclude_from_loading='data': there is 'train_state', 'model', 'optimizer'"):
        train(4, exclude_from_loading=["data"])


def test_a_seed_is_begun_from(train: Any, tmp_path: Path) -> None:
    seed = train(create_seed_checkpoint=True, last_save_model_only=True)
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == ["step-0"]
    begun = train(0, seed=2)
    assert_equal(weights(begun), weights(seed))


def test_the_model_alone_after_the_last_step(train: Any, tmp_path: Path) -> None:
    """In torchtitan's own format, and dtype; another run begins from it.  The run itself can still be continued."""
    first = train(3, last_save_model_only=True, export_dtype="bfloat16")
    assert (tmp_path / "checkpoint/step-3/.metadata").exists()
    exact = {name: each.to(torch.bfloat16).float() for name, each in weights(first).items()}
    begun = train(0, tmp_path / "other", seed=2, initial_load_path=str(tmp_path / "checkpoint/step-3"))
    assert_equal(weights(begun), exact)
    again = train(5, last_save_model_only=True)
    assert steps_in(tmp_path) == [1, 2, 3, 4, 5]
    assert again.step == 5


def test_hugging_face_opens_the_export_and_it_is_opened(train: Any, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.engines.titan import DIM, LENGTH, VOCABULARY

    trainer = train(3, last_save_model_only=True, last_save_in_hf=True)
    exported = weights(trainer)
    export = tmp_path / "checkpoint/step-3"
    LlamaConfig(
        hidden_size=DIM, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCABULARY, max_position_embeddings=LENGTH, rms_norm_eps=1e-5, tie_word_embeddings=False,
    ).save_pretrained(export)  # fmt: skip
    theirs = LlamaForCausalLM.from_pretrained(export)
    tokens = torch.arange(LENGTH).unsqueeze(0)
    with torch.no_grad():
        expected = trainer.model_parts[0](tokens, positions=tokens)
        expected = getattr(expected, "full_tensor", lambda: expected)()
        torch.testing.assert_close(theirs(tokens).logits, expected, rtol=1e-4, atol=1e-5)
    begun = train(0, tmp_path / "other", seed=2, initial_load_path=str(export), initial_load_in_hf=True)
    assert_equal(weights(begun), exported)


def test_a_run_of_torchtitans_own_is_continued(train: Any, tmp_path: Path) -> None:
    """In the same folder: its checkpoints are read, and never removed."""
    train(3, stock=True)
    again = train(5, seed=2, keep_latest_k=2)
    assert again.step == 5
    assert again.ntokens_seen == 5 * 16
    assert steps_in(tmp_path) == [4, 5]
    assert len(list((tmp_path / "checkpoint").glob("step-*"))) == 3


def test_validation_draws_what_training_does_not_miss(train: Any, tmp_path: Path) -> None:
    """It comes between a save and the next batch, and a resumed run leaves it out."""
    numbers = importlib.import_module("stillframe.integrations.torchtitan.state").Numbers()
    loader = Loading([torch.tensor(1), torch.tensor(2)])
    importlib.import_module("stillframe.integrations.torchtitan.state").watch(loader, numbers)
    torch.manual_seed(5)
    numbers.state_dict()
    expected = torch.rand(3)
    batches = iter(loader)
    torch.rand(100)
    next(batches)
    assert torch.equal(torch.rand(3), expected)
    following = torch.get_rng_state()
    next(batches)
    assert torch.equal(torch.get_rng_state(), following)  # once for each save


class Loading:
    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


# --- the manager alone -------------------------------------------------------------------------


class Part(torch.nn.Module):
    """Some layers of a model, as a rank of a pipeline has them."""

    def __init__(self, *layers: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleDict({str(layer): torch.nn.Linear(4, 4) for layer in layers})
        self.scratch: torch.Tensor
        self.register_buffer("scratch", torch.rand(3), persistent=False)
        if 1 in layers:
            self.seen: torch.Tensor
            self.register_buffer("seen", torch.zeros(3))


def managed(place: Path, *parts: Part, dataloader: Any = None, **how: Any) -> tuple[Any, Any]:
    from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

    from stillframe.integrations.torchtitan import Manager

    groups = [
        ParamGroupConfig(pattern="bias", optimizer_name="Adam", optimizer_kwargs={"lr": 0.1}),
        ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.01}),
    ]
    optimizers = OptimizersContainer.Config(param_groups=groups, **how).build(model_parts=list(parts))
    schedulers = LRSchedulersContainer.Config(warmup_steps=1).build(optimizers=optimizers, training_steps=9)
    manager = Manager.Config(interval=1).build(
        dataloader=dataloader, model_parts=list(parts), optimizers=optimizers, lr_schedulers=schedulers,
        states={}, sd_adapter=None, base_folder=str(place),
    )  # fmt: skip
    return manager, optimizers


def test_a_model_in_parts_is_restored_as_one_and_in_other_parts(tmp_path: Path) -> None:
    """Each part has two kinds of optimizers."""
    parts = [Part(0), Part(1)]
    manager, optimizers = managed(tmp_path, *parts)
    for part in parts:
        for parameter in part.parameters():
            parameter.grad = torch.rand_like(parameter)
    parts[1].seen.add_(7)
    optimizers.step()
    manager.save(1)
    manager.maybe_wait_for_saving()
    manager.close()
    expected = {name: each for part in parts for name, each in part.state_dict().items()}
    for others in ([Part(0, 1)], [Part(1), Part(0)]):
        scratch = [part.scratch.clone() for part in others]
        again, other = managed(tmp_path, *others)
        assert again.load()
        assert_equal({name: each for part in others for name, each in part.state_dict().items()}, expected)
        theirs = other.state_dict()
        for name, value in optimizers.state_dict().items():
            assert torch.equal(theirs[name], value) if isinstance(value, torch.Tensor) else theirs[name] == value, name
        for part, before in zip(others, scratch, strict=True):
            assert torch.equal(part.scratch, before)
        again.close()


def test_the_dtype_of_an_optimizers_state_is_kept(tmp_path: Path) -> None:
    """torch's ``load_state_dict`` gives it that of the parameter."""
    part = Part(0)
    manager, optimizers = managed(tmp_path, part)
    optimizers.state_dict()  # makes it
    in_bf16(optimizers)
    manager.save(1)
    manager.close()
    again, others = managed(tmp_path, Part(0))
    others.state_dict()
    in_bf16(others, 0.0)
    assert again.load()
    kept = {name: each for name, each in others.state_dict().items() if "exp_avg" in name}
    assert {each.dtype for each in kept.values()} == {torch.bfloat16}
    assert all(each.eq(0.5).all() for each in kept.values())
    again.close()


def in_bf16(optimizers: Any, value: float = 0.5) -> None:
    """As ``fused_opt_states_bf16`` has it, which needs CUDA."""
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.full_like(state[name], value, dtype=torch.bfloat16)


def test_what_was_never_tried_is_refused() -> None:
    weights = importlib.import_module("stillframe.integrations.torchtitan.state").Weights

    class Extra(Part):
        def get_extra_state(self) -> Any:
            return {"a": 1}

        def set_extra_state(self, state: Any) -> None:
            pass

    with pytest.raises(ConfigError, match="_extra_state: stillframe does not save"):
        weights([Extra(0)])
