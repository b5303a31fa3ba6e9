"""A fingerprint of a model folder: configuration and weights, read in milliseconds.

Weights are sampled, not read: every tensor's name, dtype and shape, and a few blocks of its bytes.
Fine-tuning moves practically every weight, so the blocks differ between any two trained models.
"""

import hashlib
import json
from pathlib import Path

_BLOCK_BYTES = 256
_NUM_BLOCKS = 4  # spread over the tensor, first and last bytes included
# Configuration keys that change without the model changing.
_VOLATILE = ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache")


def folder_fingerprint(folder: Path) -> str:
    """Hex digest of the model in `folder`; independent of how its weights are sharded.

    Raises:
        ValueError: if there are no weights in it.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = {key: value for key, value in config.items() if key not in _VOLATILE}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    samples: dict[str, bytes] = {}
    for path in folder.glob("*.safetensors"):
        samples |= _tensor_samples(path)
    if not samples:
        for path in sorted((*folder.glob("*.gguf"), *folder.glob("*.bin"))):
            samples[path.name] = _sampled(path, 0, path.stat().st_size)
    if not samples:
        raise ValueError(
            f"{folder} holds no weights: expected .safetensors files beside config.json"
        )
    for name in sorted(samples):
        digest.update(name.encode() + samples[name])
    return digest.hexdigest()


def _tensor_samples(path: Path) -> dict[str, bytes]:
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
    start = 8 + header_bytes
    samples = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        first, end = entry["data_offsets"]
        kind = f"{entry['dtype']}{entry['shape']}".encode()
        samples[name] = kind + _sampled(path, start + first, start + end)
    return samples


def _sampled(path: Path, first: int, end: int) -> bytes:
    """The size and some blocks of bytes [first, end) of a file."""
    span = max(0, end - first - _BLOCK_BYTES)
    with path.open("rb") as file:
        blocks = [(end - first).to_bytes(8, "little")]
        for i in range(_NUM_BLOCKS):
            file.seek(first + span * i // (_NUM_BLOCKS - 1))
            blocks.append(file.read(min(_BLOCK_BYTES, end - first)))
    return b"".join(blocks)
