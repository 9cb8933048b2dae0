"""The kernel's table of mounts, and the escapes of its text. Names in it may be any bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass

MOUNTS = "/proc/self/mountinfo"
_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True, kw_only=True)
class MountEntry:
    """A line of proc_pid_mountinfo(5). Names decode as Python decodes paths."""

    number: str  # major:minor
    place: str
    filesystem: str
    source: str
    options: str  # those of the superblock: ext4's data=ordered is there


def read_mounts(path: str = MOUNTS) -> list[MountEntry]:
    """All mounts, later ones over earlier ones. Raises OSError."""
    with open(path, encoding="utf-8", errors="surrogateescape", newline="\n") as file:
        return parse_mounts(file.read())


def parse_mounts(text: str) -> list[MountEntry]:
    """Parse a table of mounts; other lines are skipped. Pure."""
    found = []
    for line in text.split("\n"):
        fields, _, rest = line.partition(" - ")
        first, last = fields.split(" "), rest.split(" ")
        if len(first) >= 6 and len(last) >= 3:
            found.append(
                MountEntry(
                    number=first[2],
                    place=unescape(first[4]),
                    filesystem=last[0],
                    source=unescape(last[1]),
                    options=last[2],
                )
            )
    return found


def unescape(text: str) -> str:
    """A name of a table of mounts, of fstab(5) too: blanks and the like are octal there."""
    return _OCTAL.sub(lambda found: chr(int(found[1], 8)), text)
