"""Operations by name; each runs the table's implementation for its tensors' device, or the plain one.

Shape letters: `T` packed tokens, `H` query heads, `J` key and value heads, `K` head size, `U` head size of values,
`B` rows, `Q` queries of a row, `S` key positions, `C` blocks of a table, `M` rows, `E` experts, `D` inputs and `O`
outputs of a linear layer; `C` places and `V` vocabulary of a head. Of linear attention: `G` heads of queries and keys,
`H` of values, `C` channels and `W` width of its convolution, `S` slots of states.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spmdrl.engines.models.kernels import cpu, cuda, delta, invariant, npu, plain
from spmdrl.engines.models.kernels.cpp import delta_steps, elementwise, row_attention
from spmdrl.engines.models.kernels.cpp.cpu_library import cpu_library
from spmdrl.engines.models.kernels.packed import PackedRows, Sinks, Window
from spmdrl.engines.models.kernels.prefixed import PrefixedRows

TABLE: dict[str, dict[str, Callable[..., Any]]] = {
    "rms_norm": {"cpu": elementwise.rms_norm, "cuda": cuda.rms_norm, "npu": npu.rms_norm},
    "rotate": {"cpu": elementwise.rotate, "cuda": cuda.rotate, "npu": npu.rotate},
    "swiglu": {"cpu": elementwise.swiglu, "cuda": cuda.swiglu, "npu": npu.swiglu},
    "geglu": {"cpu": plain.geglu, "cuda": plain.geglu, "npu": plain.geglu},
    "sigmoid": {"cpu": plain.sigmoid, "cuda": plain.sigmoid, "npu": plain.sigmoid},
    "softplus": {"cpu": plain.softplus, "cuda": plain.softplus, "npu": plain.softplus},
    "softcap": {"cpu": plain.softcap, "cuda": plain.softcap, "npu": plain.softcap},
    "masked_attention": {"cpu": plain.masked_attention, "cuda": plain.masked_attention, "npu": plain.masked_attention},
    "grouped_linear": {"cpu": cpu.grouped_linear, "cuda": cuda.grouped_linear, "npu": npu.grouped_linear},
    "linear": {"cpu": cpu.linear, "cuda": F.linear, "npu": F.linear},
    "blocked_linear": {"cpu": cpu.blocked_linear, "cuda": plain.blocked_linear, "npu": plain.blocked_linear},
    "add_matmul": {"cpu": cpu.add_matmul, "cuda": cuda.add_matmul, "npu": npu.add_matmul},
    "exponential_sums": {
        "cpu": elementwise.exponential_sums,
        "cuda": cuda.exponential_sums,
        "npu": plain.exponential_sums,
    },
    "minus_expected": {"cpu": elementwise.minus_expected, "cuda": cuda.minus_expected, "npu": plain.minus_expected},
    "invert_cdf": {"cpu": plain.invert_cdf, "cuda": cuda.invert_cdf, "npu": plain.invert_cdf},
    "paged_attention": {"cpu": cpu.paged_attention, "cuda": cuda.paged_attention, "npu": plain.paged_attention},
    "packed_attention": {
        "cpu": row_attention.packed_attention,
        "cuda": cuda.packed_attention,
        "npu": npu.packed_attention,
    },
    "prefixed_attention": {
        "cpu": row_attention.prefixed_attention,
        "cuda": cuda.prefixed_attention,
        "npu": npu.prefixed_attention,
    },
    "causal_conv": {"cpu": delta_steps.causal_conv, "cuda": delta.causal_conv, "npu": delta.causal_conv},
    "conv_step": {"cpu": delta_steps.conv_step, "cuda": delta.conv_step, "npu": delta.conv_step},
    "gated_delta": {"cpu": delta_steps.gated_delta, "cuda": cuda.gated_delta, "npu": delta.gated_delta},
    "gated_delta_step": {
        "cpu": delta_steps.gated_delta_step,
        "cuda": cuda.gated_delta_step,
        "npu": delta.gated_delta_step,
    },
}


def compute_batch_invariantly() -> None:
    """Switch to operations that give a row the same bits whatever is computed beside it; CPUs in float32 only.

    Raises ValueError on a machine without the CPU's library, whose attention this needs.
    """
    if cpu_library() is None:
        raise ValueError(
            "debug.batch_invariant is true, but the CPU's operations can't be built here, as was logged; install g++, "
            "name a compiler in the environment's CXX, or set debug.batch_invariant to false"
        )
    # Threads divide a product's rows, until one of them has too few.
    torch.set_num_threads(1)
    for name, function in invariant.OPERATIONS.items():
        TABLE[name] = {"cpu": function}


def implementation(operation: str, tensor: Tensor) -> Callable[..., Any]:
    """Return the operation's implementation for a tensor's device."""
    return TABLE[operation].get(tensor.device.type) or getattr(plain, operation)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize the last dim by its root mean square (arXiv:1910.07467, eq. 4), in float32; returns x's dtype."""
    return implementation("rms_norm", x)(x, weight, eps)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embedding to [T, H, K], half-split, in float32; cosines and sines are float32 [T, 1, K / 2]."""
    return implementation("rotate", heads)(heads, cos, sin)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up (arXiv:2002.05202, eq. 6)."""
    return implementation("swiglu", gate)(gate, up)


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return gelu(gate) * up with the tanh form of GELU (arXiv:1606.08415, section 2)."""
    return implementation("geglu", gate)(gate, up)


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x))."""
    return implementation("sigmoid", x)(x)


def softplus(x: Tensor) -> Tensor:
    """Return log(1 + exp(x))."""
    return implementation("softplus", x)(x)


def softcap(logits: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(logits / cap) of float32 logits, which are overwritten. No gradient."""
    return implementation("softcap", logits)(logits, cap)


def linear(rows_MD: Tensor, weight_OD: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return rows @ weight.T + bias [M, O]."""
    return implementation("linear", rows_MD)(rows_MD, weight_OD, bias_O)


def grouped_linear(rows_MD: Tensor, weights_EOD: Tensor, counts_E: Tensor) -> Tensor:
    """Apply each expert's linear layer to its own rows, which are sorted by expert; returns [M, O].

    `counts_E` int64 adds up to R and may hold zeros; every expert's weight gets a gradient.
    """
    return implementation("grouped_linear", rows_MD)(rows_MD, weights_EOD, counts_E)


def blocked_linear(weight_OD: Tensor, bias_O: Tensor | None) -> cpu.BlockedLinear | None:
    """Return a linear layer with a copy of this weight that beats F.linear without gradients, or None."""
    return implementation("blocked_linear", weight_OD)(weight_OD, bias_O)


def add_matmul(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Add a.T @ b, of a [T, O] and b [T, D], to the float32 `out` [O, D] in place; returns `out`. No gradient."""
    return implementation("add_matmul", out)(out, a, b)


def exponential_sums(logits_CV: Tensor, highest_C: Tensor) -> tuple[Tensor, Tensor]:
    """Return sums [C] of exp(z) and of z exp(z) over each row, where z is a logit minus the row's highest.

    The float32 logits are overwritten by z. No gradient.
    """
    return implementation("exponential_sums", logits_CV)(logits_CV, highest_C)


def minus_expected(
    above_CV: Tensor, log_sum_C: Tensor, entropy_C: Tensor, by_logprob_C: Tensor | None, by_entropy_C: Tensor | None
) -> Tensor:
    """Return -p * (g + h * (log p + H)) [C, V], float32; log p is z - log sum; overwrites z. No gradient.

    d/dz of g * log p_t + h * H is this, plus g at the target t. `by_logprob_C` has g and `by_entropy_C` h of each row;
    one of them may be None.
    """
    compute = implementation("minus_expected", above_CV)
    return compute(above_CV, log_sum_C, entropy_C, by_logprob_C, by_entropy_C)


def invert_cdf(weights_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """Return the token [B] whose share of the cumulative weights holds the uniform number; never one of weight 0.

    Where a row has weights that are NaN its token is any, within the vocabulary. No gradient.
    """
    return implementation("invert_cdf", weights_BV)(weights_BV, uniforms_B)


def packed_attention(
    q_THK: Tensor, k_TJK: Tensor, v_TJU: Tensor, rows: PackedRows, window: Window = None, sinks_H: Sinks = None
) -> Tensor:
    """Attend causally inside each row and never across rows, scaled by 1 / sqrt(K); returns [T, H, U].

    J divides H. Values may have a smaller head size than keys. With a window a token sees itself and the `window` - 1
    tokens before it. Sinks are one more score of each head, unscaled, in the softmax of all its queries, with no value.
    """
    return implementation("packed_attention", q_THK)(q_THK, k_TJK, v_TJU, rows, window, sinks_H)


def prefixed_attention(
    q_THK: Tensor, k_TJK: Tensor, v_TJU: Tensor, rows: PrefixedRows, window: Window = None, sinks_H: Sinks = None
) -> Tensor:
    """Compute `packed_attention` of rows of which some share their first tokens; returns [T, H, U]."""
    return implementation("prefixed_attention", q_THK)(q_THK, k_TJK, v_TJU, rows, window, sinks_H)


def masked_attention(q_BHQK: Tensor, k_BJSK: Tensor, v_BJSU: Tensor, mask: Tensor, sinks_H: Sinks = None) -> Tensor:
    """Attend to the keys for which the mask, broadcast to [B, 1, Q, S], is true; returns [B, H, Q, U].

    A mask of numbers has 0 for true and -inf for false, and is added to the scores. Scaled by 1 / sqrt(K). J divides H.
    Every query sees at least one key. Sinks are those of `packed_attention`.
    """
    return implementation("masked_attention", q_BHQK)(q_BHQK, k_BJSK, v_BJSU, mask, sinks_H)


def paged_attention(
    q_BHK: Tensor,
    keys: Tensor,
    values: Tensor,
    tables_BC: Tensor,
    lengths_B: Tensor,
    window: Window = None,
    sinks_H: Sinks = None,
) -> Tensor:
    """Attend from one query per row to its first `lengths_B` cached positions; returns [B, H, U].

    Position s of a row is place s % block_size of block `tables_BC`[s // block_size]; keys are [blocks, J, block size,
    K], values [blocks, J, block size, U]. Tables and lengths are int32, lengths at least 1. Scaled by 1 / sqrt(K). J
    divides H. With a window the last `window` of these positions are seen; blocks without any of them may be any block.
    Sinks are those of `packed_attention`.
    """
    return implementation("paged_attention", q_BHK)(q_BHK, keys, values, tables_BC, lengths_B, window, sinks_H)


def causal_conv(values_TC: Tensor, weight_CW: Tensor, rows: PackedRows, before_BWC: Tensor | None = None) -> Tensor:
    """Mix each channel of a token with those of the W - 1 before it in its row, then silu; returns [T, C].

    out[t] = silu(sum of weight[w] * values[t - W + 1 + w]); `before` [B, W - 1, C] are the columns before each row that
    holds tokens, or zeros. `delta.last_columns` are those before tokens that follow.
    """
    return implementation("causal_conv", values_TC)(values_TC, weight_CW, rows, before_BWC)


def conv_step(values_BC: Tensor, weight_CW: Tensor, columns_SWC: Tensor, slots_B: Tensor) -> Tensor:
    """Compute `causal_conv` of one token per row; returns [B, C]. No gradient.

    The W - 1 columns of slot `slots_B` (int64, distinct) are those before the token, and are moved on in place.
    """
    return implementation("conv_step", values_BC)(values_BC, weight_CW, columns_SWC, slots_B)


def gated_delta(
    q_TGK: Tensor, k_TGK: Tensor, v_THU: Tensor, log_decay_TH: Tensor, beta_TH: Tensor, rows: PackedRows,
    before_BHKU: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Read and update each row's state by the gated delta rule; returns outputs [T, H, U] and states [B, H, K, U].

    S <- exp(log decay) S; S <- S + k (beta (v - S^T k))^T; out = S^T q / sqrt(K), with q and k divided by their norms.
    `before` are the states before each row that holds tokens, or zeros; states are float32. Log decays are at most 0. G
    divides H: each key head serves consecutive value heads.
    """
    compute = implementation("gated_delta", v_THU)
    return compute(q_TGK, k_TGK, v_THU, log_decay_TH, beta_TH, rows, before_BHKU)


def gated_delta_step(
    q_BGK: Tensor, k_BGK: Tensor, v_BHU: Tensor, log_decay_BH: Tensor, beta_BH: Tensor,
    states_SHKU: Tensor, slots_B: Tensor,
) -> Tensor:  # fmt: skip
    """Compute `gated_delta` of one token per row; returns [B, H, U]. No gradient.

    The float32 states of slots `slots_B` (int64, distinct) are read and updated in place.
    """
    compute = implementation("gated_delta_step", v_BHU)
    return compute(q_BGK, k_BGK, v_BHU, log_decay_BH, beta_BH, states_SHKU, slots_B)


def reads_pages(device: torch.device, dtype: torch.dtype | None = None) -> bool:
    """Return True if paged attention, of this dtype or at all, reads blocks in place instead of copying them."""
    function = TABLE["paged_attention"].get(device.type, plain.paged_attention)
    if function is cpu.paged_attention:
        return cpu.reads_pages(dtype)
    return function is not plain.paged_attention


def reads_pages_of_a_row_once(device: torch.device) -> bool:
    """Return True if paged attention reads blocks once for consecutive positions of a row beside each other."""
    return TABLE["paged_attention"].get(device.type) is row_attention.cached_attention
