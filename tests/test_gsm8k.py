"""The whole of GSM8K's training file through reading, tokenizing and the reward children."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from spmdrl.dataflow.data.data_rows import RowNeeds, read_rows
from spmdrl.dataflow.data.prompts import PromptSource
from spmdrl.engines.models.make_model import make_model_folder
from spmdrl.engines.models.renderer import Renderer
from spmdrl.engines.models.tokenizer import ModelTokenizer
from spmdrl.engines.reward.calls import RewardCall
from spmdrl.engines.reward.pool import RewardPool
from spmdrl.nouns.settings.data_config import DataConfig
from spmdrl.nouns.settings.model_config import MakeConfig
from spmdrl.nouns.settings.reward_config import RewardConfig

CALL = 500


@pytest.mark.real_data
def test_every_reference_solution_scores_one_on_its_own_question(tmp_path):
    path = os.environ.get("SPMDRL_GSM8K")
    if not path:
        pytest.skip("SPMDRL_GSM8K names no GSM8K file")
    num_lines = len(Path(path).read_text(encoding="utf-8").splitlines())
    config = DataConfig(train=path, max_prompt_length=4096)
    sources = read_rows(config.train, config, needs=RowNeeds(answer=True))
    make_model_folder(
        tmp_path / "model",
        MakeConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1),
        0,
    )
    tokenizer = ModelTokenizer(tmp_path / "model")
    source = PromptSource(sources, Renderer(tokenizer), config, seed=0, vocab_size=len(tokenizer.raw))
    prompts = list(source.all())
    assert len(prompts) == len(source) == num_lines and not source.skipped
    assert all(len(prompt.prompt_ids) == len(prompt.text) for prompt in prompts), "one token a character"
    with RewardPool(RewardConfig(functions=("number",))) as pool:
        keys = []
        for start in range(0, num_lines, CALL):
            part = prompts[start : start + CALL]
            solutions = [str(prompt.answer) for prompt in part]
            ids = [tokenizer.encode(solution) for solution in solutions]
            columns = {"answer": [prompt.answer for prompt in part]}
            pool.submit({start: RewardCall([prompt.original for prompt in part], solutions, ids, columns)})
            keys.append(start)
        rewards = [reward for result in pool.collect(keys) for reward in result.rewards]
    assert rewards == [1.0] * num_lines
