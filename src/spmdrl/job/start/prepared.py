"""A run's inputs from its model's folder before any weight: config, tokenizer and prompts, checked together."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from spmdrl.config.config import Config
from spmdrl.config.reader import start_up
from spmdrl.dataflow.data.prompts import LearntRows, PromptSource
from spmdrl.dataflow.stages.inference import TeachersPrompts
from spmdrl.engines.environment.environment_runner import EnvironmentFacts
from spmdrl.engines.environment.tool_calls import check_tools, find_forks
from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.hf.foreign_folder import try_folder
from spmdrl.engines.models.hf.model_folder import HUB_TEXT_FILES, compute_dtype, read_config, resolve_model_folder
from spmdrl.engines.models.make_model import decoder_config, make_folder_without_weights
from spmdrl.engines.models.renderer import Renderer
from spmdrl.engines.models.tokenizer import ModelTokenizer
from spmdrl.engines.training.checkpoints.checkpoint import CheckpointStore, model_dtype
from spmdrl.job.model.model_source import (
    CHECKPOINTS,
    INITIAL_MODEL,
    ModelSource,
    model_facts,
    newest_sound_model,
    prepare_model,
    sources_of,
)
from spmdrl.job.run.run_folder import check_disk_space, num_parameters, on_main
from spmdrl.job.start.checked_run import ON_PAIRS, CheckedRun
from spmdrl.job.start.model_checks import (
    check_generation_cuts,
    check_model_fits,
    check_models_beside,
    check_vllm_computes,
)
from spmdrl.nouns.roles import JUDGE, POLICY, REWARD_MODEL, TEACHER, Role
from spmdrl.observability.terminal.console import Console
from spmdrl.resources.world import World


@dataclass(frozen=True)
class Prepared:
    """The models' folders without their weights, and the prompts in the policy's tokens."""

    sources: Mapping[Role, ModelSource]
    renderer: Renderer
    train_prompts: PromptSource | None
    """prompts of `data.train`; None if the verb reads none"""
    held_out: PromptSource | None
    """prompts of `data.eval`"""
    teachers_prompts: TeachersPrompts | None = None
    """a teacher's replacement of `data.train`'s prompts; None: the same"""
    forks: Sequence[str] = ()
    """places where the chat template writes turns otherwise once the environment has answered"""

    @property
    def tokenizer(self) -> ModelTokenizer:
        return self.renderer.tokenizer

    @property
    def warnings(self) -> list[str]:
        """Return warnings on prompts and template options that may be used in an unintended way."""
        both = [prompts for prompts in (self.train_prompts, self.held_out) if prompts is not None]
        forks = [f"WARNING: {line}" for line in self.forks]
        return [*dict.fromkeys(line for prompts in both for line in prompts.warnings), *forks, *self._also_trained()]

    def _also_trained(self) -> Iterator[str]:
        """Yield a warning if held-out prompts are among those to train on, unless an environment completes them."""
        if self.train_prompts is None or self.held_out is None or self.renderer.has_openings:
            return
        held_out = Counter(self.held_out.texts())
        # Rows of one text differ in what the model doesn't read. No set of those to train on: they may be millions.
        shared = {text for text, number in held_out.items() if number == 1}.intersection(self.train_prompts.texts())
        if rows := [text for text in held_out if text in shared]:
            found = f"{len(rows)} of the {held_out.total()} prompts of data.eval are also in data.train"
            yield f"WARNING: {found}, the first is {rows[0][:200]!r}; answers learnt by heart count as right there"

    @property
    def vocabulary_gaps(self) -> str | None:
        """Return a line on ids of the model without a token; None without any."""
        size = self.source.decoder.vocab_size
        num_gaps = len(self.tokenizer.ids_without_token(size))
        line = f"vocabulary: {num_gaps} of the model's {size} ids have no token; they are never sampled"
        return line if num_gaps else None

    @property
    def source(self) -> ModelSource:
        """Source of the policy."""
        return self.sources[POLICY]

    @property
    def prompts(self) -> PromptSource:
        """Prompts to train on."""
        assert self.train_prompts is not None, "this verb reads no data.train"
        return self.train_prompts


def prepare_without_weights(checked: CheckedRun) -> Prepared:
    """Prepare models that needn't be here, made or fetched."""
    with start_up(), source_without_making(checked.config) as source:
        return prepare(checked, source, is_there=False)


def prepare(
    checked: CheckedRun, source: ModelSource, try_first: Callable[[Path], None] = try_folder, *, is_there: bool = True
) -> Prepared:
    """Read the tokenizer and the prompts; raises ValueError if they, the model and the run do not fit.

    `try_first` is called with each folder before its tokenizer is loaded, unless this run makes the model. Without
    `is_there`, the weights of further models needn't be on this machine.
    """
    config, folder = checked.config, source.folder
    if checked.train_rows:
        source = source.with_adapters(config.lora, config.seed)
    elif source.adapters is not None:
        # Raises ValueError if they belong to another model.
        source.with_adapters(source.adapters.lora, config.seed)
    check_generation_cuts(source.decoder, config.resources.generation)
    if config.rollout.engine == "vllm":
        check_vllm_computes(folder, source.decoder)
    sources = sources_of(checked.roles, source, config, is_there=is_there)
    if checked.rating(POLICY) == "row_values":
        sources[POLICY] = source.with_value_head()
    if checked.train_rows:
        check_model_fits(config, source.decoder, checked.layout)
        check_models_beside(checked, {role: other.decoder for role, other in sources.items()})
    for found in dict.fromkeys([folder, *(other.folder for other in sources.values())]):
        if found != folder or config.model.path is not None:
            try_first(found)
    tokenizer = ModelTokenizer(folder, skips_special=config.reward.special_tokens == "skip")
    _check_stop_tokens(tokenizer, source.decoder)
    if checked.algorithm.num_likeliest > source.decoder.vocab_size:
        raise ValueError(
            f"algo.top_k is {checked.algorithm.num_likeliest}, but the model's vocabulary has "
            f"{source.decoder.vocab_size} tokens; lower algo.top_k"
        )
    for role in (TEACHER, REWARD_MODEL):
        if role in sources:
            tokenizer.check_same_tokens(ModelTokenizer(sources[role].folder))
    if JUDGE in sources:
        # Raises ValueError if no token would end a verdict.
        ModelTokenizer(sources[JUDGE].folder)
    facts, vocab_size = checked.environment or EnvironmentFacts(False, None), source.decoder.vocab_size
    renderer = Renderer(
        tokenizer, config.data.template, facts.tools,
        has_openings=facts.has_openings, has_own_prompts=facts.has_own_prompts,
    )  # fmt: skip
    if facts.tools:
        check_tools(renderer)
    learnt = LearntRows(renderer, config.sft.turns if checked.verb == "sft" else "last")
    decoder = source.decoder
    check = learnt.check(vocab_size, decoder.max_positions, decoder.position_rule)
    train, held_out = (
        PromptSource(rows, renderer, config.data, config.seed, vocab_size=vocab_size, check=check if learns else None)
        if rows
        else None
        for rows, learns in (
            (checked.train_rows, checked.offline is not None),
            (checked.eval_rows, checked.verb in ON_PAIRS),
        )
    )
    num_new = config.rollout.max_completion_length
    if train is not None and checked.offline is None:
        check_positions(train, "data.train", source.decoder, num_new)
    # Responses of `generate` end at the last position.
    if held_out is not None and checked.verb not in ("generate", *ON_PAIRS):
        check_positions(held_out, "data.eval", source.decoder, num_new)
    teachers_prompts = None
    if train is not None and checked.verb != "sft" and config.teacher is not None and config.teacher.prompt_column:
        teachers_prompts = TeachersPrompts(config.teacher.prompt_column, renderer)
        most_tokens = sources.get(TEACHER, source).decoder.max_positions - num_new
        teachers_prompts.check([*train.all()], most_tokens=most_tokens, vocab_size=vocab_size)
    first = next((prompt for prompts in (train, held_out) if prompts is not None for prompt in prompts.all()), None)
    is_split = config.environment.on_fork == "split"
    forks = [] if first is None or is_split else find_forks(renderer, first.original, first.columns)
    if forks and config.environment.on_fork == "refuse":
        raise ValueError(f"environment.on_fork is refuse, and {forks[0]}; or set environment.on_fork to keep or split")
    return Prepared(sources, renderer, train, held_out, teachers_prompts, forks)


def prepare_together(checked: CheckedRun, world: World, console: Console) -> Prepared:
    """Prepare on all ranks, which must find equal models, weights included, and prompts. Collective.

    Warns of prompts and options that may be used in an unintended way.
    """
    if (make := checked.config.model.make) is not None:
        # Before random weights are written; critics are about as large.
        decoders = dict.fromkeys(checked.roles, replace(decoder_config(make), lora=checked.config.lora))
        is_made = (checked.config.run.folder / INITIAL_MODEL).exists
        on_main(world, lambda: None if is_made() else check_room(checked, decoders, world.device.kind))
    with console.doing("reading the model's config, tokenizer and prompts"):
        source = prepare_model(checked.config, world)
        prepared = prepare(checked, source, lambda folder: on_main(world, partial(try_folder, folder)))
        for role, other in prepared.sources.items():
            if other.folder != source.folder:
                world.agree(partial(model_facts, other.folder, role.name))
        # Templates may write the date, and files of a template may differ.
        named = {"data.train": prepared.train_prompts, "data.eval": prepared.held_out}
        world.agree(lambda: {f"the tokens of {key}": one.digest for key, one in named.items() if one is not None})
    for warning in prepared.warnings:
        console.note(warning)
    if checked.verb not in ON_PAIRS and (gaps := prepared.vocabulary_gaps):
        console.note(gaps)
    return prepared


def check_room(checked: CheckedRun, decoders: Mapping[Role, DecoderConfig], device_kind: str) -> int:
    """Refuse a disk that lacks room for checkpoints and for weights that `model.make` has yet to write.

    Returns their bytes. Raises ValueError.
    """
    config, kept = checked.config, [one for role, one in decoders.items() if role.checkpoint is not None]
    is_new = config.model.make is not None and not (config.run.folder / INITIAL_MODEL).exists()
    made_bytes = num_parameters(decoders[POLICY]) * torch.float32.itemsize if is_new else 0
    store = CheckpointStore(config.run.folder / CHECKPOINTS, config.checkpoint, is_main=True)
    dtype = model_dtype(config.checkpoint, compute_dtype(config.model, device_kind))
    kept = kept if checked.train_rows else []
    return check_disk_space(config.run, store, kept, dtype, num_steps=checked.num_steps, made_bytes=made_bytes)


def check_positions(prompts: PromptSource, key: str, decoder: DecoderConfig, num_new: int) -> None:
    """Refuse responses that would exceed the positions that the model was made for."""
    most_tokens = decoder.max_positions - num_new
    if too_long := prompts.longer_than(most_tokens):
        longest, _ = max(too_long)
        skip = f", or leave them out by data.max_prompt_length={most_tokens} and data.on_bad_row=skip"
        raise ValueError(
            f"the longest prompt of {key} has {longest} tokens; with rollout.max_completion_length {num_new} it needs "
            f"{longest + num_new} positions, but the model has {decoder.max_positions} positions"
            f"{decoder.position_rule}; rows with too long a prompt: {len(too_long)}, the first is {too_long[0][1]}; "
            f"lower rollout.max_completion_length{skip if most_tokens > 0 else ''}"
        )


def _check_stop_tokens(tokenizer: ModelTokenizer, decoder: DecoderConfig) -> None:
    beyond = [str(stop) for stop in tokenizer.stop_tokens if stop.token_id >= decoder.vocab_size]
    if beyond:
        raise ValueError(
            f"responses of {tokenizer.folder} would stop at {', '.join(beyond)}, beyond the model's vocab_size "
            f"{decoder.vocab_size}; fix eos_token_id in tokenizer_config.json, generation_config.json or config.json"
        )


@contextlib.contextmanager
def source_without_making(config: Config) -> Iterator[ModelSource]:
    """Yield the initial model's source, without weights if they would have to be fetched or made."""
    if config.model.path is not None:
        path = Path(config.model.path).expanduser()
        folder = Path(newest_sound_model(path) or resolve_model_folder(config.model.path, HUB_TEXT_FILES))
        yield ModelSource.of(folder, patterns=HUB_TEXT_FILES, is_there=path.is_dir())
        return
    assert config.model.make is not None
    with TemporaryDirectory(prefix="spmdrl_check_") as name:
        make_folder_without_weights(Path(name), config.model.make)
        yield ModelSource(Path(name), read_config(name))
