"""Layers of a decode step inside vLLM: where they are fxrl's, and that they compute the same."""

import types

import pytest
import sympy
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from fxrl.engines.vllm import door
from fxrl.engines.vllm.decode_layers import (
    LONGEST_ROW,
    NO_TRIALS,
    make_choices,
    make_kernel,
    offered,
    wanted,
    with_inductor,
)
from fxrl.engines.vllm.options import HOPPER, VllmOptions


@pytest.mark.parametrize(
    ("options", "capability", "expected"),
    [
        ({}, HOPPER, True),
        ({"decode_layers": False}, HOPPER, False),
        ({"tensor_parallel_size": 2}, HOPPER, False),
        ({}, (10, 0), False),
        ({}, None, False),
    ],
)
def test_layers_are_ours_on_hopper_in_this_process(options, capability, expected):
    assert wanted(VllmOptions(**options), capability) is expected


class Theirs:
    """Stands for ``InductorChoices``."""

    @staticmethod
    def should_use_persistent_reduction(features, cooperative_reduction):
        return "theirs"


@pytest.mark.parametrize(
    ("row", "hint", "cooperative", "expected"),
    [
        (4096, "INNER", False, True),
        (LONGEST_ROW, "INNER", False, True),
        (LONGEST_ROW + 1, "INNER", False, "theirs"),
        (4096, "OUTER", False, "theirs"),
        (4096, "INNER", True, "theirs"),
        (sympy.Symbol("s0"), "INNER", False, "theirs"),
    ],
)
def test_rows_of_known_width_stay_in_registers(row, hint, cooperative, expected):
    kind = types.SimpleNamespace(name=hint)
    features = types.SimpleNamespace(
        reduction_numel=sympy.sympify(row), get_reduction_hint=lambda: kind
    )
    chosen = make_choices(Theirs).should_use_persistent_reduction(features, cooperative)
    assert chosen == expected


def test_choices_are_part_of_caches_keys():
    import importlib
    import pickle

    choices = door.RowChoices
    assert f"{choices.__module__}.{choices.__qualname__}" == "fxrl.engines.vllm.door.RowChoices"
    assert importlib.import_module(choices.__module__).RowChoices is choices
    assert pickle.loads(pickle.dumps(choices)) is choices
    assert str(LONGEST_ROW) in choices().uuid()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, {"inductor_compile_config": {"a": 1}}),
        (3, {"mode": 3, "inductor_compile_config": {"a": 1}}),
        (
            {"custom_ops": ["none"], "inductor_compile_config": {"a": 2, "b": 3}},
            {"custom_ops": ["none"], "inductor_compile_config": {"a": 2, "b": 3}},
        ),
    ],
)
def test_settings_for_inductor_stand_beside_the_users_own_which_win(given, expected):
    options = VllmOptions(compilation_config=given, max_num_seqs=7)
    settled = with_inductor(options, {"a": 1})
    assert settled.compilation_config == expected
    assert settled.max_num_seqs == 7
    assert options.compilation_config == given


def quantized(rows, columns, seed):
    """[rows, columns] in e4m3, a float32 scale of each row, and what both stand for."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(rows, columns, generator=generator)
    wide *= torch.linspace(0.1, 8, rows)[:, None]  # no two scales alike
    scale = wide.abs().amax(1, keepdim=True) / 448
    values = (wide / scale).to(torch.float8_e4m3fn)
    return values, scale, values.double() * scale.double()


def kernel_of(depth, width, device):
    """vLLM's choice for a layer in FP8 by token and channel, and the layer's exact weight."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.layers.quantization.utils import quant_utils

    with set_current_vllm_config(VllmConfig()):
        kernel = linear.init_fp8_linear_kernel(
            activation_quant_key=quant_utils.kFp8DynamicTokenSym,
            weight_quant_key=quant_utils.kFp8StaticChannelSym,
            input_dtype=torch.bfloat16,
            out_dtype=torch.bfloat16,
            weight_shape=(width, depth),
        )
    values, scale, exact = quantized(width, depth, seed=depth + width)
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(values.to(device).t(), requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(scale.to(device), requires_grad=False)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # in which vLLM loads
    try:
        kernel.process_weights_after_loading(layer)
    finally:
        torch.set_default_dtype(default)
    return kernel, layer, exact


@pytest.fixture
def compiling(vllm_process, monkeypatch):
    """vLLM's other tests on a CPU run without compiling, from the first of them on."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")
    with torch._dynamo.config.patch(disable=False):
        yield


SHAPES = [(256, 128), (256, 256), (128, 256)]


def check_products(device, shapes):
    """Compiled in one graph, as vLLM compiles its models."""
    for depth, width in shapes:
        kernel, layer, weight = kernel_of(depth, width, device)
        assert type(kernel).__name__ == "NarrowProducts"
        assert kernel.narrow is (width <= depth and width % 16 == 0), (depth, width)
        values, scale, x = quantized(24, depth, seed=1)
        for bias in (None, torch.linspace(-3, 3, width).bfloat16()):
            backend = CompileCounterWithBackend("aot_eager")
            multiply = torch.compile(kernel.apply_scaled_mm, backend=backend, fullgraph=True)
            made = multiply(
                A=values.to(device), B=layer.weight, out_dtype=torch.bfloat16, As=scale.to(device),
                Bs=layer.weight_scale, bias=None if bias is None else bias.to(device),
                output_shape=[2, 12, width],
            )  # fmt: skip
            assert backend.frame_count == 1
            exact = x @ weight.T + (0 if bias is None else bias.double())
            assert made.shape == (2, 12, width)
            assert made.dtype == torch.bfloat16
            # Twice rounded to bf16, and sums of FP8 products that Hopper keeps in 14 bits.
            error = (made.view(24, width).double().cpu() - exact).norm() / exact.norm()
            assert error < 4e-3, (depth, width, bias is not None)


@pytest.mark.vllm
def test_narrow_products_equal_the_exact_ones(compiling):
    """On a CPU, over the kernel that vLLM has there."""
    from vllm.model_executor.kernels import linear
    from vllm.platforms import PlatformEnum, current_platform

    if not current_platform.is_cpu():
        pytest.skip("the GPU's kernel has a test of its own")
    kernels = linear._POSSIBLE_FP8_KERNELS[PlatformEnum.CPU]
    before = list(kernels)
    with offered(kernels, make_kernel(linear.ChannelWiseTorchFP8ScaledMMLinearKernel)):
        check_products("cpu", [*SHAPES, (256, 40)])
    assert kernels == before


@pytest.mark.vllm
@pytest.mark.gpu
def test_an_engine_on_hopper_finds_the_kernel_and_compiles_rows_whole():
    from torch._inductor.utils import run_and_get_code

    pytest.importorskip("vllm")
    if torch.cuda.get_device_capability() != HOPPER:
        pytest.skip("layers are fxrl's on Hopper only")
    symbols = door.installed(VllmOptions())

    def norm(x):
        return x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-6)

    x = torch.randn(64, 4096, device="cuda")
    with door.layers(VllmOptions(), symbols) as settled:
        settings = settled.compilation_config["inductor_compile_config"]
        assert settings == {"inductor_choices_class": door.RowChoices, **NO_TRIALS}
        check_products("cuda", SHAPES)
        made, (code,) = run_and_get_code(torch.compile(norm, options=settings), x)
    assert "triton_per_fused" in code
    torch.testing.assert_close(made, norm(x))
    torch.compiler.reset()
    _, (code,) = run_and_get_code(torch.compile(norm), x)
    assert "triton_red_fused" in code  # Inductor's own again
    kernel, *_ = kernel_of(256, 128, "cuda")
    assert type(kernel).__name__ == "CutlassFP8ScaledMMLinearKernel"
    theirs = VllmOptions(decode_layers=False)
    with door.layers(theirs, symbols) as settled:
        assert settled is theirs
