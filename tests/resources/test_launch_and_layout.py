import re

import pytest

from spmdrl.resources.layout import GenerationLayout, UpdateLayout, check_generation_layout, fit_update_layout
from spmdrl.resources.startup.launch import command_of, read_launch_environment

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
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


def test_the_open_shard_degree_takes_the_ranks_that_are_left():
    assert fit_update_layout(UpdateLayout(), 4) == UpdateLayout(1, 4)
    assert fit_update_layout(UpdateLayout(data=2), 4) == UpdateLayout(2, 2)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (UpdateLayout(data=3), "data 3 does not divide the job's 4 ranks; set it to one of \\[1, 2, 4\\]"),
        (UpdateLayout(data=2, shard=4), "data 2 x shard 4 = 8 ranks, but the job has 4"),
        (UpdateLayout(data=0), "resources.update.data is 0"),
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
