"""The device that the order is proved on is one: it queues, frees late, copies slowly, fails on order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.device import queued
from tests.device.models import Kind, Recipe, Training, on_cpu, train
from tests.device.running import on_device
from tests.support import assert_same, until


def test_no_other_test_sees_it() -> None:
    assert not hasattr(torch, "queued")


@on_device
def test_torch_takes_it_for_an_accelerator() -> None:
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator() == torch.device("queued")
    assert torch.accelerator.device_count() == 2
    assert torch.ones(3, device="queued:1").device == torch.device("queued:1")


@on_device
def test_the_host_runs_ahead_and_streams_know_of_one_another_by_events_only() -> None:
    one, other = torch.Stream("queued"), torch.Stream("queued")
    with queued.on_stream(one):
        x = torch.zeros(8, device="queued")
    one.synchronize()
    with queued.Gate(one):
        with queued.on_stream(one):
            x.add_(1)
            late = x * 2
            event = one.record_event()
        assert not event.query()
        assert not queued.is_idle(one)
        assert queued.peek(x).sum() == 0
        with queued.on_stream(other):
            assert (x + 1).sum().item() == 8  # it does not wait for the other
            other.wait_event(event)
            waits = x + 1
        assert not queued.is_idle(other)
    other.synchronize()
    one.synchronize()
    assert queued.peek(waits).tolist() == queued.peek(late).tolist() == [2.0] * 8


@on_device
def test_it_computes_what_the_cpu_does() -> None:
    tokens, gradients = torch.arange(64).view(4, 16), []
    for device in ("queued:1", "cpu"):
        model = Training(Recipe(devices=(device,))).model
        model(tokens.to(device)).square().mean().backward()
        gradients.append([on_cpu(each.grad) for each in model.parameters()])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)
    kinds: tuple[Kind, ...] = ("plain", "foreach", "fused", "in_backward")
    for kind in kinds:
        assert_same(train(Recipe(kind, dropout=0.2), 2), train(Recipe(kind, dropout=0.2), 2))
    assert set(queued.waiting_ops()) <= {"aten::_local_scalar_dense", "aten::equal"}


@on_device
def test_a_freed_block_is_used_again_by_the_next_allocation_on_its_stream() -> None:
    side = torch.Stream("queued")
    for is_recorded in (False, True):
        x = torch.ones(1000, device="queued")
        torch.accelerator.synchronize()
        with queued.Gate(side):
            with queued.on_stream(side):
                y = x + 1
            if is_recorded:
                x.record_stream(side)
            del x
            torch.empty(3, device="queued")
            if not is_recorded:
                torch.accelerator.current_stream().synchronize()
        side.synchronize()
        torch.accelerator.synchronize()
        reports = queued.take_reports()
        assert len(reports) == (0 if is_recorded else 1), reports
        if is_recorded:
            assert y.sum().item() == 2000


@on_device
def test_a_copy_takes_its_time_and_stops_where_it_is_told() -> None:
    x = torch.ones(1_000_000, device="queued")
    into = torch.zeros(1_000_000)
    torch.accelerator.synchronize()
    before = queued.copied()
    queued.stop_copies(after=1_000_000)
    into.copy_(x, non_blocking=True)
    until(lambda: queued.copied() - before == 1_000_000, "a quarter of the copy")
    assert into.sum() == 250_000
    queued.let_copies_go()
    torch.accelerator.synchronize()
    assert into.sum() == 1_000_000
    pinned = torch.ones(4).pin_memory()
    assert pinned.is_pinned()
    assert not torch.ones(4).is_pinned()
    pageable = torch.ones(4)
    with queued.Gate(torch.accelerator.current_stream()):
        from_pinned, from_pageable = (each.to("queued", non_blocking=True) for each in (pinned, pageable))
        pinned.fill_(2)
        pageable.fill_(2)
    assert (from_pinned.sum().item(), from_pageable.sum().item()) == (8, 4)


@on_device
def test_errors_come_when_they_are_ordered() -> None:
    side = torch.Stream("queued")
    event = side.record_event()
    calls: dict[queued.Call, Callable[[], object]] = {
        "allocate": lambda: torch.empty(8, device="queued"),
        "launch": lambda: torch.ones(8, device="queued"),
        "copy": lambda: torch.ones(8).to("queued"),
        "record": lambda: side.record_event(),
        "wait": lambda: side.wait_event(event),
        "synchronize": lambda: side.synchronize(),
        "stream": lambda: torch.Stream("queued"),
    }
    for name, call in calls.items():
        queued.fail(name, 1)
        with pytest.raises(RuntimeError, match=f"ordered, in {name}"):
            call()
        call()
        queued.fail(name)
        for _ in range(3):
            with pytest.raises(RuntimeError, match="ordered"):
                call()
        queued.reset()
        call()
    queued.fail("allocate", 1, out_of_memory=True)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(8, device="queued")
    queued.set_limit(queued.allocated() + 1000)
    torch.empty(100, device="queued")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2000, device="queued")


@on_device
def test_an_error_in_a_kernel_is_raised_when_somebody_waits() -> None:
    indexes = torch.tensor([99]).to("queued")
    torch.nn.functional.embedding(indexes, torch.ones(3, 3, device="queued"))
    with pytest.raises(RuntimeError, match="a kernel failed: index out of range"):
        torch.accelerator.synchronize()


JOINED = {
    "rows": [torch.arange(5.0), torch.arange(3.0), torch.empty(0)],
    "scalars": [torch.tensor(1.0), torch.tensor(2.0)],
    "two types": [torch.arange(5), torch.arange(3.0)],
    "with gaps": [torch.arange(10.0)[::2], torch.arange(3.0)],
    "two dimensions": [torch.ones(2, 3), torch.zeros(1, 3)],
}


@pytest.mark.parametrize("what", JOINED)
@on_device
def test_tensors_are_joined_as_on_the_host(what: str) -> None:
    tensors = JOINED[what]
    join = torch.cat if tensors[0].dim() else torch.stack
    wanted = join(tensors)
    for device in ("queued:0", "queued:1"):
        with torch.no_grad():
            found = join([each.to(device) for each in tensors])
        assert str(found.device) == device
        assert found.dtype == wanted.dtype
        assert torch.equal(found.cpu(), wanted)
    leaf = tensors[0].float().to("queued").requires_grad_()
    join([leaf, leaf]).sum().backward()
    assert leaf.grad is not None
    assert torch.equal(leaf.grad.cpu(), torch.full(leaf.shape, 2.0))


@on_device
def test_random_numbers_go_on_from_a_state() -> None:
    torch.manual_seed(5)
    first = torch.rand(8, device="queued").cpu()
    states = [torch.queued.get_rng_state(device) for device in range(2)]  # type: ignore[attr-defined]
    drawn = [torch.rand(8, device=f"queued:{device}").cpu() for device in range(2)]
    host = torch.rand(8)
    for device in range(2):
        torch.queued.set_rng_state(states[device], device)  # type: ignore[attr-defined]
        assert torch.equal(torch.rand(8, device=f"queued:{device}").cpu(), drawn[device])
    torch.manual_seed(5)
    assert torch.equal(torch.rand(8, device="queued").cpu(), first)
    assert torch.equal(torch.rand(8), host)  # the host's own is not drawn from by the device
    mine = torch.Generator(device="queued").manual_seed(7)
    state = mine.get_state()
    one = torch.rand(8, device="queued", generator=mine).cpu()
    mine.set_state(state)
    assert torch.equal(torch.rand(8, device="queued", generator=mine).cpu(), one)
