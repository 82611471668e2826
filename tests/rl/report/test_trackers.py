"""Trackers and the hub, by stand-ins that have their packages' real call signatures."""

import base64
import http.server
import json
import re
import sys
import threading
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

import huggingface_hub
import pytest

from fxrl.rl import Trainer
from fxrl.rl.train import main


def stand_in(monkeypatch, name):
    module = types.ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)  # transformers looks for it
    monkeypatch.setitem(sys.modules, name, module)
    return module


class WandbRun:
    def __init__(self, run_id):
        self.id, self.logged, self.finished, self.metrics = run_id, [], None, []

    def define_metric(self, name, step_metric=None):
        self.metrics.append((name, step_metric))

    def log(self, data, step=None, commit=None):
        self.logged.append(data)

    def finish(self, exit_code=None):
        self.finished = exit_code


@pytest.fixture
def wandb(monkeypatch):
    """wandb 0.31's calls."""
    module = stand_in(monkeypatch, "wandb")
    module.runs = []

    def init(
        entity=None, project=None, dir=None, id=None, name=None, notes=None, tags=None,
        config=None, allow_val_change=None, group=None, mode=None, resume=None,
    ):  # fmt: skip
        json.dumps(config)
        module.given = {"project": project, "name": name, "resume": resume, "dir": dir}
        module.runs.append(WandbRun(id or "id-of-wandb"))
        return module.runs[-1]

    module.init = init
    return module


@pytest.fixture
def trackio(monkeypatch):
    """trackio 0.43's calls."""
    module = stand_in(monkeypatch, "trackio")
    module.logged, module.all_given = [], []

    class Run:
        def log(self, metrics, step=None):
            module.logged.append((step, metrics))

        def finish(self):
            module.logged.append("finished")

    def init(project, name=None, group=None, space_id=None, config=None, resume="never"):
        module.given = {"project": project, "name": name, "resume": resume}
        module.all_given.append(module.given)
        return Run()

    module.init = init
    return module


@pytest.fixture
def mlflow(monkeypatch):
    """mlflow 3.17's calls."""
    module = stand_in(monkeypatch, "mlflow")
    module.logged, module.started = [], []

    def start_run(run_id=None, experiment_id=None, run_name=None, nested=False):
        module.started.append((run_id, run_name, nested))
        info = types.SimpleNamespace(run_id=run_id or "id-of-mlflow")
        return types.SimpleNamespace(info=info)

    def log_metrics(metrics, step=None, synchronous=None, run_id=None):
        module.logged.append((step, metrics, run_id))

    def end_run(status="FINISHED"):
        module.logged.append(status)

    module.set_experiment = lambda experiment_name=None, experiment_id=None: None
    module.active_run = lambda: None
    module.log_dict = lambda dictionary, artifact_file, run_id=None: json.dumps(dictionary)
    module.start_run, module.log_metrics, module.end_run = start_run, log_metrics, end_run
    return module


def train(file, *options, resume=None):
    return main(str(file), ["run_dir=runs/a", "steps=2", *options], resume=resume, json=True)


def lines():
    return [json.loads(text) for text in Path("runs/a/metrics.jsonl").read_text().splitlines()]


def finite(line):
    return {k: float(v) for k, v in line.items() if v is not None and k != "step"}


def test_all_of_them_get_every_number(config_file, wandb, trackio, mlflow):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    names = "log_to=['tensorboard', 'wandb', 'trackio', 'mlflow']"
    assert train(config_file, names, "tensorboard=true", "eval.size=2", "project=sums") == 0
    expected = [finite(line) for line in lines()]
    assert wandb.given == {"project": "sums", "name": "a", "resume": "allow", "dir": "runs/a"}
    [run] = wandb.runs
    assert run.metrics == [("step", None), ("*", "step")]
    assert run.finished == 0
    assert [one.pop("step") for one in run.logged] == [0, 1, 2]
    assert "eval/accuracy" in run.logged[0]
    assert run.logged[1:] == expected
    assert re.fullmatch("a-[0-9a-f]{6}", trackio.given["name"])
    assert trackio.given | {"name": ""} == {"project": "sums", "name": "", "resume": "never"}
    assert trackio.logged[1:] == [(1, expected[0]), (2, expected[1]), "finished"]
    assert mlflow.started == [(None, "a", False)]
    assert mlflow.logged[1:3] == [(i + 1, e, "id-of-mlflow") for i, e in enumerate(expected)]
    assert mlflow.logged[-1] == "FINISHED"
    events = EventAccumulator("runs/a/tensorboard").Reload()
    assert set(events.Tags()["scalars"]) >= expected[0].keys()
    assert [event.step for event in events.Scalars("reward")] == [1, 2]


def test_a_resumed_run_is_the_same_run(config_file, wandb, mlflow, trackio):
    names = "log_to=['wandb', 'mlflow', 'trackio']"
    assert train(config_file, names, "steps=1") == 0
    assert train(config_file, names, resume="") == 0
    assert [run.id for run in wandb.runs] == ["id-of-wandb"] * 2
    assert [one["step"] for one in wandb.runs[1].logged] == [2]
    assert mlflow.started[1] == ("id-of-mlflow", "a", False)
    [name] = {given["name"] for given in trackio.all_given}
    assert trackio.given == {"project": "fxrl", "name": name, "resume": "allow"}


def test_runs_in_folders_of_one_name_stay_apart(config_file, trackio):
    """trackio itself knows its runs by their names alone."""
    names = "log_to=['trackio']"
    for folder in ("one/a", "two/a"):
        assert train(config_file, names, "steps=1", f"run_dir={folder}") == 0
    assert train(config_file, names, "run_dir=one/a", resume="") == 0
    one, two, again = (given["name"] for given in trackio.all_given)
    assert one == again != two
    Path("one/a/trackers.json").unlink()  # as of a run that began before names were kept
    assert train(config_file, names, "steps=3", "run_dir=one/a", resume="") == 0
    assert trackio.given["name"] == "a"


def test_a_package_that_is_missing_is_named_before_the_start(config_file, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert train(config_file, "log_to=['wandb']") == 2
    told = capsys.readouterr().out
    assert "log_to='wandb' needs wandb" in told
    assert "pip install wandb" in told
    assert not Path("runs/a").exists()


def test_a_tracker_that_cannot_start_stops_the_run_before_its_first_step(
    config_file, wandb, capsys
):
    def init(**_):
        raise RuntimeError("api_key not configured (no-tty)")

    wandb.init = init
    assert train(config_file, "log_to=['wandb']") == 1
    assert "api_key not configured" in capsys.readouterr().out
    assert lines() == []


def test_one_that_fails_later_is_told_once(config_file, trackio, monkeypatch, capsys):
    def init(project, name=None, config=None, resume="never"):
        def log(metrics, step=None):
            raise ConnectionError("the server is away")

        return types.SimpleNamespace(log=log, finish=lambda: pytest.fail("it was given up"))

    trackio.init = init
    assert train(config_file, "log_to=['trackio']") == 0
    assert capsys.readouterr().out.count("trackio: the server is away") == 1
    assert len(lines()) == 2


def test_a_failed_run_is_marked_so(config_file, wandb, mlflow):
    Path("broken_rewards.py").write_text("def raises(**_):\n    raise ValueError\n")
    broken = "reward.functions=['length', 'broken_rewards:raises']"
    assert train(config_file, "log_to=['wandb', 'mlflow']", broken) == 1
    assert wandb.runs[0].finished == 1
    assert mlflow.logged == ["FAILED"]


class Hub:
    """huggingface_hub 1 and 2's two calls, and what they were given."""

    def __init__(self):
        self.made, self.pushed, self.fails = [], [], 0

    def create_repo(self, repo_id, *, token=None, private=None, repo_type=None, exist_ok=False):
        if self.fails == "always":
            raise OSError("Invalid user token.")
        self.made.append((repo_id, exist_ok))

    def upload_folder(self, *, repo_id, folder_path, path_in_repo=None, commit_message=None):
        if self.fails:
            self.fails -= 1
            raise ConnectionError("the hub is away")
        files = {path.name for path in Path(folder_path).iterdir()}
        self.pushed.append((repo_id, commit_message, files))


@pytest.fixture
def hub(monkeypatch):
    hub = Hub()
    monkeypatch.setattr(huggingface_hub, "create_repo", hub.create_repo)
    monkeypatch.setattr(huggingface_hub, "upload_folder", hub.upload_folder)
    return hub


def test_the_model_is_pushed_at_the_end(config_file, hub):
    assert train(config_file, "push_to_hub=me/model") == 0
    assert hub.made == [("me/model", True)]
    [(repo, message, files)] = hub.pushed
    assert (repo, message) == ("me/model", "trained for 2 steps")
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json"} <= files


@pytest.fixture
def answering_hub(monkeypatch):
    """The hub's protocol, as far as a push speaks it: what it was asked, and the files it got."""
    asked, files = [], {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self):
            sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            asked.append((self.command, self.path.partition("?")[0], self.headers["authorization"]))
            if self.path.endswith("/repos/create"):
                told = {"url": f"{url}/me/model"}
            elif "/preupload/" in self.path:
                paths = [file["path"] for file in json.loads(sent)["files"]]
                told = {
                    "files": [
                        {"path": path, "uploadMode": "regular", "shouldIgnore": False}
                        for path in paths
                    ]
                }
            elif "/commit/" in self.path:
                for part in map(json.loads, sent.splitlines()):
                    if part["key"] == "file":
                        value = part["value"]
                        files[value["path"]] = base64.b64decode(value["content"])
                told = {"success": True, "commitUrl": f"{url}/me/model/commit/1", "commitOid": "1"}
            else:
                told = {"id": "me/model", "sha": "0" * 40, "siblings": []}
            content = json.dumps(told).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = answer

        def log_message(self, *_):
            """Nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", url)
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        yield asked, files
        server.shutdown()


def test_a_push_speaks_the_hubs_protocol(config_file, answering_hub):
    assert train(config_file, "push_to_hub=me/model") == 0
    asked, files = answering_hub
    assert asked[0] == ("POST", "/api/repos/create", "Bearer hf_secret")
    assert ("POST", "/api/models/me/model/commit/main", "Bearer hf_secret") in asked
    final = {path.name: path.read_bytes() for path in Path("runs/a/final").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json"} <= final.keys()
    assert files == final


def test_and_at_every_save(config_file, hub, capsys):
    """One that fails there is told, and the run goes on."""
    hub.fails = 1
    every = ("push_to_hub=me/model", "hub_strategy=every_save", "save_every=1")
    assert train(config_file, *every) == 0
    assert [message for _, message, _ in hub.pushed] == ["step 2", "trained for 2 steps"]
    assert "the hub is away; the run goes on" in capsys.readouterr().out


def test_a_push_that_fails_at_the_end_loses_nothing(config_file, hub, capsys):
    hub.fails = 1
    assert train(config_file, "push_to_hub=me/model") == 1
    told = capsys.readouterr().out
    assert "the run is complete, but could not be pushed" in told
    assert "hf upload me/model runs/a/final" in told
    assert Path("runs/a/final/adapter_model.safetensors").is_file()
    assert json.loads(Path("runs/a/summary.json").read_text())["steps"] == 2


def test_who_may_not_push_hears_it_before_the_start(config_file, hub, capsys):
    hub.fails = "always"
    assert train(config_file, "push_to_hub=me/model") == 2
    assert "hf auth login" in capsys.readouterr().out
    assert not Path("runs/a").exists()


def test_a_run_that_was_stopped_is_not_pushed(config_file, hub):
    class Stop:
        def on_log(self, config, state, control, **_):
            raise ValueError

    rows = [{"prompt": "a"}, {"prompt": "b"}]
    config = {"push_to_hub": "me/model", "steps": 1, "optimize": False, "tensorboard": False}
    model = "tiny:llama:layers=1,hidden=32,heads=2,kv_heads=1"
    with pytest.raises(Exception, match=r"Stop\.on_log"):
        Trainer(model, "length", rows, config, callbacks=[Stop()]).train()
    assert hub.pushed == []
