"""Pages of `spmdrl help`: a verb, a key, a section of keys, or a name of another trainer."""

from __future__ import annotations

import json
from collections.abc import Mapping

from spmdrl.config.reader import ConfigError
from spmdrl.observability.terminal.spelling import nearest

_CONFIGURED = "[FILE.yaml ...] [key.path=value ...]"

VERB_PAGES: Mapping[str, str] = {
    "train": f"""usage: spmdrl train {_CONFIGURED} [--plan DEVICE]

Reinforcement learning: model.path or model.make, data.train, reward.functions, train.max_steps and the keys below them.
The same command again goes on from the newest checkpoint of the run's folder (resume). With sft.max_steps > 0 it trains
on answers first, and with data.eval it evaluates before, during (eval.interval) and after.

--plan plans the run (spmdrl plan) on such devices, h100, h200, 910b or a YAML file, while it loads the model, prints
whether it fits and the seconds of a step, and has the report show planned beside measured.

examples:
  python -m spmdrl train run.yaml optim.lr=1e-6 run.name=second
  torchrun --standalone --nproc-per-node 8 -m spmdrl train run.yaml resources.update.tensor=2
""",
    "sft": f"""usage: spmdrl sft {_CONFIGURED}

Supervised training on the completions or answers of data.train, for sft.max_steps steps of sft.rows_per_step rows, with
sft.optim. docs/data.md has the formats. With data.eval it evaluates before and after.

examples:
  python -m spmdrl sft model.path=models/base data.train=chats.jsonl sft.max_steps=200
  torchrun --standalone --nproc-per-node 8 -m spmdrl sft run.yaml sft.optim.lr=1e-5
""",
    "preferences": f"""usage: spmdrl preferences {_CONFIGURED}

DPO: learns to prefer chosen to rejected, the pairs of data.train, for preferences.max_steps steps of
preferences.rows_per_step rows, by preferences.loss_type. The reference is the model that the run starts from. With
data.eval it counts the held-out pairs that are in order before, during (eval.interval) and after.

examples:
  python -m spmdrl preferences model.path=models/base data.train=pairs.jsonl preferences.max_steps=200
  torchrun --standalone --nproc-per-node 8 -m spmdrl preferences run.yaml preferences.beta=0.05
""",
    "reward-model": f"""usage: spmdrl reward-model {_CONFIGURED}

Trains a model with one score per row, at its last token, to score chosen above rejected, the pairs of data.train, for
reward_model.max_steps steps of reward_model.rows_per_step rows. It begins with the layers of a language model and a new
head, or with a reward model. Checkpoints open in transformers, as AutoModelForSequenceClassification with one label.
With data.eval it counts the held-out pairs that are in order before, during (eval.interval) and after.

examples:
  python -m spmdrl reward-model model.path=models/base data.train=pairs.jsonl reward_model.max_steps=200
  torchrun --standalone --nproc-per-node 8 -m spmdrl reward-model run.yaml reward_model.centring=0.01
""",
    "quickstart": f"""usage: spmdrl quickstart {_CONFIGURED}

A model of about a million parameters, made by code, learns sums in minutes on this machine: a short supervised start,
then GRPO. It is spmdrl train with a configuration that comes with the package, which spmdrl init quickstart writes.

examples:
  python -m spmdrl quickstart train.max_steps=50
  torchrun --standalone --nproc-per-node 2 -m spmdrl quickstart run.name=two_ranks
""",
    "init": """usage: spmdrl init [NAME] [--to FOLDER]

Writes a commented run.yaml and the files that it names, and prints the command that comes next: quickstart, smollm2,
gsm8k, dpo or environment. Without a name it lists them. Nothing is overwritten.

examples:
  python -m spmdrl init quickstart
  python -m spmdrl init environment --to game
""",
    "convert": """usage: spmdrl convert FILE | -- WORDS ... [--to FILE] [--from TRAINER] [--verb VERB] [--ranks N]

Writes the settings of TRL (and Hugging Face's Trainer), verl, OpenRLHF, prime-rl, slime or NeMo-RL as run.yaml, or as
--to says, and prints what became of each: taken, converted, nothing to set, or no counterpart, with the reason. FILE is
YAML, TOML (prime-rl) or a shell script; after -- follows a command line as it was typed. --ranks is the number of
processes, which settings per process are multiplied with. The trainer and the verb (train, sft, preferences,
reward-model) are found by the names, unless --from and --verb name them. The trainer's own defaults are written out
where ours differ.

examples:
  python -m spmdrl convert examples/grpo_math_1B.yaml --to math.yaml
  python -m spmdrl convert --ranks 8 -- trl grpo --model_name_or_path models/base --per_device_train_batch_size 8
""",
    "eval": f"""usage: spmdrl eval {_CONFIGURED}

Answers the rows of data.eval, eval.num_samples times each (1: greedily), and judges them by reward.functions: accuracy
(avg@k of k answers) and pass@k for each k of eval.pass_at, with intervals. Writes eval.jsonl and eval.summary.json into
a folder of the model and the data below eval/ of the run's. docs/evaluation.md has what is measured, docs/data.md the
benchmarks (data.format).

examples:
  python -m spmdrl eval run.yaml model.path=runs/a/checkpoints/step_000100/model
  python -m spmdrl eval model.path=runs/a data.eval=test.jsonl eval.num_samples=8 'eval.pass_at=[1, 8]' run.name=a_eval
""",
    "generate": f"""usage: spmdrl generate {_CONFIGURED} [prompt=TEXT ...] [-]

Answers prompts with rollout's sampling, eval.num_samples times each. Prompts of the command line (- is standard input)
are answered on the screen and leave no file; answers to those of data.eval go into generated.jsonl in a folder of the
model and the data below generate/ of the run's, and the same command again goes on where it was interrupted.

examples:
  python -m spmdrl generate model.path=runs/a prompt='12+30=' rollout.temperature=0
  torchrun --standalone --nproc-per-node 8 -m spmdrl generate run.yaml data.eval=prompts.jsonl eval.num_samples=4
""",
    "check": f"""usage: spmdrl check [VERB] {_CONFIGURED} [--reward] [--all]
           [--ranks N] [--nodes N] [--device-memory SIZE]

Refuses what VERB would refuse (train, sft, preferences, reward-model, eval or generate; train if it is left out), and
prints whether it would start, faults with their remedies, the first row as the model and the reward functions read it,
the settings that aren't defaults (--all: the whole config with the origin of each value, as YAML), the layouts, bytes
of each owner on a rank, tokens of a step and epochs of the run. Trains nothing. With --ranks it checks for a job of so
many ranks without starting any, wherever its devices are, and --device-memory compares the bytes with one device's
memory; otherwise it looks at this machine too: memory, versions, devices, a port, disk, shared memory, open files, and
under torchrun the time of a small all-reduce. With --reward it scores responses of known worth on rows of the data
(docs/rewards.md): the reference, an empty one, another row's answer and others. Ends with 1 where a line FAILED, and
with 2 where the verb would refuse the config.

examples:
  python -m spmdrl check run.yaml --reward
  python -m spmdrl check sft run.yaml --ranks 16 --nodes 2 --device-memory 80GiB
""",
    "plan": f"""usage: spmdrl plan {_CONFIGURED} [--ranks N] [--nodes N] [--device NAME|FILE]
           [--prompt-length N] [--response-length N] [--sizes FOLDER] [--json FILE] [--picture FILE.svg]
           [--search] [--scale]
       spmdrl plan {_CONFIGURED} --calibrate FILE [--ranks N]
       spmdrl train {_CONFIGURED} --dry-run [--rank R] [the same]

Prints, for `train` on N ranks, the memory of one rank of each kind by worker state and owner, and whether it fits a
device: h100 (the default), h200, 910b, or a YAML file such as `{{memory_gib: 79.6, kernels: cuda}}`. No devices, data
or weights need be here: the models are built as on such a rank, of tensors without values, and run the states of
a step on rows of the given lengths (by default the longest that the config allows). --sizes takes the config.json of a
folder in place of model.path. --picture draws the fullest rank's memory, and the seconds of a step. Ends with 1 if it
doesn't fit. docs/planning.md has what is planned, and how exactly.

Seconds of each state, and tokens per second and device, follow from the device's rates. Those of the names are made
of data sheets; --calibrate trains small random models on N ranks of this machine for some minutes and writes a device
FILE with the rates that explain how long they take.

--search plans other layouts and sets of ranks, too, and prints them by tokens per second and device; --scale plans the
run on 4, 16, ... times the nodes, with as many times the prompts and replicas, to 10,000 devices.

--dry-run does so for one rank with all micro-batches of a step, and adds the bytes that it sends, beside the plan.

examples:
  python -m spmdrl plan run.yaml --ranks 8 --calibrate node.yaml
  python -m spmdrl plan run.yaml resources.update.tensor=8 --ranks 64 --nodes 8 --response-length 4000
  python -m spmdrl train run.yaml --dry-run --ranks 16 --nodes 2 --rank 15
""",
    "launch": f"""usage: spmdrl launch slurm|msrun [VERB] {_CONFIGURED} --ranks-per-node N
           [--nodes N] [--sbatch=OPTION ...] [--dry-run]

Checks the config for so many ranks, as they would, and submits the run to Slurm (sbatch), or starts it under msrun, on
each node by the same command. VERB is train if it is left out. --dry-run prints the script, complete, and starts
nothing. --sbatch adds an option of sbatch, such as --sbatch=--time=4:00:00. Other settings are variables of the
environment, which the head of the script lists: SCRATCH for Slurm; HEAD, PORT, NODE_RANK and MSRUN for msrun.
docs/slurm.md has what happens at signals, time limits and preemption, docs/launching.md all launchers.

examples:
  python -m spmdrl launch slurm run.yaml --nodes 4 --ranks-per-node 8 --sbatch=--gpus-per-node=8
  python -m spmdrl launch msrun run.yaml --ranks-per-node 2 --dry-run
""",
    "explain": """usage: spmdrl explain [algo.NAME ...] [--json]

Prints what an algorithm computes, its keys with their defaults, and what the functions of other trainers make of the
same rows. Without a name it lists the algorithms.

examples:
  python -m spmdrl explain algo.gspo
  python -m spmdrl explain --json
""",
}


def help_page(name: str, *, keys_too: bool = False) -> str:
    """Return the page of a verb, a key, a section or another trainer's name, or of all keys.

    Verbs and sections of one name have both pages with `keys_too`. Raises ConfigError for any other name.
    """
    verb_page = VERB_PAGES.get(name, "")
    if verb_page and not (keys_too and name in ("train", "sft", "preferences", "eval")):
        return verb_page
    # Pages of verbs do without these imports.
    from spmdrl.config.config import Config
    from spmdrl.config.reference import config_page, json_schema, key_page, known_names

    if name == "--markdown":
        return "\n".join(config_page(Config)) + "\n"
    if name == "--schema":
        return json.dumps(json_schema(Config), indent=1) + "\n"
    if name.startswith("--coming-from="):
        from spmdrl.config.coming_from import pages

        page_of, known = name.partition("=")[2], pages()
        if page_of not in known:
            raise ConfigError(f"there is no page {page_of!r}; there are {', '.join(known)}")
        return "\n".join(known[page_of]) + "\n"
    page = key_page(Config, name)
    if page is not None:
        return f"{verb_page}\n{page}" if verb_page else page
    near = nearest(name, VERB_PAGES)
    advice = f"did you mean {near}?" if near else known_names(Config).advice(name)
    raise ConfigError(f"there is no key or verb {name!r}; {advice}")
