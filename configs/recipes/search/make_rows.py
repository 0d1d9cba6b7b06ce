"""Write facts about made-up people and questions about them, to FOLDER or data/search.

    python configs/recipes/search/make_rows.py [FOLDER]

No question about the last 50 people is among those to train on.
"""

import json
import random
import sys
from pathlib import Path

NUM_PEOPLE, NUM_HELD_OUT = 550, 50
KINDS = ("home", "craft", "song")


def made_up_words(rng: random.Random, count: int) -> list[str]:
    # No set, whose order differs from process to process.
    words: dict[str, None] = {}
    while len(words) < count:
        words["".join(rng.choice("bdfghklmnprstvz") + rng.choice("aeiou") for _ in range(rng.randint(2, 3)))] = None
    return list(words)


def main(folder: Path) -> None:
    rng = random.Random(0)  # noqa: S311
    folder.mkdir(parents=True, exist_ok=True)
    corpus, lines = folder / "corpus.txt", []
    rows: dict[str, list[dict[str, str]]] = {"train": [], "test": []}
    # All differ, so that a search for a person finds no answer of that name.
    words = iter(made_up_words(rng, NUM_PEOPLE * (1 + len(KINDS))))
    for number in range(NUM_PEOPLE):
        person = next(words)
        for kind in KINDS:
            answer = next(words)
            fact = f"{person}'s {kind} is {answer}."
            lines.append(fact)
            rows["train" if number < NUM_PEOPLE - NUM_HELD_OUT else "test"].append(
                {
                    "prompt": f"{kind} of {person}?",
                    "answer": answer,
                    "completion": f"[{person} {kind}]{fact}{answer}",
                    "corpus": str(corpus),
                }
            )
    rng.shuffle(lines)
    corpus.write_text("\n".join(lines))
    for name, of in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in of))


if __name__ == "__main__":
    main(Path(*sys.argv[1:] or ["data/search"]))
