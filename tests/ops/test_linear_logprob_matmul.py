"""Products of the loss head are as exact as their operands' dtype, whatever the user has set."""

from contextlib import ExitStack, contextmanager

import pytest
import torch

from fxrl.ops.linear_logprob.matmul import full_precision, product_dtype

CUDA, ONEDNN = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul


@pytest.fixture(autouse=True)
def _settings():
    yield
    CUDA.allow_fp16_accumulation = False
    torch.set_float32_matmul_precision("highest")


def flags():
    return CUDA.fp32_precision, ONEDNN.fp32_precision, CUDA.allow_fp16_accumulation


def narrow_sums():
    names = ("fp16", "bf16")
    return [getattr(CUDA, f"allow_{name}_reduced_precision_reduction") for name in names]


@contextmanager
def everywhere():
    """Every setting there is, as products of all dtypes on both devices ask for it."""
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            for dtype in (torch.float32, torch.float16, torch.bfloat16):
                stack.enter_context(full_precision(device, dtype, narrow_result=True))
        yield


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_what_the_user_switched_on_is_off_inside_and_back_after(precision):
    torch.set_float32_matmul_precision(precision)
    CUDA.allow_fp16_accumulation = True
    before = flags()
    assert before == ("tf32", "tf32" if precision == "high" else "bf16", True)
    assert narrow_sums() == [True, True]  # torch's default
    with everywhere():
        assert flags() == ("ieee", "ieee", False)
        assert narrow_sums() == [False, False]
    assert narrow_sums() == [True, True]
    assert flags() == before
    assert torch.get_float32_matmul_precision() == precision
    with pytest.raises(ZeroDivisionError), everywhere():
        raise ZeroDivisionError
    assert flags() == before


def test_only_the_new_setting_was_used():
    CUDA.fp32_precision = "tf32"
    with everywhere():
        assert CUDA.fp32_precision == "ieee"
    assert CUDA.fp32_precision == "tf32"


def test_a_default_is_left_alone():
    before = flags()
    with everywhere():
        assert flags() == before


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_by_default_nothing_of_the_process_is_touched(device, dtype):
    """Another thread may be capturing, and Dynamo guards on the settings."""
    before = flags(), narrow_sums()
    with full_precision(device, dtype):
        assert (flags(), narrow_sums()) == before


def test_the_last_thread_puts_the_users_setting_back():
    CUDA.fp32_precision = "tf32"
    first, second = (full_precision("cuda", torch.float32) for _ in range(2))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert CUDA.fp32_precision == "ieee", "the second still multiplies"
    second.__exit__(None, None, None)
    assert CUDA.fp32_precision == "tf32"


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
    ids=str,
)
def test_on_a_cpu_every_product_takes_a_wide_gradient(dtype, wide):
    assert product_dtype(torch.zeros(1, dtype=dtype)) == wide
