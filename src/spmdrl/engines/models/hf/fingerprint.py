"""Identity of the model in a local folder: its architecture key by key, and digests of its weights and tokenizer.

Cheap for models of any size: only headers and a sample of the values of large weights are read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.hf.model_folder import read_config
from spmdrl.engines.models.hf.tensor_files import weight_files_of
from spmdrl.engines.models.tokenizer import TOKENIZER_FILES

_BLOCK_BYTES = 4096
_NUM_BLOCKS = 512
_LEAST_BLOCKS_OF_A_FILE = 4
# safetensors' own limit; a longer header is damage.
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class ModelFingerprint:
    """Comparable facts of a model; equal for copies of one folder, wherever they are."""

    architecture: dict[str, Any]
    """The decoder's config as plain JSON values, nested ones under dotted keys: hidden_size, moe.num_experts."""
    weights: str
    """SHA-256 over names, sizes and headers of the files (their weights' places) and a sample of the values."""
    tokenizer: str
    """SHA-256 over the tokenizer's files, with the chat template and generation_config.json."""


def fingerprint(folder: str | Path) -> ModelFingerprint:
    """Read a local model folder. Raises ValueError if config.json or the weights can't be used.

    Reads at most some megabytes of a large model, and all of a small one's weights. Models that differ in a few values
    only may have equal fingerprints.
    """
    folder = Path(folder)
    return ModelFingerprint(architecture(read_config(folder)), _weights_digest(folder), _tokenizer_digest(folder))


def architecture(config: DecoderConfig) -> dict[str, Any]:
    """Return the decoder's config as flat, plain JSON values, equal to its own copy from a JSON file.

    Absent parts (no sparse layers, no rope scaling) are None under their own key.
    """
    # Adapters are in no file of the model.
    return {key: value for key, value in _flatten(asdict(config), "") if not key.startswith("lora")}


def architecture_differences(found: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Describe each differing key, as `hidden_size is 64, not 128`; empty for the same architecture."""
    keys = [*expected, *(key for key in found if key not in expected)]
    return [
        f"{key} is {found.get(key)!r}, not {expected.get(key)!r}" for key in keys if found.get(key) != expected.get(key)
    ]


def _flatten(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", list(value) if isinstance(value, tuple) else value


def _weights_digest(folder: Path) -> str:
    paths = weight_files_of(folder)
    num_blocks = max(_LEAST_BLOCKS_OF_A_FILE, _NUM_BLOCKS // len(paths))
    digest = hashlib.sha256()
    for path in paths:
        try:
            with path.open("rb") as file:
                size = path.stat().st_size
                digest.update(f"{path.name}:{size}:".encode())
                for piece in _header_and_sample(file, size, num_blocks):
                    digest.update(piece)
        except OSError as error:
            raise ValueError(f"{path} can't be read: {error.strerror}; fetch it again") from error
    return digest.hexdigest()


def _header_and_sample(file: BinaryIO, size: int, num_blocks: int) -> Iterator[bytes]:
    """Yield the header, then blocks spread evenly over the values, including the first and the last."""
    length = file.read(8)
    header_bytes = int.from_bytes(length, "little")
    if len(length) < 8 or header_bytes > min(size - 8, _MAX_HEADER_BYTES):
        raise ValueError(f"{file.name} is not a whole safetensors file: its header is cut off; fetch it again")
    yield length + file.read(header_bytes)
    start, last = 8 + header_bytes, max(8 + header_bytes, size - _BLOCK_BYTES)
    if size - start <= num_blocks * _BLOCK_BYTES:
        yield file.read()
        return
    for number in range(num_blocks):
        file.seek(start + (last - start) * number // (num_blocks - 1))
        yield file.read(_BLOCK_BYTES)


def _tokenizer_digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            content = (folder / name).read_bytes()
            digest.update(f"{name}:{len(content)}:".encode() + content)
    return digest.hexdigest()
