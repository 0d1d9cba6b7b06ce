"""Generator and trainer compute a token's log-prob to the same last bit, whatever is computed beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from spmdrl.engines.generation.native.native_engine import NativeEngine
from spmdrl.engines.generation.protocol import Request, Response
from spmdrl.engines.models.decoder import Decoder, DecoderConfig
from spmdrl.engines.models.kernels.ops import compute_batch_invariantly
from spmdrl.engines.training.packed_rows import TokenRows
from spmdrl.engines.training.training_engine import TrainingEngine
from spmdrl.nouns.batch import WeightSlice, offsets_of
from spmdrl.nouns.settings.model_sizes import DeltaSizes, WindowConfig
from spmdrl.nouns.settings.rollout_config import RolloutConfig, SamplingParams
from spmdrl.nouns.settings.training_config import TrainingConfig
from spmdrl.resources.layout import UpdateLayout, fit_update_layout
from spmdrl.resources.mesh import build_update_mesh
from spmdrl.resources.world import World
from tests.engines.models.support import no_cpu_library
from tests.engines.training.tiny import CONFIG, LATENT, OPTIM, SPARSE, part_of
from tests.support.made import small_decoders
from tests.support.ranks import run_ranks

# An intermediate size that no vector register divides.
DENSE = replace(
    CONFIG, hidden_size=64, intermediate_size=100, vocab_size=211, num_heads=4, num_kv_heads=2, head_size=16,
    max_positions=256,
)  # fmt: skip
MODELS = {
    "dense": DENSE,
    "sparse": replace(DENSE, moe=SPARSE.moe),
    "latent": replace(LATENT, max_positions=256, vocab_size=101),
    "windows and sinks": replace(DENSE, attention_sinks=True, window=WindowConfig(9, layers=(0,))),
    "delta nets": replace(
        DENSE,
        attention_gate=True,
        norm_offset=1.0,
        rotary_size=8,
        delta=DeltaSizes((0,), num_key_heads=2, num_value_heads=4, key_size=12, value_size=10, conv_width=4),
    ),
}
# Untied, as a tied embedding as large as these weights gives each token its own successor.
MODELS |= {f"small {name}": replace(config, tied_head=False) for name, config in small_decoders().items()}
PROMPT_LENGTHS = (1, 2, 3, 31, 40, 65)


class Weights:
    def __init__(self, config: DecoderConfig):
        generator = torch.Generator().manual_seed(0)
        with torch.device("meta"):
            shapes = {name: weight.shape for name, weight in Decoder(config).state_dict().items()}
        self.tensors = {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}

    def read(self, wanted: WeightSlice) -> Tensor:
        return part_of(self.tensors[wanted.name], wanted)


def generated(config: DecoderConfig, weights: Weights, prompts: Sequence[tuple[int, ...]]) -> list[Response]:
    """Two responses a prompt, of lengths that stop tokens make."""
    engine = NativeEngine(config, RolloutConfig(), torch.device("cpu"), torch.float32)
    engine.load_weights((name, weights.tensors[name]) for name in engine.weight_shapes())
    engine.wake_cache()
    sampling = SamplingParams(max_tokens=80, temperature=0.8, stop_token_ids=(0, 1, 2))
    engine.submit(
        [Request((2 * i, 2 * i + 1), prompt, (7 * i, 7 * i + 1), sampling) for i, prompt in enumerate(prompts)]
    )
    responses = {}
    while engine.has_work:
        responses.update((response.row, response) for response in engine.step())
    return [responses[row] for row in sorted(responses)]


def rows_of(prompts: Sequence[tuple[int, ...]], responses: Sequence[Response]) -> TokenRows:
    tokens = [[*prompts[response.row // 2], *response.token_ids] for response in responses]
    return TokenRows(
        torch.tensor([token for row in tokens for token in row]),
        offsets_of([len(row) for row in tokens]),
        torch.tensor([len(prompts[response.row // 2]) for response in responses]),
    )


def check_same_bits(world: World, name: str) -> None:
    compute_batch_invariantly()
    config = MODELS[name]
    generator = torch.Generator().manual_seed(1)
    prompts = [tuple(torch.randint(3, config.vocab_size, (n,), generator=generator).tolist()) for n in PROMPT_LENGTHS]
    weights = Weights(config)
    mesh = build_update_mesh(fit_update_layout(UpdateLayout(), 1), world.device, 0)
    training = TrainingConfig(max_tokens_per_microbatch=300)
    trainer = TrainingEngine(config, training, OPTIM, mesh, world.device, temperature=0.8, compute_dtype=torch.float32)
    trainer.load(weights)
    responses = generated(config, weights, prompts)
    lengths = [len(response.token_ids) for response in responses]
    assert min(lengths) < 16 and max(lengths) > 40, lengths
    together = trainer.score(rows_of(prompts, responses)).logprobs_R
    assert torch.equal(together, torch.tensor([value for response in responses for value in response.logprobs]))
    alone = [trainer.score(rows_of(prompts, [response])).logprobs_R for response in responses]
    assert torch.equal(torch.cat(alone), together)
    # A row of two tokens is fewer than a matrix product rounds alike.
    first = replace(responses[0], token_ids=responses[0].token_ids[:1], logprobs=responses[0].logprobs[:1])
    assert trainer.score(rows_of(prompts, [first])).logprobs_R[0] == together[0]


@pytest.mark.cpu_only(reason="the batch-invariant operations are a CPU's")
@pytest.mark.ranks
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name.startswith("small") else name for name in MODELS]
)
def test_generator_and_trainer_agree_to_the_last_bit(name):
    run_ranks(1, check_same_bits, name)


def test_a_machine_without_a_compiler_is_refused():
    with no_cpu_library(), pytest.raises(ValueError, match="can't be built here.*set debug.batch_invariant to false"):
        compute_batch_invariantly()
