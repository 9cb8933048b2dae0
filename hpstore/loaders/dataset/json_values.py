"""Values that are stored as JSON text: any JSON, lists of strings, chat messages. Pure.

The text is UTF-8 without spaces and without escapes that it can do without; keys keep their order,
as chat templates render them in it. Numbers are Python's: ints of up to 4300 digits, floats in the
shortest form that reads back the same. NaN and infinities are no JSON and are refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

from hpstore.errors import ConfigError
from hpstore.format.untrusted_bytes import no_constant

MOST_DEPTH = 200  # of lists and dicts in each other: parsers of JSON recurse, ours and others
MOST_DIGITS = 4300  # of an int: Python's own limit for its text
_LARGE = 10**MOST_DIGITS
_SHOWN = 40


def encode_value(form: str, value: object) -> bytes:
    """The text of a value. `form`: "json", "chat", or "str" for a list of strings. Raises
    ConfigError, whose message goes on after the name of a field.
    """
    if form == "str":
        check_strings(value)
    else:
        check_json(value)
        if form == "chat":
            check_chat(value)
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"is not valid Unicode: {error}") from None


def decode_value(form: str, data: bytes) -> Any:
    """Inverse of encode_value. Raises ValueError: an attacker may have written the bytes."""
    return _checked(form, _parsed(data, parse_constant=no_constant))


def parse_value(form: str, data: bytes) -> Any:
    """The value of JSON text that another program wrote, in any style, for encode_value. Raises
    ValueError, also for a key that comes twice in an object."""
    value = _parsed(data, object_pairs_hook=unique_keys)
    check_json(value)
    return _checked(form, value)


def _parsed(data: bytes, **how: Any) -> Any:
    try:
        return json.loads(data.decode(), **how)
    except RecursionError:
        raise ValueError("JSON is nested too deeply") from None


def _checked(form: str, value: Any) -> Any:
    if form == "str":
        check_strings(value)
    elif form == "chat":
        check_chat(value)
    return value


def unique_keys(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON whose keys come once each. Raises ValueError."""
    pairs = list(pairs)
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice!r} comes twice")
    return made


def check_strings(value: object) -> None:
    """Raise ConfigError unless this is a list of strings."""
    if not isinstance(value, list):
        raise ConfigError(f"is a {type(value).__name__}, not a list of strings")
    for place, one in enumerate(value):
        if not isinstance(one, str):
            raise ConfigError(f"[{place}] is a {type(one).__name__}, not a str")


def check_json(value: object) -> None:
    """Raise ConfigError unless JSON text gives back an equal value."""
    _check(value, "", 0)


def _check(value: object, path: str, depth: int) -> None:
    if value is None or isinstance(value, str | bool):
        return
    if isinstance(value, int):
        if not -_LARGE < value < _LARGE:
            raise ConfigError(f"{path} is an int of more than {MOST_DIGITS} digits".lstrip())
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ConfigError(f"{path} is {value}, which is no JSON; give None".lstrip())
    elif isinstance(value, dict | list):
        if depth >= MOST_DEPTH:
            raise ConfigError(f"is nested more than {MOST_DEPTH} deep")
        if isinstance(value, list):
            for place, one in enumerate(value):
                _check(one, f"{path}[{place}]", depth + 1)
            return
        for key, one in value.items():
            if not isinstance(key, str):
                raise ConfigError(f"{path} has the key {key!r:.{_SHOWN}}, not a str".lstrip())
            _check(one, f"{path}[{key!r:.{_SHOWN}}]", depth + 1)
    else:
        hint = "; give a list" if isinstance(value, tuple) else ""
        kind = type(value).__name__
        raise ConfigError(f"{path} is a {kind}, which is no JSON{hint}".lstrip())


def check_chat(value: object) -> None:
    """Raise ConfigError unless this is a list of messages: dicts with a `role`, and `content`
    (text, None or a list of parts with a `type`) or `tool_calls` (dicts with a `function` that has
    a `name`). Other keys are free.
    """
    if not isinstance(value, list):
        raise ConfigError(f"is a {type(value).__name__}, not a list of messages")
    for place, message in enumerate(value):
        problem = _message_problem(message)
        if problem:
            raise ConfigError(f"[{place}] {problem}")


def _message_problem(message: object) -> str:
    """What is wrong with one message; "" for nothing."""
    if not isinstance(message, dict):
        return f"is a {type(message).__name__}, not a message: a dict with role and content"
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        return f"has the role {role!r:.{_SHOWN}}, not a text"
    calls = message.get("tool_calls")
    if "content" not in message and not calls:
        return "has neither content nor tool_calls"
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or not isinstance(part.get("type"), str):
                return "has content of several parts, of which one is no dict with a type"
    elif content is not None and not isinstance(content, str):
        return f"has content of {type(content).__name__}, not text or a list of parts"
    return _calls_problem(calls)


def _calls_problem(calls: object) -> str:
    if calls is None:
        return ""
    if not isinstance(calls, list):
        return f"has tool_calls that are a {type(calls).__name__}, not a list"
    for call in calls:
        called = call.get("function") if isinstance(call, dict) else None
        if not isinstance(called, dict) or not isinstance(called.get("name"), str):
            return "has a tool call without a function that has a name"
        if not isinstance(called.get("arguments", ""), str | dict | None):
            return "has a tool call whose arguments are neither text nor a dict"
    return ""


def is_chat(value: object) -> bool:
    """Whether this is a list of one message or more."""
    if not isinstance(value, list) or not value:
        return False
    return not any(_message_problem(message) for message in value)
