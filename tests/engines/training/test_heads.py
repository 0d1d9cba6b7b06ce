from __future__ import annotations

import resource

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spmdrl.engines.models.kernels.plain import LEAST_ROWS
from spmdrl.engines.parallel.weight_cuts import VocabularyPart
from spmdrl.engines.training import heads
from spmdrl.engines.training.heads import LikeliestHead, logprobs_and_entropy
from spmdrl.resources.layout import UpdateLayout
from spmdrl.resources.mesh import build_update_mesh
from spmdrl.resources.world import World
from tests.support.chosen_device import chosen_device
from tests.support.ranks import run_ranks

NUM_ROWS, WIDTH, VOCAB = 21, 6, 40
CHUNK_BYTES = 5 * VOCAB * 4


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden_RD = torch.randn(NUM_ROWS, WIDTH, generator=generator).to(dtype)
    head_weight_VD = torch.randn(VOCAB, WIDTH, generator=generator).to(dtype)
    targets_R = torch.randint(0, VOCAB, (NUM_ROWS,), generator=generator)
    return tuple(tensor.to(chosen_device()) for tensor in (hidden_RD, head_weight_VD, targets_R))


def all_logprobs(hidden_RD: Tensor, head_weight_VD: Tensor, temperature: float, softcap: float | None) -> Tensor:
    """The definition, all at once."""
    logits_RV = hidden_RD @ head_weight_VD.T
    if softcap is not None:
        logits_RV = softcap * (logits_RV / softcap).tanh()
    return torch.log_softmax(logits_RV / temperature, dim=-1)


def reference(
    hidden_RD: Tensor, head_weight_VD: Tensor, targets_R: Tensor, temperature: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    all_RV = all_logprobs(hidden_RD, head_weight_VD, temperature, softcap)
    return all_RV.gather(1, targets_R[:, None]).squeeze(1), -(all_RV.exp() * all_RV).sum(-1)


@pytest.mark.on_device
@pytest.mark.parametrize("chunk_bytes", [1, CHUNK_BYTES, 1 << 20])
@pytest.mark.parametrize("weights", [(1.0, 0.0), (0.0, 1.0), (0.7, -0.3)])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_values_and_gradients_equal_the_float64_definition(chunk_bytes, weights, softcap):
    hidden_RD, head_weight_VD, targets_R = inputs()
    pulls = torch.linspace(-1, 1, NUM_ROWS, device=hidden_RD.device)
    results = []
    for dtype in (torch.float32, torch.float64):
        hidden, head = (tensor.to(dtype, copy=True).requires_grad_() for tensor in (hidden_RD, head_weight_VD))
        if dtype == torch.float32:
            scales = {"temperature": 0.7, "softcap": softcap}
            outputs = logprobs_and_entropy(hidden, head, targets_R, **scales, chunk_bytes=chunk_bytes)
        else:
            outputs = reference(hidden, head, targets_R, 0.7, softcap)
        sum(
            weight * (pulls.to(dtype) * output).sum() for weight, output in zip(weights, outputs, strict=True)
        ).backward()
        results.append((*outputs, hidden.grad, head.grad))
    for ours, exact in zip(*results, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=2e-5, atol=2e-6)


def test_either_output_can_be_used_alone():
    hidden_RD, head_weight_VD, targets_R = inputs()
    for output in (0, 1):
        gradients = []
        for function in (logprobs_and_entropy, lambda h, w, t: reference(h, w, t, 1.0)):
            hidden = hidden_RD.clone().requires_grad_()
            function(hidden, head_weight_VD, targets_R)[output].sum().backward()
            gradients.append(hidden.grad)
        torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-5)


def test_bfloat16_inputs_give_float32_results_and_bfloat16_gradients():
    hidden_RD, head_weight_VD, targets_R = inputs(torch.bfloat16)
    hidden_RD.requires_grad_()
    head_weight_VD.requires_grad_()
    logprobs_R, entropy_R = logprobs_and_entropy(hidden_RD, head_weight_VD, targets_R)
    (logprobs_R.sum() + entropy_R.sum()).backward()
    assert logprobs_R.dtype == entropy_R.dtype == torch.float32
    assert hidden_RD.grad.dtype == head_weight_VD.grad.dtype == torch.bfloat16
    exact, _ = reference(hidden_RD.double(), head_weight_VD.double(), targets_R, 1.0)
    torch.testing.assert_close(logprobs_R.double(), exact, rtol=0.02, atol=0.05)


def test_extreme_logits_stay_finite():
    hidden_RD, head_weight_VD, targets_R = inputs()
    hidden_RD = (hidden_RD * 1e4).requires_grad_()
    logprobs_R, entropy_R = logprobs_and_entropy(hidden_RD, head_weight_VD, targets_R)
    (logprobs_R.sum() + entropy_R.sum()).backward()
    assert logprobs_R.isfinite().all() and entropy_R.isfinite().all() and hidden_RD.grad.isfinite().all()


def test_no_rows_give_empty_results_and_zero_gradients():
    hidden_RD, head_weight_VD, targets_R = inputs()
    hidden = hidden_RD[:0].requires_grad_()
    logprobs_R, _ = logprobs_and_entropy(hidden, head_weight_VD.requires_grad_(), targets_R[:0])
    logprobs_R.sum().backward()
    assert logprobs_R.shape == (0,) and not head_weight_VD.grad.any()


class LargestLogits(TorchDispatchMode):
    """Notes the largest tensor with a vocabulary axis, the head's weight and gradient aside."""

    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and VOCAB in tensor.shape and WIDTH not in tensor.shape:
                self.num_bytes = max(self.num_bytes, tensor.numel() * tensor.element_size())
        return out


def largest_logits(function) -> int:
    hidden_RD, head_weight_VD, targets_R = inputs()
    with LargestLogits() as largest:
        logprobs_R, entropy_R = function(hidden_RD.requires_grad_(), head_weight_VD.requires_grad_(), targets_R)
        (logprobs_R.sum() + entropy_R.sum()).backward()
    return largest.num_bytes


def test_no_more_than_a_chunk_of_logits_is_ever_held():
    # Products of fewer rows are padded to as many.
    at_most = LEAST_ROWS * VOCAB * 4
    chunked = largest_logits(lambda h, w, t: logprobs_and_entropy(h, w, t, chunk_bytes=at_most))
    assert 0 < chunked <= at_most < NUM_ROWS * VOCAB * 4
    assert largest_logits(lambda h, w, t: reference(h, w, t, 1.0)) == NUM_ROWS * VOCAB * 4


def gradients_and_products(rows_of_calls: list[int], monkeypatch: pytest.MonkeyPatch) -> tuple[list[Tensor], int]:
    """Gradients of all calls' first rows, gone forward through before any goes back, and how often logits were made."""
    made = []
    monkeypatch.setattr(heads, "_logits", lambda *inputs: made.append(1) or logits_of(*inputs))
    hidden_RD, head_weight_VD, targets_R = inputs()
    head_weight_VD.requires_grad_()
    hidden = [hidden_RD[:num].clone().requires_grad_() for num in rows_of_calls]
    results = [
        logprobs_and_entropy(h, head_weight_VD, targets_R[: len(h)], temperature=0.7, chunk_bytes=CHUNK_BYTES)
        for h in hidden
    ]
    for logprobs_R, entropy_R in results:
        (logprobs_R.sum() + 0.3 * entropy_R.sum()).backward()
    return [h.grad for h in hidden], len(made)


logits_of = heads._logits


def test_the_last_chunk_is_computed_once_and_kept_for_the_newest_call_only(monkeypatch: pytest.MonkeyPatch) -> None:
    # 21 rows are five chunks, 20 are four.
    (alone,), num_alone = gradients_and_products([NUM_ROWS], monkeypatch)
    assert num_alone == 5 + 4
    (first, last), num_of_two = gradients_and_products([NUM_ROWS, 20], monkeypatch)
    assert num_of_two == 5 + 5 + 4 + 3
    assert torch.equal(first, alone), "kept and made again are the same bits"
    (only,), _ = gradients_and_products([20], monkeypatch)
    assert torch.equal(last, only)


# Beyond 32 MiB glibc gives freed memory back, so that what stays resident is what is held.
BIG_CHUNK_BYTES = 100 * 150_000 * 4


def _peaks_of_more_and_more_rows(world: World) -> list[int]:
    """Most resident bytes of this fresh process after forward and backward over 0, 2 and 8 chunks of 100 rows."""
    vocab_size, width = 150_000, 32
    head_weight_VD = torch.randn(vocab_size, width).requires_grad_()
    head_weight_VD.grad = torch.zeros_like(head_weight_VD)
    peaks = []
    for num_rows in (0, 200, 800):
        hidden_RD = torch.randn(num_rows, width).requires_grad_()
        targets_R = torch.randint(0, vocab_size, (num_rows,))
        logprobs_R, _ = logprobs_and_entropy(hidden_RD, head_weight_VD, targets_R, chunk_bytes=BIG_CHUNK_BYTES)
        logprobs_R.sum().backward()
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    return peaks


@pytest.mark.cpu_only(reason="it measures resident memory of the host")
@pytest.mark.ranks
def test_memory_does_not_grow_with_tokens_times_a_real_vocabulary():
    [(before, few, many)] = run_ranks(1, _peaks_of_more_and_more_rows)
    # All float32 logits of the further rows would take six chunks.
    assert many - few < BIG_CHUNK_BYTES / 2, (before, few, many)
    assert few - before < 5 * BIG_CHUNK_BYTES, (before, few, many)


def _rated_by_parts(world: World):
    axis = build_update_mesh(UpdateLayout(shard=1, tensor=world.size), world.device, world.rank).tensor
    hidden_RD, head_weight_VD, targets_R = inputs()
    vocabulary = VocabularyPart.of(VOCAB, axis)
    head_weight_VD = head_weight_VD[vocabulary.start : vocabulary.stop].clone().requires_grad_()
    hidden_RD.requires_grad_()
    logprobs_R, entropy_R = logprobs_and_entropy(
        hidden_RD, head_weight_VD, targets_R, temperature=0.7, vocabulary=vocabulary, chunk_bytes=CHUNK_BYTES
    )
    (logprobs_R.sum() + 0.5 * entropy_R.sum()).backward()
    return [tensor.cpu() for tensor in (logprobs_R.detach(), entropy_R.detach(), hidden_RD.grad, head_weight_VD.grad)]


@pytest.mark.ranks
def test_parts_of_a_vocabulary_rate_as_the_whole_does():
    hidden_RD, head_weight_VD, targets_R = (
        tensor.cpu().double() if tensor.is_floating_point() else tensor.cpu() for tensor in inputs()
    )
    hidden_RD.requires_grad_()
    head_weight_VD.requires_grad_()
    expected = reference(hidden_RD, head_weight_VD, targets_R, 0.7)
    (expected[0].sum() + 0.5 * expected[1].sum()).backward()
    answers = run_ranks(3, _rated_by_parts)
    for outputs in answers:
        for output, exact in zip(outputs[:2], expected, strict=True):
            torch.testing.assert_close(output.double(), exact, rtol=2e-5, atol=2e-6)
    close = {"rtol": 2e-5, "atol": 5e-6}
    torch.testing.assert_close(sum(outputs[2] for outputs in answers).double(), hidden_RD.grad, **close)
    torch.testing.assert_close(torch.cat([outputs[3] for outputs in answers]).double(), head_weight_VD.grad, **close)


NUM_TARGETS = 3


def several_targets() -> Tensor:
    """Other tokens beside the first target, which may be among them."""
    generator = torch.Generator().manual_seed(5)
    others_RJ = torch.randint(0, VOCAB, (NUM_ROWS, NUM_TARGETS - 1), generator=generator).to(chosen_device())
    return torch.cat((inputs()[2][:, None], others_RJ, inputs()[2][:, None]), 1)


def pulled(logprobs_R: Tensor, entropy_R: Tensor, others_RJ: Tensor) -> Tensor:
    logprobs_RJ = torch.cat((logprobs_R[:, None], others_RJ), 1)
    pulls_RJ = torch.linspace(-1, 1, logprobs_RJ.numel(), device=logprobs_RJ.device).view_as(logprobs_RJ)
    return (pulls_RJ * logprobs_RJ).sum() + 0.5 * entropy_R.sum()


def rest_of(all_RV: Tensor, ids_RJ: Tensor) -> Tensor:
    """The log-prob of all other tokens [R, 1]."""
    return all_RV.scatter(1, ids_RJ, -torch.inf).logsumexp(-1, keepdim=True)


def expected_of_several(softcap: float | None) -> tuple[Tensor, ...]:
    hidden_RD, head_weight_VD = (tensor.cpu().double().requires_grad_() for tensor in inputs()[:2])
    all_RV = all_logprobs(hidden_RD, head_weight_VD, 0.7, softcap)
    targets_RJ, entropy_R = several_targets().cpu(), -(all_RV.exp() * all_RV).sum(-1)
    logprobs_RJ = torch.cat((all_RV.gather(1, targets_RJ), rest_of(all_RV, targets_RJ[:, 1:])), 1)
    pulled(logprobs_RJ[:, 0], entropy_R, logprobs_RJ[:, 1:]).backward()
    return logprobs_RJ.detach(), hidden_RD.grad, head_weight_VD.grad, all_RV.detach()


def _several_by_parts(world: World, softcap: float | None):
    """Log-probs of several targets with gradients, and the likeliest tokens, of a part of the vocabulary."""
    axis = build_update_mesh(UpdateLayout(shard=1, tensor=world.size), world.device, world.rank).tensor
    hidden_RD, head_weight_VD, _ = inputs()
    vocabulary = VocabularyPart.of(VOCAB, axis)
    head_weight_VD = head_weight_VD[vocabulary.start : vocabulary.stop].clone().requires_grad_()
    hidden_RD.requires_grad_()
    scales = {"temperature": 0.7, "softcap": softcap}
    rated = logprobs_and_entropy(
        hidden_RD, head_weight_VD, several_targets(), **scales, vocabulary=vocabulary, chunk_bytes=CHUNK_BYTES
    )
    pulled(*rated).backward()
    places_P = torch.arange(NUM_ROWS, device=hidden_RD.device)
    own = slice(axis.rank * NUM_ROWS // axis.size, (axis.rank + 1) * NUM_ROWS // axis.size)
    head = LikeliestHead(places_P, NUM_LIKELIEST, VOCAB - 3, vocabulary, **scales)
    with torch.no_grad():
        likeliest = head(hidden_RD[own], head_weight_VD)
    return [
        tensor.cpu()
        for tensor in (
            torch.cat((rated[0][:, None], rated[2]), 1).detach(),
            hidden_RD.grad,
            head_weight_VD.grad,
            *likeliest,
        )
    ]


# More than the 14 tokens of a part.
NUM_LIKELIEST = 17


@pytest.mark.ranks
@pytest.mark.parametrize(("num_ranks", "softcap"), [(1, None), (3, None), (3, 5.0)])
def test_several_tokens_are_rated_in_each_place_and_the_likeliest_found(num_ranks, softcap):
    logprobs_RJ, by_hidden_RD, by_head_VD, all_RV = expected_of_several(softcap)
    results = run_ranks(num_ranks, _several_by_parts, softcap)
    torch.testing.assert_close(
        sum(by_hidden for _, by_hidden, *_ in results).double(), by_hidden_RD, rtol=2e-5, atol=1e-5
    )
    torch.testing.assert_close(
        torch.cat([by_head for _, _, by_head, *_ in results]).double(), by_head_VD, rtol=2e-5, atol=1e-5
    )
    # The last three tokens are never among them, though they count.
    expected = all_RV[:, : VOCAB - 3].topk(NUM_LIKELIEST)
    for found_RJ, _, _, ids_RJ, likeliest_RJ in results:
        torch.testing.assert_close(found_RJ.double(), logprobs_RJ, rtol=2e-5, atol=2e-6)
        assert torch.equal(ids_RJ, expected.indices)
        with_rest_RJ = torch.cat((expected.values, rest_of(all_RV, expected.indices)), 1)
        torch.testing.assert_close(likeliest_RJ.double(), with_rest_RJ, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("log_rest", [-14.0, -28.0, -100.0])
def test_a_small_rest_and_its_gradient_are_those_of_float64(log_rest):
    """Of 1 minus the sum of probabilities in float32 nothing would be left."""
    hidden_RD, head_weight_VD, _ = inputs(torch.float64)
    ids_RJ = torch.arange(3, device=hidden_RD.device).expand(NUM_ROWS, 3)
    hidden_RD, head_weight_VD = (torch.nn.functional.pad(tensor, (0, 1)) for tensor in (hidden_RD, head_weight_VD))
    hidden_RD[:, -1], head_weight_VD[3:, -1] = 1.0, log_rest
    results = []
    for dtype in (torch.float32, torch.float64):
        hidden, head = (tensor.to(dtype).requires_grad_() for tensor in (hidden_RD, head_weight_VD))
        if dtype == torch.float32:
            rest_R = logprobs_and_entropy(hidden, head, torch.cat((ids_RJ[:, :1], ids_RJ), 1))[2][:, -1]
        else:
            rest_R = rest_of(torch.log_softmax(hidden @ head.T, -1), ids_RJ).squeeze(1)
        rest_R.sum().backward()
        results.append((rest_R.double(), hidden.grad.double(), head.grad.double()))
    for ours, exact in zip(*results, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-5, atol=2e-6 * float(exact.detach().abs().max()))


def test_a_rest_of_no_token_is_finite_and_so_is_its_gradient():
    hidden_RD, head_weight_VD, targets_R = inputs()
    all_RV = torch.arange(VOCAB, device=hidden_RD.device).expand(NUM_ROWS, VOCAB)
    hidden_RD.requires_grad_()
    rated_RJ = logprobs_and_entropy(hidden_RD, head_weight_VD, torch.cat((targets_R[:, None], all_RV), 1))[2]
    rated_RJ[:, -1].sum().backward()
    assert (rated_RJ[:, -1] < -9e3).all() and hidden_RD.grad.isfinite().all()
