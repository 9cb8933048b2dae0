"""Tensors that cannot be saved as they are, and what to save in their place."""

from __future__ import annotations

import functools
import warnings

import torch

from hpstore.errors import CheckpointError

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
