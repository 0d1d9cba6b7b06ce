"""Which device a rank gets, and what is said where there is none."""

from __future__ import annotations

import pytest
import torch

from spmdrl.resources.device import find_device


@pytest.mark.parametrize(
    ("built", "remedy"), [(None, "install the PyTorch build"), (torch.device("cuda"), "check the driver")]
)
def test_a_missing_device_is_refused_with_what_to_look_at(built, remedy, monkeypatch) -> None:
    """A build for the device needs a driver, not another build."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: built)
    with pytest.raises(ValueError, match=f"resources.device is 'cuda', but PyTorch finds 'cpu'.*{remedy}"):
        find_device("cuda", 0)
    assert find_device("auto", 0).is_cpu
