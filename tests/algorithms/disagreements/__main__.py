"""Compare, and write down what was found: `python -m tests.algorithms.disagreements [--write]`."""

from __future__ import annotations

import json
import logging
import sys

from tests.algorithms.disagreements.cases import CASES
from tests.algorithms.disagreements.padded_rows import PaddedRows
from tests.algorithms.disagreements.page import PAGE, RECORD, Found, with_table
from tests.algorithms.disagreements.peers import VERSIONS

DRAWS = 20
TOLERANCE = 1e-6


def main() -> int:
    logging.disable(logging.INFO)
    draws = [PaddedRows.drawn(seed) for seed in range(DRAWS)]
    differences = [max(case.difference(rows) for rows in draws) for case in CASES]
    others = [(case, by) for case, by in zip(CASES, differences, strict=True) if (by > TOLERANCE) != bool(case.why)]
    for case, by in others:
        print(f"NOT AS STATED, they differ by {by:.1e}: {case.entry}")
    print(
        f"{len(CASES)} comparisons on {DRAWS} draws: {sum(not case.why for case in CASES)} are stated to be equal to "
        f"{TOLERANCE}, the others to differ; {len(others)} aren't as stated"
    )
    found: Found = {"versions": VERSIONS, "rows": [case.entry for case in CASES]}
    if "--write" in sys.argv[1:]:
        rows = ",\n".join(map(json.dumps, found["rows"]))
        RECORD.write_text(f'{{"versions": {json.dumps(VERSIONS)}, "rows": [\n{rows}\n]}}\n')
        PAGE.write_text(with_table(PAGE.read_text(), found))
    elif json.loads(RECORD.read_text()) != found:
        print(f"{RECORD} isn't what was found; write it with --write")
        return 1
    return int(bool(others))


if __name__ == "__main__":
    sys.exit(main())
