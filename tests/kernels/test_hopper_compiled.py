"""The GEMMs compile for a Hopper GPU, without one, to the code that their speed needs."""

import re
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytest.importorskip("cuda.bindings.nvrtc")

import triton

from fxrl.kernels.hopper import module
from tests.rows import rows

DISASSEMBLER = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
NAMES = ("MODE", "BIAS", "CAP", "MOMENTS", "WEIGHTED")
#: Each mode with its flags all on: each one's code is there, and registers are few. All off, they
#: are seldom compiled.
FEW = [(mode, 0, 0, 0, 0) for mode in (module.STATISTICS, module.EXPONENTIALS, module.GRADIENT)]
VARIANTS = [
    *FEW,
    (module.STATISTICS, 1, 1, 1, 0),
    (module.EXPONENTIALS, 1, 1, 1, 0),
    (module.GRADIENT, 1, 1, 0, 1),
]


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


def machine_code(variant, tmp_path, kernel="loss_head", names=NAMES):
    """Instructions in order, without addresses and operands' encodings."""
    defines = tuple(f"-D{name}={value}" for name, value in zip(names, variant, strict=True))
    binary = tmp_path / "kernel.cubin"
    binary.write_bytes(module._cubin(kernel, defines))
    done = subprocess.run(
        [DISASSEMBLER, "-c", binary], capture_output=True, text=True, check=True, timeout=120
    )
    return re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", done.stdout)


@pytest.mark.parametrize("variant", rows(VARIANTS, FEW), ids=str)
def test_nothing_stalls_the_main_loop(variant, tmp_path):
    code = machine_code(variant, tmp_path)
    products = [k for k, line in enumerate(code) if "HGMMA.64x256x16.F32.BF16" in line]
    assert len(products) >= 4
    loop = code[products[0] : products[-1]]
    # Cluster-wide release and acquire would flush and invalidate at every step.
    assert not [line for line in loop if re.search("MEMBAR|CCTL|STL|LDL", line)]
    assert any("MULTICAST" in line for line in code if "UTMALDG" in line)
    assert any("UTMASTG" in line for line in code) == (variant[0] != module.STATISTICS)


@pytest.mark.parametrize("columns", [0, 1])
def test_products_in_fp8_and_of_low_rank_share_their_sums(columns, tmp_path):
    code = machine_code((columns,), tmp_path, "scaled_product", ("COLUMNS",))
    of = {kind: [k for k, line in enumerate(code) if kind in line] for kind in ("QGMMA", "HGMMA")}
    assert len(of["QGMMA"]) >= 4
    assert of["HGMMA"]
    loop = code[of["QGMMA"][0] : of["QGMMA"][-1]]
    assert not [line for line in loop if re.search("MEMBAR|CCTL|STL|LDL", line)]
    assert not [line for line in code if re.search("STL|LDL", line)]  # no sum leaves registers


def test_a_variant_is_compiled_once(monkeypatch):
    compile_ = module._cubin.__wrapped__
    defines = tuple(f"-D{name}=0" for name in NAMES)
    first = compile_("loss_head", defines)
    monkeypatch.setattr("cuda.bindings.nvrtc.nvrtcCompileProgram", None)
    assert compile_("loss_head", defines) == first


def test_what_nvrtc_says_is_passed_on():
    defines = ("-DMODE=nonsense", "-DBIAS=0", "-DCAP=0", "-DMOMENTS=0")
    with pytest.raises(module.CudaModuleError, match="nonsense"):
        module._cubin.__wrapped__("loss_head", defines)
