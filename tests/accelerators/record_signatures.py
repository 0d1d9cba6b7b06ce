"""Records the signatures that our calls of other libraries must fit, from wheels that are read, not installed.

pip download --no-deps -d WHEELS vllm==0.23.0 torch-npu==2.10.0 torch==2.10.0 ...
python -m tests.accelerators.record_signatures WHEELS/*.whl
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

RECORD = Path(__file__).with_name("signatures.json")
# Functions and classes by the name that tests know them by, with the file and the path in it.
PYTHON = {
    "vllm": {
        "LLM": ("vllm/entrypoints/llm.py", "LLM.__init__"),
        "EngineArgs": ("vllm/engine/arg_utils.py", "EngineArgs"),
        "SamplingParams": ("vllm/sampling_params.py", "SamplingParams"),
        "TokensPrompt": ("vllm/inputs/llm.py", "TokensPrompt"),
        "get_tp_group": ("vllm/distributed/parallel_state.py", "get_tp_group"),
        "CPUAttentionBackend.get_supported_head_sizes": (
            "vllm/v1/attention/backends/cpu_attn.py",
            "CPUAttentionBackend.get_supported_head_sizes",
        ),
        **{
            f"LLM.{name}": ("vllm/entrypoints/llm.py", f"LLM.{name}")
            for name in ("generate", "sleep", "wake_up", "collective_rpc", "apply_model", "reset_prefix_cache")
        },
        **{
            f"LLMEngine.{name}": ("vllm/v1/engine/llm_engine.py", f"LLMEngine.{name}")
            for name in ("add_request", "abort_request", "step")
        },
        "reload_weights": ("vllm/v1/worker/gpu_model_runner.py", "GPUModelRunner.reload_weights"),
    },
    "fla_core": {
        name: (f"fla/ops/gated_delta_rule/{path}.py", name)
        for path, name in (
            ("chunk", "chunk_gated_delta_rule"),
            ("fused_recurrent", "fused_recurrent_gated_delta_rule"),
        )
    },
}
# Operators by the files that hold their schemas as text.
OPERATORS = {
    "torch": (
        r"torchgen/packaged/ATen/native/native_functions\.yaml",
        r"_flash_attention_forward|_flash_attention_backward|addmm\.dtype_out|_grouped_mm|_fused_adamw_"
        r"|_fused_rms_norm"
        r"|_scaled_dot_product_flash_attention_for_cpu(?:_backward)?",
    ),
    "torch_npu": (
        r"torch_npu/lib/.*\.so",
        r"npu_rms_norm|npu_rotary_mul|npu_swiglu|npu_grouped_matmul|npu_fusion_attention|_npu_matmul_add_fp32",
    ),
}


def main() -> None:
    found: dict[str, dict[str, dict[str, str]]] = {}
    for wheel in map(Path, sys.argv[1:]):
        library, version, *_ = wheel.name.split("-")
        with zipfile.ZipFile(wheel) as files:
            signatures = dict(sorted([*_of_python(library, files), *_of_operators(library, files)]))
        found.setdefault(library, {})[version] = signatures
    RECORD.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def _of_python(library: str, files: zipfile.ZipFile) -> Iterator[tuple[str, str]]:
    for name, (path, place) in PYTHON.get(library, {}).items():
        node: ast.AST = ast.parse(files.read(path))
        for part in place.split("."):
            node = next(child for child in ast.iter_child_nodes(node) if getattr(child, "name", None) == part)
        yield name, _fields(node) if isinstance(node, ast.ClassDef) else _parameters(node.args)


def _parameters(arguments: ast.arguments) -> str:
    """As in a def, without annotations, and with `...` for each default."""
    for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]:
        if argument is not None:
            argument.annotation = None
    arguments.defaults = [ast.Constant(...) for _ in arguments.defaults]
    arguments.kw_defaults = [default and ast.Constant(...) for default in arguments.kw_defaults]
    return ast.unparse(arguments)


def _fields(node: ast.ClassDef) -> str:
    """The annotated fields of a class, as keywords."""
    fields = [item.target.id for item in node.body if isinstance(item, ast.AnnAssign)]
    return ", ".join(["*", *(f"{name}=..." for name in fields)])


def _of_operators(library: str, files: zipfile.ZipFile) -> Iterator[tuple[str, str]]:
    if library not in OPERATORS:
        return
    path, names = OPERATORS[library]
    # A library's texts may follow each other without a gap.
    schema = re.compile(rb"(?:(?<![A-Za-z0-9_.:])|(?=_npu_))(" + names.encode() + rb")(\([^\x00\n]*?\) -> [^\x00\n]+)")
    for name in files.namelist():
        if re.fullmatch(path, name):
            for match in schema.finditer(files.read(name)):
                yield match[1].decode(), match[0].decode()


if __name__ == "__main__":
    main()
