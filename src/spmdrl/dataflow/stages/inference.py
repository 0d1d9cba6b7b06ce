"""The inference states: what a model makes of finished responses before the update.

Log-probs under reference and policy, values of the critic, a reward model's scores, a teacher's likeliest tokens.
`score_stages` chooses the class of each by its slot.

Shape letters: `R` packed response tokens that the model wrote; `J` likeliest tokens of a place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from spmdrl.dataflow.data.prompts import Prompt
from spmdrl.dataflow.samples.samples import Samples
from spmdrl.dataflow.samples.schema import column_of
from spmdrl.dataflow.stages.rows import TURNS, ModelTokens, token_rows
from spmdrl.dataflow.stages.schedule import Slot
from spmdrl.engines.models.renderer import Renderer, TokenizedPrompts
from spmdrl.engines.training.packed_rows import TokenRows
from spmdrl.engines.training.training_engine import TrainingEngine
from spmdrl.nouns.batch import Batch, Integers, WorkerState, gather_ragged_rows, offsets_of
from spmdrl.nouns.roles import POLICY, TEACHER, Role
from spmdrl.nouns.settings.role_configs import END_VALUE
from spmdrl.observability.fault_points import faultpoint
from spmdrl.resources.device import to_device

Presence = Callable[[], AbstractContextManager[None]]
Seen = Callable[[Batch, Samples], Batch]
"""Makes rows with other prompts of those of a step."""


class ScoreStage:
    """Scores the responses that are there with one engine, portion by portion. Collective over all ranks."""

    def __init__(
        self, state: WorkerState, engine: TrainingEngine, presence: Presence = nullcontext,
        seen: Seen | None = None,
    ):  # fmt: skip
        """`presence` brings the engine's weights to the device, and releases them when it is left.

        `seen` makes the rows that the engine sees of those of the step; None: these themselves.
        """
        self.state = state
        self.column = column_of(state)
        self.engine = engine
        self.presence = presence
        self.seen = seen

    def __call__(self, samples: Samples) -> None:
        portions = samples.rows.ready_portions(self.state)
        if portions:
            with self.presence():
                for rows in portions:
                    self._score_portion(samples, rows)

    def _score_portion(self, samples: Samples, rows: Integers) -> None:
        batch = samples.take(self.state, among=rows)
        samples.put(self.state, self._scored(batch if self.seen is None else self.seen(batch, samples)))
        samples.commit(self.state)

    def _scored(self, batch: Batch) -> Batch:
        """The columns of these rows. Collective over the mesh."""
        scored = Batch(batch.rows)
        rated = self._rate(token_rows(batch, self.engine.config))
        faultpoint("logprob", rated)
        if self.engine.rating == "row_values":
            scored.put_dense(self.column, rated)
        else:
            scored.put_ragged(self.column, ModelTokens.of(batch).spread(rated), batch.offsets("response_ids"))
        return scored

    def _rate(self, rows: TokenRows) -> Tensor:
        """What the head gives for each response token [R] or row [B], on the device. Collective over the mesh."""
        if self.engine.rating == "logprobs":
            return self.engine.score(rows).logprobs_R
        return self.engine.values(rows)


class OlderLogprobsStage(ScoreStage):
    """Scores only rows with tokens of earlier weights; of all others, the rollout's log-probs are those of the engine.

    For runs in which generator and trainer agree to the last bit; the update checks that they do.
    """

    def _scored(self, batch: Batch) -> Batch:
        is_older_B = has_older_tokens(batch, self.engine.update_count)
        rated = super()._scored(batch.select(is_older_B.nonzero().squeeze(1))).values(self.column)
        rated_R = is_older_B.repeat_interleave(batch.lengths("response_ids")).nonzero().squeeze(1)
        scored = Batch(batch.rows)
        generated_R = to_device(batch.values("rollout_logprobs"), rated.device)
        logprobs_R = generated_R.index_copy(0, to_device(rated_R, rated.device), rated)
        scored.put_ragged(self.column, logprobs_R, batch.offsets("response_ids"))
        return scored


def has_older_tokens(batch: Batch, version: int) -> Tensor:
    """Which rows [B] have a token of the model that other weights than those of `version` generated."""
    model_tokens = ModelTokens.of(batch)
    row_R = torch.arange(len(batch)).repeat_interleave(model_tokens.lengths_B)
    is_older_R = model_tokens.pick(batch.values("versions")) != version
    return torch.zeros(len(batch), dtype=torch.bool).index_put_((row_R[is_older_R],), torch.tensor(True))


class CutValueStage(ScoreStage):
    """Also puts the value behind each row's last token, or 0 behind a response that ended by itself."""

    def _scored(self, batch: Batch) -> Batch:
        is_cut_B = batch.dense("finished") == 0
        longer = _with_end_state(batch, is_cut_B)
        found_R, ends_B = self._rate(token_rows(longer, self.engine.config)), ModelTokens.of(longer).offsets[1:] - 1
        is_own_R = is_cut_B.new_ones(len(found_R)).index_fill(0, ends_B[is_cut_B], False)
        scored = Batch(batch.rows)
        own_R = found_R[to_device(is_own_R.nonzero().squeeze(1), found_R.device)]
        scored.put_ragged(self.column, ModelTokens.of(batch).spread(own_R), batch.offsets("response_ids"))
        end_values_B = found_R[to_device(ends_B, found_R.device)]
        scored.put_dense(END_VALUE, end_values_B.where(to_device(is_cut_B, found_R.device), 0.0))
        return scored


def _with_end_state(batch: Batch, is_cut_B: Tensor) -> Batch:
    """The rows with one more token of the model at the end of those that were cut, before which a value is computed.

    Any token does, as no token before it sees it.
    """
    longer = Batch(batch.rows)
    longer.put_ragged("prompt_ids", batch.values("prompt_ids"), batch.offsets("prompt_ids"))
    offsets = batch.offsets("response_ids")
    # A cut row's last token stands twice.
    counts_T = torch.ones_like(batch.values("response_ids")).index_fill(0, offsets[1:][is_cut_B] - 1, 2)
    offsets = offsets + offsets_of(is_cut_B)
    longer.put_ragged("response_ids", batch.values("response_ids").repeat_interleave(counts_T), offsets)
    if TURNS in batch:
        turns = batch.values(TURNS).repeat_interleave(counts_T).index_fill(0, offsets[1:][is_cut_B] - 1, 1)
        longer.put_ragged(TURNS, turns, offsets)
    return longer


class LikeliestTokensStage(ScoreStage):
    """Puts ids and log-probs of the teacher's likeliest tokens in each place, and the log-prob of all others."""

    def __init__(
        self, engine: TrainingEngine, presence: Presence, seen: Seen | None, *, num_likeliest: int, vocab_size: int
    ):
        """`vocab_size` is that of the policy: a larger teacher's further tokens have no text."""
        super().__init__(WorkerState.TEACHER_TOP, engine, presence, seen)
        self.num_likeliest = num_likeliest
        self.vocab_size = vocab_size

    def _scored(self, batch: Batch) -> Batch:
        rows = token_rows(batch, self.engine.config)
        found, model_tokens = self.engine.likeliest(rows, self.num_likeliest, self.vocab_size), ModelTokens.of(batch)
        scored, lengths_B = Batch(batch.rows), batch.lengths("response_ids")
        for name, values_RJ in (("ids", found.ids_RJ.int()), ("logprobs", found.logprobs_RJ)):
            offsets = offsets_of(lengths_B * values_RJ.shape[1])
            scored.put_ragged(f"teacher_top_{name}", model_tokens.spread(values_RJ).flatten(), offsets)
        return scored


def score_stages(
    slots: Sequence[Slot], engines: Mapping[Role, TrainingEngine],
    present: Callable[[Role], AbstractContextManager[None]], teachers_view: Seen | None, *, num_likeliest: int,
) -> dict[WorkerState, ScoreStage]:  # fmt: skip
    """The stages in which models score; `teachers_view` is the `seen` of the teacher."""
    stages: dict[WorkerState, ScoreStage] = {}
    for slot in slots:
        state, role = slot.state, slot.role
        if state.work != "score" or role is None:
            continue
        engine, presence = engines[role], partial(present, role)
        seen = teachers_view if state.role is TEACHER else None
        if state is WorkerState.REFERENCE and role is POLICY:
            stages[state] = ScoreStage(state, engine, _without_adapters(presence, engine))
        elif state is WorkerState.TEACHER_TOP:
            vocab_size = engines[POLICY].config.vocab_size
            stages[state] = LikeliestTokensStage(
                engine, presence, seen, num_likeliest=num_likeliest, vocab_size=vocab_size
            )
        else:
            is_older = "versions" in slot.reads
            kind = CutValueStage if END_VALUE in slot.makes else OlderLogprobsStage if is_older else ScoreStage
            stages[state] = kind(state, engine, presence, seen)
    return stages


def _without_adapters(present: Presence, engine: TrainingEngine) -> Presence:
    @contextmanager
    def both() -> Iterator[None]:
        with present(), engine.without_adapters():
            yield

    return both


@dataclass(frozen=True)
class TeachersPrompts:
    """Renders a column of the data as prompts are, by `data.chat_template`."""

    column: str
    renderer: Renderer

    def check(self, prompts: Sequence[Prompt], *, most_tokens: int, vocab_size: int) -> None:
        """Raise ValueError unless each row has a prompt in the column, of at most so many tokens of the vocabulary."""
        for prompt in prompts:
            found = prompt.columns.get(self.column)
            if not isinstance(found, (str, list)) or not found:
                raise ValueError(
                    f"teacher.prompt_column is {self.column}, but row {prompt.id} of data.train has {found!r} there, "
                    f"which is no prompt; its columns are {', '.join(sorted(prompt.columns)) or 'none'}"
                )
        tokenized = self._tokenized(prompts)
        for place, problem in tokenized.problems.items():
            raise ValueError(f"teacher.prompt_column is {self.column}, but of row {prompts[place].id}: {problem}")
        highest = int(tokenized.ids.max(initial=0))
        if highest >= vocab_size:
            problem = self.renderer.tokenizer.unknown_token(highest, vocab_size)
            raise ValueError(f"teacher.prompt_column is {self.column}, but of a row of it: {problem}")
        for place, prompt in enumerate(prompts):
            if not 1 <= (length := tokenized.length(place)) <= most_tokens:
                raise ValueError(
                    f"teacher.prompt_column is {self.column}, whose prompt of row {prompt.id} has {length} tokens, but "
                    f"beside rollout.max_completion_length the teacher has positions for 1 to {most_tokens}; shorten "
                    "the prompt, or lower rollout.max_completion_length"
                )

    def in_place(self, batch: Batch, samples: Samples) -> Batch:
        """The rows with the teacher's prompts in place of the policy's."""
        groups, place_B = (batch.rows // samples.group_size).unique(return_inverse=True)
        tokenized = self._tokenized([samples.rows.prompts[group] for group in groups.tolist()])
        ids, offsets = torch.from_numpy(tokenized.ids), torch.from_numpy(tokenized.offsets)
        seen = batch.select(range(len(batch)))
        seen.put_ragged("prompt_ids", *gather_ragged_rows(ids, offsets, place_B))
        return seen

    def _tokenized(self, prompts: Sequence[Prompt]) -> TokenizedPrompts:
        columns = [prompt.columns for prompt in prompts]
        return self.renderer.prompts([of_row[self.column] for of_row in columns], columns)
