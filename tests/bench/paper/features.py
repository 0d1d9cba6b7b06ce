"""The paper's Table 2 with a column of our own, in which each tick names tests that exist."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.bench.harness.bench_table import BenchTable
from tests.support.jobs import ROOT

SYSTEMS = ("MSRL", "OpenRLHF", "VeRL", "TRL")


@dataclass(frozen=True)
class Feature:
    """A row of the table."""

    name: str
    in_paper: str
    """marks of the paper's systems: yes, no, or partly (o)"""
    tests: tuple[str, ...] = ()
    """of ours, below tests/; none: we lack it, and `remark` says why"""
    remark: str = ""


_POLICY, _CONTEXT = "algorithms/test_policy_advantages.py", "engines/training/test_context_parallel.py"
_PARITY = "engines/models/test_transformers_parity.py"
_PARITY_TESTS = (
    f"{_PARITY}::test_logits_and_gradients_of_packed_rows_have_parity_with_transformers",
    f"{_PARITY}::test_greedy_tokens_of_the_native_engine_have_parity_with_transformers",
)
FEATURES = (
    Feature(
        "PPO", "yes yes yes yes",
        (
            f"{_POLICY}::test_advantages_are_those_of_the_equations",
            "job/test_critic.py::test_one_rank_and_two_with_the_swap_train_the_same_critic",
        ),
        "with a critic",
    ),
    Feature("GRPO", "yes yes yes yes", ("algorithms/test_grpo.py::test_group_advantages_equal_numpy",)),
    Feature(
        "PF-PPO", "yes no yes no",
        ("algorithms/test_pf_ppo.py::test_over_many_steps_rows_are_drawn_as_often_as_their_weights_say",),
    ),
    Feature(
        "DAPO", "yes yes yes no",
        ("algorithms/test_dapo.py::test_groups_with_an_accuracy_of_0_or_1_are_left_out_whatever_their_lengths",),
    ),
    Feature(
        "DPO", "yes yes no yes",
        (
            "algorithms/test_pairs.py::test_losses_and_gradients_are_those_of_the_equations",
            "job/test_preferences.py::test_one_rank_and_two_learn_the_same_of_pairs",
        ),
        "of pairs in a file, and online",
    ),
    Feature("DP", "yes yes yes yes", ("test_train.py::test_one_rank_and_more_train_alike_on_the_same_rollouts",)),
    Feature(
        "PP/TP", "yes o yes no",
        (
            "engines/training/test_pipeline_parallel.py::test_every_schedule_equals_one_process_on_2_ranks",
            "engines/parallel/test_tensor_parallel.py::test_a_cut_decoder_computes_what_the_whole_one_does",
        ),
        "interleaved stages (VPP) among the schedules",
    ),
    Feature(
        "ZeRO", "yes yes yes yes",
        (
            "engines/training/test_ranks.py::"
            "test_sharded_and_replicated_ranks_with_uneven_rows_train_as_one_process_does",
        ),
        "stage 3, by FSDP2",
    ),
    Feature(
        "All2All EP", "yes no o no",
        ("engines/parallel/test_expert_parallel.py::test_spread_experts_equal_experts_in_one_place",),
    ),
    Feature(
        "RingAttention", "yes no no no",
        (f"{_CONTEXT}::test_context_ranks_compute_what_one_process_computes",),
    ),
    Feature(
        "Ulysses", "yes no yes no",
        (
            f"{_CONTEXT}::test_context_ranks_compute_what_one_process_computes",
            f"{_CONTEXT}::test_ulysses_deals_out_heads_that_divide",
        ),
    ),
    Feature(
        "Fused Kernels", "yes o o o",
        (
            "engines/models/kernels/test_table.py::test_an_implementation_equals_the_plain_one",
            "engines/models/kernels/test_elementwise.py::test_values_and_gradients_are_those_in_float64",
            "accelerators/test_npu_kernels.py::test_a_kernel_equals_the_plain_one",
        ),
        "all six of the paper; run on CPUs and GPUs, on NPUs' operators by stand-ins only",
    ),
    Feature(
        "Stage Fusion", "yes yes no no",
        ("job/test_fusion.py::test_rows_losses_and_weights_are_those_of_the_unfused_run",),
    ),
    Feature(
        "Partial Rollout", "yes no o no",
        ("dataflow/stages/rollout/test_partial.py::test_responses_over_several_steps_are_those_of_one_step",),
    ),
    Feature(
        "Load Balance", "yes no yes no",
        (
            "dataflow/samples/test_balance.py::test_no_taker_carries_more_than_the_mean_its_slack_and_one_row",
            "dataflow/samples/test_balance.py::test_every_row_is_assigned_exactly_once",
        ),
    ),
    Feature(
        "Transfer Dock", "yes no no no",
        (
            "dataflow/samples/test_eq4.py::test_bytes_through_a_warehouse_are_those_of_the_papers_equation",
            "dataflow/samples/test_dock.py::test_the_papers_placement_moves_the_same_rows_over_nodes",
        ),
        "a central buffer to compare with is not in the product",
    ),
    Feature(
        "Allgather-Swap", "yes no no no",
        (
            "dataflow/resharding/test_transitions.py::test_on_2_ranks",
            "job/test_switching.py::"
            "test_update_state_is_off_the_device_and_out_of_resident_memory_during_generation",
        ),
        "reshard.executor=allgather, reshard.swap=always; by default only missing slices move",
    ),
    Feature("Dense Model", "yes yes yes yes", _PARITY_TESTS),
    Feature(
        "MoE Model", "yes o yes no",
        (
            *_PARITY_TESTS,
            "engines/models/test_moe.py::test_tokens_get_the_weighted_sum_of_their_experts_and_so_do_gradients",
        ),
    ),
)  # fmt: skip


def missing_tests(features: Iterable[Feature], folder: Path = ROOT / "tests") -> list[str]:
    """The named tests that no file below the folder defines, read from the sources without importing them."""
    named = dict.fromkeys(test for feature in features for test in feature.tests)
    return [test for test in named if not _is_defined(folder, *test.split("::"))]


def _is_defined(folder: Path, file: str, name: str) -> bool:
    path = folder / file
    if not path.is_file():
        return False
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return any(isinstance(node, ast.FunctionDef) and node.name == name for node in body)


def table2() -> BenchTable:
    """Passes if every named test exists."""
    missing = missing_tests(FEATURES)
    rows = [
        {"feature": feature.name}
        | dict(zip(SYSTEMS, feature.in_paper.split(), strict=True))
        | {
            "spmdrl": "yes" if feature.tests and not set(feature.tests) & set(missing) else "no",
            "remark": feature.remark or None,
        }
        for feature in FEATURES
    ]
    named = {feature.name: [f"tests/{test}" for test in feature.tests] for feature in FEATURES}
    ticks = sum(row["spmdrl"] == "yes" for row in rows)
    return BenchTable(
        title="Table 2: features; o: partly, in the paper's words",
        rows=rows,
        notes=(
            "The first four columns are the paper's, of July 2025. Each yes of ours is one of these tests:",
            *(f"  {name}: {' '.join(tests)}" for name, tests in named.items()),
            f"Named tests that don't exist: {', '.join(missing) or 'none'}.",
        ),
        details={"here": f"{ticks} of {len(rows)} features", "tests": named, "missing": missing},
        passed=not missing,
    )
