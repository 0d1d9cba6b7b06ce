import re

import pytest

from spmdrl.resources.layout import GenerationLayout, UpdateLayout, check_generation_layout, fit_update_layout
from spmdrl.runtime.launch import command_of, is_msruns_scheduler, read_launch_environment, without_launcher

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}

# Of task 5, as Slurm 22.05 sets them in `srun --nodes=2 --ntasks-per-node=4`.
SRUN = {
    "SLURM_JOB_ID": "123457",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gpu[008-009]",
}
# Of worker 5, as msrun 2.10 sets them with --worker_num=8 --local_worker_num=4 --node_rank=1.
MSRUN = {
    "MS_ROLE": "MS_WORKER",
    "MS_WORKER_NUM": "8",
    "MS_NODE_ID": "5",
    "RANK_ID": "5",
    "RANK_SIZE": "8",
    "DEVICE_ID": "1",
    "MS_SCHED_HOST": "10.0.0.1",
    "MS_SCHED_PORT": "8118",
    "LOCAL_WORLD_SIZE": "4",
}


def test_plain_python_is_a_job_of_one_rank():
    launch = read_launch_environment({"HOME": "/root"})
    assert (launch.rank, launch.world_size, launch.source) == (0, 1, "python")


def test_torchruns_variables_give_rank_and_node():
    launch = read_launch_environment(TORCHRUN)
    assert (launch.rank, launch.node_rank, launch.num_nodes, launch.local_rank) == (5, 1, 2, 1)
    assert [launch.node_of(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert launch.first_rank_of(1) == 4


@pytest.mark.parametrize(
    ("variables", "address", "source"),
    [(TORCHRUN, "10.0.0.1:29500", "torchrun"), (SRUN, "gpu008:23457", "srun"), (MSRUN, "10.0.0.1:8119", "msrun")],
)
def test_every_launcher_gives_the_same_place_in_a_job(variables, address, source):
    launch = read_launch_environment(variables)
    assert (launch.rank, launch.world_size, launch.local_rank, launch.local_world_size) == (5, 8, 1, 4)
    assert without_launcher({**variables, "HOME": "/root"}) == {"HOME": "/root"}
    assert (launch.node_rank, launch.num_nodes, launch.source) == (1, 2, source)
    assert f"{launch.master_addr}:{launch.master_port}" == address


@pytest.mark.parametrize(
    ("variables", "index"),
    [
        ({}, 1),
        ({"SLURM_GPUS_PER_TASK": "1", "CUDA_VISIBLE_DEVICES": "0"}, 0),
        ({"SLURM_GPUS_PER_TASK": "h100:1"}, 0),
        ({"SLURM_GPUS_PER_TASK": "2", "CUDA_VISIBLE_DEVICES": "0,1"}, 1),
        ({"SLURM_GPUS_PER_TASK": "1", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 1),  # --gpu-bind=none
    ],
)
def test_a_task_of_srun_that_sees_its_own_device_only_takes_that(variables, index):
    assert read_launch_environment({**SRUN, **variables}).device_index == index


def test_torchruns_variables_win_over_those_of_what_it_runs_under():
    assert read_launch_environment({**SRUN, **MSRUN, **TORCHRUN}) == read_launch_environment(TORCHRUN)
    assert read_launch_environment({**SRUN, **MSRUN}) == read_launch_environment(MSRUN)
    assert not is_msruns_scheduler({**TORCHRUN, "MS_ROLE": "MS_SCHED"})


def test_a_batch_script_is_no_task_of_a_step():
    batch = {name: value for name, value in SRUN.items() if "STEP" not in name}
    assert read_launch_environment(batch).source == "python"


@pytest.mark.parametrize(
    ("node_list", "first"),
    [
        ("n1", "n1"),
        ("n[1-2]", "n1"),
        ("a-b[007,009-012]", "a-b007"),
        ("rack[2-3]gpu[04,07],login", "rack2gpu04"),
        ("login,n[1-2]", "login"),
    ],
)
def test_rank_0_is_on_the_first_host_of_slurms_list(node_list, first):
    assert read_launch_environment({**SRUN, "SLURM_STEP_NODELIST": node_list}).master_addr == first


def test_the_users_master_wins_over_the_one_derived_from_the_step():
    launch = read_launch_environment({**SRUN, "MASTER_ADDR": "10.1.0.8", "MASTER_PORT": "4000"})
    assert (launch.master_addr, launch.master_port) == ("10.1.0.8", 4000)


def test_workers_of_an_msrun_on_loopback_are_on_one_node():
    alone = {name: value for name, value in MSRUN.items() if name != "LOCAL_WORLD_SIZE"}
    launch = read_launch_environment({**alone, "MS_SCHED_HOST": "127.0.0.1", "DEVICE_ID": "5"})
    assert (launch.local_rank, launch.local_world_size, launch.num_nodes) == (5, 8, 1)


def without(name: str, variables: dict[str, str]) -> dict[str, str]:
    return {other: value for other, value in variables.items() if other != name}


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "5,3"}, "SLURM_STEP_TASKS_PER_NODE=5,3, but every.*--ntasks-per-node=N"),
        ({**SRUN, "SLURM_PROCID": "3"}, "SLURM_PROCID=3 and SLURM_LOCALID=1 .*consecutive; use --distribution=block"),
        ({**SRUN, "SLURM_PROCID": "8"}, r"SLURM_PROCID=8, which is not in 0\.\.7"),
        ({**SRUN, "MASTER_PORT": "70000"}, "MASTER_PORT is 70000, but a port is at most 65535"),
        (without("SLURM_LOCALID", SRUN), "not SLURM_LOCALID; start the ranks with srun, or unset SLURM_STEP_ID"),
        (without("MS_NODE_ID", MSRUN), "not MS_NODE_ID; start the ranks with msrun, on several nodes with --node_rank"),
        (without("LOCAL_WORLD_SIZE", MSRUN), "MS_SCHED_HOST=10.0.0.1, .*export LOCAL_WORLD_SIZE=N before msrun"),
        ({**MSRUN, "LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE=3 doesn't divide msrun's RANK_SIZE=8"),
        ({**MSRUN, "DEVICE_ID": "0"}, "RANK_ID=5 and DEVICE_ID=0 with LOCAL_WORLD_SIZE=4, but the ranks"),
        ({**MSRUN, "MS_SCHED_PORT": "65535"}, "MS_SCHED_PORT is 65535, but a port is at most 65534"),
    ],
)
def test_what_srun_or_msrun_set_amiss_is_named_with_the_way_out(variables, message):
    with pytest.raises(ValueError, match=message):
        read_launch_environment(variables)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "eight"}, "RANK='eight', which is not a whole number"),
        ({"RANK": "8"}, "RANK=8, which is not in 0..7"),
        ({"WORLD_SIZE": "6"}, "WORLD_SIZE=6 is not a multiple of LOCAL_WORLD_SIZE=4"),
    ],
)
def test_a_broken_environment_is_refused_with_the_numbers(change, message):
    with pytest.raises(ValueError, match=message):
        read_launch_environment({**TORCHRUN, **change})


def test_a_half_set_environment_names_what_is_missing():
    with pytest.raises(ValueError, match="but not LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT"):
        read_launch_environment({"RANK": "0", "WORLD_SIZE": "2"})


def test_an_open_degree_takes_the_ranks_that_are_left():
    assert fit_update_layout(UpdateLayout(), 4) == UpdateLayout(1, 4)
    assert fit_update_layout(UpdateLayout(data=2), 4) == UpdateLayout(2, 2)
    assert fit_update_layout(UpdateLayout(data=0, shard=1), 4) == UpdateLayout(4, 1)
    assert fit_update_layout(UpdateLayout(data=0, shard=2), 8) == UpdateLayout(4, 2)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (UpdateLayout(data=3), "data 3 does not divide the job's 4 ranks; set it to one of \\[1, 2, 4\\]"),
        (UpdateLayout(data=2, shard=4), "data 2 x shard 4 = 8 ranks, but the job has 4"),
        (UpdateLayout(data=0), "resources.update.data and resources.update.shard are both 0, .*shard to 1 to repl"),
        (UpdateLayout(data=0, shard=3), "shard 3 does not divide the job's 4 ranks; set it to one of"),
        (UpdateLayout(data=-1), "resources.update.data is -1"),
        (UpdateLayout(shard=-1), "resources.update.shard is -1"),
    ],
)
def test_an_impossible_update_layout_is_refused_with_a_way_out(layout, message):
    with pytest.raises(ValueError, match=message):
        fit_update_layout(layout, 4)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (GenerationLayout(3), "tensor 3 does not divide the job's 8 ranks; set it to one of .1, 2, 4, 8."),
        (GenerationLayout(4, expert=2), "expert 2 must be a multiple of tensor 4.*set it to one of .1, 4, 8."),
        (GenerationLayout(expert=3), "expert 3 must be a multiple of tensor 1 that divides the job's 8 ranks"),
        (GenerationLayout(2, tensor_stride=3), "tensor_stride 3 x tensor 2 = 6 does not divide the job's 8 ranks"),
        (GenerationLayout(0), "resources.generation.tensor is 0"),
    ],
)
def test_an_impossible_generation_layout_is_refused_with_a_way_out(layout, message):
    check_generation_layout(GenerationLayout(2, expert=4), 8)
    with pytest.raises(ValueError, match=message):
        check_generation_layout(layout, 8)


@pytest.mark.parametrize(
    ("layout", "replicas", "expert_places"),
    [
        (GenerationLayout(2), [(0, 1), (2, 3), (4, 5), (6, 7)], [0] * 8),
        (GenerationLayout(2, expert=4), [(0, 1), (2, 3), (4, 5), (6, 7)], [0, 1, 2, 3, 0, 1, 2, 3]),
        (GenerationLayout(2, expert=2, tensor_stride=2), [(0, 2), (1, 3), (4, 6), (5, 7)], [0, 0, 1, 1, 0, 0, 1, 1]),
        (GenerationLayout(expert=8), [(rank,) for rank in range(8)], list(range(8))),
    ],
)
def test_generation_ranks_have_their_places(layout, replicas, expert_places):
    ranks = sorted(range(8), key=layout.place)
    assert [tuple(ranks[i : i + layout.tensor]) for i in range(0, 8, layout.tensor)] == replicas
    assert [layout.place(rank)[1] for rank in replicas[1]] == list(range(layout.tensor))
    assert [layout.expert_place(rank) for rank in range(8)] == expert_places


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (UpdateLayout(tensor=3), "resources.update.tensor 3 does not divide the job's 8 ranks"),
        (UpdateLayout(pipeline=2, tensor=3), "pipeline 2 x tensor 3 = 6 does not divide the job's 8 ranks"),
        (UpdateLayout(shard=2, tensor=2, context=4), "shard 2 x context 4 x tensor 2 = 16 ranks, but the job has 8"),
        (UpdateLayout(data=2, expert=3), "resources.update.expert 3 must divide shard 4 x context 1 = 4"),
        (UpdateLayout(data=4, shard=2, expert=0), "resources.update.expert is 0, but a degree counts ranks"),
    ],
)
def test_a_layout_that_cannot_be_had_is_refused_with_the_numbers(layout, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        fit_update_layout(layout, 8)


def test_what_the_other_axes_leave_goes_to_the_shards():
    fitted = fit_update_layout(UpdateLayout(pipeline=2, tensor=2, expert=4), 16)
    assert (fitted.shard, fitted.expert_shard) == (4, 1)
    assert fit_update_layout(UpdateLayout(data=2, context=2, expert=2), 8).expert_shard == 2
    assert str(fitted) == "pipeline 2 x shard 4 x tensor 2 x expert 4 x 1f1b"


def test_a_suggested_command_runs_whether_the_environment_is_activated_or_not(monkeypatch, tmp_path):
    own = tmp_path / ".venv" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.executable", str(own))
    monkeypatch.setenv("PATH", "/nowhere")
    assert command_of("generate", "model.path=runs/a") == ".venv/bin/python -m spmdrl generate model.path=runs/a"
    monkeypatch.setenv("PATH", str(own.parent))
    assert command_of("check") == "python -m spmdrl check"
