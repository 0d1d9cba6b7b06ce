"""The line that names who holds a job up, and a node that is lost."""

from __future__ import annotations

import re
from dataclasses import replace

from spmdrl.runtime.supervision.board import RankState, culprits
from spmdrl.runtime.supervision.hang_report import hang_line, silent_main_line

LIMIT = 10.0
RANKS_PER_NODE = 2


def state(rank: int, **others) -> RankState:
    node = rank // RANKS_PER_NODE
    return replace(
        RankState(rank, "update", 3, 40, 11.0, "all_reduce", "at x.py:1", host=f"n{node} (10.0.0.{node + 1})"), **others
    )


STATES = [state(rank) for rank in range(6)]


def line_of(silent: dict[int, float]) -> str:
    return hang_line(culprits(STATES, silent, LIMIT), STATES, silent, LIMIT, RANKS_PER_NODE)


def test_a_node_none_of_whose_ranks_answers_is_named_with_its_host_and_ranks():
    line = line_of({0: 0.1, 1: 0.1, 2: 0.1, 3: 0.1, 4: 10.1, 5: 9.6})
    assert line.startswith("node 2 is lost, with ranks 4-5 on n2 (10.0.0.3): no answer for 10 s"), line
    assert "rank 0 waits in all_reduce" in line and "hangs" not in line


def test_one_silent_rank_of_a_node_hangs_and_its_node_is_there():
    assert line_of({rank: 11.0 if rank == 4 else 0.1 for rank in range(6)}).startswith("rank 4 hangs: no answer")


def test_where_no_other_node_answers_it_is_this_one_that_is_cut_off():
    line = line_of({0: 0.1, 1: 0.1, 2: 9.6, 3: 10.9, 4: 9.8, 5: 10.5})
    assert line == "this node, n0 (10.0.0.1), is cut off: no answer from any other for 10 s"


def test_while_a_rank_is_silent_for_long_no_other_is_blamed_for_waiting():
    waiting = [*STATES[:3], state(3, collective=""), *STATES[4:]]
    assert culprits(waiting, dict.fromkeys(range(6), 0.1), LIMIT) == [3]
    assert culprits(waiting, {4: 6.0, 5: 6.0}, LIMIT) == []
    assert culprits(waiting, {4: 10.5, 5: 10.5}, LIMIT) == [4, 5]


def test_of_the_ranks_that_wait_one_of_each_place_comes_first():
    waiting = [*map(state, range(6)), *(state(rank, stage="wait_for_update") for rank in (6, 7))]
    line = hang_line([1], waiting, {}, LIMIT)
    assert re.findall(r"rank (\d) waits", line) == ["1", "0", "6", "2", "3"]
    assert "rank 6 waits in all_reduce in wait_for_update of step 3" in line and line.endswith("; 3 more wait")


def test_a_rank_that_lost_the_store_names_both_ends_of_the_way_there():
    line = silent_main_line(STATES[4], STATES[0], 10.6, LIMIT)
    assert line.startswith("rank 0 on n0 (10.0.0.1) is lost: nothing came from it to rank 4 on n2 (10.0.0.3) for 11 s")
    assert silent_main_line(STATES[1], STATES[0], 10.6, LIMIT).startswith("rank 0 hangs: no answer for 11 s")
    assert silent_main_line(STATES[4], None, 10.6, LIMIT).startswith("rank 0 hangs: nothing came from it for 11 s")
