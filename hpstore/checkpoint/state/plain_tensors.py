"""Tensors that cannot be saved as they are, and what to save in their place."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import compress

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hpstore.errors import CheckpointError

PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})  # of nearly all tensors of a state

_PARTS = {
    torch.sparse_coo: "x.coalesce().indices() and .values()",
    torch.sparse_csr: "x.crow_indices(), .col_indices() and .values()",
    torch.sparse_csc: "x.ccol_indices(), .row_indices() and .values()",
    torch.sparse_bsr: "x.crow_indices(), .col_indices() and .values()",
    torch.sparse_bsc: "x.ccol_indices(), .row_indices() and .values()",
    torch.jagged: "x.values() and .offsets()",
}
_QUANTISED = "x.int_repr(), and x.q_scale() and .q_zero_point() (or those by channel),"


@functools.cache
def _is_copied(dtype: torch.dtype) -> bool:
    """Whether torch copies tensors of a dtype: not those of numbers below a byte (int4), nor bytes
    that are viewed as quantised ones."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # quantised dtypes are deprecated
        try:
            torch.zeros(16, dtype=torch.uint8, device="cpu").view(dtype).clone()
        except RuntimeError:
            return False
    return True


_LOW_ADDRESS = 1 << 32  # a null pointer with an offset into a tensor is below it, memory hardly


def is_freed(value: torch.Tensor) -> bool:
    """Whether a tensor's storage was given back while it goes on to have a shape, as by frameworks
    that shard, between steps, or has none. To read or to fill it ends the process."""
    try:
        if value.data_ptr() >= _LOW_ADDRESS or not value.numel():
            return False
    except RuntimeError:
        return True  # one of torch.func's, which has no storage
    spans = ((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))
    end = (value.storage_offset() + sum(spans) + 1) * value.element_size()
    return value.untyped_storage().nbytes() < end


def is_plain_tensor(value: torch.Tensor) -> bool:
    """Whether a tensor's values are bytes of one dtype that lie in strides."""
    odd = value.layout is not torch.strided or value.is_quantized or value.is_nested
    return not odd and _is_copied(value.dtype)


def require_plain(tensor: torch.Tensor, where: str) -> None:
    """Raise CheckpointError for sparse, nested and quantised tensors, and for dtypes that torch
    does not copy, saying what to save."""
    if is_plain_tensor(tensor):
        return
    if tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested:
        raise CheckpointError(
            f"{where} is a tensor of {tensor.dtype}, which torch itself does not copy; nothing was "
            f"written. Save x.view(torch.uint8), and view that as {tensor.dtype} after restore()"
        )
    if tensor.is_nested and tensor.layout is torch.strided:
        raise CheckpointError(
            f"{where} is a nested tensor, which cannot be saved as it is; nothing was written. "
            "Save x.unbind(), a tuple, and make it of that after restore()"
        )
    layout = str(tensor.layout).removeprefix("torch.")
    parts = _PARTS.get(tensor.layout, "the dense tensors that it is made of")
    if tensor.is_quantized:
        layout, parts = "quantised", _QUANTISED
    raise CheckpointError(
        f"{where} is a {layout} tensor, which cannot be saved as it is; nothing was written. Save "
        f"{parts} and make it of them after restore(), or save .to_dense()"
        + (" (.dequantize() for this one)" if tensor.is_quantized else "")
    )


def has_chunks(value: torch.Tensor) -> bool:
    """Whether a tensor is in parts of which this rank has some, such as a DTensor."""
    return hasattr(value, "__create_chunk_list__")


def require_savable(value: torch.Tensor, where: str) -> None:
    """Raise CheckpointError for a tensor that cannot be saved. Of one in parts (has_chunks), each
    part is for a call of its own."""
    if type(value) in PLAIN_TYPES:
        _require_values(value, where)
        return
    if is_lazy(value):
        raise CheckpointError(
            f"{where} is a parameter without a shape yet, of a lazy module: nothing was written. "
            "Run the module once, or save what has run alone"
        )
    require_plain(value, where)
    if value.is_meta or isinstance(value, FakeTensor):
        raise _without_values(value, where)
    if has_chunks(value):
        return
    if is_traceable_wrapper_subclass(value):
        raise CheckpointError(
            f"{where} is a {type(value).__qualname__}, made of several tensors: it would not be "
            "saved as it is. Save these, or what it stands for, instead."
        )
    _require_memory(value, where)


def _require_values(value: torch.Tensor, where: str) -> None:
    """As require_savable, for a tensor of PLAIN_TYPES."""
    require_plain(value, where)
    if value.is_meta:
        raise _without_values(value, where)
    _require_memory(value, where)


def _require_memory(value: torch.Tensor, where: str) -> None:
    if is_freed(value):
        raise CheckpointError(
            f"{where} is a tensor whose storage was freed, or that has none: it holds no values "
            "now. Nothing was written. Save when whatever shards it has gathered it, or save its "
            "shards"
        )


def _without_values(value: torch.Tensor, where: str) -> CheckpointError:
    kind = "meta" if value.is_meta else "fake"
    return CheckpointError(
        f"{where} is a {kind} tensor: it holds no values to save. Nothing was written"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorColumns:
    """What many tensors are, asked of each once: 10,000 are a part of the stall of every save.

    Equal columns are of tensors that look alike; where they lie is not compared.
    """

    kinds: list[type]
    dtypes: list[torch.dtype]
    shapes: list[torch.Size]
    devices: list[torch.device]
    addresses: list[int] = field(compare=False)  # 0 where there are no bytes, or are chunks


def columns_of(tensors: Mapping[str, torch.Tensor]) -> TensorColumns:
    """Columns of a state's tensors. Raises CheckpointError for one of PLAIN_TYPES, by its path,
    that cannot be saved; require_savable() is for the others."""
    values = list(tensors.values())
    kinds = list(map(type, values))
    try:
        columns = TensorColumns(
            kinds=kinds,
            dtypes=[value.dtype for value in values],
            shapes=[value.shape for value in values],
            devices=[value.device for value in values],
            addresses=list(
                map(torch.Tensor.data_ptr if PLAIN_TYPES.issuperset(kinds) else _address, values)
            ),
        )
    except RuntimeError:  # nested ones have no shape, those of torch.func or sparse no address
        _require_all(tensors)
        raise
    if not all(map(_is_copied, set(columns.dtypes))):  # quantised ones are not, either
        _require_all(tensors)
    elif min(columns.addresses, default=_LOW_ADDRESS) < _LOW_ADDRESS:  # freed, meta or empty
        low = (at < _LOW_ADDRESS for at in columns.addresses)
        _require_all(dict(compress(tensors.items(), low)))
    return columns


def _require_all(tensors: Mapping[str, torch.Tensor]) -> None:
    for path, value in tensors.items():
        if type(value) in PLAIN_TYPES:
            _require_values(value, f"state {path!r}")


def _address(value: torch.Tensor) -> int:
    return 0 if has_chunks(value) else value.data_ptr()
