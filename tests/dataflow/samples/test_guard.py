from __future__ import annotations

import builtins
import os
import pickle
import subprocess
from pathlib import Path

import pytest
import torch
from torch.distributed.rpc import internal

from spmdrl.dataflow.samples.transport.several_nodes import remote_get, remote_put
from spmdrl.dataflow.samples.transport.unpickle_guard import AllowListUnpickler, install_guard


@pytest.fixture(autouse=True)
def guard():
    before = internal._unpickler, AllowListUnpickler.allowed
    install_guard([remote_put, remote_get])
    yield
    internal._unpickler, AllowListUnpickler.allowed = before


class Calls:
    """Pickles as a call of any function."""

    def __init__(self, function, *args):
        self.call = (function, args)

    def __repr__(self):
        function, args = self.call
        return f"{function.__name__}{args[1:] or args}"

    def __reduce__(self):
        return self.call


class Sets:
    """Pickles as an allowed function whose attributes are then set."""

    def __repr__(self):
        return "Sets"

    def __reduce__(self):
        return getattr, (internal._InternalRPCPickler, "_tensor_receiver"), (None, {"__defaults__": (1,)})


def chain(*names: str) -> Calls:
    found = internal._InternalRPCPickler
    for name in names:
        found = Calls(getattr, found, name)
    return found


@pytest.mark.parametrize(
    "gadget",
    [
        Calls(os.system, "touch {marker}"),
        Calls(subprocess.Popen, ["touch", "{marker}"]),
        Calls(builtins.eval, "open('{marker}', 'w')"),
        Calls(builtins.exec, "open('{marker}', 'w')"),
        Calls(builtins.open, "{marker}", "w"),
        Calls(torch.load, "{marker}"),
        Calls(internal._InternalRPCPickler._script_module_receiver, b""),
        chain("_tensor_receiver", "__globals__"),
        chain("__init__", "__globals__"),
        chain("__class__", "__base__", "__subclasses__"),
        Calls(getattr, Calls(__import__, "os"), "system"),
        Sets(),
        os.system,
        Path("x"),
    ],
    ids=repr,
)
def test_a_message_that_names_anything_else_is_refused_before_it_runs(gadget, tmp_path):
    marker = tmp_path / "ran"
    if isinstance(gadget, Calls):
        function, args = gadget.call
        args = tuple(arg.format(marker=marker) if isinstance(arg, str) else arg for arg in args)
        gadget = Calls(function, *args)
    message = pickle.dumps(internal.PythonUDF(gadget, (), {}))
    with pytest.raises(pickle.UnpicklingError, match="refused"):
        internal.deserialize(message, [])
    assert not marker.exists()


def test_what_the_dock_sends_goes_through():
    call = internal.PythonUDF(remote_get, (torch.arange(3), torch.tensor([1])), {})
    received = internal.deserialize(*internal.serialize(call))
    assert received.func is remote_get
    assert received.args[0].tolist() == [0, 1, 2]
    answer = ("KeyError", "row 3", [torch.ones(2)])
    kind, text, tensors = internal.deserialize(*internal.serialize(answer))
    assert (kind, text, tensors[0].tolist()) == ("KeyError", "row 3", [1.0, 1.0])


def test_a_garbled_message_is_refused():
    message = pickle.dumps(internal.PythonUDF(remote_get, (1, 2), {}))
    for cut in range(0, len(message), 7):
        with pytest.raises((pickle.UnpicklingError, EOFError)):
            internal.deserialize(message[:cut], [])


def test_a_persistent_reference_is_refused():
    with pytest.raises(pickle.UnpicklingError, match="PERSID"):
        internal.deserialize(b"Pos\n.", [])
