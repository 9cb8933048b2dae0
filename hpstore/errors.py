"""Every error that hpstore raises on purpose.

    HpstoreError                     exit 1
      ConfigError (ValueError)       exit 2   a setting, geometry or file of settings is wrong
        AlreadyClosed                exit 6   a pool, dataset, reader or loader that was closed
        RegistersForeign             exit 7   the pool's registers are elsewhere, or lost
        PoolKeyError                 exit 9   pool.toml lacks the pool's key, or has another one
      InvalidKey (ValueError)        exit 3   a key that cannot name an object
      ObjectNotFound (FileNotFoundError) exit 4
      VersionConflict                exit 5   if_absent / if_version did not hold
      SomeFailed                     exit 8   of many objects: which are done, and why others not
      DeviceError (OSError)          exit 10
        DeviceMissing                exit 11  not there, wiped, or unmounted
        DeviceForeign                exit 12  belongs to another pool
        DeviceTimeout                exit 13  no answer within the deadline
        DeviceFull                   exit 14
        DeviceReadOnly               exit 15
        DeviceInUse                  exit 16  already belongs to a pool
        ReadAbandoned                exit 17  nobody waits for it any more; the device was not asked
        DescriptorsExhausted         exit 18  this process has too many open files
        DeviceDenied                 exit 19  this user has no rights there
      FormatTooNew                   exit 20  written by a newer hpstore
      IntegrityError                 exit 21  bytes do not match their checksum
        NotAuthentic                 exit 24  nor what the pool's key makes of them
        BlocksDamaged                exit 22  blocks of one column; its others can be used
        MalformedFile                exit 23  a file that was named is not what it is said to be
      RedundancyError                exit 30
        TooFewDevices                exit 31  a write or a membership change cannot be made safe
          PoolFull                   exit 37  devices have too few bytes or inodes left for it
        TooManyErasures              exit 32  more units lost than parity can replace
        RegistersUnavailable         exit 36  no majority of devices can be locked, or etcd is away
      MembershipError                exit 33  a membership change is refused
      ThreadsExhausted               exit 38  this process may start no more threads
      LockTimeout                    exit 34
      BudgetExceeded                 exit 35
      CheckpointError                exit 40
        CheckpointMismatch           exit 41  state and manifest do not fit
        StepVoid                     exit 42  another rank could not do this step: do it again
        StepBroken                   exit 43  no step can follow in this process
      IngestError                    exit 45  a record or a source cannot be taken
      ForecastError                  exit 70   a drive-stats file or a model cannot be used
        ForecastRefused              exit 71   the model's card does not cover these drives
      DirectError                    exit 60  a read straight into GPU memory failed
        DirectUnavailable            exit 61  this process, file or memory cannot take part in one

The constructor is (message, **optional keywords): worker processes rebuild an error from its
message alone, so the message carries every fact. Each class has its own exit code for the
command line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

# how messages say what is as it was before, to the end of that sentence
_PROMISE = re.compile(
    r"[;,.:]? (?:[Nn]othing (?:was|of)|Objects are untouched|[Tt]he membership is unchanged"
    r"|the version before it is unchanged)\b.*?(?=\.(?: |$)|$)",
    re.DOTALL,
)


class HpstoreError(Exception):
    """Base of all hpstore errors."""

    exit_code: ClassVar[int] = 1
    maybe_visible = False  # of a put or delete that raised: it may count all the same

    def __init__(
        self, text: str = "", *, device: str | None = None, key: str | None = None
    ) -> None:
        super().__init__(text)
        self.device = device
        self.key = key

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class ConfigError(HpstoreError, ValueError):
    """A setting, a geometry or a settings file is wrong. Nothing was changed."""

    exit_code = 2


class AlreadyClosed(ConfigError):
    """What was asked for a pool, dataset, reader or loader came after its close()."""

    exit_code = 6


class RegistersForeign(ConfigError):
    """The pool's registers are not where this process looks: in another run directory, in etcd that
    it cannot use, or lost. Reading and plain puts go on."""

    exit_code = 7


class PoolKeyError(ConfigError):
    """pool.toml has not the key that the pool was made with. Nothing was read or changed."""

    exit_code = 9


class InvalidKey(HpstoreError, ValueError):
    """The key cannot name an object."""

    exit_code = 3


class ObjectNotFound(HpstoreError, FileNotFoundError):
    """No object of that key exists."""

    exit_code = 4


class VersionConflict(HpstoreError):
    """A conditional put did not hold, or a newer version took the place of this one."""

    exit_code = 5


class SomeFailed(HpstoreError):
    """Of many objects that were put or deleted together, some were not. The others are, durably.

    `done`: the keys of these, in the order given. `failed`: the error of each other key. Both are
    there where the error was made in this process; the message counts them and names the first.
    """

    exit_code = 8
    done: tuple[str, ...] = ()
    failed: Mapping[str, Exception] = MappingProxyType({})


class DeviceError(HpstoreError, OSError):
    """A device failed an operation."""

    exit_code = 10


class DeviceMissing(DeviceError):
    """The device is not there: no path, no identity, or another filesystem under the path."""

    exit_code = 11


class DeviceForeign(DeviceError):
    """The device belongs to another pool or carries another identity than recorded."""

    exit_code = 12


class DeviceTimeout(DeviceError):
    """A device did not answer within its deadline. The operation may still complete."""

    exit_code = 13


class DeviceFull(DeviceError):
    """No space left on the device."""

    exit_code = 14


class DeviceReadOnly(DeviceError):
    """The device refuses writes."""

    exit_code = 15


class DeviceInUse(DeviceError):
    """The path already holds a device of some pool."""

    exit_code = 16


class ReadAbandoned(DeviceError):
    """The file was closed before the device came to the read. Says nothing of the device."""

    exit_code = 17


class DescriptorsExhausted(DeviceError):
    """This process, or this machine, has no file descriptor left. Says nothing of a device, nor of
    what is stored: raise `ulimit -n`, or close files."""

    exit_code = 18


class DeviceDenied(DeviceError):
    """This user has no rights on a device's files. Says nothing of the device, nor of what is
    stored: its owner can give them, see the message."""

    exit_code = 19


class FormatTooNew(HpstoreError):
    """Written by a newer hpstore. Nothing was read or changed; upgrade to use it."""

    exit_code = 20


class IntegrityError(HpstoreError):
    """Bytes on a device do not match their checksum."""

    exit_code = 21


class NotAuthentic(IntegrityError):
    """Bytes carry no MAC of this pool's key, or that of another key: no writer of it made them."""

    exit_code = 24


class BlocksDamaged(IntegrityError):
    """Blocks of one column do not match their checksums; its other blocks can be used.

    `blocks`: their numbers in the column, where the error was made in this process.
    """

    exit_code = 22
    blocks: tuple[int, ...] = ()


class RedundancyError(HpstoreError):
    """There is not enough redundancy for the operation."""

    exit_code = 30


class RedundancyWarning(UserWarning):
    """Something is stored, and survives fewer losses than the pool's parity."""


class TooFewDevices(RedundancyError):
    """Too few devices answered. Earlier data is unchanged, unless `maybe_visible`."""

    exit_code = 31


class PoolFull(TooFewDevices):
    """Too few devices have bytes and inodes left. What is stored is untouched and can be read."""

    exit_code = 37


class TooManyErasures(RedundancyError):
    """More units are lost than parity can replace. Nothing was deleted.

    `damaged`: all that there was has been looked at, so no device brings it back. `away`: devices
    that did not answer, or have left, may have what is missing.
    """

    exit_code = 32
    damaged = False
    away = True


class RegistersUnavailable(RedundancyError):
    """What excludes other processes does not answer: too few devices, or the registers outside.
    What is stored is untouched, unless `maybe_visible`; it can be tried again."""

    exit_code = 36


class MembershipError(HpstoreError):
    """A membership change was refused. The membership is unchanged, or the message says how far it
    came."""

    exit_code = 33


class ThreadsExhausted(HpstoreError):
    """This process, or its container, may start no more threads. Says nothing of what is stored:
    raise the limit, or use fewer threads."""

    exit_code = 38


class LockTimeout(HpstoreError):
    """Another process holds the lock past the deadline."""

    exit_code = 34


class BudgetExceeded(HpstoreError):
    """A byte budget could not be met within the deadline."""

    exit_code = 35


class CheckpointError(HpstoreError):
    """A checkpoint could not be saved or restored. Committed checkpoints are unchanged."""

    exit_code = 40


class CheckpointMismatch(CheckpointError):
    """The state given and the recorded one do not fit together."""

    exit_code = 41


class StepVoid(CheckpointError):
    """Another rank could not do a step of a pipeline, so it counts nowhere. Call step() again, with
    the same micro-batches, or end the run; what was committed is untouched.

    Where the other rank's error was one of Python's own (OSError, FloatingPointError), this is one
    of that type, too: one `except` is enough on all ranks.
    """

    exit_code = 42


class StepBroken(CheckpointError):
    """A pipeline's schedule broke off in the middle on this rank, and its peers wait for what it
    did not send. End this process: its peers notice that at once, the next job goes on from the
    newest committed step."""

    exit_code = 43


class IngestError(HpstoreError):
    """A record of a source is bad, or the source changed. Nothing is visible; see the message."""

    exit_code = 45


class MalformedFile(IntegrityError, IngestError, CheckpointError, ConfigError):
    """A file that the user named is damaged, cut, or not what it is said to be. Nothing was taken
    from it.

    It is what callers catch of imports, ingests and settings, too: one class for hostile bytes,
    whatever they were to be.
    """

    exit_code = 23


class ForecastError(HpstoreError):
    """A drive-stats file or a forecast model cannot be used. Nothing was written."""

    exit_code = 70


class ForecastRefused(ForecastError):
    """The model's card does not cover these drives: it says nothing of them."""

    exit_code = 71


class DirectError(HpstoreError):
    """A read straight into GPU memory failed; its target is undefined. Files are unharmed."""

    exit_code = 60


class DirectUnavailable(DirectError):
    """GPUDirect cannot be used here; the path over pinned memory can. Nothing was read."""

    exit_code = 61


def without_promise(error: BaseException) -> str:
    """What went wrong, in words, without the sentence that nothing was changed: for a caller that
    had changed something before the call which failed. Ends with a full stop."""
    return _PROMISE.sub("", str(error)).rstrip(".") + "."
