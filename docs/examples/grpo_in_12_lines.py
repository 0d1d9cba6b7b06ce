"""GRPO from Python: a model made by code learns to add, with a reward of its own."""

import spmdrl


def score(completions, answer, **columns):
    return [float(text.strip() == right) for text, right in zip(completions, answer, strict=True)]


run = spmdrl.train(
    {"model.make": {"hidden_size": 64, "num_hidden_layers": 2}, "data.train": "synthetic://addition?low=0&high=49"},
    reward={"functions": [score]}, rollout={"prompts_per_step": 16, "max_completion_length": 4},
    optim={"lr": 1e-3}, train={"max_steps": 20}, sft={"max_steps": 40}, run={"name": "twelve_lines"},
)  # fmt: skip
print(run.metrics[-1]["reward"], spmdrl.generate(["3+4="], model={"path": str(run.folder)}))
