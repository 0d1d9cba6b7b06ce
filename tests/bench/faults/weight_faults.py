"""Weights that reach a generator otherwise than they were sent: skipped, swapped, stale and flipped."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import torch
from torch import Tensor

from spmdrl.dataflow.resharding.filling import SwitchRecord
from spmdrl.dataflow.resharding.planning.buckets import Piece
from spmdrl.dataflow.resharding.planning.cells import SlicedWeights
from spmdrl.nouns.batch import WeightSlice, whole_slice
from tests.bench.faults.fault_tally import Tally

_NUM_WEIGHTS = 6
_SHAPE = (17, 9)
Weights = dict[WeightSlice, Tensor]


def received(*, count: int) -> list[Tally]:
    """So many of each kind, all elements compared, as with reshard.verify."""
    kinds: dict[str, Callable[[Weights, Weights, Random], None]] = {
        "skipped": _skip, "swapped": _exchange, "stale": _leave_stale, "flipped": _flip_bit,
    }  # fmt: skip
    tallies = []
    for kind, change in kinds.items():
        tally = Tally("R13", f"{kind} weights where they arrive")
        for seed in range(count):
            with tally.timed(f"{kind} {seed}") as problems:
                random = Random(seed)  # noqa: S311 - no secret
                problems += [] if _is_found(change, random) else ["it was not found"]
        tallies.append(tally)
    return tallies


def _is_found(change: Callable[[Weights, Weights, Random], None], random: Random) -> bool:
    torch.manual_seed(random.randrange(1 << 30))
    boxes = [whole_slice(f"layer.{number}.weight", _SHAPE) for number in range(_NUM_WEIGHTS)]
    earlier: Weights = {box: torch.randn(_SHAPE) for box in boxes}
    sent: Weights = {box: values + 1e-3 for box, values in earlier.items()}
    arrived: Weights = {box: values.clone() for box, values in sent.items()}
    change(arrived, earlier, random)
    pieces = [Piece(box, (0,), (0,), number) for number, box in enumerate(boxes)]
    record = SwitchRecord(pieces, {box.name: torch.float32 for box in boxes}, rank=0, verify=True)
    record.begin(1)
    record.add_sent(pieces, SlicedWeights(sent))
    record.add_received([piece for piece in pieces if piece.box in arrived], SlicedWeights(arrived))
    return bool(record.differences(None))


def _skip(arrived: Weights, earlier: Weights, random: Random) -> None:
    del arrived[random.choice(list(arrived))]


def _exchange(arrived: Weights, earlier: Weights, random: Random) -> None:
    one, other = random.sample(list(arrived), 2)
    arrived[one], arrived[other] = arrived[other], arrived[one]


def _leave_stale(arrived: Weights, earlier: Weights, random: Random) -> None:
    box = random.choice(list(arrived))
    arrived[box] = earlier[box]


def _flip_bit(arrived: Weights, earlier: Weights, random: Random) -> None:
    octets = arrived[random.choice(list(arrived))].view(-1).view(torch.uint8)
    octets[random.randrange(len(octets))] ^= 1 << random.randrange(8)
