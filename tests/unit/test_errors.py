"""Every error survives a trip between processes and tells itself apart on the command line."""

from __future__ import annotations

import pickle
import re
from collections import Counter

import pytest

from hpstore import errors
from hpstore.errors import HpstoreError

DEFINED: list[type[HpstoreError]] = [
    v for v in vars(errors).values() if isinstance(v, type) and v.__module__ == errors.__name__
]
CLASSES: list[type[HpstoreError]] = [kind for kind in DEFINED if not issubclass(kind, Warning)]
every_class = pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)


def test_every_error_of_the_module_is_an_hpstore_error() -> None:
    """Whoever catches HpstoreError catches them all; warnings are the only other classes."""
    assert len(CLASSES) > 30
    assert all(issubclass(kind, HpstoreError) for kind in CLASSES)


@every_class
def test_error_is_rebuilt_from_its_message_alone(kind: type[HpstoreError]) -> None:
    """One string makes an error, and str() is that string: worker processes rely on it."""
    error = kind("device /mnt/a is gone")
    assert str(error) == "device /mnt/a is gone"
    assert error.args == ("device /mnt/a is gone",)


@every_class
def test_error_survives_pickling(kind: type[HpstoreError]) -> None:
    """Class, message and fields are the same after a pickle round trip."""
    error = kind("text", device="d1", key="a/b")
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        back = pickle.loads(pickle.dumps(error, protocol))
        assert type(back) is kind
        assert str(back) == "text"
        assert (back.device, back.key) == ("d1", "a/b")


@every_class
def test_error_has_no_attribute_called_message(kind: type[HpstoreError]) -> None:
    """STYLE: no class attribute `message`; the message is str()."""
    assert not hasattr(kind, "message")


@every_class
def test_error_says_what_it_means(kind: type[HpstoreError]) -> None:
    """Each class has a docstring of its own."""
    assert kind.__doc__
    assert all(kind.__doc__ != base.__doc__ for base in kind.__bases__)


def test_exit_codes_are_unique() -> None:
    """The command line can tell every class from every other; none is 0."""
    codes = Counter(kind.exit_code for kind in CLASSES)
    assert [code for code, count in codes.items() if count > 1] == []
    assert 0 not in codes
    assert all("exit_code" in vars(kind) for kind in CLASSES)


def test_docstring_shows_the_whole_tree() -> None:
    """Each class stands in the module docstring, with its exit code, below its parent."""
    rows = re.findall(r"^( +)(\w+)(?: \(\w+\))? +exit +(\d+)", errors.__doc__ or "", re.MULTILINE)
    shown = {name: (len(indent), int(code)) for indent, name, code in rows}
    assert shown.keys() == {kind.__name__ for kind in CLASSES}
    stack: list[tuple[int, str]] = []
    for indent, name, code in rows:
        stack = [item for item in stack if item[0] < len(indent)]
        kind = getattr(errors, name)
        assert kind.exit_code == int(code)
        if stack:
            assert getattr(errors, stack[-1][1]) in kind.__bases__
        stack.append((len(indent), name))


def test_errors_can_be_caught_as_builtin_ones() -> None:
    """Callers that know nothing of hpstore catch what they expect."""
    assert issubclass(errors.ObjectNotFound, FileNotFoundError)
    assert issubclass(errors.DeviceError, OSError)
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.InvalidKey, ValueError)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (
            "2 of 4 are needed. Nothing was changed, and so on. Bring it: why",
            "2 of 4 are needed. Bring it: why.",
        ),
        ("it may count. Objects are untouched; see pool.toml and try again.", "it may count."),
        ("put failed; the version before it is unchanged.", "put failed."),
        ("no sample is left: nothing was changed; delete it", "no sample is left."),
        (
            "taken for dead. Nothing of it can be read. Save it again.",
            "taken for dead. Save it again.",
        ),
        ("Nothing older is lost", "Nothing older is lost."),
    ],
)
def test_what_went_wrong_is_kept_without_the_promise(text: str, left: str) -> None:
    """The reasons that follow it, too."""
    assert errors.without_promise(HpstoreError(text)) == left
