"""Keys of an AWS profile (``AWS_PROFILE``), by botocore: obstore reads the environment, not the AWS tools' files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from typing import Any, Final

from stillframe.errors import ConfigError

_GIVEN: Final = {"access_key_id", "aws_access_key_id", "skip_signature", "aws_skip_signature"}
_REGION: Final = {"region", "aws_region", "default_region", "aws_default_region"}
_LASTING: Final = timedelta(minutes=10)
"""botocore renews keys that have fewer minutes left; it is asked again before that."""


def with_profile(url: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """What ``from_url`` is to be called with beside: nothing if no profile is named, or keys are given otherwise.

    As with the AWS tools, keys in the environment come first.  Reads the files of the profile, and may ask a server for
    keys.  Raises :class:`ConfigError`.
    """
    name = os.environ.get("AWS_PROFILE", "")
    is_given = any(each.lower() in _GIVEN for each in options) or bool(os.environ.get("AWS_ACCESS_KEY_ID"))
    if not name or is_given or not url.startswith("s3://"):
        return {}
    try:
        import botocore.session
        from botocore.exceptions import BotoCoreError
    except ImportError:
        raise ConfigError(f"{url}: AWS_PROFILE={name} needs botocore; pip install botocore, or unset it") from None
    try:
        session = botocore.session.Session()
        keys = session.get_credentials()
        region = session.get_config_variable("region")
    except BotoCoreError as error:
        raise ConfigError(f"{url}: AWS_PROFILE={name}: {error}") from None
    if keys is None:
        raise ConfigError(f"{url}: AWS_PROFILE={name}: there are no keys in this profile")

    def provide() -> dict[str, Any]:
        now = keys.get_frozen_credentials()
        until = datetime.now(timezone.utc) + _LASTING
        return {
            "access_key_id": now.access_key, "secret_access_key": now.secret_key, "token": now.token,
            "expires_at": until,
        }  # fmt: skip

    is_placed = any(each.lower() in _REGION for each in options) or bool(os.environ.get("AWS_REGION"))
    return {"credential_provider": provide} | ({"region": region} if region and not is_placed else {})
