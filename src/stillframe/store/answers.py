"""What an error of an object store's library means, in a line, and what to do about it."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import urlsplit

from stillframe.errors import StorageError
from stillframe.store.clouds import cloud_of

_BODY = re.compile(r":\s*\ufeff?(<\?xml|<!doctype|<html|\{)", re.IGNORECASE)
"""Where it begins, if it is for programs or browsers."""
_CODE = re.compile(r"<Code>(\w+)</Code>|\"error\"\s*:\s*\"(\w+)\"")
_NO_IDENTITY = re.compile(r"169\.254\.169\.254|metadata\.google\.internal|/computeMetadata/")
_NO_TLS = "BadScheme"
_REQUEST = re.compile(r"Error performing \w+ (?P<url>\S+) in (?P<took>\S+?)(, after (?P<times>\d+) retries.*?)? +- ")
_ANSWERED = "Server returned non-2xx status code: "
_ANSWER = re.compile(_ANSWERED + r"(?P<status>\d{3}[ \w-]*)(:|\s*$)")
_SECRET = re.compile(r"(?<=://)[^/@\s]*@")
"""In the URL of a server: who asks, and the password."""
_UNANSWERED = re.compile(r"HTTP error: |error sending request|error decoding response body")
_CAUSE = re.compile(r'(?:message|error): "([^"]*)"')


class _Advice(NamedTuple):
    signs: re.Pattern[str]
    """Codes of servers, or the status."""
    text: str


_ADVICE = (
    _Advice(
        re.compile("ExpiredToken|TokenRefreshRequired|RequestExpired|InvalidToken|token is expired"),
        "the credentials have expired: renew them. Keys in storage_options= stay as they are; those of a role, of a "
        "web identity or of a profile renew themselves",
    ),
    _Advice(
        re.compile("invalid_grant|invalid_client"),
        "no token is given for these credentials: they were revoked, or have expired; renew them",
    ),
    _Advice(
        re.compile("RequestTimeTooSkewed"),
        "the clocks of this machine and of the server are too far apart: set them right",
    ),
    _Advice(
        re.compile("Quota|StorageFull|507 "),
        "there is no room, or a quota is reached: make room there (keep=…, or stillframe prune), or raise it",
    ),
    _Advice(
        re.compile("AccessDenied|AuthorizationPermissionMismatch|InsufficientAccountPermissions|ReadOnly"),
        "look at the credentials and at what they may do: they must be allowed to read, write, list and delete there",
    ),
    _Advice(re.compile("40[13] "), "look at the credentials and at what they may do"),
    _Advice(re.compile("SlowDown|50[0-4] |429 "), "it is overloaded, or down"),
)


def trouble(doing: str, error: BaseException, url: str) -> StorageError:
    """With what to do, where the kind of error tells."""
    text = _own(error)
    if _NO_IDENTITY.search(text):
        why = _whom(text) + " does not answer" if is_unanswered(error) else first_line(error)
        what = f"no credentials were given, and this machine has none of its own ({why})"
        return StorageError(f"{doing}: {what}: give {cloud_of(url).credentials}")
    if _NO_TLS in text:
        what = "a server without TLS is used only if base_url or endpoint names it, or with allow_http=True"
        return StorageError(f"{doing}: {_whom(text)} is refused: {what} in storage_options=")
    if is_unanswered(error):
        return StorageError(f"{doing}: {_silence(text)}")
    said = first_line(error)
    advice = next((each.text for each in _ADVICE if each.signs.search(f"{said} ")), "")
    return StorageError(f"{doing}: {said}; {advice}" if advice else f"{doing}: {said}")


def first_line(error: BaseException) -> str:
    """Without the request, which was named, the debugging output that follows, and the server's text but its code."""
    text = str(error).strip() or type(error).__name__
    found = _CODE.search(text)
    code = f" ({found[1] or found[2]})" if found else ""
    line = _SECRET.sub("", _BODY.split(text.splitlines()[0])[0])
    request = _REQUEST.search(line)
    answer = _ANSWER.search(line)
    if request is not None and answer is not None:
        line = f"the server's answer is {answer['status'].strip()}"
        return line + code + _asked(request)
    return line + code


def is_unanswered(error: BaseException) -> bool:
    """Whether nobody has answered, or not to the end: it may have been done."""
    text = _own(error)
    return _UNANSWERED.search(text) is not None and _NO_TLS not in text


def is_denied(error: BaseException) -> bool:
    return re.search("40[13] (Forbidden|Unauthorized)", str(error)) is not None


def _own(error: BaseException) -> str:
    """What the library says, without what the server has said: that may be anything."""
    return str(error).partition(_ANSWERED)[0]


def _whom(text: str) -> str:
    request = _REQUEST.search(text)
    url = urlsplit(request["url"]) if request else None
    return f"{url.scheme}://{url.netloc.rpartition('@')[2]}" if url else "the server"


def _silence(text: str) -> str:
    request = _REQUEST.search(text)
    causes = _CAUSE.findall(text)
    why = causes[-1] if causes else "it took too long" if "TimedOut" in text or "Timeout" in text else "it was cut off"
    asked = _asked(request) if request else ""
    return f"{_whom(text)} does not answer ({why}){asked}: does it run, and can it be reached from here?"


def _asked(request: re.Match[str]) -> str:
    """How long it was tried."""
    took = re.sub(r"(\.\d)\d*", r"\1", request["took"])
    return f", asked {int(request['times']) + 1} times in {took}" if request["times"] else ""
