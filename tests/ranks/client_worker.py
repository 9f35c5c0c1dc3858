"""One process that trains through each way into stillframe: ``client_worker.py CLIENT ROOT train|resume|fail|error``.

What every one of them promises is tested alike (test_clients.py): a save holds the state as it was, whatever happens
to it next; a failure is told; a crash leaves what was committed.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")


def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port()))

import torch  # noqa: E402

import stillframe  # noqa: E402
from tests import layout  # noqa: E402
from tests.ranks.saying import say  # noqa: E402

dcp: Any = importlib.import_module("torch.distributed.checkpoint")
STEPS = 6


class Net(torch.nn.Module):
    """Megabytes of parameters, and a buffer that every forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(1024, 2048), torch.nn.Linear(2048, 1024))
        self.register_buffer("seen", torch.zeros(1 << 20))
        self.seen: torch.Tensor

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        found: torch.Tensor = self.layers(batch)
        return found.square().mean()


class Client:
    """Saves and restores a model and its optimizer, in one of the ways."""

    def __init__(self, root: Path) -> None:
        self.root = root
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer: Any = torch.optim.Adam(self.model.parameters(), lr=0.01)

    def update(self) -> None:
        self.model(torch.ones(2, 1024)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, step: int) -> None: ...

    def settle(self) -> None:
        """Everything saved is committed, or an error is raised."""

    def restore(self) -> int:
        """The step that is restored; 0 if there is none."""
        raise NotImplementedError

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {name: each.clone() for name, each in self.model.state_dict().items()}
        for number, state in enumerate(self.optimizer.state_dict()["state"].values()):
            found.update({f"{number}.{name}": each.clone() for name, each in state.items()})
        return found


class Own(Client):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.checkpointer = stillframe.Checkpointer(root)

    def save(self, step: int) -> None:
        self.checkpointer.save(step, {"model": self.model, "optimizer": self.optimizer})

    def settle(self) -> None:
        self.checkpointer.wait()

    def restore(self) -> int:
        return self.checkpointer.restore({"model": self.model, "optimizer": self.optimizer}).step or 0


class Dcp(Client):
    def state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": 0}

    def save(self, step: int) -> None:
        from stillframe.integrations.dcp import Writer

        dcp.save({**self.state(), "step": step}, storage_writer=Writer(self.root, step=step))

    def restore(self) -> int:
        from torch.distributed.checkpoint.state_dict import set_state_dict

        from stillframe.integrations.dcp import Reader

        if stillframe.Catalog(self.root).latest() is None:
            return 0
        state = self.state()
        dcp.load(state, storage_reader=Reader(self.root))
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        step: int = state["step"]
        return step


class DcpLazy(Dcp):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        from stillframe.integrations.dcp import Stager, Writer

        self.writer = Writer(root)
        self.stager = Stager(self.writer)
        self.response: Any = None

    def save(self, step: int) -> None:
        self.writer.step = step
        state = {**self.state(), "step": step}
        self.settle()
        self.response = dcp.async_save(state, storage_writer=self.writer, async_stager=self.stager)

    def settle(self) -> None:
        if self.response is not None:
            self.response.staging_completion.result()
            self.response.upload_completion.result()


class DeepSpeed(Client):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        import deepspeed

        from stillframe.integrations.deepspeed import install

        deepspeed.ops.__compatible_ops__.clear()  # compile nothing
        install()
        config = {"train_batch_size": 2, "datastates_ckpt": {"host_cache_size": 1}}
        self.engine, *_ = deepspeed.initialize(model=self.model, optimizer=self.optimizer, config=config)

    def update(self) -> None:
        self.engine.backward(self.engine(torch.ones(2, 1024)))
        self.engine.step()

    def save(self, step: int) -> None:
        self.engine.save_checkpoint(str(self.root), client_state={"step": step})

    def settle(self) -> None:
        self.engine.checkpoint_engine.cleanup()

    def restore(self) -> int:
        path, client = self.engine.load_checkpoint(str(self.root))
        return 0 if path is None else int(client["step"])


CLIENTS: dict[str, Callable[[Path], Client]] = {
    "checkpointer": Own, "dcp": Dcp, "dcp-lazy": DcpLazy, "deepspeed": DeepSpeed,
}  # fmt: skip


def train(client: Client, root: Path) -> None:
    """Save at every step, with the next update right behind; then end by SIGKILL, in the middle of the last save."""
    for step in range(1, STEPS + 1):
        client.update()
        torch.save(client.tensors(), root.parent / f"{step}.pt")
        client.save(step)
        if step == STEPS - 1:
            client.settle()
            say(f"committed {step}")
    client.update()
    os.kill(os.getpid(), signal.SIGKILL)


def resume(client: Client, root: Path) -> None:
    step = client.restore()
    assert step in (STEPS - 1, STEPS), step
    expected = torch.load(root.parent / f"{step}.pt")
    got = client.tensors()
    assert got.keys() == expected.keys()
    for name in got:
        assert torch.equal(got[name], expected[name]), name
    say(f"resumed {step}")


def fail(client: Client, root: Path) -> None:
    """Storage that stops working is told of, not later than with the save after; training could go on."""
    client.update()
    client.save(1)
    client.settle()
    before = set(stillframe.Catalog(root).steps())
    for step in (2, 3):
        layout.next_dir(root, step, is_running=True).write_text("in the way")
    try:
        for step in (2, 3):
            client.update()
            client.save(step)
            time.sleep(0.5)
        client.settle()
    except (Exception, dcp.CheckpointException) as error:
        assert "in the way" in str(error) or "directory" in str(error), error  # noqa: PT017
        say(f"told {type(error).__name__}")
    client.update()
    assert set(stillframe.Catalog(root).steps()) == before


def error(client: Client, root: Path) -> None:
    """The program ends by an error of its own, with a save under way."""
    for step in (1, 2):
        client.update()
        client.save(step)
    raise ValueError("on purpose")


def main() -> None:
    name, root, what = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    if name != "checkpointer":
        torch.distributed.init_process_group("gloo")
    globals()[what](CLIENTS[name](root), root)


if __name__ == "__main__":
    main()
