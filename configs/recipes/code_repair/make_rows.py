"""Write rows of small Python functions with one defect each, to FOLDER or data/code_repair.

    python configs/recipes/code_repair/make_rows.py [FOLDER]

A function is a shape filled with parts; its defect is another part of the same kind. Every fifth function is held out,
with all of its defects.
"""

import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

TOTALS = {"sum": "sum", "max": "largest", "min": "smallest", "len": "number"}
OPERATORS = {"+": "plus", "-": "minus", "*": "times"}
COMPARISONS = {"<": "below", ">": "above", "<=": "up to", ">=": "from"}
NUMBERS = dict(zip("23456789", "two three four five six seven eight nine".split(), strict=True))

FUNCTIONS, ITEMS = ("work", "solve", "apply", "answer", "run"), "bkmnvx"
NUM_TESTS, NUM_ITEMS, LARGEST_ITEM = 3, 5, 11


@dataclass(frozen=True)
class Shape:
    """Functions that differ in their parts alone; `I` stands for the name of an item."""

    purpose: str
    expression: str
    kinds: Sequence[Mapping[str, str]]
    """of each part: what it may be, in code and in words"""

    def value(self, parts: Sequence[str], items: list[int]) -> Any:
        return eval(self.expression.format(*parts), {"Is": items})  # noqa: S307

    def wrongs(self, parts: Sequence[str]) -> list[tuple[str, ...]]:
        """Return the parts with one of them changed, for each such change."""
        return [
            (*parts[:place], other, *parts[place + 1 :])
            for place, kind in enumerate(self.kinds)
            for other in kind
            if other != parts[place]
        ]


SHAPES = (
    Shape("the {} of Is {} {}", "{}(Is) {} {}", (TOTALS, OPERATORS, NUMBERS)),
    Shape("all Is {} {}", "[I {} {} for I in Is]", (OPERATORS, NUMBERS)),
    Shape("those Is {} {}", "[I for I in Is if I {} {}]", (COMPARISONS, NUMBERS)),
    Shape("how many Is are {} {}", "sum(I {} {} for I in Is)", (COMPARISONS, NUMBERS)),
)


def repairs(shape: Shape, parts: Sequence[str], rng: random.Random) -> Iterator[dict[str, Any]]:
    """Yield a row for each defect of a function."""
    words = (kind[part] for kind, part in zip(shape.kinds, parts, strict=True))
    purpose = shape.purpose.format(*words)
    for wrong in shape.wrongs(parts):
        function, item = rng.choice(FUNCTIONS), rng.choice(ITEMS)
        right_code, wrong_code = (
            f"def {function}({item}s):\n    return {shape.expression.format(*of).replace('I', item)}\n"
            for of in (parts, wrong)
        )
        yield {
            "prompt": f"# {purpose.replace('I', item)}\n{wrong_code}# repaired\n",
            "completion": right_code,
            "test_list": [
                f"assert {function}({items}) == {shape.value(parts, items)}"
                for items in telling_inputs(shape, parts, rng)
            ],
        }


def telling_inputs(shape: Shape, parts: Sequence[str], rng: random.Random) -> list[list[int]]:
    """Draw inputs on which no defective function gives all the values of the right one."""
    while True:
        inputs = [rng.sample(range(LARGEST_ITEM + 1), NUM_ITEMS) for _ in range(NUM_TESTS)]
        values = [shape.value(parts, items) for items in inputs]
        if all([shape.value(wrong, items) for items in inputs] != values for wrong in shape.wrongs(parts)):
            return inputs


def main(folder: Path) -> None:
    rng = random.Random(0)  # noqa: S311
    functions = [(shape, parts) for shape in SHAPES for parts in product(*shape.kinds)]
    rng.shuffle(functions)
    folder.mkdir(parents=True, exist_ok=True)
    for name, own in (("train", [one for n, one in enumerate(functions) if n % 5]), ("test", functions[::5])):
        rows = [row for shape, parts in own for row in repairs(shape, parts, rng)]
        rng.shuffle(rows)
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


if __name__ == "__main__":
    main(Path(*sys.argv[1:] or ["data/code_repair"]))
