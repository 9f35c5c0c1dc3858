"""Servers, started once for all tests of a process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.servers import azurite as of_azure
from tests.servers import ceph as of_s3
from tests.servers import gcs as of_google
from tests.servers.shared import running


@pytest.fixture(scope="session")
def ceph() -> Iterator[of_s3.Ceph]:
    if why := of_s3.missing():
        pytest.skip(why)
    with running(of_s3.Ceph, "sf-ceph-") as server:
        yield server


@pytest.fixture(scope="session")
def azurite() -> Iterator[of_azure.Azurite]:
    if why := of_azure.missing():
        pytest.skip(why)
    with running(of_azure.Azurite, "sf-azurite-") as server:
        yield server


@pytest.fixture(scope="session")
def gcs() -> Iterator[of_google.Gcs]:
    """A stand-in, and so always there."""
    with running(of_google.Gcs, "sf-gcs-") as server:
        yield server
