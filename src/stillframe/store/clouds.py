"""What differs between the object stores that obstore knows: their words, and the names of their options."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from stillframe.errors import ConfigError

AGAIN: Final = "retry_timeout"
"""The option that says how long a server is asked again that does not answer, in seconds."""
_WRITE_AGAIN_S, _READ_AGAIN_S = 300.0, 30.0
"""By default: a keeper, and anybody else."""


class Cloud(NamedTuple):
    """One kind of object store."""

    place: str
    """What it calls the first part of a URL."""
    endpoint_options: tuple[str, ...]
    endpoint_variables: tuple[str, ...]
    credentials: str
    """Where they come from, for messages."""
    condition: str
    """The header that lets a write make an object, but replace none."""


CLOUDS: Final = {
    "s3": Cloud(
        "bucket",
        ("endpoint", "endpoint_url", "aws_endpoint", "aws_endpoint_url"),
        ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
        "access_key_id and secret_access_key in storage_options=, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in "
        "the environment, or AWS_PROFILE",
        "If-None-Match: *",
    ),
    "gs": Cloud(
        "bucket",
        ("base_url", "google_base_url"),
        ("GOOGLE_BASE_URL",),
        "service_account, a path, in storage_options=, or GOOGLE_APPLICATION_CREDENTIALS in the environment",
        "x-goog-if-generation-match: 0",
    ),
    "az": Cloud(
        "container",
        ("endpoint", "azure_endpoint", "azure_storage_endpoint"),
        ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
        "account_key or sas_key in storage_options=, or AZURE_STORAGE_ACCOUNT_KEY in the environment",
        "If-None-Match: *",
    ),
}
"""By the scheme of their URLs."""


def cloud_of(url: str) -> Cloud:
    """Of a URL; S3's words if it is of no kind that a user can name."""
    return CLOUDS.get(url.partition("://")[0], CLOUDS["s3"])


def endpoint_of(url: str, options: Mapping[str, Any]) -> str:
    """The server that was named, if any: by an option, or in the environment as for the vendor's own tools."""
    cloud = cloud_of(url)
    for name, value in options.items():
        if name.lower() in cloud.endpoint_options:
            return str(value)
    return next(filter(None, map(os.environ.get, cloud.endpoint_variables)), "")


def again_s(options: Mapping[str, Any] | None, is_patient: bool = False) -> float:
    """So long a server is asked again.  Raises :class:`ConfigError`."""
    given = (options or {}).get(AGAIN, _WRITE_AGAIN_S if is_patient else _READ_AGAIN_S)
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given < 86400:
        raise ConfigError(f"storage_options[{AGAIN!r}]={given!r}: give a number of seconds")
    return float(given)
