"""Checkpoints of 8 and 4 bits are saved with the bytes that were read; others quantised as read."""

import json
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fxrl.models import ModelError, Quantization, QuantizedLinear, load_model, lora, quantize
from fxrl.models.stored import read_stored
from fxrl.ops import dequantized as dequantized_op
from fxrl.ops.dequantized import FORMATS, NF4, quantized, widened
from fxrl.ops.fp8 import RECIPES, dequantized, quantized_weight

IDS = torch.randint(3, 250, (2, 9), generator=torch.Generator().manual_seed(0))
SIZES = "tiny:qwen3:hidden=128,intermediate=320,heads=4,head_dim=32"
FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}


def compressed(weights):
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


def rows_in_bf16(weight):
    """As llm-compressor writes them: scales in the model's dtype."""
    scale = (weight.float().abs().amax(1, keepdim=True) / 448).bfloat16()
    values = (weight.float() / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale": scale}


def one_scale(weight):
    values, scale = quantized_weight(weight, "tensor")
    return {"weight": values, "weight_scale": scale.reshape(()), "input_scale": torch.tensor(0.5)}


def blocks(weight):
    values, scale = quantized_weight(weight, "block")
    return {"weight": values, "weight_scale_inv": scale}


def integers(weight):
    """Groups of 128 or, where those do not fit, of a whole row; eight codes an int32."""
    size = 128 if weight.shape[1] % 128 == 0 else weight.shape[1]
    groups = weight.float().view(len(weight), -1, size)
    scale = (groups.abs().amax(2) / 7).bfloat16()
    codes = (groups / scale.float()[..., None]).round().clamp(-8, 7).view(weight.shape).int() + 8
    packed = sum(codes[:, i::8].long() << 4 * i for i in range(8)).to(torch.uint32)
    shape = torch.tensor(weight.shape)
    return {
        "weight_packed": packed.view(torch.int32),
        "weight_scale": scale,
        "weight_shape": shape,
    }


def nested_nf4(weight):
    """As bitsandbytes writes them with ``bnb_4bit_use_double_quant``."""
    table = torch.tensor(NF4)
    groups = weight.float().view(-1, 64)
    absmax = groups.abs().amax(1)
    codes = (groups / absmax[:, None]).view(-1, 1).sub(table).abs().argmin(1).to(torch.uint8)
    offset = float(absmax.mean())
    outer = torch.nn.functional.pad(absmax - offset, (0, -len(absmax) % 256)).view(-1, 256)
    most = outer.abs().amax(1)
    code = torch.linspace(-1, 1, 256)
    small = ((absmax - offset) / most.repeat_interleave(256)[: len(absmax)])[:, None]
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [*weight.shape]}
    state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    return {
        "weight": (codes[::2] << 4 | codes[1::2])[:, None],
        "weight.absmax": (small - code).abs().argmin(1).to(torch.uint8),
        "weight.quant_map": table,
        "weight.nested_absmax": most,
        "weight.nested_quant_map": code,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(
            [*json.dumps(state).encode()], dtype=torch.uint8
        ),
    }


BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
DEEPSEEK = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
STORED = {
    "channel": (rows_in_bf16, compressed({**FP8, "strategy": "channel"}), "fp8"),
    "tensor": (one_scale, compressed({**FP8, "strategy": "tensor"}), "fp8"),
    "block": (blocks, DEEPSEEK, "fp8"),
    "int4": (integers, compressed(INT4), "int4"),
    "nf4": (nested_nf4, BNB, "nf4"),
}


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A checkpoint in bf16, and what is in its file."""
    folder = tmp_path_factory.mktemp("wide")
    model, tokenizer = load_model(SIZES, "bf16")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def written(wide, folder, store, config):
    """The same checkpoint with its Linears stored otherwise; what is in its file."""
    tensors = {}
    for name, tensor in load_file(wide / "model.safetensors").items():
        path = name.rpartition(".")[0]
        if path.endswith("_proj"):
            tensors |= {f"{path}.{n}": t.contiguous() for n, t in store(tensor).items()}
        else:
            tensors[name] = tensor
    for file in wide.iterdir():
        if file.name != "model.safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    save_file(tensors, folder / "model.safetensors")
    told = json.loads((wide / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**told, "quantization_config": config}))
    return tensors


def bits(tensor):
    return tensor.dtype, tensor.shape, tensor.contiguous().view(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("name", STORED)
def test_a_quantised_checkpoint_is_read_and_saved_as_it_is(wide, tmp_path, name):
    store, config, format = STORED[name]
    (tmp_path / "in").mkdir()
    tensors = written(wide, tmp_path / "in", store, config)
    model, _ = load_model(tmp_path / "in")
    layers = {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    assert len(layers) == 14
    assert {m.format for m in layers.values()} == {format}
    model.save_pretrained(tmp_path / "out")
    again = load_file(tmp_path / "out" / "model.safetensors")
    assert {n: bits(t) for n, t in again.items()} == {n: bits(t) for n, t in tensors.items()}
    told = json.loads((tmp_path / "out" / "config.json").read_text())
    assert told["quantization_config"] == config
    plain, _ = load_model(wide)
    for path, layer in layers.items():
        exact = plain.get_submodule(path).weight.detach().float()
        near = widened([layer.weight, layer.weight_scale], format, torch.float32)
        assert float((near - exact).norm() / exact.norm()) < 0.2, path
    adapted = lora(model, r=4, seed=0)
    adapted(input_ids=IDS, labels=IDS).loss.backward()
    trained = [p for p in adapted.parameters() if p.requires_grad]
    assert {p.dtype for p in trained} == {torch.float32}
    assert all(p.grad.isfinite().all() for p in trained)


def test_what_a_checkpoint_means_is_what_was_written(wide):
    """Against arithmetic of its own."""
    weight = load_file(wide / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    stored = rows_in_bf16(weight)
    values, scale = read_stored(stored, weight.shape, "fp8")
    expected = stored["weight"].float() * stored["weight_scale"].float()
    assert torch.equal(dequantized(values, scale, torch.float32), expected)
    stored = integers(weight)
    packed = stored["weight_packed"].view(torch.uint32).long()
    codes = torch.stack([packed >> 4 * i & 15 for i in range(8)], -1).flatten(1)
    expected = (codes - 8).float().view(len(weight), -1, 128) * stored["weight_scale"][..., None]
    made = widened(read_stored(stored, weight.shape, "int4"), "int4", torch.float32)
    assert torch.equal(made, expected.view(weight.shape))
    stored = nested_nf4(weight)
    codes = torch.stack([stored["weight"] >> 4, stored["weight"] & 15], -1).flatten().long()
    groups = stored["weight.nested_quant_map"][stored["weight.absmax"].long()]
    outer = stored["weight.nested_absmax"][torch.arange(len(groups)) // 256]
    state = json.loads(bytes(stored["weight.quant_state.bitsandbytes__nf4"].tolist()))
    groups = groups * outer + state["nested_offset"]
    expected = torch.tensor(NF4)[codes].view(-1, 64) * groups[:, None]
    made = widened(read_stored(stored, weight.shape, "nf4"), "nf4", torch.float32)
    assert torch.equal(made, expected.view(weight.shape))


def test_bitsandbytes_reads_what_is_written_and_the_other_way_round():
    bnb = pytest.importorskip("bitsandbytes")
    from fxrl.models.stored import to_store

    weight = torch.randn(96, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    for nested in (False, True):
        packed, state = bnb.functional.quantize_4bit(
            weight, quant_type="nf4", compress_statistics=nested
        )
        told = {f"weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
        read = read_stored({"weight": packed, **told}, weight.shape, "nf4")
        theirs = bnb.functional.dequantize_4bit(packed, state).float()
        torch.testing.assert_close(widened(read, "nf4", torch.bfloat16).float(), theirs)
    stored = to_store(*quantized(weight, "nf4"), "nf4", {})
    parts = {n.removeprefix("weight."): t for n, t in stored.items() if n != "weight"}
    state = bnb.functional.QuantState.from_dict(parts, device=torch.device("cpu"))
    theirs = bnb.functional.dequantize_4bit(stored["weight"], state).float()
    ours = widened(quantized(weight, "nf4"), "nf4", torch.bfloat16).float()
    torch.testing.assert_close(ours, theirs)


def test_compressed_tensors_reads_what_is_written():
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    weight = torch.randn(48, 128, generator=torch.Generator().manual_seed(0))
    from fxrl.models.stored import to_store

    stored = to_store(*quantized(weight, "int4"), "int4", {})
    codes = helpers.unpack_from_int32(stored["weight_packed"], 4, weight.shape)
    made = codes.float().view(48, 2, 64) * stored["weight_scale"][..., None]
    expected = widened(quantized(weight, "int4"), "int4", torch.float32)
    assert torch.equal(made.view(48, 128), expected)


# ---------------------------------------------------------------------------- what is refused
REFUSED = {
    "a format": (
        None,
        compressed({**FP8, "num_bits": 4}),
        "weights.num_bits=4 is not read, only 8",
    ),
    "zero points": (None, compressed({**INT4, "symmetric": False}), "weights.symmetric=False"),
    "blocks": (None, {**DEEPSEEK, "weight_block_size": [64, 64]}, r"weight_block_size=\[64, 64\]"),
    "fp4": (
        None,
        {**BNB, "bnb_4bit_quant_type": "fp4"},
        "quant_type='fp4' is not read, only 'nf4'",
    ),
    "int8": (None, {"quant_method": "bitsandbytes", "load_in_8bit": True}, "load_in_4bit=False"),
    "another": (
        "nf4",
        compressed({**FP8, "strategy": "channel"}),
        "already, as fp8: quantization=",
    ),
    "gptq": (
        "nf4",
        {"quant_method": "gptq", "bits": 4},
        "already, by gptq, which is not read here",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(wide, tmp_path, name):
    asked, config, reason = REFUSED[name]
    written(wide, tmp_path, rows_in_bf16, config)
    with pytest.raises(ModelError, match=reason):
        load_model(tmp_path, quantization=asked)


def test_tensors_that_do_not_fit_their_configuration(wide, tmp_path):
    written(wide, tmp_path, lambda w: {"weight": rows_in_bf16(w)["weight"]}, DEEPSEEK)
    said = r"layers\.0\.\S+ is FP8 and it has no scales; use the checkpoint in bf16"
    with pytest.raises(ModelError, match=said):
        load_model(tmp_path)


# ---------------------------------------------------------------------------- quantised here
@pytest.mark.parametrize("format", FORMATS)
def test_what_is_quantised_here_is_saved_and_read_again(wide, tmp_path, format):
    model, tokenizer = load_model(wide, quantization=format)
    whole = {n: m for n, m in load_model(wide)[0].named_modules() if n.endswith("_proj")}
    for path, linear in whole.items():
        layer = model.get_submodule(path)
        for made, expected in zip(
            (layer.weight, layer.weight_scale), quantized(linear.weight, format), strict=True
        ):
            assert bits(made) == bits(expected), path
    assert type(model.lm_head) is torch.nn.Linear
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, _ = load_model(tmp_path)
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("adapted", [False, True])
def test_a_model_that_its_owner_quantised_is_saved_and_read_again(wide, tmp_path, adapted):
    model, tokenizer = load_model(wide)
    model.requires_grad_(False)
    held = lora(model, r=2, seed=0) if adapted else model
    quantize(held, Quantization("fp8", skip=("layers.0",)))
    model = held.unload() if adapted else model
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, _ = load_model(tmp_path)
    assert type(again.model.layers[0].self_attn.q_proj) is torch.nn.Linear
    assert type(again.model.layers[1].self_attn.q_proj) is QuantizedLinear
    assert torch.equal(again(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_and_exceptions_are_saved_and_read_again(wide, tmp_path, recipe):
    how = Quantization("fp8", recipe, skip=("layers.0.self_attn",))
    model, tokenizer = load_model(wide, quantization=how)
    assert type(model.model.layers[0].self_attn.q_proj) is torch.nn.Linear
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, _ = load_model(tmp_path)
    assert bits(again.model.layers[1].mlp.up_proj.weight_scale) == bits(
        model.model.layers[1].mlp.up_proj.weight_scale
    )
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    with pytest.raises(ModelError, match="is quantised already, as fp8: quantization="):
        load_model(tmp_path, quantization=how)


class Peak(TorchDispatchMode):
    """The most bytes of tensors that were alive at once, of those that any op has seen."""

    def __init__(self):
        super().__init__()
        self.alive, self.most = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in filter(torch.is_tensor, tree_leaves((args, kwargs, made))):
            storage = tensor.untyped_storage()
            if tensor.device.type == "cpu" and storage._cdata not in self.alive:
                self.alive[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.alive.pop, storage._cdata, None)
        self.most = max(self.most, sum(self.alive.values()))
        return made


@pytest.mark.parametrize("format", FORMATS)
def test_loading_needs_one_layer_in_full_at_most(tmp_path, format, monkeypatch):
    monkeypatch.setattr(dequantized_op, "_PART", 2**14)  # as small beside these layers
    model, tokenizer = load_model("tiny:qwen3:layers=6,hidden=256,intermediate=768", "bf16")
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    layer = sum(p.nbytes for p in model.model.layers[0].parameters())
    whole = sum(p.nbytes for p in model.parameters())
    del model
    how = Quantization(format, embeddings=True, head=True)
    with Peak() as peak:
        made, _ = load_model(tmp_path, quantization=how)
    held = sum(p.nbytes for p in made.parameters())
    assert held < 0.7 * whole
    assert held < peak.most < held + layer
