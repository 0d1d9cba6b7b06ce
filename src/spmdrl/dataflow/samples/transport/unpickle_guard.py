"""An allow-list in front of the unpickler of `torch.distributed.rpc`, the one place of the code that meets pickle.

RPC pickles callables by reference and runs whatever arrives. With the guard, messages may name only the dock's remote
functions, RPC's own start and stop messages, plain containers and tensors. It doesn't cover calls that RPC decodes in
C++ (built-in tensor operators by name), which is one reason why the transport listens on a loopback or private
interface only.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Callable, Iterable
from typing import IO, Any

from torch.distributed.rpc import api, internal

_OPCODES = frozenset(
    "PROTO FRAME STOP MARK MEMOIZE BINGET LONG_BINGET NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT "
    "SHORT_BINUNICODE BINUNICODE SHORT_BINBYTES BINBYTES EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND "
    "APPENDS EMPTY_DICT SETITEM SETITEMS EMPTY_SET ADDITEMS STACK_GLOBAL REDUCE NEWOBJ".split()
)

# RPC writes a tensor as a call of this method, and pickle writes a method as getattr(class, name).
_TENSOR_OWNER = "_InternalRPCPickler"
_TENSOR_METHOD = "_tensor_receiver"


def _tensor_receiver(owner: object, name: object) -> Callable[[int], Any]:
    """Replace `getattr`, with only what a tensor needs."""
    if owner != _TENSOR_OWNER or name != _TENSOR_METHOD:
        raise pickle.UnpicklingError(f"refused to look up {name!r}: only tensors may be received")
    return internal._InternalRPCPickler._tensor_receiver


def _rpc_globals() -> dict[tuple[str, str], Any]:
    """Return the names in RPC's own messages: calls, errors, and the joint start and stop."""
    objects: list[Any] = [
        internal.PythonUDF,
        internal.RemoteException,
        api._gather_to_leader,
        api._broadcast_to_followers,
    ]
    allowed: dict[tuple[str, str], Any] = {(entry.__module__, entry.__qualname__): entry for entry in objects}
    allowed["builtins", "getattr"] = _tensor_receiver
    allowed[internal.__name__, _TENSOR_OWNER] = _TENSOR_OWNER
    for error in (AssertionError, AttributeError, KeyError, RuntimeError, TypeError, ValueError):
        allowed["builtins", error.__name__] = error
    return allowed


class AllowListUnpickler(pickle.Unpickler):
    """Unpickler of plain data and listed names; raises UnpicklingError for anything else before it runs."""

    allowed: dict[tuple[str, str], Any] = {}

    def __init__(self, file: IO[bytes]):
        data = file.read()
        _check_opcodes(data)
        super().__init__(io.BytesIO(data))

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.allowed:
            raise pickle.UnpicklingError(f"refused a remote message that names {module}.{name}")
        return self.allowed[module, name]

    def persistent_load(self, reference: object) -> Any:
        raise pickle.UnpicklingError(f"refused a remote message with the outside reference {reference!r}")


def _check_opcodes(data: bytes) -> None:
    """Refuse instructions that plain calls don't need, such as BUILD, which sets an object's attributes."""
    try:
        unknown = next((code.name for code, _, _ in pickletools.genops(data) if code.name not in _OPCODES), None)
    except ValueError as broken:
        raise pickle.UnpicklingError(f"refused a remote message that is cut short or garbled: {broken}") from broken
    if unknown is not None:
        raise pickle.UnpicklingError(f"refused a remote message with the instruction {unknown}")


def install_guard(functions: Iterable[Callable[..., Any]]) -> None:
    """Make RPC in this process accept calls of these functions only; to be called before `init_rpc`."""
    allowed = _rpc_globals()
    allowed.update({(function.__module__, function.__qualname__): function for function in functions})
    AllowListUnpickler.allowed = allowed
    internal._unpickler = AllowListUnpickler  # type: ignore[assignment]
