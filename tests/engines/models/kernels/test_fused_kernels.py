"""The kernels in Triton equal PyTorch's operations: interpreted on a CPU, and compiled for Hopper without a GPU."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from spmdrl.engines.models.kernels import plain
from tests.engines.models.kernels.interpreter import Interpreter

VOCABULARY = 5000
"""More than a program reads at once."""


def with_gradients(name: str, inputs: tuple[Tensor, ...], fixed: tuple[Tensor, ...], module) -> list[Tensor]:
    """The result, and its gradients for random weights of its elements."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = getattr(module, name)(*inputs, *fixed)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return [out, *torch.autograd.grad(out, inputs, weights)]


def interpreted_with_gradients(name: str, inputs: tuple[Tensor, ...], fixed: tuple[Tensor, ...]) -> list[Tensor]:
    from spmdrl.engines.models.kernels import fused_kernels

    return [x.detach() for x in with_gradients(name, inputs, fixed, fused_kernels)]


def interpreted(name: str, *arguments: Tensor | None) -> tuple[Tensor, ...]:
    """The result, and what the kernel has made of its first argument."""
    from spmdrl.engines.models.kernels import fused_kernels

    out = getattr(fused_kernels, name)(*arguments)
    return (*(out if isinstance(out, tuple) else (out,)), arguments[0])


def rows_of(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def angles(num_tokens: int, half: int) -> tuple[Tensor, Tensor]:
    turns = rows_of(num_tokens, 1, half, seed=2)
    return turns.cos(), turns.sin()


ROTATED = {
    "several heads": (rows_of(5, 7, 32),),
    "more heads than a program's": (rows_of(3, 33, 8),),
    "an odd half": (rows_of(4, 2, 6),),
    "a part of each head": (rows_of(4, 2, 48)[..., :24],),
    "heads with others between them": (rows_of(4, 6, 16)[:, ::2],),
    "no tokens": (rows_of(0, 2, 16),),
}
GATED = {
    "rows": (rows_of(5, 100), rows_of(5, 100, seed=1)),
    "longer than a program's": (rows_of(2, 3, 1100), rows_of(2, 3, 1100, seed=1)),
    "halves of one product": tuple(rows_of(3, 64).split(32, dim=-1)),
    "no rows": (rows_of(0, 8), rows_of(0, 8)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rotations_and_gates_equal_the_plain_ones(interpreter: Interpreter, dtype: torch.dtype) -> None:
    cases = [("rotate", inputs, angles(len(inputs[0]), inputs[0].shape[-1] // 2)) for inputs in ROTATED.values()]
    cases += [("swiglu", inputs, ()) for inputs in GATED.values()]
    cases = [(name, tuple(x.to(dtype) for x in inputs), fixed) for name, inputs, fixed in cases]
    tolerance = 1e-6 if dtype is torch.float32 else 4e-3
    for case, found in zip(cases, interpreter.run(interpreted_with_gradients, cases), strict=True):
        for ours, theirs in zip(found, with_gradients(*case, plain), strict=True):
            assert ours.dtype == dtype
            torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


def test_sums_of_exponentials_and_their_gradients_equal_the_plain_ones(interpreter: Interpreter) -> None:
    logits_CV = rows_of(3, VOCABULARY) * 4
    above_CV, highest_C = logits_CV - logits_CV.amax(-1, keepdim=True), logits_CV.amax(-1)
    sum_C, weighted_C = plain.exponential_sums(logits_CV.clone(), highest_C)
    log_sum_C = sum_C.log()
    entropy_C, pulls_C = log_sum_C - weighted_C / sum_C, torch.tensor([1.0, -0.5, 0.0])
    rows = [(pulls_C, 0.1 * pulls_C), (pulls_C, None), (None, pulls_C)]
    cases = [("minus_expected", above_CV.clone(), log_sum_C, entropy_C, *own) for own in rows]
    [sums, *gradients] = interpreter.run(interpreted, [("exponential_sums", logits_CV.clone(), highest_C), *cases])
    for ours, theirs in zip(sums, (sum_C, weighted_C, above_CV), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    for (_, _, *case), (out, overwritten) in zip(cases, gradients, strict=True):
        torch.testing.assert_close(out, plain.minus_expected(above_CV.clone(), *case), atol=1e-6, rtol=1e-5)
        assert torch.equal(out, overwritten)


def test_tokens_are_drawn_at_the_same_places_and_never_of_weight_zero(interpreter: Interpreter) -> None:
    weights_BV = torch.where(rows_of(40, VOCABULARY) > 1, rows_of(40, VOCABULARY).exp(), 0.0)
    uniforms_B = torch.rand(40, generator=torch.Generator().manual_seed(1))
    edges_BV = torch.tensor([[0.0, 0.3, 0.0, 0.1, 0.0], [0.0, 0.0, 1e-7, 0.0, 0.0]])
    edges = [("invert_cdf", edges_BV, torch.full((2,), uniform)) for uniform in (0.0, 0.5, 1 - 2.0**-24)]
    broken = ("invert_cdf", torch.full((2, 5), math.nan), torch.tensor([0.0, 0.9]))
    [(drawn_B, _), *at_edges, (any_B, _)] = interpreter.run(
        interpreted, [("invert_cdf", weights_BV, uniforms_B), *edges, broken]
    )
    cumulated_BV = weights_BV.double().cumsum(-1)
    expected_B = torch.searchsorted(cumulated_BV, (uniforms_B.double() * cumulated_BV[:, -1])[:, None], right=True)
    assert torch.equal(drawn_B[:, None], expected_B)
    for tokens_B, _ in at_edges:
        assert (edges_BV.gather(1, tokens_B[:, None]) > 0).all()
    assert ((any_B >= 0) & (any_B < 5)).all()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_kernels_compile_for_hopper(dtype: str, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton isn't installed; it comes with torch's CUDA builds")
    from spmdrl.engines.models.kernels import fused_kernels
    from tests.engines.models.kernels.interpreter import compiled_size

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    constants = {"HALF": 64, "HEADS": 16, "LANES": 64, "BLOCK": 1024, "TILE": 4096, "SIZE": 151936}
    constants |= {"HAS_LOGPROB": True, "HAS_ENTROPY": True}
    kinds = dict.fromkeys(("heads", "out", "gates", "ups", "gradients", "by_gates", "by_ups"), f"*{dtype}")
    floats = ("cos", "sin", "logits", "highest", "sums", "weighted", "above", "log_sums", "entropies", "weights")
    kinds |= dict.fromkeys((*floats, "by_logprobs", "by_entropies", "targets"), "*fp32")
    kinds |= {"tokens": "*i64", "sign": "fp32"}
    names = ("_rotate", "_gate", "_gate_backward", "_sum_exponentials", "_subtract_expected", "_find_tokens")
    for name in names:
        assert compiled_size(getattr(fused_kernels, name), kinds, constants) > 1000
