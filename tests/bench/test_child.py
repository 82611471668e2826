"""Measurements in processes of their own are heard while they work."""

import sys

from bench.lib.child import measured


def child(code, **options):
    return measured(["-c", code], **options)


def test_words_are_seen_before_the_child_ends_and_the_row_comes_back(tmp_path, monkeypatch):
    """The child waits until its first words have been passed on."""
    seen = tmp_path / "seen"

    class Heard:
        def write(self, text):
            if "working" in text:
                seen.touch()

        def flush(self):
            pass

    monkeypatch.setattr(sys, "stderr", Heard())
    code = f"import os\nprint('working')\nwhile not os.path.exists({str(seen)!r}): pass\n"
    code += "from bench.lib.child import tell\ntell({'ms': 3})"
    assert child(code, limit_s=60) == {"ms": 3}


def test_a_child_that_fails_says_why(capsys):
    found = child("import sys; print('before'); sys.exit('no such GPU')")
    assert found == {"error": "exit code 1: no such GPU"}
    assert "before" in capsys.readouterr().err
    assert child("pass") == {"error": "exit code 0: no output"}
    assert "exit code -9" in child("while True: pass", limit_s=0.2)["error"]
