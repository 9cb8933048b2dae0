"""Names of classes are kept: of image folders, of Hugging Face's features, of dictionaries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hpstore.cli import app
from hpstore.errors import ConfigError, HpstoreError
from hpstore.loaders import Dataset, Field, ingest
from hpstore.loaders.dataset.class_names import class_names, feature_classes
from tests.integration.ingest_cases import images, make_pool

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


class ClassLabel:
    """As Hugging Face's, as far as ingest looks at it."""

    def __init__(self, names: list[str]) -> None:
        self.names = names


class Rows(list[dict[str, Any]]):
    """A dataset with features, as those of Hugging Face have."""

    features = {"label": ClassLabel(["cat", "dog"]), "n": object()}  # noqa: RUF012 (not changed)


def test_classes_of_image_folders_and_features(tmp_path: Path) -> None:
    """By field, whichever way the source has them; metadata of image folders is as it was."""
    with make_pool(tmp_path) as pool:
        ingest(pool, "images", images(tmp_path / "in", 6), check_images=False)
        ingest(pool, "rows", Rows([{"label": 1, "n": 3}]))
        with Dataset(pool, "images") as found:
            assert found.classes == {"label": ["class0", "class1", "class2"]}
            assert found.metadata["classes"] == ["class0", "class1", "class2"]
        with Dataset(pool, "rows") as found:
            assert found.classes == {"label": ["cat", "dog"]}
        with Dataset(pool, "rows", fields=["n"]) as found:
            assert found.classes == {}


def table() -> Any:
    """A dictionary in batches with other dictionaries, and a schema as Hugging Face writes it."""
    features = {
        "label": {"names": ["no", "yes"], "_type": "ClassLabel"},
        "many": {"feature": {"names": ["a", "b"], "_type": "ClassLabel"}, "_type": "Sequence"},
        "n": {"dtype": "int64", "_type": "Value"},
    }
    kinds = [["b", "a", None, "b"], ["c", "a", "c", "a"]]
    batches = [
        pa.table(
            {
                "label": [0, 1, 1, 0],
                "many": [[0], [1, 0], [], [1]],
                "kind": pa.array(one).dictionary_encode(),
            }
        )
        for one in kinds
    ]
    made = pa.concat_tables(batches)
    info = json.dumps({"info": {"features": features}})
    return made.replace_schema_metadata({"huggingface": info})


def written(path: Path) -> Path:
    found = table()
    if path.suffix == ".parquet":
        pq.write_table(found, path, row_group_size=4)
        return path
    options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)
    with pa.ipc.new_stream(str(path), found.schema, options=options) as out:
        out.write_table(found)
    return path


@pytest.mark.parametrize("file", ["t.parquet", "t.arrow"])
def test_classes_of_tables(tmp_path: Path, file: str) -> None:
    """Dictionaries come as texts, or as the classes' numbers where a field of ints is asked for."""
    source = written(tmp_path / file)
    texts = ["b", "a", None, "b", "c", "a", "c", "a"]
    with make_pool(tmp_path) as pool:
        ingest(pool, "t", source, shuffle=False)
        with Dataset(pool, "t") as found:
            names = ["b", "a", "c"]
            assert found.classes == {"label": ["no", "yes"], "many": ["a", "b"], "kind": names}
            assert [s["kind"] for s in found.__getitems__(range(8))] == texts
        fields = {"kind": Field("int32", optional=True), "label": Field("int64")}
        ingest(pool, "n", source, shuffle=False, fields=fields)
        with Dataset(pool, "n") as found:
            numbers = [s["kind"] for s in found.__getitems__(range(8))]
            assert [None if n is None else names[int(n)] for n in numbers] == texts
            assert set(found.classes) == {"label", "kind"}
        with pytest.raises(ConfigError, match="texts or whole numbers"):
            ingest(pool, "f", source, fields={"kind": Field("float32", optional=True)})


def test_numbers_of_classes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """300 classes do not fit int8, 65,537 are none: they had become other numbers. A null in the
    dictionary itself is a bad record."""
    with make_pool(tmp_path) as pool:
        for count, dtype, said in [
            (300, "int8", "300 classes of a dictionary do not fit int8"),
            ((1 << 16) + 1, "int64", "'0' is none of the 0 classes of the dictionary"),
        ]:
            found = pa.table({"kind": pa.array(map(str, range(count))).dictionary_encode()})
            pq.write_table(found, tmp_path / "t.parquet")
            with pytest.raises(HpstoreError, match=said):
                ingest(pool, "t", tmp_path / "t.parquet", fields={"kind": Field(dtype)})
        kinds = pa.DictionaryArray.from_arrays([1, 0, 0], pa.array([None, "a"]))
        with pa.ipc.new_stream(str(tmp_path / "t.arrow"), pa.table({"k": kinds}).schema) as out:
            out.write_table(pa.table({"k": kinds}))
        fields = {"k": Field("int64")}
        report = ingest(pool, "n", tmp_path / "t.arrow", fields=fields, on_error="skip")
        assert report.samples == 1
        assert [skipped.problem for skipped in report.skipped] == ["it holds a null: 'k'"] * 2


def test_info_shows_classes_and_what_fields_are(tmp_path: Path) -> None:
    with make_pool(tmp_path) as pool:
        ingest(pool, "t", written(tmp_path / "t.parquet"))
        config = str(pool.config.path)
    shown = CliRunner().invoke(app, ["dataset", "info", config, "t", "--json"])
    facts = json.loads(shown.stdout)
    assert facts["classes"]["kind"] == ["b", "a", "c"]
    assert facts["fields"]["kind"]["optional"] is True
    assert "optional" not in facts["fields"]["label"]
    plain = CliRunner().invoke(app, ["dataset", "info", config, "t"]).stdout
    assert "no, yes" in plain
    assert "b, a, c" in plain


@pytest.mark.parametrize(
    "raw", [3, {"label": 3}, {"label": [1]}, {"label": {"a": 1}}, {"gone": ["a"]}, [1], None]
)
def test_other_metadata_are_no_classes(raw: Any) -> None:
    """Metadata are the user's: what is not of the form is left alone."""
    assert class_names({"classes": raw}, ["label"]) == {}


@pytest.mark.parametrize(
    "feature", [3, None, {"_type": "ClassLabel"}, {"names": 3}, {"names": [1]}]
)
def test_features_of_other_forms_have_no_classes(feature: Any) -> None:
    assert feature_classes({"x": feature}) == {}


@pytest.mark.parametrize("raw", [b"", b"[", b"[]", b'{"info": 3}', b'{"info": {"features": 3}}'])
def test_a_schema_that_lies_has_no_classes(tmp_path: Path, raw: bytes) -> None:
    made = pa.table({"n": [1]}).replace_schema_metadata({b"huggingface": raw})
    pq.write_table(made, tmp_path / "t.parquet")
    with make_pool(tmp_path) as pool:
        ingest(pool, "t", tmp_path / "t.parquet")
        with Dataset(pool, "t") as found:
            assert found.classes == {}


def test_hugging_face_s_own_datasets(tmp_path: Path) -> None:
    """Rows of a real one: None, lists, dicts, texts, and the names of its ClassLabel."""
    library = pytest.importorskip("datasets", reason="Hugging Face's datasets is not installed")
    features = library.Features(
        {
            "label": library.ClassLabel(names=["no", "yes"]),
            "ids": library.Sequence(library.Value("int64")),
            "tags": library.Sequence(library.Value("string")),
            "meta": {"a": library.Value("string"), "b": library.Value("int64")},
            "age": library.Value("int64"),
        }
    )
    rows = [
        {"label": 1, "ids": [1, 2], "tags": ["x"], "meta": {"a": "q", "b": 2}, "age": None},
        {"label": 0, "ids": [], "tags": [], "meta": {"a": None, "b": 3}, "age": 5},
    ]
    made = library.Dataset.from_list(rows, features=features)
    made.save_to_disk(str(tmp_path / "hf"))
    with make_pool(tmp_path) as pool:
        for name, source in (("python", made), ("arrow", tmp_path / "hf")):
            ingest(pool, name, source, shuffle=False)
            with Dataset(pool, name) as found:
                assert found.classes == {"label": ["no", "yes"]}
                again = [
                    {n: v.tolist() if hasattr(v, "tolist") else v for n, v in sample.items()}
                    for sample in found.__getitems__(range(2))
                ]
                assert again == rows
                assert found.fields["ids"] == Field("int64", (None,))
                assert found.fields["meta"] == Field("json")
