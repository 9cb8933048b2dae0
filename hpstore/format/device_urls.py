"""URLs of devices as they may be shown: without what opens them. Pure.

A pool.toml may hold "sftp://user:password@host/pool" or a token in a query. That is for opening the
device alone: records on other devices, status, logs and errors have the URL without it.
"""

from __future__ import annotations

import re

_LOGIN = re.compile(r"^([A-Za-z][\w+.-]*://)([^/:@]*):([^/]*)@")  # a password may hold an @
_QUERY = re.compile(
    r"(?i)([?&;](?:[\w-]*(?:passw(?:or)?d|pwd|secret|token|signature|key)|sig|sas)=)([^&#;]+)"
)


def without_secrets(url: str) -> str:
    """A URL without its password and tokens; equal for equal places. A path is as it is."""
    if "://" not in url:
        return url
    return _QUERY.sub(r"\1", _LOGIN.sub(r"\1\2@", url))


def has_secrets(url: str) -> bool:
    """Whether a URL holds what must not be shown."""
    return without_secrets(url) != url


def without_secrets_of(url: str, text: str) -> str:
    """A text of somebody else, about a URL, such as an error: what the URL hides is hidden."""
    found = _LOGIN.match(url)
    secrets = [found[3]] if found else []
    secrets += [value for _, value in _QUERY.findall(url)]
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        text = text.replace(secret, "***")
    return text
