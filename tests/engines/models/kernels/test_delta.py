"""The gated delta rule and its convolution: right, alike for a row in any company, and handed on between its pieces."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from spmdrl.engines.models.kernels import delta, ops
from spmdrl.engines.models.kernels.cpp import delta_steps
from spmdrl.engines.models.kernels.packed import PackedRows
from spmdrl.nouns.batch import offsets_of
from tests.engines.models.delta_cases import SIZES, a_few_sizes, assert_near, conv_inputs, need_library, rule_inputs
from tests.engines.models.support import no_cpu_library

LENGTHS = [1, 63, 64, 130, 65, 2]


def rule(inputs: Sequence[Tensor], lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    return ops.gated_delta(*inputs[:5], PackedRows(offsets_of(lengths)), inputs[5])


def conv(inputs: Sequence[Tensor], lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return mixed values, and the last columns of rows."""
    values, weight, before = inputs
    rows = PackedRows(offsets_of(lengths))
    last = delta.last_columns(values, rows, weight.shape[1] - 1, before)
    return ops.causal_conv(values, weight, rows, before), last


Operation = Callable[[Sequence[Tensor], Sequence[int]], tuple[Tensor, Tensor]]


def with_gradients(operation: Operation, inputs: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
    """Both results, and gradients of all inputs."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    results = operation(leaves, lengths)
    pulls = [torch.randn(x.shape, generator=torch.Generator().manual_seed(5), dtype=x.dtype) for x in results]
    return [*(x.detach() for x in results), *torch.autograd.grad(results, leaves, pulls)]


def recurrence(q, k, v, log_decay, beta, state):
    """One row of one head, as the definition has it, in float64."""
    q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    outputs = []
    for t in range(len(q)):
        state = state * np.exp(log_decay[t])
        state = state + np.outer(k[t], beta[t] * (v[t] - state.T @ k[t]))
        outputs.append(state.T @ q[t] / np.sqrt(len(q[t])))
    return np.stack(outputs), state


@pytest.mark.parametrize("sizes", SIZES)
def test_outputs_and_states_are_those_of_the_definition_in_float64(kernels, sizes):
    inputs = rule_inputs(sum(LENGTHS), len(LENGTHS), sizes)
    out, after = rule(inputs, LENGTHS)
    *tokens, before = (x.double().numpy() for x in inputs)
    for row, (start, stop) in enumerate(pairwise(offsets_of(LENGTHS).tolist())):
        for head in range(sizes[1]):
            of_keys = head * sizes[0] // sizes[1]
            heads = [of_keys, of_keys, head, head, head]
            of_head = [x[start:stop, h] for x, h in zip(tokens, heads, strict=True)]
            wanted, state = recurrence(*of_head, before[row, head])
            np.testing.assert_allclose(out[start:stop, head], wanted, atol=1e-6, rtol=0)
            np.testing.assert_allclose(after[row, head], state, atol=3e-6, rtol=0)


@pytest.mark.parametrize("sizes", SIZES)
def test_convolutions_are_those_of_the_definition_in_float64(kernels, sizes):
    inputs = conv_inputs(sum(LENGTHS), len(LENGTHS), sizes)
    mixed, last = conv(inputs, LENGTHS)
    values, weight, before = (x.double().numpy() for x in inputs)
    for row, (start, stop) in enumerate(pairwise(offsets_of(LENGTHS).tolist())):
        columns, width = np.concatenate((before[row], values[start:stop])), sizes[-1]
        sums = np.stack([(columns[t : t + width] * weight.T).sum(0) for t in range(stop - start)])
        np.testing.assert_allclose(mixed[start:stop], sums / (1 + np.exp(-sums)), atol=2e-6, rtol=1e-5)
        assert np.array_equal(last[row].double(), columns[len(columns) - width + 1 :])


@a_few_sizes(others=pytest.mark.slow)
def test_values_and_gradients_are_those_of_transformers_functions_row_by_row(kernels, sizes):
    logging.getLogger("transformers").setLevel(logging.ERROR)
    from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

    def theirs(chunked: Callable[..., tuple[Tensor, Tensor]]) -> Operation:
        def compute(inputs: Sequence[Tensor], lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
            rows = zip(*(x.split(list(lengths)) for x in inputs[:5]), inputs[5].split(1), strict=True)
            options = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}
            found = [chunked(*(x[None] for x in row), initial_state=before, **options) for *row, before in rows]
            outs, states = zip(*found, strict=True)
            return torch.cat([out[0] for out in outs]), torch.cat(states)

        return compute

    inputs = rule_inputs(sum(LENGTHS), len(LENGTHS), sizes)
    found = with_gradients(rule, inputs, LENGTHS)
    for module in (qwen3_5, qwen3_next):
        for function in (module.torch_chunk_gated_delta_rule, module.torch_recurrent_gated_delta_rule):
            # Their chunks take differences of cumulative sums.
            assert_near(found, with_gradients(theirs(function), inputs, LENGTHS), 5e-5)

    def their_conv(inputs: Sequence[Tensor], lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
        values, weight, before = inputs
        mixed, last = [], []
        for row, columns in zip(values.split(list(lengths)), before, strict=True):
            joined = torch.cat((columns, row)).T[None]
            out = qwen3_5.causal_conv1d_fn(joined, weight, activation="silu")[0].T
            mixed.append(out[len(columns) :])
            last.append(joined[0].T[len(row) :])
        return torch.cat(mixed), torch.stack(last)

    values = conv_inputs(sum(LENGTHS), len(LENGTHS), sizes)
    assert_near(with_gradients(conv, values, LENGTHS), with_gradients(their_conv, values, LENGTHS))


@pytest.mark.parametrize("lengths", [[1], [3, 1, 2], [70, 5]])
def test_gradients_are_those_of_finite_differences(lengths):
    sizes = (1, 2, 3, 2, 3)
    for operation, make in ((rule, rule_inputs), (conv, conv_inputs)):
        inputs = [x.requires_grad_() for x in make(sum(lengths), len(lengths), sizes, torch.float64)]
        # Not each number by itself, but for the shortest.
        is_long = sum(lengths) > 1
        assert torch.autograd.gradcheck(lambda *x, mix=operation: mix(x, lengths), inputs, fast_mode=is_long)


@pytest.mark.parametrize("operation, make", [(rule, rule_inputs), (conv, conv_inputs)])
def test_a_packed_row_is_the_row_alone_and_moves_no_gradient_of_others(kernels, operation, make):
    sizes, count = SIZES[1], len(LENGTHS)
    inputs = make(sum(LENGTHS), count, sizes)
    found = with_gradients(operation, inputs, LENGTHS)
    pulls = [torch.randn(x.shape, generator=torch.Generator().manual_seed(5)) for x in found[:2]]
    by_tokens = [len(x) == sum(LENGTHS) for x in inputs]
    for row, (start, stop) in enumerate(pairwise(offsets_of(LENGTHS).tolist())):
        # The weight is every row's.
        own = [slice(start, stop) if of_tokens else slice(row, row + 1) for of_tokens in by_tokens]
        own = [slice(None) if len(x) not in (sum(LENGTHS), count) else one for x, one in zip(inputs, own, strict=True)]
        leaves = [x[one].clone().requires_grad_() for x, one in zip(inputs, own, strict=True)]
        out, last = operation(leaves, LENGTHS[row : row + 1])
        assert_near([out, last], [found[0][start:stop], found[1][row : row + 1]])
        pulled = (out * pulls[0][start:stop]).sum() + (last * pulls[1][row : row + 1]).sum()
        for gradient, whole, one in zip(torch.autograd.grad(pulled, leaves), found[2:], own, strict=True):
            if one != slice(None):
                assert_near([gradient], [whole[one]])


def test_no_bit_of_a_row_depends_on_others_nor_on_where_it_is_cut():
    need_library()
    for sizes in SIZES:
        inputs, values = (make(130, 1, sizes) for make in (rule_inputs, conv_inputs))
        wanted = [*rule(inputs, [130]), *conv(values, [130])]
        others, other_values = (make(sum(LENGTHS), len(LENGTHS), sizes) for make in (rule_inputs, conv_inputs))
        both = [torch.cat((a, b, a)) for a, b in zip(others, inputs, strict=True)]
        beside = [torch.cat((a, b, a)) for a, b in zip(other_values, values, strict=True)]
        beside[1] = values[1]
        row, tokens = len(LENGTHS), slice(sum(LENGTHS), sum(LENGTHS) + 130)
        lengths = [*LENGTHS, 130, *LENGTHS]
        found = [*rule(both, lengths), *conv(beside, lengths)]
        together = [found[0][tokens], found[1][row : row + 1], found[2][tokens], found[3][row : row + 1]]
        assert all(map(torch.equal, together, wanted))
        for cut in (1, 2, 5, 63, 64, 65, 100, 129):
            first = [x[:cut] for x in inputs[:5]], [values[0][:cut], *values[1:]]
            then = [x[cut:] for x in inputs[:5]], [values[0][cut:], values[1]]
            out, state = rule([*first[0], inputs[5]], [cut])
            rest, after = rule([*then[0], state], [130 - cut])
            mixed, columns = conv(first[1], [cut])
            more, last = conv([*then[1], columns], [130 - cut])
            pieces = [torch.cat((out, rest)), after, torch.cat((mixed, more)), last]
            assert all(map(torch.equal, pieces, wanted)), (sizes, cut)


@pytest.mark.parametrize("threads", [1, 3])
def test_steps_of_rows_in_slots_have_the_bits_of_whole_rows(threads):
    need_library()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for sizes in SIZES:
            assert_steps_equal_whole_rows(sizes, torch.equal)
    finally:
        torch.set_num_threads(before)


def test_steps_without_the_library_are_whole_rows_too():
    with no_cpu_library():
        for sizes in SIZES[:4]:
            assert_steps_equal_whole_rows(sizes, lambda *pair: assert_near(pair[:1], pair[1:]) is None)


def assert_steps_equal_whole_rows(sizes: Sequence[int], agree: Callable[[Tensor, Tensor], bool]) -> None:
    num_rows, num_steps = 5, 4
    lengths = [num_steps] * num_rows
    inputs, values = (make(num_rows * num_steps, num_rows, sizes) for make in (rule_inputs, conv_inputs))
    (out, after), (mixed, last) = rule(inputs, lengths), conv(values, lengths)
    slots = torch.tensor([6, 2, 0, 5, 3])
    states, columns = torch.full((8, *inputs[5].shape[1:]), 7.0), torch.full((8, *values[2].shape[1:]), 7.0)
    states[slots], columns[slots] = inputs[5], values[2]
    of_step = torch.arange(num_rows) * num_steps
    for step in range(num_steps):
        tokens = of_step + step
        found = ops.gated_delta_step(*(x[tokens] for x in inputs[:5]), states, slots)
        assert agree(found, out[tokens])
        assert agree(ops.conv_step(values[0][tokens], values[1], columns, slots), mixed[tokens])
    assert agree(states[slots], after) and agree(columns[slots], last)
    others = [slot for slot in range(8) if slot not in slots]
    assert bool((states[others] == 7).all() and (columns[others] == 7).all())


def forgetting(inputs: Sequence[Tensor]) -> None:
    """Each tenth token forgets all, the others nearly nothing."""
    inputs[3].fill_(-0.01)
    inputs[3][::10] = -5000.0


def repeating(inputs: Sequence[Tensor]) -> None:
    """All tokens have one key, and nothing is forgotten but what that key recalls."""
    inputs[1].copy_(inputs[1][:1].clone())
    inputs[3].zero_()
    inputs[4].fill_(0.999)


@pytest.mark.parametrize("change", [forgetting, repeating])
def test_extreme_rows_cost_no_accuracy(kernels, change):
    inputs = rule_inputs(130, 1, SIZES[0])
    change(inputs)
    out, after = rule(inputs, [130])
    *tokens, before = (x.double().numpy() for x in inputs)
    wanted, state = recurrence(*(x[:, 0] for x in tokens), before[0, 0])
    np.testing.assert_allclose(out[:, 0], wanted, atol=1e-6, rtol=0)
    np.testing.assert_allclose(after[0, 0], state, atol=2e-6, rtol=0)


def test_bfloat16_is_computed_in_float32_and_rounded_once(kernels):
    inputs = [x.to(torch.bfloat16) for x in rule_inputs(70, 2, SIZES[1])]
    inputs[5] = inputs[5].float()
    out, after = rule(inputs, [5, 65])
    exact, state = rule([x.float() for x in inputs], [5, 65])
    assert out.dtype == torch.bfloat16 and after.dtype == torch.float32
    assert torch.equal(out, exact.to(torch.bfloat16)) and torch.equal(after, state)
    values = [x.to(torch.bfloat16) for x in conv_inputs(70, 2, SIZES[1])]
    mixed, last = conv(values, [5, 65])
    assert mixed.dtype == last.dtype == torch.bfloat16
    assert_near([mixed], [conv([x.float() for x in values], [5, 65])[0]], 1e-2)


def test_no_rows_have_no_states_but_gradients(kernels):
    for operation, make in ((rule, rule_inputs), (conv, conv_inputs)):
        out, last, *gradients = with_gradients(operation, make(0, 0, SIZES[1]), [])
        assert len(out) == len(last) == 0
        assert all(not gradient.any() for gradient in gradients)


def test_inputs_may_be_parts_of_wider_tensors(kernels):
    q, k, v, decay, beta, before = rule_inputs(70, 2, SIZES[2])
    wide = torch.cat((q, k, v), dim=1)
    parts = [*wide.split([4, 4, 4], dim=1), torch.cat((decay, beta), 1)[:, :4], torch.cat((decay, beta), 1)[:, 4:]]
    assert all(map(torch.equal, rule([*parts, before], [5, 65]), rule([q, k, v, decay, beta, before], [5, 65])))


def test_on_a_cpu_training_has_the_bits_of_decoding():
    need_library()
    inputs = rule_inputs(70, 2, SIZES[1])
    leaves = [x.clone().requires_grad_() for x in inputs]
    assert all(map(torch.equal, rule(leaves, [5, 65]), rule(inputs, [5, 65])))
    assert ops.implementation("gated_delta", inputs[0]) is delta_steps.gated_delta
