"""Readable numbers: durations, counts, bytes and small values."""

from __future__ import annotations

import math

BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def duration(seconds: float) -> str:
    """Return a length of time in its two largest units: 8.4s, 45s, 3m12s, 26m, 1h05m, 2d03h."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 600:
        return f"{whole // 60}m{whole % 60:02d}s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes}m"
    if minutes < 24 * 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    hours = round(seconds / 3600)
    return f"{hours // 24}d{hours % 24:02d}h"


def time_text(seconds: float) -> str:
    """Return a length of time, of less than a second in milliseconds."""
    return duration(seconds) if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def count(value: float) -> str:
    """Return a number of things in three digits: 812, 14.2k, 3.1M."""
    if not math.isfinite(value):
        return str(value)
    for scale, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * scale:
            scaled = value / scale
            return f"{scaled:.{0 if abs(scaled) >= 99.95 else 1}f}{unit}"
    return f"{value:.0f}"


def byte_unit(largest: float) -> tuple[float, str]:
    """Return the scale and name of the unit in which `largest` bytes has one to four digits before the point."""
    power = 0
    while abs(largest) >= 1024 and power < len(BYTE_UNITS) - 1:
        largest /= 1024
        power += 1
    return float(1024**power), BYTE_UNITS[power]


def bytes_text(num_bytes: float) -> str:
    """Return an amount of memory: 512 B, 1.5 MiB, 61 GiB."""
    scale, unit = byte_unit(num_bytes)
    scaled = num_bytes / scale
    return f"{scaled:.{0 if scaled >= 10 or unit == 'B' else 1}f} {unit}"


def fixed(value: float, decimals: int) -> str:
    """Return a value with this many decimals, or in scientific form where it is too small for them or huge."""
    if not math.isfinite(value):
        return str(value)
    hidden = value != 0 and abs(value) < 0.5 * 10**-decimals
    return scientific(value) if hidden or abs(value) >= 1e5 else f"{value:.{decimals}f}"


def scientific(value: float) -> str:
    """Format with two digits and the shortest exponent: 1.2e-3."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def percent(fraction: float) -> str:
    """Return a fraction as whole percent: 18%."""
    return f"{100 * fraction:.0f}%" if math.isfinite(fraction) else str(fraction)
