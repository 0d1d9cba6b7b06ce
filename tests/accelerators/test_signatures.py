"""Our calls of optional libraries and of PyTorch's operators fit the signatures of their releases."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.accelerators.record_signatures import RECORD
from tests.support.jobs import ROOT

RECORDED: dict[str, dict[str, dict[str, str]]] = json.loads(RECORD.read_text())
SOURCE = ROOT / "src" / "spmdrl"
# How code names what it calls, longest first, and the name under which that is recorded.
PREFIXES = {
    "vllm": {
        "self._llm.llm_engine.": "LLMEngine.",
        "self._llm.": "LLM.",
        "self._vllm.": "",
        "vllm.": "",
        "CPUAttentionBackend.": "CPUAttentionBackend.",
        "get_tp_group": "get_tp_group",
    },
    "torch_npu": {"_operators().": ""},
    "fla_core": {"_delta_kernels().": ""},
    "torch": {"torch.ops.aten.": ""},
}
FILES = {
    "vllm": [*(SOURCE / "engines" / "generation").glob("vllm*.py"), ROOT / "tests/bench/rollout/rollout_vllm.py"],
    "torch_npu": [SOURCE / "engines" / "models" / "kernels" / "npu.py"],
    "fla_core": [SOURCE / "engines" / "models" / "kernels" / "cuda.py"],
    "torch": sorted(SOURCE.rglob("*.py")),
}
# torch_npu 2.13's library holds the text of this schema in pieces.
UNREADABLE = {("torch_npu", "2.13.0", "_npu_matmul_add_fp32")}


def calls_of(library: str, files: list[Path] | None = None) -> Iterator[tuple[str, ast.Call]]:
    """Calls of a library by recorded name, wherever they stand."""
    for path in files or FILES[library]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and (name := _recorded_name(library, ast.unparse(node.func))):
                yield name, node


def _recorded_name(library: str, called: str) -> str | None:
    for prefix, recorded in PREFIXES[library].items():
        if called.startswith(prefix):
            return recorded + called.removeprefix(prefix) if prefix.endswith(".") else recorded
    return None


def signature_of(recorded: str) -> inspect.Signature:
    if "->" not in recorded:
        signature = inspect.signature(eval(f"lambda {recorded}: None"))
        first = next(iter(signature.parameters), None)
        bound = list(signature.parameters.values())[first in ("self", "cls", "ctx") :]
        return signature.replace(parameters=bound)
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    return inspect.Signature(
        inspect.Parameter(
            argument.name, kinds[argument.kwarg_only], default=... if argument.has_default_value() else inspect._empty
        )
        for argument in torch._C.parse_schema(recorded).arguments
    )


def bind(call: ast.Call, signature: inspect.Signature) -> None:
    """Raise TypeError unless the signature takes the call; what is starred stands for any number of arguments."""
    keywords = {keyword.arg: ... for keyword in call.keywords if keyword.arg is not None}
    is_open = any(isinstance(argument, ast.Starred) for argument in call.args) or len(keywords) < len(call.keywords)
    (signature.bind_partial if is_open else signature.bind)(*call.args, **keywords)


@pytest.mark.parametrize(
    ("library", "version"), [(library, version) for library in RECORDED for version in RECORDED[library]]
)
def test_every_call_fits_the_release(library: str, version: str) -> None:
    recorded, found = RECORDED[library][version], set()
    for name, call in calls_of(library):
        if (library, version, name) in UNREADABLE:
            continue
        assert name in recorded, f"{ast.unparse(call)}: {library} {version} has no {name}, or it isn't recorded"
        try:
            bind(call, signature_of(recorded[name]))
        except TypeError as error:
            raise AssertionError(f"{library} {version}: {ast.unparse(call)}: {error}") from error
        found.add(name)
    assert found, "no call was found"


@pytest.mark.parametrize("version", RECORDED["vllm"])
def test_vllm_takes_the_arguments_that_its_engine_is_built_with(version: str) -> None:
    recorded = RECORDED["vllm"][version]
    taken = {name for key in ("LLM", "EngineArgs") for name in signature_of(recorded[key]).parameters}
    (path,) = [path for path in FILES["vllm"] if path.name == "vllm_engine.py"]
    (function,) = [
        node for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == "_arguments"
    ]  # fmt: skip
    given = {key.value for node in ast.walk(function) if isinstance(node, ast.Dict) for key in node.keys}
    given |= {
        node.slice.value for node in ast.walk(function)
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
    }  # fmt: skip
    assert len(given) > 12 and given <= taken, given - taken


@pytest.mark.parametrize("version", RECORDED["vllm"])
def test_vllms_worker_reloads_weights_from_an_iterator(version: str) -> None:
    assert "weights_iterator" in signature_of(RECORDED["vllm"][version]["reload_weights"]).parameters


def test_a_call_that_does_not_fit_is_found(tmp_path: Path) -> None:
    (path := tmp_path / "wrong.py").write_text("_operators().npu_swiglu(x, axis=-1)\n")
    ((name, call),) = calls_of("torch_npu", [path])
    with pytest.raises(TypeError, match="axis"):
        bind(call, signature_of(RECORDED["torch_npu"]["2.13.0"][name]))


def test_the_oldest_and_newest_admitted_releases_are_recorded() -> None:
    versions = {library: sorted(RECORDED[library]) for library in RECORDED}
    assert versions["vllm"][0].startswith("0.23") and versions["fla_core"][0].startswith("0.4.")
    for library in ("torch", "torch_npu"):
        assert versions[library][0].startswith("2.10") and versions[library][-1].startswith("2.13")
