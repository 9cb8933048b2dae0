"""What stands in the place of a value, or near it, is never taken for the value: zeros for None,
floats near ints, what lies under a mask, numbers of other classes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpstore.errors import ConfigError
from hpstore.loaders import (
    DataLoader,
    Dataset,
    DatasetWriter,
    Field,
    Mixture,
    Packing,
    ingest,
    publish_parts,
)
from hpstore.loaders.dataset.row_filter import filter_mask
from hpstore.pool.pool import Pool
from tests.integration.data_sets import make_pool

LARGE = 2**53 + 1  # no float64


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with make_pool(tmp_path) as made:
        yield made


def write(pool: Pool, name: str, fields: dict[str, Field], rows: list[Any], **how: Any) -> None:
    with DatasetWriter(pool, name, fields, **how) as writer:
        for row in rows:
            writer.write(row)


def test_a_transform_changes_no_json_and_no_none(pool: Pool) -> None:
    """A batch of samples is what a batch of records is."""
    fields = {
        "j": Field("json", optional=True),
        "k": Field("json"),
        "t": Field("int64", (None,), optional=True),
    }
    rows = [
        {"j": 3, "k": True, "t": np.arange(5)},
        {"j": None, "k": LARGE, "t": None},
        {"j": "x", "k": 0.5, "t": np.arange(3)},
    ]
    write(pool, "c", fields, rows)
    with Dataset(pool, "c") as data:
        loader = DataLoader(data, 3, transform=lambda one: one)
        (batch,) = loader
        loader.close()
    assert batch["j"] == [3, None, "x"]
    assert batch["k"] == [True, LARGE, 0.5]
    assert [type(one) for one in batch["k"]] == [bool, int, float]
    assert [one.tolist() for one in batch["t"]] == [[0, 1, 2, 3, 4], [], [0, 1, 2]]
    assert batch["t_mask"].tolist() == [True, False, True]


@pytest.mark.parametrize(
    "values", [[LARGE, 0.5], [[LARGE, -1], [0.5]], [[-1, 2**63 + 1025], [5]]], ids=str
)
def test_no_int_becomes_a_float_that_it_is_not(pool: Pool, values: list[Any]) -> None:
    """Where fields are found from samples: it is an error, or JSON keeps them."""
    rows = [{"id": value} for value in values]
    if isinstance(values[0], int):
        with pytest.raises(ConfigError, match="json"):
            ingest(pool, "o", rows, shuffle=False)
        return
    ingest(pool, "o", rows, shuffle=False)
    with Dataset(pool, "o") as data:
        assert [data[n]["id"] for n in range(len(values))] == values


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (Field("float64"), LARGE),
        (Field("float64", (None,)), [LARGE, 0.5]),
        (Field("float64", (None,)), [LARGE, float("nan")]),
    ],
)
def test_no_writer_rounds_an_int(pool: Pool, field: Field, value: Any) -> None:
    with pytest.raises(ConfigError, match="float64 rounds"):
        write(pool, "w", {"x": field}, [{"x": value}])
    write(pool, "w", {"x": Field("float64")}, [{"x": LARGE - 1}])


@pytest.mark.parametrize("optional", [True, False])
def test_what_is_masked_in_numpy_is_no_value(pool: Pool, optional: bool) -> None:
    masked = np.ma.masked_array([1, 999, 3], mask=[False, True, False])
    with pytest.raises(ConfigError, match="masked array"):
        ingest(pool, "a", {"x": masked})
    with (
        pytest.raises(ConfigError, match="masked array"),
        DatasetWriter(pool, "m", {"x": Field("int64", optional=optional)}) as writer,
    ):
        writer.write_batch({"x": masked})
    ingest(pool, "a", {"x": np.ma.masked_array([1, 2], mask=[False, False])})


def with_classes(pool: Pool, name: str, names: list[str], **how: Any) -> None:
    metadata = {"classes": {"label": names}}
    rows = [{"label": number} for number in range(len(names))]
    write(pool, name, {"label": Field("int64")}, rows, metadata=metadata, **how)


def test_numbers_of_classes_stand_for_one_name(pool: Pool) -> None:
    """In a mixture, in parts that are published, and in what is appended."""
    with_classes(pool, "a", ["cat", "dog"])
    with_classes(pool, "b", ["dog", "cat"])
    with Dataset(pool, "a") as one, Dataset(pool, "b") as other:
        with pytest.raises(ConfigError, match="classes of 'label'"):
            Mixture([one, other], weights=[1, 1])
        Mixture([one, one], weights=[1, 1])
    for number, names in enumerate((["cat", "dog"], ["dog", "cat"])):
        with_classes(pool, "p", names, part=(number, 2))
    with pytest.raises(ConfigError, match="parts 0 and 1 differ in the classes of 'label'"):
        publish_parts(pool, "p")
    with_classes(pool, "q", ["cat", "dog"], part=(0, 2))
    write(pool, "q", {"label": Field("int64")}, [{"label": 1}], part=(1, 2))
    publish_parts(pool, "q")  # one has said it for all
    with pytest.raises(ConfigError, match="Nothing was appended"):
        with_classes(pool, "a", ["dog", "cat"], append=True)
    with_classes(pool, "a", ["cat", "dog", "cow"], append=True)
    with Dataset(pool, "a") as grown:
        assert grown.classes == {"label": ["cat", "dog", "cow"]}
        assert len(grown) == 5


def test_packing_wraps_no_token(pool: Pool) -> None:
    rows = [{"t": np.array([1, 70_000, 5])}, {"t": np.array([7])}]
    write(pool, "t", {"t": Field("int64", (None,))}, rows)
    with Dataset(pool, "t") as data:
        for dtype, fits in (("uint16", False), ("int32", True)):
            packing = Packing(field="t", length=6, separator=9, dtype=dtype)
            loader = DataLoader(data, 1, packing=packing)
            if fits:
                assert next(iter(loader))["t"].tolist() == [[1, 70_000, 5, 9, 7, 9]]
            else:
                with pytest.raises(ConfigError, match="70000 of field 't' does not fit"):
                    next(iter(loader))
            loader.close()


BEYOND: list[tuple[Any, list[int]]] = [  # of the values 1, inf, the largest
    (("f", ">", 1e39), [1]),
    (("f", "==", 1e39), []),
    (("f", "!=", 1e39), [0, 1, 2]),
    (("f", "<", 10**39), [0, 2]),
    (("f", "in", [1e39, 1]), [0]),
    (("f", "not in", [1e39]), [0, 1, 2]),
    (("h", "in", [70_000]), []),
    (("h", ">=", 70_000), [1]),
    (("h", "==", float("inf")), [1]),
]


def test_a_number_beyond_a_column_is_no_infinity(pool: Pool) -> None:
    fields = {"f": Field("float32"), "h": Field("float16")}
    with DatasetWriter(pool, "f", fields) as writer:
        most = {name: np.finfo(field.dtype).max for name, field in fields.items()}
        for row in ({"f": 1.0, "h": 1.0}, {"f": np.inf, "h": np.inf}, most):
            writer.write({n: np.asarray(v, fields[n].dtype) for n, v in row.items()})
    with Dataset(pool, "f") as data:
        for condition, wanted in BEYOND:
            assert np.flatnonzero(filter_mask(data, [condition])).tolist() == wanted, condition
