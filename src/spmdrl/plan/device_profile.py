"""Kinds of devices that runs are planned for: their memory, and the rates by which their work becomes time."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import yaml
from annotated_types import Interval
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from spmdrl.config.key_schema import adapter
from spmdrl.config.reader import ConfigError
from spmdrl.engines.models.kernels import ops

_DEVICES = Path(__file__).with_name("devices.yaml")
GENERATION, SCORING, TRAINING = "generation", "scoring", "training"
NODE, CROSS_NODE, HOST, DOCK = "node", "cross_node", "host", "dock"
_Positive: TypeAlias = Annotated[float, Interval(gt=0, lt=math.inf)]
_NotNegative: TypeAlias = Annotated[float, Interval(ge=0, lt=math.inf)]


@dataclass(frozen=True)
class Rates:
    """Rates of a kind of work."""

    tflops: _Positive
    """of matrix products and attention, 10^12 per second"""
    gib_per_second: _Positive
    """of the device's memory"""
    launch_us: _NotNegative
    """of each operator, on its host"""


@dataclass(frozen=True)
class LinkRate:
    """Rate of a kind of link, of each device; the dock's is each node's."""

    gib_per_second: _Positive
    message_us: _NotNegative = 0.0
    """of each message, and of each doubling of its ranks"""


@dataclass(frozen=True)
class DeviceProfile:
    """A kind of device."""

    name: str
    memory_gib: _Positive
    """memory that programs see"""
    kernels: str
    """row of the table of operations whose kernels it runs: cuda, or cpu for the plain ones"""
    overlaps: bool = False
    """true if operators, launches and messages run side by side, so that a state takes the longest of the three"""
    rates: Mapping[str, Rates] | None = None
    """by kind of work: generation, scoring, training; None: times aren't planned"""
    links: Mapping[str, LinkRate] | None = None
    """node and cross_node between devices, host for the swap, dock for rows that cross nodes; there with `rates`"""

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * 2**30)

    def write(self, file: Path, head: str) -> None:
        """Write what `read_profile` reads, below a comment."""
        values = asdict(self)
        del values["name"]
        file.write_text(f"# {head}\n" + yaml.safe_dump(values, sort_keys=False))


def read_profile(name: str, flag: str = "--device") -> DeviceProfile:
    """Return the profile of a known device, or of a YAML file. Raises ConfigError, which names the `flag`."""
    path = Path(name)
    profiles = yaml.safe_load(_DEVICES.read_text())
    if name not in profiles and not path.is_file():
        raise ConfigError(f"{flag} is {name!r}, but must be one of {', '.join(profiles)}, or a YAML file")
    try:
        values = profiles[name] if name in profiles else yaml.safe_load(path.read_text())
        return _checked({**values, "name": path.stem})
    except ValidationError as error:
        problem = ", ".join(map(_problem, error.errors()))
    except (TypeError, KeyError, ValueError, OSError, yaml.YAMLError) as error:
        problem = f"it has no {error}" if isinstance(error, KeyError) else str(error)
    raise ConfigError(f"{flag} {name}: {problem}; {_DEVICES.name} of the package shows the form")


def _problem(error: ErrorDetails) -> str:
    key = ".".join(map(str, error["loc"][1:]))
    absent = {"missing": f"it has no {key}", "unexpected_keyword_argument": f"there is no {key}"}
    return absent.get(error["type"]) or f"{key} is {error['input']!r}: {error['msg']}"


def require_rates(profile: DeviceProfile, flag: str) -> None:
    """Raise ConfigError if times, which a flag needs, can't be planned."""
    if profile.rates is None:
        raise ConfigError(
            f"{flag} needs times, but the device {profile.name} has no rates; name a device that has, or measure this "
            "machine's with --calibrate"
        )


def _checked(values: Mapping[str, Any]) -> DeviceProfile:
    """Return the profile. Raises ValidationError, or KeyError if kinds of work or links are missing."""
    found: DeviceProfile
    (found,) = adapter(DeviceProfile).validate_json(json.dumps([values]), strict=True)
    # Operators of NPUs have no rules of shapes here.
    kinds = {kind for row in ops.TABLE.values() for kind in row} - {"npu"}
    if found.kernels not in kinds:
        raise ValueError(f"kernels is {found.kernels!r}, but must be one of {', '.join(sorted(kinds))}")
    if found.rates is not None:
        links = found.links or {}
        _ = [found.rates[kind] for kind in (GENERATION, SCORING, TRAINING)]
        _ = [links[link] for link in (NODE, CROSS_NODE, HOST, DOCK)]
    return found
