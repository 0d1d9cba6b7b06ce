"""Each rule of a stored form reads every slice, and writes the bytes that it reads."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from spmdrl.engines.models.hf.model_weights import WeightFiles, write_weights
from spmdrl.engines.models.hf.stored_forms import StoredForm, StoredForms
from spmdrl.nouns.batch import WeightSlice, whole_slice

LAYER = "model.layers.3."
RULES = {
    "renamed": StoredForm("old.weight", {"new.weight": 1}),
    "transposed": StoredForm("down", {"down_proj": 1}, transposed=True),
    "one by one": StoredForm("experts.*.w1.weight", {"experts.gate_proj": 1}),
    "one by one and transposed": StoredForm("experts.*.w1.weight", {"experts.gate_proj": 1}, transposed=True),
    "fused": StoredForm("qkv.weight", {"q.weight": 4, "k.weight": 4, "v.weight": 6}),
    "fused within experts": StoredForm("gate_up", {"gate": 5, "up": 5}, dim=1),
    "interleaved": StoredForm("gate_up_bias", {"gate_bias": 1, "up_bias": 1}, dim=1),
    "interleaved and transposed": StoredForm("gate_up", {"gate": 1, "up": 1}, dim=1, transposed=True),
    "interleaved by heads": StoredForm("qkvz.weight", {"q": 2, "k": 2, "v": 6, "z": 6}),
}
SHAPES = {
    "renamed": {"new.weight": (7,)},
    "transposed": {"down_proj": (3, 4, 5)},
    "one by one": {"experts.gate_proj": (3, 4, 5)},
    "one by one and transposed": {"experts.gate_proj": (3, 4, 5)},
    "fused": {"q.weight": (4, 1, 3), "k.weight": (4, 1, 3), "v.weight": (6, 1, 3)},
    "fused within experts": {"gate": (3, 5, 4), "up": (3, 5, 4)},
    "interleaved": {"gate_bias": (3, 5), "up_bias": (3, 5)},
    "interleaved and transposed": {"gate": (3, 5, 4), "up": (3, 5, 4)},
    "interleaved by heads": {"q": (6, 5), "k": (6, 5), "v": (18, 5), "z": (18, 5)},
}


def weights_of(kind: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {LAYER + name: torch.randn(shape, generator=generator) for name, shape in SHAPES[kind].items()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, WeightFiles]:
    found = {}
    for kind, rule in RULES.items():
        folder, forms = tmp_path_factory.mktemp("form"), StoredForms((rule,))
        write_weights(folder, weights_of(kind).items(), forms=forms)
        found[kind] = WeightFiles(folder, forms)
    return found


@pytest.mark.parametrize("kind", RULES)
def test_what_a_rule_writes_it_reads_to_the_bit(kind: str, folders: dict[str, WeightFiles]) -> None:
    files, weights = folders[kind], weights_of(kind)
    assert files.names == sorted(weights)
    for name, weight in weights.items():
        assert files.shape(name) == tuple(weight.shape) and files.dtype(name) == "F32"
        assert torch.equal(files.read(whole_slice(name, weight.shape)), weight)


@pytest.mark.parametrize("kind", RULES)
def test_what_a_rule_reads_it_writes_to_the_bit(kind: str, folders: dict[str, WeightFiles]) -> None:
    files = folders[kind]
    read = ((name, files.read(whole_slice(name, files.shape(name)))) for name in files.names)
    written = {name: tensor.clone() for name, tensor in files.as_stored(read)}
    stored = load_file(files.folder / "model.safetensors")
    assert written.keys() == stored.keys()
    assert all(torch.equal(tensor, stored[name]) and tensor.is_contiguous() for name, tensor in written.items())


@pytest.mark.parametrize("kind", RULES)
@given(data=st.data())
def test_any_slice_of_any_part_can_be_read(kind: str, data: st.DataObject, folders: dict[str, WeightFiles]) -> None:
    name, weight = data.draw(st.sampled_from(sorted(weights_of(kind).items(), key=lambda item: item[0])))
    bounds = [sorted(data.draw(st.tuples(*[st.integers(0, size)] * 2))) for size in weight.shape]
    wanted = WeightSlice(name, tuple(start for start, _ in bounds), tuple(stop for _, stop in bounds))
    read = folders[kind].read(wanted)
    assert read.shape == wanted.shape and torch.equal(read, weight[tuple(slice(*pair) for pair in bounds)])


def test_the_tensors_of_each_rule_are_what_the_models_compute_with(folders: dict[str, WeightFiles]) -> None:
    def stored(kind: str) -> Tensor:
        (tensor,) = load_file(folders[kind].folder / "model.safetensors").values()
        return tensor

    def parts(kind: str) -> list[Tensor]:
        return list(weights_of(kind).values())

    assert torch.equal(stored("transposed"), parts("transposed")[0].mT)
    assert torch.equal(stored("fused"), torch.cat(parts("fused")))
    assert torch.equal(stored("fused within experts"), torch.cat(parts("fused within experts"), 1))
    gate_up = stored("interleaved and transposed")
    assert torch.equal(gate_up[..., ::2].mT, parts("interleaved and transposed")[0])
    assert torch.equal(gate_up[..., 1::2].mT, parts("interleaved and transposed")[1])
    q, k, v, z = stored("interleaved by heads").view(3, 16, 5).split([2, 2, 6, 6], 1)
    for mine, theirs in zip(parts("interleaved by heads"), (q, k, v, z), strict=True):
        assert torch.equal(mine, theirs.flatten(0, 1))


def test_a_slice_within_one_run_reads_nothing_beside_it() -> None:
    rule = RULES["fused"]
    wanted = WeightSlice(f"{LAYER}k.weight", (1, 0, 0), (3, 1, 3))
    assert rule.boxes(wanted) == [WeightSlice(f"{LAYER}qkv.weight", (5, 0, 0), (7, 1, 3))]
    by_heads = RULES["interleaved by heads"]
    assert by_heads.boxes(WeightSlice(f"{LAYER}v", (6, 0), (12, 5))) == [
        WeightSlice(f"{LAYER}qkvz.weight", (20, 0), (26, 5))
    ]


def test_parts_may_share_a_buffer_and_only_one_fused_tensor_is_held() -> None:
    forms, buffer, held = StoredForms((RULES["fused within experts"],)), torch.empty(3, 5, 4), []

    def weights() -> Iterator[tuple[str, Tensor]]:
        for layer in range(3):
            assert not any(tensor() is not None for tensor in held)
            yield f"model.layers.{layer}.gate", buffer.fill_(2 * layer)
            yield f"model.layers.{layer}.up", buffer.fill_(2 * layer + 1)

    for name, tensor in forms.write(weights()):
        layer = len(held)
        assert name == f"model.layers.{layer}.gate_up"
        assert tensor.unique(sorted=True).tolist() == [2 * layer, 2 * layer + 1]
        held.append(weakref.ref(tensor))
        del tensor
    assert len(held) == 3


def test_a_fused_tensor_without_one_of_its_parts_is_not_written() -> None:
    forms = StoredForms((RULES["fused"],))
    parts = [item for item in weights_of("fused").items() if not item[0].endswith("k.weight")]
    with pytest.raises(ValueError, match=r"model.layers.3.qkv.weight can't be written without k.weight; give all"):
        list(forms.write(parts))


@pytest.mark.parametrize("shape", [(15, 2), ()])
def test_a_fused_tensor_of_another_size_is_named(shape: tuple[int, ...], tmp_path: Path) -> None:
    save_file({f"{LAYER}qkv.weight": torch.ones(shape)}, tmp_path / "model.safetensors")
    files = WeightFiles(tmp_path, StoredForms((RULES["fused"],)))
    with pytest.raises(ValueError, match="qkv.weight has shape .* but dim 0 must be a multiple of 14 to hold q.weight"):
        files.shape(f"{LAYER}k.weight")


MULTIMODAL = StoredForms(
    (RULES["fused"],),
    {"model.language_model.": "model.", "language_model.lm_head.": "lm_head."},
    ("model.visual.", "mtp."),
)


def test_a_multimodal_folder_is_read_without_its_prefix_and_its_other_parts(tmp_path: Path) -> None:
    tensors = {
        "model.language_model.norm.weight": torch.randn(3),
        "model.language_model.layers.3.qkv.weight": torch.cat(list(weights_of("fused").values())),
        "language_model.lm_head.weight": torch.randn(5, 3),
        "model.visual.merger.weight": torch.ones(2),
        "mtp.layers.0.qkv.weight": torch.ones(4),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    files = WeightFiles(tmp_path, MULTIMODAL)
    expected = weights_of("fused") | {
        "model.norm.weight": tensors["model.language_model.norm.weight"],
        "lm_head.weight": tensors["language_model.lm_head.weight"],
    }
    assert files.names == sorted(expected) and files.left_out == {"model.visual.": 1, "mtp.": 1}
    read = {name: files.read(whole_slice(name, weight.shape)) for name, weight in expected.items()}
    assert all(torch.equal(read[name], weight) for name, weight in expected.items())
    assert dict(files.as_stored(read.items())).keys() == {name for name in tensors if "language_model" in name}
    assert dict(MULTIMODAL.write(read.items())).keys() == {"model.norm.weight", "lm_head.weight", f"{LAYER}qkv.weight"}


def test_a_weight_that_is_there_with_and_without_prefix_is_refused(tmp_path: Path) -> None:
    save_file(
        {"model.norm.weight": torch.ones(3), "model.language_model.norm.weight": torch.ones(3)},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(ValueError, match="holds model.norm.weight both as model"):
        WeightFiles(tmp_path, MULTIMODAL)


def test_any_form_of_a_weight_is_read_and_the_first_is_written(tmp_path: Path) -> None:
    one_by_one = StoredForm("experts.*.gate.weight", {"gate": 1})
    forms = StoredForms((one_by_one, StoredForm("experts.*.up.weight", {"up": 1}), RULES["fused within experts"]))
    weights = weights_of("fused within experts")
    assert f"{LAYER}experts.2.up.weight" in dict(forms.write(weights.items()))
    write_weights(tmp_path, weights.items(), forms=StoredForms((RULES["fused within experts"],)))
    files = WeightFiles(tmp_path, forms)
    assert all(torch.equal(files.read(whole_slice(name, weight.shape)), weight) for name, weight in weights.items())
    assert [name for name, _ in files.as_stored(weights.items())] == [f"{LAYER}gate_up"]


def test_a_weight_that_is_there_in_two_forms_is_refused(tmp_path: Path) -> None:
    forms = StoredForms((StoredForm("experts.*.gate.weight", {"gate": 1}), RULES["fused within experts"]))
    one = f"{LAYER}experts.0.gate.weight"
    save_file({f"{LAYER}gate_up": torch.ones(1, 10, 4), one: torch.ones(5, 4)}, tmp_path / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"holds model.layers.3.gate both as .*experts.\*.gate.weight and in .*gate_up"
    ):
        WeightFiles(tmp_path, forms)
