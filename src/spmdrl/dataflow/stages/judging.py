"""The judge's state: a frozen model writes a verdict on each response, and a number is parsed from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from spmdrl.dataflow.data.prompts import Prompt
from spmdrl.dataflow.samples.samples import Samples
from spmdrl.dataflow.samples.schema import JUDGE_SCORE
from spmdrl.dataflow.stages.reward import DecodeTokens
from spmdrl.dataflow.stages.rollout.requests import StopPoint, run_requests
from spmdrl.engines.generation.frozen_generator import FrozenGenerator
from spmdrl.engines.generation.protocol import Request
from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.renderer import Renderer
from spmdrl.nouns.batch import Batch, WorkerState
from spmdrl.nouns.settings.role_configs import JudgeConfig
from spmdrl.nouns.settings.rollout_config import SamplingParams
from spmdrl.observability.metrics import Recorder
from spmdrl.resources.mesh import GenerationMesh


@dataclass(frozen=True)
class Judge:
    """A frozen model that rates responses by numbers."""

    config: JudgeConfig
    generator: FrozenGenerator
    mesh: GenerationMesh
    """ranks that hold it together and get the same questions"""
    renderer: Renderer
    """with the judge's own chat template, if it has one"""
    decoder: DecoderConfig

    def scores(self, questions: Sequence[str], recorder: Recorder) -> list[float | None]:
        """Return each verdict's number; None without one, counted as unread, and for questions that can't be asked.

        Collective over the ranks that hold the judge, or share its experts.
        """
        requests, decode = self._requests(questions), self.renderer.tokenizer.decode
        verdicts: dict[int, str] = {}
        with self.generator.awake() as engine:
            for ended in run_requests(engine, requests, StopPoint(self.mesh)):
                for responses in ended.values():
                    verdicts |= {one.row: decode(one.token_ids) for one in responses}
        scores = {row: self.config.score(verdict) for row, verdict in verdicts.items()}
        if self.mesh.is_leader:
            recorder.total("judge/unread", list(scores.values()).count(None))
            recorder.total("judge/unasked", len(questions) - len(requests))
        return [scores.get(row) for row in range(len(questions))]

    def _requests(self, questions: Sequence[str]) -> list[Request]:
        """Return requests for the questions that fit the judge's positions and tokens."""
        sampling = SamplingParams(
            temperature=0.0, max_tokens=self.config.max_tokens, stop_token_ids=self.renderer.tokenizer.stop_token_ids
        )
        most_tokens = self.decoder.max_positions - sampling.max_tokens
        is_chat = self.renderer.has_template
        tokenized = self.renderer.prompts(
            [[{"role": "user", "content": one}] for one in questions] if is_chat else questions
        )
        prompts = {row: tokenized.prompt_ids(row) for row in range(len(questions))}
        return [
            Request((row,), prompt_ids, (0,), sampling)
            for row, prompt_ids in prompts.items()
            if 1 <= len(prompt_ids) <= most_tokens and max(prompt_ids) < self.decoder.vocab_size
        ]


class JudgeStage:
    """State in which a frozen model judges this rank's share of the responses. Collective: once per step."""

    state = WorkerState.JUDGE

    def __init__(self, judge: Judge, decode: DecodeTokens, recorder: Recorder):
        self.judge = judge
        self._decode = decode
        self._recorder = recorder

    def __call__(self, samples: Samples) -> None:
        batch = samples.take(self.state)
        rows, responses = batch.rows.tolist(), batch.to_lists("response_ids")
        questions = [
            self._question(samples.rows.prompt_of(row), self._decode(response))
            for row, response in zip(rows, responses, strict=True)
        ]
        scores = self.judge.scores(questions, self._recorder)
        judged = Batch(batch.rows)
        found = [float("nan") if score is None else score for score in scores]
        judged.put_dense(JUDGE_SCORE, torch.tensor(found, dtype=torch.float32))
        samples.put(self.state, judged)
        samples.commit(self.state)

    def _question(self, prompt: Prompt, response: str) -> str:
        values = {"prompt": text_of(prompt), "response": response, "answer": prompt.answer or ""}
        return self.judge.config.question(values)


def text_of(prompt: Prompt) -> str:
    """Return a row's prompt without a template's tokens; messages one after another, each with its role."""
    if isinstance(prompt.original, str):
        return prompt.original
    return "\n".join(f"{message['role']}: {message.get('content') or ''}" for message in prompt.original)
