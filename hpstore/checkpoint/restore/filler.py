"""The tensors that a restore fills: the state's own, or new ones where it has none yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hpstore.checkpoint.format.backed_bytes import Backed
from hpstore.checkpoint.format.items import Item, by_name
from hpstore.checkpoint.format.segment_plan import Chunk, chunks_of
from hpstore.checkpoint.restore.fresh_memory import fresh
from hpstore.checkpoint.restore.restore_plan import RestorePlan
from hpstore.checkpoint.state.fill_objects import require_shape
from hpstore.checkpoint.state.scalars import dtype_name, dtype_named
from hpstore.checkpoint.state.state_tree import join
from hpstore.errors import CheckpointMismatch, IntegrityError
from hpstore.pool.pool import Pool


class Filler:
    """Hands out a tensor for each item that a tree names, and remembers what to read into it."""

    def __init__(self, pool: Pool, plan: RestorePlan, *, cast: bool) -> None:
        self._backed = Backed(pool, plan.manifest.segments)
        self._items = by_name(plan.manifest.items)
        self.filled, self._kept, self._ready = plan.filled, plan.kept, plan.ready
        self.wanted: dict[str, list[Chunk]] = {}
        self.cast: set[str] = set()
        self._given: dict[str, torch.Tensor] = {}
        self._arrays: set[str] = set()  # of these
        self._casts = cast
        self._moments = self._moment_dtypes() if cast else {}

    @property
    def loaded(self) -> list[str]:
        """Names of the tensors that were given out to be filled."""
        return sorted(self._given)

    def tensor(self, name: str) -> torch.Tensor:
        """The place to fill: the state's own tensor when there is one."""
        if name in self._kept:
            return self.filled.stays(name)
        if name not in self._given:
            if name not in self._items:
                raise IntegrityError(f"the manifest refers to {name!r} but holds no such item")
            self._given[name] = self._make(name, self._items[name])
            if name not in self._ready:
                self.wanted[name] = chunks_of(name, self._given[name])
        return self._given[name]

    def array(self, name: str) -> torch.Tensor:
        """As tensor(), of what was a numpy array: on the host. Raises CheckpointMismatch where the
        state has a tensor that is no such array."""
        self._arrays.add(name)
        found = self.tensor(name)
        if found is self.filled.places.get(name):
            try:
                found.numpy()
            except (RuntimeError, TypeError) as error:
                raise CheckpointMismatch(
                    f"{name!r}: a numpy array was saved, a {dtype_name(found.dtype)} tensor on "
                    f"{found.device} is wanted. Nothing was changed. Give an array, such as "
                    f"np.empty({list(found.shape)})"
                ) from error
        return found

    def put_transformed(self) -> None:
        """Copy what was transformed to where it belongs, each rank its part."""
        for name in sorted(self._ready.keys() & self._given.keys()):
            value, place = self._ready[name], self._given[name]
            for chunk in chunks_of(name, place) if place is not value else ():
                where = zip(chunk.box.offsets, chunk.box.sizes, strict=True)
                with torch.no_grad():
                    chunk.tensor.copy_(value[tuple(slice(at, at + n) for at, n in where)])

    def require_own_memory(self) -> None:
        """Raise CheckpointMismatch when names of other values are one memory: which of them it
        would hold in the end, or that it holds parts of both, would be chance."""
        first: dict[tuple[Any, ...], str] = {}
        for name, place in sorted(self._given.items()):
            for chunk in self.wanted[name] if name in self.wanted else chunks_of(name, place):
                at = chunk.tensor
                if not at.numel() or not at.data_ptr():  # 0: of tensors that wrap others
                    continue
                other = first.setdefault((at.device, at.data_ptr(), at.shape, at.stride()), name)
                if other != name:
                    self._require_same(other, name)

    def _require_same(self, one: str, other: str) -> None:
        """Raise CheckpointMismatch unless two names of one memory get the same values."""
        made = [self._ready.get(name) for name in (one, other)]
        if made[0] is not None and made[1] is not None:
            if _equal(made[0], made[1]):
                return
            why = "transform gives them other values"
        elif made[0] is not None or made[1] is not None:
            why = "only one of them is transformed: give transform both names, or leave one out"
        elif self._content(one) == self._content(other):
            return
        else:
            why = "two with other values were saved"
        raise CheckpointMismatch(
            f"{one!r} and {other!r} are one tensor in the state, but {why}. Nothing was changed."
        )

    def _content(self, name: str) -> set[tuple[object, ...]]:
        return {(item.box, item.digest) for item in self._items[name]}

    def _make(self, name: str, items: Sequence[Item]) -> torch.Tensor:
        item, ready = items[0], self._ready.get(name)
        dtype, shape = dtype_named(item.dtype), item.shape
        if ready is not None:
            dtype, shape = ready.dtype, tuple(ready.shape)
        there = self.filled.places.get(name)
        if there is not None:
            require_shape(name, there)
        if there is not None and there.device.type != "meta":
            if there.dtype == dtype and tuple(there.shape) == shape:
                return there
            if name not in self.filled.free:
                return self._of_other_dtype(name, there, dtype, shape, ready is not None)
        if ready is None:
            self._backed.require(name, items)
        elif there is not None:
            return ready
        if there is not None and there.device.type != "meta":
            return fresh(shape, dtype, None)
        return self._like(name, dtype, shape)

    def _like(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor for what has no place yet: a moment lies, and is sharded, as its parameter."""
        if name in self._arrays:
            return fresh(shape, dtype, None)
        moments = self._moments_at(name)
        if shape and moments is not None and moments[0] == dtype:
            self.cast.add(name)
            dtype = moments[1]
        like = self.filled.like(name)
        if like is not None and tuple(like.shape) == shape and hasattr(like, "to_local"):
            return torch.empty_like(like, dtype=dtype)
        return fresh(shape, dtype, like.device if like is not None and shape else None)

    def _moments_at(self, name: str) -> tuple[torch.dtype, torch.dtype] | None:
        """Dtypes of the parameter that a moment belongs to, also of one in a list (LBFGS)."""
        above = name
        while self._moments and above:
            above = above.rpartition("/")[0]
            if above in self._moments:
                return self._moments[above]
        return None

    def _of_other_dtype(
        self,
        name: str,
        there: torch.Tensor,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        transformed: bool,
    ) -> torch.Tensor:
        """A place that the read casts to. Raises CheckpointMismatch when it must not."""
        wanted = tuple(there.shape)
        if self._casts and wanted == shape and _castable(dtype, there.dtype):
            self.cast.add(name)
            return there
        hint = ""
        if wanted == shape and not self._casts and _castable(dtype, there.dtype):
            hint = " LoadOptions(cast=True) loads other dtypes of floating point."
        what = "given by transform" if transformed else "saved"
        raise CheckpointMismatch(
            f"{name!r}: {dtype_name(dtype)} {shape} was {what}, {dtype_name(there.dtype)} "
            f"{wanted} is wanted. Nothing was changed.{hint}"
        )

    def _moment_dtypes(self) -> dict[str, tuple[torch.dtype, torch.dtype]]:
        """By the path of a parameter's moments its dtypes, recorded and now, where they differ."""
        found = {}
        for (path, number), (_, name) in self.filled.owners().items():
            if name in self._items:
                saved = dtype_named(self._items[name][0].dtype)
                now = self.filled.parameters[path, number].dtype
                if saved != now and _castable(saved, now):
                    found[join(path, f"state/{number}")] = (saved, now)
        return found


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same bits."""
    if one is other:
        return True
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    a, b = (tensor.resolve_conj().resolve_neg().contiguous() for tensor in (one, other))
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _castable(one: torch.dtype, other: torch.dtype) -> bool:
    """Whether values of a dtype are rounded to those of another: numbers that float, and complex
    ones. Whole numbers would wrap round."""
    floats = one.is_floating_point and other.is_floating_point
    return floats or (one.is_complex and other.is_complex)
