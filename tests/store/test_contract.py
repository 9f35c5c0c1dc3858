"""Both stores keep the contract, with faults; and the suite finds stores that do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from stillframe.store.memory import Fault, MemoryBackend, MemoryStore
from stillframe.store.protocol import Capabilities, Data
from stillframe.testing.store_contract import Clients, check_store, store_contract
from tests.store.support import SPARE, posix_clients, small_blobs_reused


class MemoryFaults:
    def __init__(self, backend: MemoryBackend) -> None:
        self._backend = backend
        self._armed: tuple[Fault, int] | None = None

    def arm(self, fault: Fault, step: int) -> None:
        self._armed = fault, step % 3

    def disarm(self) -> None:
        self._armed = None

    def land(self) -> None:
        self._backend.land()

    def inject(self, verb: str, key: str) -> Fault | None:
        if self._armed is None:
            return None
        fault, step = self._armed
        self._armed = (fault, step - 1) if step else None
        return None if step else fault


def memory_clients(kind: type[MemoryStore] = MemoryStore, lands_late: bool = False) -> Clients:
    backend = MemoryBackend(lands_late)
    faults = MemoryFaults(backend)
    return Clients((kind(backend, faults.inject), kind(backend, faults.inject)), faults)


def spare_clients() -> Clients:
    clients = posix_clients(spare=SPARE)
    reused = small_blobs_reused()
    reused.__enter__()

    def close() -> None:
        reused.__exit__(None, None, None)
        clients.close()

    return Clients(clients.stores, clients.faults, close, clients.ignored)


TestMemory = store_contract(memory_clients)
TestMemoryThatLandsLate = store_contract(lambda: memory_clients(lands_late=True))
TestPosix = store_contract(posix_clients)
TestPosixWithSpares = store_contract(spare_clients)
TestPosixWithoutLinks = store_contract(lambda: posix_clients(has_links=False), examples=30)
TestPosixThatLandsLate = store_contract(lambda: posix_clients(is_local=False))


class PutNewOverwrites(MemoryStore):
    def put_new(self, key: str, data: Data) -> bool:
        self.put(key, data)
        return True


class PutNewForgetsItsOwn(MemoryStore):
    def put_new(self, key: str, data: Data) -> bool:
        return self.head(key) is None and super().put_new(key, data)


class LandsLateAndDeniesIt(MemoryStore):
    """The first client's word: nothing lands late.  It lets the backend do so."""

    @property
    def caps(self) -> Capabilities:
        return Capabilities(is_memory=True)

    def perform(self, verb, key, work):  # type: ignore[no-untyped-def]
        try:
            return super().perform(verb, key, work)
        except Exception:
            if verb == "delete":
                self.backend._late.append(work)
            raise


class ReadsOneByteTooFew(MemoryStore):
    def read(self, key: str, start: int, into: memoryview) -> int:
        return super().read(key, start, into[: max(len(into) - 1, 1)])


class DeletesTheFirstOnly(MemoryStore):
    def delete(self, keys):  # type: ignore[no-untyped-def]
        super().delete(keys[:1])


@pytest.mark.parametrize(
    "broken", [PutNewOverwrites, PutNewForgetsItsOwn, LandsLateAndDeniesIt, ReadsOneByteTooFew, DeletesTheFirstOnly]
)
def test_a_store_that_breaks_the_contract_is_found(broken: type[MemoryStore]) -> None:
    with pytest.raises(AssertionError):
        check_store(lambda: memory_clients(broken), examples=2000, shrinks=False)  # it stops at the first


@pytest.mark.parametrize("broken", [PutNewOverwrites, LandsLateAndDeniesIt, DeletesTheFirstOnly])
def test_any_sequence_alone_finds_it(broken: type[MemoryStore]) -> None:
    with pytest.raises(AssertionError):
        check_store(lambda: memory_clients(broken), examples=2000, only="any_sequence", shrinks=False)


@pytest.mark.torture
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("make", [spare_clients, lambda: posix_clients(is_local=False)])
def test_long_sequences(make: Callable[[], Clients]) -> None:
    check_store(make, examples=3000, steps=60)
