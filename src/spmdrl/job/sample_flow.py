"""The sample flow of a training run: prompts per step, places of rows, and their ends."""

from __future__ import annotations

from contextlib import ExitStack

from spmdrl.dataflow.data.prompts import PromptSource
from spmdrl.dataflow.samples.balancing.dealing import groups_of_generation, groups_of_training
from spmdrl.dataflow.samples.balancing.length_history import LengthHistory
from spmdrl.dataflow.samples.dock import TransferDock
from spmdrl.dataflow.samples.pending import PendingGroups, RoundRules, StepGroups
from spmdrl.dataflow.samples.row_lives import Accounting
from spmdrl.dataflow.samples.run_account import RunAccount
from spmdrl.dataflow.samples.samples import Samples
from spmdrl.engines.models.decoder import DecoderConfig, row_cost_of
from spmdrl.job.model.role_models import RoleModels
from spmdrl.job.start.checked_run import CheckedRun
from spmdrl.nouns.roles import POLICY, WorkerState
from spmdrl.observability.fault_points import faultpoint
from spmdrl.resources.mesh import GenerationMesh
from spmdrl.resources.rank_sets import RankSets
from spmdrl.resources.world import World


class SampleFlow:
    """Flow of each step's batch, from opening to closing.

    made -> read from a checkpoint, if there is one -> the dock is opened -> open(step) -> close(step)
    """

    dock: TransferDock

    def __init__(self, checked: CheckedRun, prompts: PromptSource, mesh: GenerationMesh, world: World):
        config = checked.config
        rollout = config.rollout
        rules = RoundRules(
            rollout.prompts_per_step, rollout.extra_prompts, rollout.partial_max_rounds,
            num_steps=checked.num_steps, num_refills=checked.algorithm.max_refills,
        )  # fmt: skip
        self.pending = PendingGroups(rules, mesh)
        self.history = LengthHistory(is_main=world.is_main)
        self.account = RunAccount(rollout.num_generations, is_main=world.is_main)
        self._prompts = prompts
        self.groups: dict[int, StepGroups] = {}
        """groups of the open steps"""
        self._mesh = mesh
        self._group_size = rollout.num_generations
        self._world = world

    @property
    def most_rows(self) -> int:
        """Most rows that a step generates at once."""
        return self.pending.rules.most_groups * self._group_size

    @property
    def leaders(self) -> tuple[int, ...]:
        """First rank of each replica."""
        return self._mesh.leaders

    def open_dock(
        self, checked: CheckedRun, models: RoleModels, decoder: DecoderConfig, judges: GenerationMesh | None,
        sets: RankSets, stack: ExitStack,
    ) -> None:  # fmt: skip
        """Open the dock, whose ranks share rows by the layout of each state's model. Collective.

        Raises ValueError if groups of several steps are pending and steps may now be refilled.
        """
        if self.pending.known and self.pending.rules.num_refills:
            raise ValueError(
                f"algo.max_refills is {self.pending.rules.num_refills}, but an earlier part of the run, with "
                f"rollout.partial_max_rounds above 1, left {len(self.pending.known)} pending prompts; set "
                "algo.max_refills to 0 until a checkpoint has none"
            )
        config, policy, device = checked.config, models.get(POLICY), self._world.device.torch_device
        roles = {slot.state: slot.role for slot in checked.slots if slot.state.uses_training_engine}
        meshes = {state: models[role].trainer.mesh for state, role in roles.items() if role is not None and models}
        row_groups = groups_of_training(meshes, device) | groups_of_generation(self._mesh, device)
        if judges is not None:
            row_groups |= groups_of_generation(judges, device, WorkerState.JUDGE)
        dock = TransferDock(
            self._world, checked.needs, config.dock,
            seed=config.seed, cost=row_cost_of(decoder), row_groups=row_groups,
            whole_groups=[WorkerState.UPDATE] if checked.algorithm.unit_size > 1 else [],
            shares_prompts=policy is not None and policy.trainer.shares_prompts, history=self.history,
            sets=sets, num_places=config.rollout.lag + 1,
        )  # fmt: skip
        self.dock = stack.enter_context(dock)

    def open(self, step: int, groups: StepGroups | None = None) -> Samples:
        """Open the batch of a step: pending groups, if any, then new prompts, in order; or that of a checkpoint."""
        faultpoint("data")
        groups = self.groups[step] = groups or self.pending.of_step(step)
        prompts = [self._prompts.at(serial) for serial in groups.serials]
        return self.dock.open_batch(step, prompts, self._group_size, groups.holders)

    def close(self, samples: Samples) -> Accounting | None:
        """Close the batch of a step, each of whose rows was trained, dropped with a reason or deferred. Collective.

        Ranks that only generate return None.
        """
        serials, accounting = self.groups.pop(samples.step).serials, self.dock.close_batch(samples)
        if accounting is None:
            return None
        self.account.open(samples.step, serials)
        return self.account.close(accounting)
