"""Result files: rows are on disk as they come, a file is gone on with, JSON stays clean."""

import json

import pytest

from bench.lib import common

COLUMNS = ("variant", "ms", "error")


def make(out, **options):
    return common.Results("Title", COLUMNS, str(out), ["a note"], **options)


def test_rows_are_written_as_they_come(tmp_path, capsys):
    made = make(tmp_path / "deep" / "a.json")
    made.add(variant="eager", ms=1.23456789)
    record = json.loads((tmp_path / "deep" / "a.json").read_text())
    assert record["rows"] == [["eager", 1.23457, None]]
    assert "ROW variant=eager, ms=1.235" in capsys.readouterr().out
    with pytest.raises(KeyError, match="speed"):
        made.add(speed=3)
    made.finish()
    said = capsys.readouterr().out
    assert said.index("Title") < said.index("variant") < said.index("eager")
    assert "error" not in said  # a column without a value is not shown
    assert said.rstrip().endswith("note: a note")


def test_append(tmp_path):
    first = make(tmp_path / "a.json")
    first.extra["floors"] = {"x": 1}
    first.add(variant="eager", ms=1.0)
    second = make(tmp_path / "a.json", append=True)
    assert second.extra == {"floors": {"x": 1}}
    assert second.has(variant="eager")
    assert not second.has(variant="eager", ms=2.0)
    second.add(variant="eager", error="late")
    second.drop(variant="eager", error="late")
    second.note("another")
    second.note("another")
    second.add(variant="fxrl", ms=0.5)
    record = json.loads((tmp_path / "a.json").read_text())
    assert [row[0] for row in record["rows"]] == ["eager", "fxrl"]
    assert record["notes"] == ["a note", "another"]
    assert not make(tmp_path / "a.json").has(variant="eager")  # without append: a new file
    assert make(tmp_path / "missing.json", append=True).rows == []


def test_append_refuses_what_does_not_fit(tmp_path, monkeypatch):
    (tmp_path / "text.json").write_text("no json")
    with pytest.raises(common.ResultsError, match="it is no result file"):
        make(tmp_path / "text.json", append=True)
    make(tmp_path / "a.json").write()
    with pytest.raises(common.ResultsError, match="holds 'Title'"):
        common.Results("Other", COLUMNS, str(tmp_path / "a.json"), append=True)
    monkeypatch.setattr(common, "machine", lambda: "another GPU")
    with pytest.raises(common.ResultsError, match="this is another GPU; give another --out"):
        make(tmp_path / "a.json", append=True)


def test_json_alone_on_stdout(tmp_path, capsys):
    made = common.Results("Title", COLUMNS, None, as_json=True)
    made.add(variant="eager", error="broken")
    made.finish()
    said = capsys.readouterr()
    assert json.loads(said.out)["rows"] == [["eager", None, "broken"]]
    assert "ROW variant=eager" in said.err
