"""Model folders of strangers: what they may not name, and what a damaged one leads to."""

import json
import random
import shutil

import pytest

from fxrl.errors import FxrlError
from fxrl.models import ModelError, load_model
from fxrl.models.load import model_folder

LONG = "a whole number of 5000 digits"
NUMBERS = [0, -1, 1, 3, 2**31, 2**63, 10**11, LONG, 1.5, 1e308, float("nan")]
OTHERS = [None, True, "", "x", "../x", "a/b", [], {}, [[[]]], {"a": 1}, "\ud800", "{% for %}"]


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    place = tmp_path_factory.mktemp("models") / "sound"
    model, tokenizer = load_model("tiny:llama:layers=1,hidden=32,heads=2,kv_heads=1", "bf16")
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


@pytest.fixture
def folder(sound, tmp_path):
    return shutil.copytree(sound, tmp_path / "model")


def change(file, **values):
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
@pytest.mark.parametrize(
    "value",
    ["attacker/evil-kernel", "kernels-community/x@v1:f", {"": "a/b"}, ["a/b"], "a:b"],
)
def test_no_kernel_is_named(folder, key, value):
    change(folder / "config.json", **{key: value})
    for place in (folder, folder / "config.json"):
        with pytest.raises(ModelError, match=f"{key}=.* names a kernel"):
            load_model(place)
    with pytest.raises(ModelError, match="names a kernel"):
        model_folder(folder, folder / "unused")


def test_no_kernel_is_named_further_down(folder):
    change(folder / "config.json", text_config={"inner": [{"experts_implementation": "a/b"}]})
    with pytest.raises(ModelError, match="experts_implementation='a/b' names a kernel"):
        load_model(folder)


def test_a_usual_implementation_is_fine(folder):
    change(folder / "config.json", attn_implementation="eager")
    assert load_model(folder)[0].config._attn_implementation == "eager"


def sharded(folder, name):
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    table = {"metadata": {}, "weight_map": {"lm_head.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(table))


@pytest.mark.parametrize("name", ["../outside/part.safetensors", "{outside}/part.safetensors"])
def test_an_index_stays_in_its_folder(folder, tmp_path, name):
    shutil.copytree(folder, tmp_path / "outside")
    sharded(folder, name.format(outside=tmp_path / "outside"))
    with pytest.raises(ModelError, match=r"index.json: weight_map: .* outside of the model's"):
        load_model(folder)


LINKED = ["model.safetensors", "tokenizer.json", "config.json", "additional_chat_templates/x.jinja"]


@pytest.mark.parametrize("name", LINKED)
def test_links_out_of_the_folder_are_not_followed(folder, tmp_path, name):
    (tmp_path / "outside").write_text("mine")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path / "outside")
    with pytest.raises(ModelError, match=rf"{name}.* outside of the model's folder"):
        load_model(folder)


def test_the_hubs_cache_is_a_folder_of_links_and_loads(folder, tmp_path):
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    shutil.move(folder, blobs)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    assert load_model(snapshot)[0].config.hidden_size == 32


def test_code_in_the_folder_is_not_run(folder, monkeypatch):
    (folder / "modeling.py").write_text("raise SystemExit('planted code was run')")
    named = {"AutoConfig": "modeling.C", "AutoModelForCausalLM": "modeling.M"}
    monkeypatch.setattr("builtins.input", lambda text: pytest.fail("asked whether to run it"))
    change(folder / "config.json", auto_map=named)
    load_model(folder)  # a kind that transformers has itself
    change(folder / "config.json", model_type="mine")
    with pytest.raises(ModelError):
        load_model(folder)


def test_the_base_of_an_adapter_is_checked_as_well(folder, tmp_path):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for file in folder.glob("tokenizer*"):
        shutil.copy(file, adapter)
    table = {"peft_type": "LORA", "base_model_name_or_path": str(folder), "r": 4}
    (adapter / "adapter_config.json").write_text(json.dumps(table))
    change(folder / "config.json", attn_implementation="attacker/evil-kernel")
    with pytest.raises(ModelError, match="names a kernel"):
        load_model(adapter)


def mutated(rng, folder):
    """Changes one file of the folder; what was done, in words."""
    file = rng.choice(sorted(p for p in folder.iterdir() if p.is_file()))
    kind = rng.choice(["value", "value", "value", "drop", "cut", "bits", "gone"])
    if kind == "gone":
        file.unlink()
        return f"{file.name} gone"
    content = file.read_bytes()
    if kind in ("value", "drop") and file.suffix == ".json":
        table = json.loads(content)
        inner, key = table, rng.choice(sorted(table))
        while isinstance(inner[key], dict) and inner[key] and rng.random() < 0.7:
            inner = inner[key]
            key = rng.choice(sorted(inner))
        value = rng.choice(NUMBERS if rng.random() < 0.6 else OTHERS)
        if kind == "drop":
            del inner[key]
        else:
            inner[key] = value
        file.write_text(json.dumps(table).replace(f'"{LONG}"', "9" * 5000))
        return f"{file.name} {kind} {key} {value!r}"
    at = rng.randrange(len(content))
    if kind == "cut":
        file.write_bytes(content[:at])
    else:
        bits = bytearray(content)
        bits[at] ^= 1 << rng.randrange(8)
        file.write_bytes(bits)
    return f"{file.name} {kind} {at}"


def test_a_model_without_some_of_its_weights_is_refused(folder):
    change(folder / "config.json", num_hidden_layers=2)
    with pytest.raises(
        ModelError, match=r"9 weights are in none of its files, such as model.layers.1"
    ):
        load_model(folder)


@pytest.mark.parametrize("count", [-2, 2**32 - 1, 1e30])
def test_more_layers_than_any_model_has_are_not_built(folder, count):
    change(folder / "config.json", num_hidden_layers=count)
    with pytest.raises(ModelError, match=r"num_hidden_layers=.* is outside 0..4096"):
        load_model(folder / "config.json", device="meta")


def test_80_damaged_folders_load_or_are_named(sound, tmp_path):
    rng, refused, raw = random.Random(12), 0, []
    for number in range(80):
        folder = shutil.copytree(sound, tmp_path / str(number))
        what = mutated(rng, folder)
        try:
            load_model(folder)
        except FxrlError:
            refused += 1
        except Exception as error:
            raw.append(f"{what}: {error!r}")
        shutil.rmtree(folder)
    assert not raw
    assert 24 < refused < 72
