"""Credentials of object stores, found by reference where a device is opened.

What is found goes to the client that signs with it, and nowhere else: no repr, error or log has it.
"""

from __future__ import annotations

import configparser
import os
import stat
from dataclasses import dataclass, field

from hpstore.errors import ConfigError
from hpstore.runtime.text_files import read_text_file

_FILE_BYTES_MOST = 1 << 20
_ELSEWHERE = ("role_arn", "sso_session", "sso_start_url", "credential_process", "web_identity")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreCredentials:
    """A key and its secret. `token`: of a session, "" for none."""

    key_id: str
    secret: str = field(repr=False)
    token: str = field(default="", repr=False)

    def hidden_in(self, text: str) -> str:
        """The text of a library, as an error, without what must not be shown."""
        for value in sorted(filter(None, (self.secret, self.token)), key=len, reverse=True):
            text = text.replace(value, "***")
        return text


def find_credentials(reference: str, *, where: str) -> StoreCredentials | None:
    """What a reference names now: a file or a profile is read again each time. None for "none" and,
    for "", where the client's own chain (the machine's role) is left to look.

    Raises ConfigError, which names the reference and what it lacks.
    """
    if reference == "none":
        return None
    kind, _, rest = reference.partition(":")
    if kind == "env":
        return _of_environment(rest, where)
    if kind == "file":
        _require_private(rest, where)
        return _of_profile(_sections(rest, where), "default", rest, where)
    if kind == "profile":
        path = _shared_file()
        return _of_profile(_sections(path, where), rest, path, where)
    return _usual(where)


def profile_facts(reference: str, *, where: str) -> dict[str, str]:
    """`region` and `endpoint_url` that AWS' config file has for a profile."""
    found = _config_section(reference.removeprefix("profile:"), where)
    return {key: found[key] for key in ("region", "endpoint_url") if found.get(key)}


def usual_facts(*, where: str) -> dict[str, str]:
    """The same of the environment, and of the profile that it names."""
    asked = {
        "endpoint_url": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
        "region": ("AWS_REGION", "AWS_DEFAULT_REGION"),
    }
    found = profile_facts(os.environ.get("AWS_PROFILE", "default"), where=where)
    for key, names in asked.items():
        if said := next(filter(None, map(os.environ.get, names)), ""):
            found[key] = said
    return found


def asks_elsewhere(*, where: str) -> bool:
    """Whether the profile in use gets its keys from a service or a program: AWS' own tools know
    how, hpstore does not."""
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        return False
    name = os.environ.get("AWS_PROFILE", "default")
    found = {**_config_section(name, where), **_section(_shared_file(), name, where)}
    return any(key.startswith(_ELSEWHERE) or key == "services" for key in found)


def _of_environment(prefix: str, where: str) -> StoreCredentials:
    names = [f"{prefix}_ACCESS_KEY_ID", f"{prefix}_SECRET_ACCESS_KEY"]
    missing = [name for name in names if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            f"{where}: credentials env:{prefix} need {' and '.join(missing)} in the environment of "
            "this process. Nothing was sent."
        )
    return StoreCredentials(
        key_id=os.environ[names[0]],
        secret=os.environ[names[1]],
        token=os.environ.get(f"{prefix}_SESSION_TOKEN", ""),
    )


def _usual(where: str) -> StoreCredentials | None:
    if os.environ.get("AWS_ACCESS_KEY_ID") and os.environ.get("AWS_SECRET_ACCESS_KEY"):
        return _of_environment("AWS", where)
    path, name = _shared_file(), os.environ.get("AWS_PROFILE", "default")
    found = _section(path, name, where)
    if found:
        return _of_profile({name: found}, name, path, where)
    return None


def _shared_file() -> str:
    return os.path.expanduser(os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"))


def _config_section(name: str, where: str) -> dict[str, str]:
    path = os.path.expanduser(os.environ.get("AWS_CONFIG_FILE", "~/.aws/config"))
    return _section(path, name if name == "default" else f"profile {name}", where)


def _section(path: str, name: str, where: str) -> dict[str, str]:
    return _sections(path, where).get(name, {}) if os.path.exists(path) else {}


def _sections(path: str, where: str) -> dict[str, dict[str, str]]:
    parser = configparser.RawConfigParser(strict=False)
    try:
        if os.path.getsize(path) > _FILE_BYTES_MOST:
            raise ConfigError(f"{where}: {path} is too large for a file of credentials")
        parser.read_string(read_text_file(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"{where}: credentials in {path} cannot be read: {reason}") from None
    except configparser.Error:  # its text has the line, which may hold a secret
        raise ConfigError(f"{where}: {path} is not a file of [sections] with key = value") from None
    return {name: dict(parser[name]) for name in parser.sections()}


def _of_profile(
    sections: dict[str, dict[str, str]], name: str, path: str, where: str
) -> StoreCredentials:
    found = sections.get(name)
    if found is None:
        raise ConfigError(f"{where}: {path} has no section [{name}]")
    for needed in ("aws_access_key_id", "aws_secret_access_key"):
        if not found.get(needed):
            raise ConfigError(
                f"{where}: [{name}] of {path} has no {needed}. Roles, SSO and programs are not "
                'asked: put keys in the environment and write credentials = "env:PREFIX".'
            )
    return StoreCredentials(
        key_id=found["aws_access_key_id"],
        secret=found["aws_secret_access_key"],
        token=found.get("aws_session_token", ""),
    )


def _require_private(path: str, where: str) -> None:
    try:
        found = os.stat(path)
    except OSError as error:
        raise ConfigError(
            f"{where}: credentials in {path} cannot be read: {error.strerror}"
        ) from None
    if found.st_mode & 0o007 or not stat.S_ISREG(found.st_mode):
        raise ConfigError(
            f"{where}: {path} holds a secret, and others may read or change it: chmod 600 {path}"
        )
