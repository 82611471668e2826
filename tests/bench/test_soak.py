"""``bench.soak`` in its shortest, and what it calls growth."""

import json

import pytest

from bench import soak


def test_no_handle_or_thread_stays_behind_a_step(tmp_path):
    rows = []
    soak.soak(tmp_path / "run", 20, "cpu", rows.append, optimize=False)
    assert [row["step"] for row in rows] == list(range(1, 21))
    assert sum(row["refills"] for row in rows) > 0
    grown = soak.growth(rows)
    assert (grown["handles"], grown["threads"]) == (0, 0)
    assert rows[0]["handles"] > 3
    assert rows[0]["threads"] > 1


@pytest.mark.parametrize(
    ("name", "rise", "code"),
    [("resident_mib", 1.9, 0), ("resident_mib", 2.1, 1), ("handles", 1, 1), ("threads", 1, 1)],
)
def test_what_grows_after_the_warm_up_fails(tmp_path, monkeypatch, name, rise, code):
    def grows(run_dir, steps, device, add):
        for number in range(soak.NUM_ROWS):
            row = {"step": number, "resident_mib": 100.0, "handles": 9, "threads": 5}
            row["resident_mib"] -= 50 * (number < soak.WARM_UP - 1)
            row[name] += rise * (number == 11)  # and goes down again
            add(row)

    monkeypatch.setattr(soak, "soak", grows)
    out = tmp_path / "soak.json"
    assert soak.main(["--device", "cpu", "--out", str(out)]) == code
    assert len(json.loads(out.read_text())["rows"]) == soak.NUM_ROWS
