"""torch_npu's operators on a CPU: recorded schemas over plain computations, as torch_npu documents them.

The dispatcher checks each call's arguments against the schema; what the documentation refuses raises ValueError.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.accelerators.record_signatures import RECORD

VERSION = "2.12.0"


def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    _refuse(input.dtype != gamma.dtype, "gamma has another dtype")
    root = (input.float().square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return (input.float() * root * gamma.float()).to(input.dtype), root


def npu_rotary_mul(
    input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    _refuse(not (input.dim() == r1.dim() == r2.dim() == 4), "all have four dims")
    _refuse(input.shape[-1] >= 896 or input.shape[-1] % 2 > 0, "a head is even and below 896")
    first, second = input.chunk(2, -1)
    return r1 * input + r2 * torch.cat((-second, first), dim=-1)


def npu_swiglu(input: Tensor, dim: int = -1) -> Tensor:
    gate, up = input.chunk(2, dim)
    return torch.nn.functional.silu(gate) * up


def npu_grouped_matmul(x: list[Tensor], weight: list[Tensor], **options: object) -> list[Tensor]:
    counts = options["group_list"]
    assert isinstance(counts, Tensor) and options["split_item"] == 3 and options["group_list_type"] == 1
    _refuse(counts.dtype != torch.int64 or len(counts) == 1, "counts are int64 and more than one")
    _refuse(x[0].dtype != weight[0].dtype, "dtypes differ")
    sizes = counts.tolist()
    if options["group_type"] == 0:
        return [torch.cat([rows @ of for rows, of in zip(x[0].split(sizes), weight[0], strict=True)])]
    assert options["group_type"] == 2
    groups = zip(x[0].split(sizes, dim=1), weight[0].split(sizes), sizes, strict=True)
    # What it leaves for a group without members isn't documented.
    return [torch.stack([left @ right if size else (left @ right) + torch.nan for left, right, size in groups])]


def npu_fusion_attention(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, **options: object
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    ends, key_ends, mask = options["actual_seq_qlen"], options["actual_seq_kvlen"], options["atten_mask"]
    assert isinstance(ends, list) and isinstance(key_ends, list) and isinstance(mask, Tensor)
    assert input_layout == "TND" and options["sparse_mode"] in (3, 4) and isinstance(options["scale"], float)
    assert mask.shape == (2048, 2048) and mask.equal(torch.ones(2048, 2048, dtype=torch.bool).triu(1))
    _refuse(not 1 <= len(ends) <= 1024 or ends[-1] != len(query) != 0, "1 to 1024 rows, which hold all tokens")
    _refuse(len(key_ends) != len(ends) or key_ends[-1] != len(key), "as many rows of keys, which hold all keys")
    _refuse(key.shape != value.shape or head_num != query.shape[1], "keys and values have one shape")
    _refuse(query.shape[-1] > 768 or query.shape[1] > 256 or query.shape[1] % key.shape[1] > 0, "sizes of heads")
    share, attended = head_num // key.shape[1], []
    for (start, stop), (first, last) in zip(
        itertools.pairwise([0, *ends]), itertools.pairwise([0, *key_ends]), strict=True
    ):
        q, k, v = (heads.transpose(0, 1).float() for heads in (query[start:stop], key[first:last], value[first:last]))
        k, v = k.repeat_interleave(share, 0), v.repeat_interleave(share, 0)
        # The triangle's corner is the last query's last key.
        hidden = torch.ones(stop - start, last - first, dtype=torch.bool).triu(1 + last - first - stop + start)
        if options["sparse_mode"] == 4:
            assert options["next_tockens"] == 0 and ends == key_ends, (
                "the band's place among more keys isn't documented"
            )
            hidden |= torch.ones_like(hidden).tril(-1 - options["pre_tockens"])
        scores = (q @ k.mT * options["scale"]).masked_fill(hidden, -torch.inf)
        attended.append((scores.softmax(-1) @ v).transpose(0, 1))
    unused = query.new_empty(0)
    return torch.cat(attended).to(query.dtype), unused, unused, unused, 0, 0, 0


def _npu_matmul_add_fp32(x: Tensor, weight: Tensor, C: Tensor) -> None:
    _refuse(x.dtype not in (torch.float16, torch.bfloat16) or x.dtype != weight.dtype, "16 bits alike")
    _refuse(C.dtype != torch.float32, "float32 sum")
    C += x.float().T @ weight.float()


def _refuse(condition: bool, rule: str) -> None:
    if condition:
        raise ValueError(f"torch_npu's documentation demands: {rule}")


def _by_name(function: Callable[..., Any], schema: str) -> Callable[..., Any]:
    """The function for the dispatcher, which passes arguments in the schema's order."""
    names = [argument.name for argument in torch._C.parse_schema(schema).arguments]
    return lambda *given, **named: function(**dict(zip(names, given, strict=False)), **named)


def stand_in() -> SimpleNamespace:
    """What `import torch_npu` gives, as far as the kernels go."""
    schemas: dict[str, str] = json.loads(RECORD.read_text())["torch_npu"][VERSION]
    library = torch.library.Library("npu_on_cpu", "FRAGMENT")
    for name, schema in schemas.items():
        library.define(schema)
        library.impl(name, _by_name(globals()[name], schema), "CompositeImplicitAutograd")
    operators = {name: getattr(torch.ops.npu_on_cpu, name) for name in schemas}
    return SimpleNamespace(**operators, library=library)
