"""Mutations of inputs: of bytes, of JSON values, of the members of an archive. Seeded, no state.

Plain random changes rarely get past a checksum. So a target says how an input comes apart into
bodies and how it is put together again, sealed: what is mutated is behind the checksum.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

MOST_BYTES = 1 << 20  # of a mutated input
_JSON_MOST = 1 << 16  # longer texts are mutated as bytes
_NUMBERS = [
    *(0, 1, 2, 3, 7, 8, 16, 127, 128, 255, 256, 4095, 4096, 65535, 65536, -1, -2, -512, -1024),
    *((1 << n) + d for n in (15, 20, 31, 32, 40, 47, 53, 62, 63, 64, 70, 100) for d in (-1, 0, 1)),
]
_VALUES: list[Any] = [  # Any: JSON
    *_NUMBERS,
    None,
    True,
    False,
    "",
    "a",
    "$",
    "\0",
    "..",
    "../x",
    "/",
    "\ud800",
    "é" * 40,
    "x" * 3000,
    0.0,
    -1.5,
    1e308,
    -0.0,
    float("inf"),
    float("-inf"),
    float("nan"),
    [],
    {},
    [[]],
    [0],
    [-1],
    [1 << 70],
    {"$": "tensor"},
    {"$": "dict", "v": 5},
    {"$": "tuple"},
    {"a": []},
    "0",
    "-1",
    "1e9",
    "NaN",
    str(1 << 70),
    "9" * 4400,
    "float32",
    "object",
    "O",
    "2024-01-01",
]
_DEPTHS = (*[1] * 6, *[70] * 3, 2000)  # the deepest are dear, and much alike
_TOKENS = [b"\0", b"\xff", b"/", b"..", b"{", b"[", b'"', b"-1", b"9" * 20, b"1e999", b"NaN", b"\n"]

Mutate = Callable[[random.Random, bytes, bytes], bytes]


def mutated(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """A changed copy of `data`; `other` is another input, to take parts of."""
    if data[:1] in (b"{", b"[") and len(data) <= _JSON_MOST and rng.random() < 0.8:
        try:
            return mutated_json(rng, data, other)
        except (ValueError, RecursionError):
            pass
    return mutated_bytes(rng, data, other)


def mutated_bytes(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """One to eight changes of bytes."""
    out = bytearray(data)
    for _ in range(1 << rng.randrange(4)):
        _change(rng, out, other)
    return bytes(out[:MOST_BYTES])


def _change(rng: random.Random, out: bytearray, other: bytes) -> None:
    kind, size = rng.randrange(10), len(out)
    at = rng.randrange(size) if size else 0
    if not size or kind == 0:
        out[at:at] = rng.choice(_TOKENS)
    elif kind == 1:
        out[at] ^= 1 << rng.randrange(8)
    elif kind == 2:
        out[at] = rng.randrange(256)
    elif kind in (3, 4):
        _number(rng, out, at)
    elif kind == 5:
        del out[at : at + rng.choice((1, 2, 4, 8, 64, 512, size))]
    elif kind == 6:
        start = rng.randrange(size)
        out[at:at] = out[start : start + rng.choice((1, 4, 16, 128, 512))]
    elif kind == 7:
        start = rng.randrange(len(other)) if other else 0
        part = other[start : start + rng.choice((1, 4, 16, 128, 1024))]
        out[at : at + len(part)] = part
    elif kind == 8:
        out[at : at + 8] = bytes([rng.choice((0, 0xFF, 0x7F, 0x80))]) * rng.choice((1, 2, 4, 8))
    else:
        del out[at:]


def _number(rng: random.Random, out: bytearray, at: int) -> None:
    """An interesting number over what is there, in one of the usual forms."""
    form = rng.choice(("<B", "<H", ">H", "<I", ">I", "<Q", ">Q", "text"))
    number = rng.choice(_NUMBERS) if rng.random() < 0.7 else rng.getrandbits(rng.randrange(1, 65))
    if form == "text":
        raw = str(number).encode()
    else:
        width = struct.calcsize(form)
        raw = struct.pack(form, number & ((1 << 8 * width) - 1))
    out[at : at + len(raw)] = raw


def mutated_json(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """One to four changes of the values in a JSON text. Raises ValueError for what is none, and for
    what became longer than MOST_BYTES: parsed, such a text takes a hundred times its length."""
    body = [json.loads(data)]  # in a list, so that the whole can be replaced
    for _ in range(1 << rng.randrange(3)):
        holder, key = _pick(rng, body)
        _change_value(rng, body, holder, key)
    text = json.dumps(body[0], ensure_ascii=False).encode(errors="surrogatepass")
    if len(text) > MOST_BYTES:
        raise ValueError("too long")
    return text


def _pick(rng: random.Random, body: list[Any]) -> tuple[Any, Any]:
    """A container in the tree, and a place in it: deeper ones as likely as shallow ones."""
    holder: Any = body
    key: Any = 0
    for _ in range(rng.randrange(12)):
        value = holder[key]
        if isinstance(value, dict) and value:
            holder, key = value, rng.choice(list(value))
        elif isinstance(value, list) and value:
            holder, key = value, rng.randrange(len(value))
        else:
            break
    return holder, key


def _change_value(rng: random.Random, body: list[Any], holder: Any, key: Any) -> None:
    kind = rng.randrange(9)
    value = holder[key]
    if kind <= 3:
        holder[key] = json.loads(json.dumps(rng.choice(_VALUES)))
    elif kind == 4 and len(holder) > (holder is body):
        del holder[key]
        if holder is body:
            holder.append(value)
    elif kind == 5:
        donor, place = _pick(rng, body)
        holder[key] = json.loads(json.dumps(donor[place]))
    elif kind == 6 and isinstance(value, int | float):
        holder[key] = rng.choice(_NUMBERS) if rng.random() < 0.5 else value + rng.choice((-1, 1))
    elif kind == 7 and isinstance(value, list):
        holder[key] = _repeated(value, rng.choice((0, 2, 30))) if len(value) < 1000 else value[:1]
    elif kind == 8:
        for level in bytes(rng.choices((0, 0, 1), k=rng.choice(_DEPTHS))):
            value = {"a": value} if level else [value]
        holder[key] = value
    elif isinstance(value, str):
        holder[key] = mutated_bytes(rng, value.encode(errors="replace"), b"").decode(
            errors="replace"
        )


def _repeated(value: list[Any], times: int) -> list[Any]:
    return value * times if len(json.dumps(value)) * times <= MOST_BYTES else value[:1]


def mutated_parts(
    rng: random.Random, parts: Sequence[bytes], other: Sequence[bytes], mutate: Mutate = mutated
) -> list[bytes]:
    """The bodies of an input with one or two of them changed, and sometimes one more or less."""
    out = list(parts)
    for _ in range(rng.choice((1, 1, 2))):
        if not out:
            break
        at = rng.randrange(len(out))
        out[at] = mutate(rng, out[at], rng.choice(other) if other else b"")
    if len(out) > 1 and rng.random() < 0.1:
        kind, at = rng.randrange(3), rng.randrange(len(out))
        if kind == 0:
            del out[at]
        elif kind == 1:
            out.insert(at, out[rng.randrange(len(out))])
        else:
            out[at], out[-1] = out[-1], out[at]
    return out
