"""Recorded choices come out in the order in which tokens are fed."""

from __future__ import annotations

import torch

from spmdrl.engines.generation.native.running_rows import ChoiceRecorder, RowChoices

LAYERS = (5, 3)


def recorded(num_tokens: int, seed: int) -> tuple[ChoiceRecorder, dict[int, torch.Tensor]]:
    """A recorder after one forward, and what each layer chose."""
    generator = torch.Generator().manual_seed(seed)
    recorder, chosen = ChoiceRecorder(), {}
    for layer in LAYERS:
        chosen[layer] = torch.randint(0, 300, (num_tokens, 2), generator=generator)
        scores = torch.rand(num_tokens, 300, generator=generator)
        unchanged = recorder(layer, scores, chosen[layer])
        assert unchanged[0] is scores and unchanged[1] is chosen[layer]
    return recorder, chosen


def test_a_forward_is_recorded_by_token_then_layer_and_forgotten_when_taken():
    recorder, chosen = recorded(4, seed=0)
    taken = recorder.take()
    assert taken.shape == (4, 2, 2) and taken.dtype == torch.int16
    assert torch.equal(taken[:, 0].long(), chosen[3]) and torch.equal(taken[:, 1].long(), chosen[5])
    recorder(3, torch.rand(1, 300), torch.tensor([[1, 2]]))
    assert recorder.take().tolist() == [[[1, 2]]]


def test_rows_of_a_group_share_the_prompt_and_add_their_own_tokens():
    prompt = recorded(3, seed=1)[0].take()
    rows = [RowChoices(prompt), RowChoices(prompt), RowChoices(prompt)]
    for seed in (2, 3):
        step = recorded(2, seed=seed)[0].take()
        rows[0].feed(step[0])
        rows[1].feed(step[1])
    first, second = recorded(2, seed=2)[0].take(), recorded(2, seed=3)[0].take()
    for number in (0, 1):
        expected = torch.cat((prompt, first[number : number + 1], second[number : number + 1]))
        assert torch.equal(rows[number].packed(), expected.flatten())
    assert torch.equal(rows[2].packed(), prompt.flatten())
