"""The states that are saved: their shapes, how a step changes them, and how to tell whether they came back right."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import xxhash
from benchmarks.systems.base import State, tensors_of

_BLOCK_ITEMS = 4 << 20
_PAGE_ITEMS = 1024
"""An update changes one number in each page of 4 KiB: enough to see any snapshot that is torn, and cheap enough that
the update costs next to no CPU, as on a machine whose accelerator does it."""

SHAPES = {
    "layers": "96 tensors of equal size, fp32",
    "large": "10 tensors, fp32",
    "medium": "1,000 tensors, fp32",
    "small": "30,000 tensors, fp32",
    "dtypes": "300 tensors of nine dtypes",
    "objects": "12 tensors and 10,000 Python values",
}
_COUNTS = {"layers": 96, "large": 10, "medium": 1_000, "small": 30_000, "dtypes": 300, "objects": 12}
_DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64,
    torch.int32, torch.uint8, torch.float8_e4m3fn, torch.complex64,
)  # fmt: skip


def make_state(size: int, shape: str = "layers") -> State:
    """About ``size`` bytes in the given shape, half as the model's and half as the optimizer's; not compressible."""
    count = _COUNTS[shape]
    items = max(1, size // 4 // count)
    block = torch.empty(_BLOCK_ITEMS, dtype=torch.int32).random_(generator=torch.Generator().manual_seed(1))
    state: State = {"model": {}, "optimizer": {}}
    for index in range(count):
        raw = torch.empty(items, dtype=torch.int32)
        for at in range(0, items, _BLOCK_ITEMS):
            part = raw[at : at + _BLOCK_ITEMS]
            part.copy_(block[: part.numel()])
        dtype = _DTYPES[index % len(_DTYPES)] if shape == "dtypes" else torch.float32
        whole = raw[: items - items % 2].view(dtype)  # the widest dtype takes two numbers
        columns = math.gcd(whole.numel(), 256)
        tensor = whole.view(-1, columns)
        state["model" if index < count / 2 else "optimizer"][f"layer{index}.weight"] = tensor
    if shape == "objects":
        state["values"] = {
            f"sample{index}": {
                "path": f"shard-{index % 97}/{index}",
                "at": [index, index * 31 % 1009],
                "loss": index / 7,
            }
            for index in range(2_500)
        }
    set_step(state, 0)
    return state


def make_sharded(size: int) -> State:
    """About ``size`` bytes on this rank: the parameters of an FSDP2 model and two moments of each, as DTensors."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    world = torch.distributed.get_world_size()
    layers, width = 8, 256
    rows = max(world, size * world // (3 * layers * 4 * width))
    model = torch.nn.Sequential(*(torch.nn.Linear(width, rows, bias=False) for _ in range(layers)))
    mesh = init_device_mesh("cpu", (world,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    parameters = {name: value.detach() for name, value in model.state_dict().items()}
    moments = {f"{name}.{kind}": torch.zeros_like(value) for name, value in parameters.items() for kind in ("m", "v")}
    state: State = {"model": parameters, "optimizer": moments}
    for _, tensor in tensors_of(state):
        tensor.uniform_()
    set_step(state, 0)
    return state


def numbers_of(state: State) -> Iterator[torch.Tensor]:
    """The numbers that an update changes: one in each page of every tensor."""
    for _, tensor in tensors_of(state):
        flat = tensor.view(-1).view(torch.uint8)
        yield flat[: flat.numel() // 4 * 4].view(torch.int32)[::_PAGE_ITEMS]


def set_step(state: State, step: int) -> None:
    """The update: every page of every tensor changes, and so does a plain value, to what ``step`` says."""
    for index, numbers in enumerate(numbers_of(state)):
        numbers.fill_(step * 1_000_003 + index)
    if "values" in state:
        state["values"]["position"] = step


def scramble(state: State) -> None:
    """Leave nothing of what was there, so that a restore which does nothing is seen."""
    for _, tensor in tensors_of(state):
        tensor.view(-1).view(torch.uint8).zero_()
    if "values" in state:
        for sample in state["values"].values():
            if isinstance(sample, dict):
                sample.update(path="", at=[0, 0], loss=0.0)
        state["values"]["position"] = -1


def digest_of(state: State) -> str:
    """One digest of every byte and every value."""
    digest = xxhash.xxh3_128()
    for path, tensor in tensors_of(state):
        digest.update(f"{path} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    if "values" in state:
        digest.update(repr(_sorted(state["values"])).encode())
    return str(digest.hexdigest())


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return [(key, _sorted(each)) for key, each in sorted(value.items())]
    return list(value) if isinstance(value, (list, tuple)) else value


def bytes_of(state: State) -> int:
    return sum(tensor.numel() * tensor.element_size() for _, tensor in tensors_of(state))
