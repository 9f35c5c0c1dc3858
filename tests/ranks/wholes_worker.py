"""Run for test_wholes.py: weights that ranks divide, made whole twice, compared with what was divided."""

from __future__ import annotations

import os
import sys
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from stillframe import StillframeError
from stillframe.integrations.transformers import wholes
from tests.ranks import saying
from tests.ranks.leaving import leave

RANK = int(os.environ["RANK"])
SHAPES: dict[str, tuple[int, ...]] = {
    "even": (6, 5),
    "uneven": (7, 3),  # 3, 3 and 1 rows
    "two of three": (4, 2),  # 2, 2 and none
    "row": (1, 9),
    "nothing": (0, 4),
    "bias": (5,),
}


def by_rows(full: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """As ``distribute_tensor`` does, also for dtypes that gloo does not send."""
    parts = full.chunk(mesh.size())
    part = parts[RANK] if len(parts) > RANK else full[:0]
    return DTensor.from_local(part, mesh, [Shard(0)], run_check=False, shape=full.shape, stride=full.stride())


def no_room(made: wholes.Wholes, mesh: DeviceMesh, is_one_file: bool) -> None:
    """On rank 0 alone; all ranks are told, and none is left in an exchange."""
    divided = {"large": by_rows(torch.randn(6, 5), mesh)}
    failing = {"side_effect": RuntimeError("can't allocate memory")} if RANK == 0 else {"side_effect": wholes._room}
    told = RuntimeError if RANK == 0 else StillframeError
    with mock.patch.object(wholes, "_room", **failing), pytest.raises(told, match="can't allocate memory"):
        made.make(divided, is_one_file=is_one_file)


def main(_: str) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    exchanged: list[int] = []
    stock = dist.all_to_all_single

    def counted(found: torch.Tensor, sent: torch.Tensor, *arguments: Any, **more: Any) -> Any:
        exchanged.append(found.numel())
        return stock(found, sent, *arguments, **more)

    dist.all_to_all_single = counted  # type: ignore[assignment]
    for is_one_file in (False, True):
        made = wholes.Wholes()
        no_room(made, mesh, is_one_file)
        for save in range(3):
            torch.manual_seed(save)
            full = {
                f"{name} {dtype}": torch.randn(shape).to(dtype)
                for name, shape in SHAPES.items()
                for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn)
            }
            if save == 2:  # of another dtype than before
                full = {name: each.double() if each.dtype is torch.float32 else each for name, each in full.items()}
            divided = {name: by_rows(each, mesh) for name, each in full.items()}
            full["columns"], full["replicated"] = torch.randn(4, 9), torch.randn(3, 3)
            divided["columns"] = distribute_tensor(full["columns"], mesh, [Shard(1)])
            divided["replicated"] = distribute_tensor(full["replicated"], mesh, [Replicate()])
            boxes = made.make(divided, is_one_file=is_one_file)
            assert boxes.keys() == full.keys() == made.owners.keys()
            for name, each in full.items():
                here = boxes[name].tensor
                assert boxes[name].shape == each.shape
                assert here.dtype == each.dtype
                if made.owners[name] == RANK:
                    assert here.view(torch.uint8).equal(each.view(torch.uint8)), name
                elif each.numel():
                    assert here.numel() == 0, name
        owners = set(made.owners.values())
        assert owners == ({0} if is_one_file else {0, 1, 2})
    saying.say(f"[{RANK}] received {sum(exchanged)}")
    leave()


main(*sys.argv[1:])
