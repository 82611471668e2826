"""The doors to optional packages and the hub."""

import os
import socket
import subprocess
import sys
import time

import pytest

from fxrl.errors import MissingPackageError, optional
from fxrl.models import hf


def test_a_missing_package_says_how_to_install_it():
    with pytest.raises(MissingPackageError, match=r"loading x needs no_such_pkg.*-e .*\[demo\]"):
        optional("no_such_pkg", "loading x")


def test_progress_bars_come_back():
    from transformers.utils import logging

    was = logging.is_progress_bar_enabled()
    with hf.no_progress_bars():
        assert not logging.is_progress_bar_enabled()
    assert logging.is_progress_bar_enabled() is was


def test_a_hub_that_does_not_answer_is_found_out_soon(monkeypatch):
    import huggingface_hub

    with socket.socket() as silent:  # accepts and says nothing
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(hf, "HUB_TIMEOUT_S", 0.2)
        start = time.monotonic()
        reason = hf.why_no_hub()
    assert reason is not None
    assert endpoint in reason
    assert time.monotonic() - start < 5
    refused = hf.why_no_hub()  # nothing listens there any more
    assert refused is not None
    assert "cannot be reached" in refused


def test_a_process_that_has_imported_nothing_of_the_hub_asks_it():
    code = "from fxrl.models.hf import why_no_hub; print(why_no_hub())"
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    found = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert "cannot be reached" in found.stdout, found.stderr


def test_any_answer_means_the_hub_is_there(monkeypatch):
    import threading
    from http.server import BaseHTTPRequestHandler, HTTPServer

    import huggingface_hub

    class Refuses(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(403)
            self.end_headers()

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Refuses)
    thread = threading.Thread(target=server.handle_request, daemon=True)
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    assert hf.why_no_hub() is None
    thread.join(5)
    server.server_close()
