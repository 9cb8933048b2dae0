"""Packing documents of tokens into sequences of one length: what to ask for, and its fields."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from hpstore.errors import ConfigError
from hpstore.loaders.dataset.fields import BFLOAT16, Field
from hpstore.units import whole_argument

DOCUMENT_IDS, POSITION_IDS = "document_ids", "position_ids"
DTYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "int64")


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How a DataLoader packs documents into sequences of tokens.

    Parameters
    ----------
    field
        The ragged field of whole numbers that holds a document's tokens, `Field(dtype, (None,))`.
    length
        Tokens of a sequence.
    separator
        A token that follows on each document, such as the tokenizer's end of text. None: none.
    pad
        What fills the last sequence of an epoch. `beside` has 0 there, and at separators.
    remainder
        Of an epoch, where its tokens are no multiple of `length`: "pad" fills the last sequence,
        "drop" leaves the last `length - 1` tokens or fewer out.
    split
        Whether a document is split where a sequence ends. False: documents that fit into a
        sequence stay whole, laid together by best fit; each sequence is filled up.
    dtype
        Of the tokens in a batch. None: the field's own.
    beside
        Other ragged fields, with a value for each token (such as a mask of the loss): packed alike.

    Raises
    ------
    ConfigError
        One of them cannot be used.
    """

    field: str
    length: int
    separator: int | None = None
    pad: int = 0
    remainder: str = "pad"
    split: bool = True
    dtype: str | None = "int64"
    beside: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.field, str):
            raise ConfigError(f"packing: field {self.field!r} is not the name of a field")
        object.__setattr__(self, "length", whole_argument("length", self.length, least=1))
        for name in ("separator", "pad"):
            value = getattr(self, name)
            if value is None and name == "separator":
                continue
            if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
                raise ConfigError(f"packing: {name} {value!r} is no token: a whole number")
            object.__setattr__(self, name, int(value))
        if self.remainder not in ("pad", "drop"):
            raise ConfigError(f'packing: remainder {self.remainder!r} is neither "pad" nor "drop"')
        if not isinstance(self.split, bool):
            raise ConfigError(f"packing: split {self.split!r} is neither True nor False")
        if not self.split and self.remainder == "drop":
            raise ConfigError(
                'packing: remainder="drop" with split=False: every sequence is filled up there'
            )
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ConfigError(f"packing: dtype {self.dtype!r} is none of {', '.join(DTYPES)}, None")
        if isinstance(self.beside, str):
            raise ConfigError(f"packing: beside={self.beside!r}: give a tuple of names")
        object.__setattr__(self, "beside", tuple(self.beside))

    @property
    def names(self) -> tuple[str, ...]:
        """The fields that are packed."""
        return (self.field, *self.beside)

    def fields(self, fields: dict[str, Field]) -> dict[str, Field]:
        """Those of a batch. ConfigError unless a dataset with `fields` can be packed so.

        Parameters
        ----------
        fields
            Of the dataset, as it was opened.

        Returns
        -------
        dict
            Each with the shape of a sequence.
        """
        for name in self.names:
            made = fields.get(name)
            if made is None:
                raise ConfigError(
                    f"packing: no field {name!r} was opened; there are {list(fields)}"
                )
            whole = made.dtype in DTYPES or (name != self.field and made.storage.kind in "bf")
            if made.shape != (None,) or not whole or made.dtype == BFLOAT16:
                raise ConfigError(
                    f"packing: field {name!r} is {made.dtype} of shape {made.shape}, not a ragged "
                    "field of tokens: Field(dtype, (None,)) with whole numbers"
                )
        for name in (DOCUMENT_IDS, POSITION_IDS):
            if name in self.names:
                raise ConfigError(f"packing: {name!r} is what batches name a field of their own")
        if len(set(self.names)) < len(self.names):
            raise ConfigError(f"packing: a field comes twice in {self.names}")
        own = self.dtype or fields[self.field].dtype
        low, high = torch.iinfo(getattr(torch, own)).min, torch.iinfo(getattr(torch, own)).max
        for what, token in (("separator", self.separator), ("pad", self.pad)):
            if token is not None and not low <= token <= high:
                raise ConfigError(f"packing: {what} {token} does not fit {own} ({low} .. {high})")
        found = {name: Field(fields[name].dtype, (self.length,)) for name in self.beside}
        return {
            self.field: Field(own, (self.length,)),
            **found,
            DOCUMENT_IDS: Field("int32", (self.length,)),
            POSITION_IDS: Field("int64", (self.length,)),
        }


def document_mask(document_ids: torch.Tensor, *, causal: bool = True) -> torch.Tensor:
    """Which places of packed sequences may attend to which: those of the same document.

    Parameters
    ----------
    document_ids
        Of a batch, (batch, length). Places that are filled up, -1, attend to themselves alone.
    causal
        Only to themselves and to earlier places.

    Returns
    -------
    torch.Tensor
        bool (batch, 1, length, length), True where the second last place may look at the last one:
        the `attn_mask` of `torch.nn.functional.scaled_dot_product_attention`.
    """
    ids = document_ids
    same = (ids[:, :, None] == ids[:, None, :]) & (ids[:, None, :] >= 0)
    if causal:
        same = same.tril()
    return (same | torch.eye(ids.shape[1], dtype=torch.bool, device=ids.device))[:, None]


def cu_seqlens(document_ids: torch.Tensor) -> torch.Tensor:
    """Where documents begin in the places of a batch laid end to end, for variable-length kernels.

    Parameters
    ----------
    document_ids
        Of a batch, (batch, length).

    Returns
    -------
    torch.Tensor
        int32 (stretches + 1), rising from 0 to batch * length, on the same device: the
        `cu_seqlens` of FlashAttention. What is filled up at the end is a stretch of its own.
    """
    new = torch.ones_like(document_ids, dtype=torch.bool)
    new[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    starts = new.flatten().nonzero().flatten()
    return torch.cat([starts, starts.new_tensor([document_ids.numel()])]).to(torch.int32)
