"""GRPO in one file, on the engines that `spmdrl train` runs on: prompts -> answers -> rewards -> loss -> update.

    python docs/examples/minimal_grpo.py [MODEL_FOLDER] [--steps 60] [--lr 2e-3]

One process and one device, no configuration. Without a folder it makes a model of random weights, which learns to
answer in digits. What is left out here, and where it is:

    several ranks, rows that travel, whatever the order in which stages end     dataflow/samples
    weights that change their layout, training state that leaves the device      dataflow/resharding
    rewards in processes that can be killed                                      engines/reward
    resuming, evaluation, logs, the report                                       job, observability

Shape letters: `B` rows, `R` response tokens of those rows, packed.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from spmdrl.algorithms.policy.grpo import Grpo
from spmdrl.algorithms.settings.policy_configs import GrpoConfig
from spmdrl.engines.generation.native.native_engine import NativeEngine
from spmdrl.engines.generation.protocol import Request, Response
from spmdrl.engines.models.hf.model_folder import read_config
from spmdrl.engines.models.hf.weight_check import open_weights
from spmdrl.engines.models.make_model import make_model_folder
from spmdrl.engines.models.tokenizer import ModelTokenizer
from spmdrl.engines.training.packed_rows import LossTerms, MicroBatch, Scores, TokenRows
from spmdrl.engines.training.training_engine import TrainingEngine
from spmdrl.engines.training.updater import UpdateResult
from spmdrl.nouns.batch import LossScope, TokenTerms, offsets_of
from spmdrl.nouns.settings.model_config import MakeConfig
from spmdrl.nouns.settings.rollout_config import RolloutConfig, SamplingParams
from spmdrl.nouns.settings.training_config import OptimConfig, TrainingConfig
from spmdrl.resources.layout import UpdateLayout
from spmdrl.resources.mesh import build_update_mesh
from spmdrl.resources.world import World, open_world

GROUP_SIZE = 8
MAX_TOKENS = 8
PROMPTS = [f"{first} and {second} are" for first in range(10) for second in range(10)]

RewardFunction = Callable[[str, str], float]


def share_of_digits(prompt: str, answer: str) -> float:
    """The reward: which share of the longest possible answer is digits."""
    return sum(letter.isdigit() for letter in answer) / MAX_TOKENS


@dataclass(frozen=True)
class Policy:
    """One model as two engines, which take turns on the device."""

    tokenizer: ModelTokenizer
    trainer: TrainingEngine
    generator: NativeEngine


def load_policy(folder: Path, world: World, *, num_steps: int, lr: float) -> Policy:
    """Both engines over a Hugging Face folder; only the trainer holds weights so far."""
    decoder = read_config(folder)
    device, dtype = world.device, world.device.compute_dtype
    mesh = build_update_mesh(UpdateLayout(shard=1), device, world.rank)
    trainer = TrainingEngine(decoder, TrainingConfig(max_steps=num_steps), OptimConfig(lr=lr), mesh, device)
    trainer.load(open_weights(folder, decoder))
    generator = NativeEngine(decoder, RolloutConfig(), device.torch_device, dtype)
    return Policy(ModelTokenizer(folder), trainer, generator)


def answer(policy: Policy, requests: Sequence[Request]) -> list[Response]:
    """Generate with the trainer's present weights; responses in the order of their rows."""
    engine = policy.generator
    storage = engine.wake_weights()
    for name, shard in policy.trainer.named_shards().items():
        storage[name].copy_(shard.tensor)
    engine.wake_cache()
    engine.version = policy.trainer.update_count
    engine.submit(requests)
    responses: list[Response] = []
    while engine.has_work:
        responses += engine.step()
    engine.sleep()
    return sorted(responses, key=lambda response: response.row)


def packed_rows(prompts_B: Sequence[Sequence[int]], responses: Sequence[Response]) -> TokenRows:
    """Prompt and response of each row, one row after the other."""
    rows = [[*prompt, *response.token_ids] for prompt, response in zip(prompts_B, responses, strict=True)]
    tokens_T = torch.tensor([token for row in rows for token in row])
    return TokenRows(tokens_T, offsets_of([len(row) for row in rows]), torch.tensor([len(p) for p in prompts_B]))


@dataclass(frozen=True)
class Loss:
    """What the engine minimises: the algorithm's loss per token, weighted so that all of a step make one mean."""

    algorithm: Grpo

    def __call__(self, scores: Scores, micro: MicroBatch) -> LossTerms:
        terms = TokenTerms(scores.logprobs_R, scores.entropy_R, micro.response, micro.row_of_response_R, micro.num_rows)
        loss = self.algorithm.loss(terms)
        count = torch.tensor(float(scores.logprobs_R.numel()))
        metrics = {name: (values_R.detach().sum(), count) for name, values_R in loss.metrics.items()}
        return LossTerms((loss.loss_R * micro.response["weights"]).sum(), metrics)


def update(policy: Policy, algorithm: Grpo, rows: TokenRows, rewards_B: Tensor, groups_B: Tensor) -> UpdateResult:
    """One optimizer step on the rows of one batch."""
    lengths_B = rows.response_offsets.diff()
    advantages_B = algorithm.row_advantages(rewards_B, groups_B)
    rows.response["advantages"] = advantages_B.repeat_interleave(lengths_B)
    scope = LossScope(num_tokens=int(lengths_B.sum()), num_rows=len(rows), max_length=MAX_TOKENS)
    rows.response["weights"] = algorithm.token_weights(lengths_B, scope).float()
    return policy.trainer.update(rows, Loss(algorithm))


def train(policy: Policy, reward: RewardFunction, *, num_steps: int, prompts_per_step: int = 16) -> list[float]:
    """The loop; returns the mean reward of each step."""
    algorithm, tokenizer, curve = Grpo(GrpoConfig()), policy.tokenizer, []
    sampling = SamplingParams(max_tokens=MAX_TOKENS, stop_token_ids=tokenizer.stop_token_ids)
    draw = torch.Generator().manual_seed(0)
    groups_B = torch.arange(prompts_per_step).repeat_interleave(GROUP_SIZE)
    for step in range(1, num_steps + 1):
        chosen = torch.randperm(len(PROMPTS), generator=draw)[:prompts_per_step].tolist()
        texts = [PROMPTS[number] for number in chosen]
        prompts = [tuple(tokenizer.begun(tokenizer.encode(text))) for text in texts]
        seeds = torch.randint(2**62, (prompts_per_step, GROUP_SIZE), generator=draw).tolist()
        requests = [
            Request(tuple(range(g * GROUP_SIZE, (g + 1) * GROUP_SIZE)), prompt, tuple(seeds[g]), sampling)
            for g, prompt in enumerate(prompts)
        ]
        responses = answer(policy, requests)
        answers = [tokenizer.decode(response.token_ids) for response in responses]
        rewards_B = torch.tensor([reward(texts[row // GROUP_SIZE], text) for row, text in enumerate(answers)])
        rows = packed_rows([prompts[row // GROUP_SIZE] for row in range(len(responses))], responses)
        result = update(policy, algorithm, rows, rewards_B, groups_B)
        curve.append(float(rewards_B.mean()))
        print(f"step {step:3}  reward {curve[-1]:.3f}  grad {result.grad_norm:.3f}  {texts[0]!r} -> {answers[0]!r}")
    return curve


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", type=Path, help="a Hugging Face model folder; without one, random weights")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=2e-3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, open_world() as world:
        folder = arguments.model or Path(scratch) / "model"
        if arguments.model is None:
            make_model_folder(
                folder, MakeConfig(hidden_size=64, num_hidden_layers=2, max_position_embeddings=64), seed=0
            )
        policy = load_policy(folder, world, num_steps=arguments.steps, lr=arguments.lr)
        train(policy, share_of_digits, num_steps=arguments.steps)


if __name__ == "__main__":
    main()
