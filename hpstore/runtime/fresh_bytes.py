"""`bytes` that are filled in place: whoever returns bytes would copy them from a buffer once more,
and fresh memory in pages of 4 KiB costs several times the copy."""

from __future__ import annotations

import ctypes

import numpy as np

from hpstore.codec.galois import Bytes
from hpstore.runtime.buffers import advise_huge

_PYBUF_WRITE = 0x200
_new = ctypes.pythonapi.PyBytes_FromStringAndSize
_new.argtypes, _new.restype = [ctypes.c_void_p, ctypes.c_ssize_t], ctypes.py_object
_address = ctypes.pythonapi.PyBytes_AsString
_address.argtypes, _address.restype = [ctypes.py_object], ctypes.c_void_p
_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]
_view.restype = ctypes.py_object


def fresh_bytes(nbytes: int) -> tuple[bytes, Bytes]:
    """A bytes object and its memory, (nbytes,) uint8, with anything in it.

    The caller owns both. It fills the memory before anything else sees the bytes, and writes there
    no more after that; the array is valid as long as the bytes are. Python's C interface makes
    bytes of a known size this way (PyBytes_FromStringAndSize without a string).
    """
    if not nbytes:
        return b"", np.empty(0, np.uint8)
    made: bytes = _new(None, nbytes)
    address = _address(made)
    advise_huge(address, nbytes)
    return made, np.frombuffer(_view(address, nbytes, _PYBUF_WRITE), np.uint8)
