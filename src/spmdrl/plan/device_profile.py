"""Kinds of devices that runs are planned for: their memory, and the rates by which their work becomes time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from spmdrl.config.reader import ConfigError

_DEVICES = Path(__file__).with_name("devices.yaml")
GENERATION, SCORING, TRAINING = "generation", "scoring", "training"
NODE, CROSS_NODE, HOST, DOCK = "node", "cross_node", "host", "dock"


@dataclass(frozen=True)
class Rates:
    """Rates of a kind of work."""

    tflops: float
    """of matrix products and attention, 10^12 per second"""
    gib_per_second: float
    """of the device's memory"""
    launch_us: float
    """of each operator, on its host"""


@dataclass(frozen=True)
class LinkRate:
    """Rate of a kind of link, of each device; the dock's is each node's."""

    gib_per_second: float
    message_us: float = 0.0
    """of each message, and of each doubling of its ranks"""


@dataclass(frozen=True)
class DeviceProfile:
    """A kind of device."""

    name: str
    memory_gib: float
    """memory that programs see"""
    kernels: str
    """row of the table of operations whose kernels it runs: cuda, or cpu for the plain ones"""
    overlaps: bool = False
    """true if operators, launches and messages run side by side, so that a state takes the longest of the three"""
    rates: Mapping[str, Rates] | None = None
    """by kind of work: generation, scoring, training; None: times aren't planned"""
    links: Mapping[str, LinkRate] | None = None
    """node and cross_node between devices, host for the swap, dock for rows that cross nodes"""

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
        return DeviceProfile(path.stem, **_parsed(values))
    except (TypeError, AttributeError, KeyError, ValueError, OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{flag} {name}: {error}; {_DEVICES.name} of the package shows the form") from error


def require_rates(profile: DeviceProfile, flag: str) -> None:
    """Raise ConfigError if times, which a flag needs, can't be planned."""
    if profile.rates is None:
        raise ConfigError(
            f"{flag} needs times, but the device {profile.name} has no rates; name a device that has, or measure this "
            "machine's with --calibrate"
        )


def _parsed(values: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(values)
    if found.get("rates"):
        found["rates"] = {kind: Rates(**found["rates"][kind]) for kind in (GENERATION, SCORING, TRAINING)}
        found["links"] = {link: LinkRate(**found["links"][link]) for link in (NODE, CROSS_NODE, HOST, DOCK)}
    return found
