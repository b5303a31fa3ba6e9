"""Checkpoints that are complete or invisible, and the exact state of a training run.

    checkpoints/step-00000120/
        weights.safetensors     trainable parameters and buffers of the drafter, float32, plain names
        optimizer.safetensors   moments and step counts of every parameter, random states of every rank
        drafter/                the same drafter as a folder that the runtime loads
        checkpoint.json         the rest, and size and SHA-256 of every file above
    best -> checkpoints/step-...

A checkpoint is written under a temporary name, flushed to the disk and renamed; a folder without a
`checkpoint.json` that matches its files does not count. Nothing is pickled.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from train.parts import Parts, scatter_whole
from train.rng import RngState
from train.sharding import trained_weights

FORMAT_VERSION = 1
MANIFEST = "checkpoint.json"
WEIGHTS = "weights.safetensors"
OPTIMIZER = "optimizer.safetensors"


@dataclass(kw_only=True)
class TrainState:
    """Where a run stands; everything that is not a tensor."""

    max_steps: int
    step: int = 0  # optimizer steps done
    num_tokens: int = 0  # trained tokens so far, over all ranks
    seconds: float = 0.0  # spent in the loop, over all sessions of the run
    best_step: int | None = None
    best_score: float | None = None  # acceptance length of the best step
    first_score: float | None = None  # acceptance length before training
    num_worse: int = 0  # measurements since the best one
    ended_early: bool = False  # too many of them
    num_measurements: int = 0  # while training
    acceptance_s: float = 0.0  # spent on them
    acceptance_every: int = 1  # steps between measurements, chosen when the run started
    num_micro_batches: int | None = None  # where the stream ends, over all ranks
    round_cost: float | None = None  # of the runtime, in tokens of plain decoding, when it started
    scaler: dict[str, float] = field(default_factory=dict)  # of float16 losses
    processes: int = 1
    metric_sums: dict[str, list[float]] = field(default_factory=dict)  # of the log interval
    identity: dict[str, str] = field(default_factory=dict)  # fingerprints of target, data, drafter

    def is_best(self, score: float) -> bool:
        """Notes `score` of the current step; true if nothing before was better."""
        if self.first_score is None:
            self.first_score = score
        if self.best_score is not None and not score > self.best_score:
            self.num_worse += 1
            return False
        self.best_step, self.best_score, self.num_worse = self.step, score, 0
        return True


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on the disk."""

    folder: Path
    state: TrainState
    param_groups: list[dict[str, Any]]
    rng: list[dict[str, Any]]

    @property
    def drafter_folder(self) -> Path:
        return self.folder / "drafter"


class Checkpoints:
    """The checkpoints of one run. Only the main process writes; every process may read."""

    def __init__(self, run_dir: Path, *, keep_last: int) -> None:
        assert keep_last >= 1
        self.root = run_dir / "checkpoints"
        self._best_link = run_dir / "best"
        self._keep_last = keep_last

    def save(
        self,
        state: TrainState,
        *,
        weights: dict[str, Tensor],
        moments: dict[str, Tensor],
        param_groups: list[dict[str, Any]],
        rng: list[RngState],
        write_drafter: Callable[[Path], object],
    ) -> Path:
        """Writes one checkpoint, points `best` to the best one, removes what is no longer needed.

        Args:
            weights: whole tensors, of `trained_weights`.
            moments: whole tensors, of `Updates.moments`, and others to be continued with.
            rng: one state per rank.
            write_drafter: writes the drafter folder.

        Raises:
            OSError: if the disk is full, say; the checkpoints that were there stay.
        """
        final = self.root / folder_name(state.step)
        temporary = self.root / f".{final.name}.tmp-{os.getpid()}"
        self.root.mkdir(parents=True, exist_ok=True)
        self._remove_leftovers()
        temporary.mkdir()
        random_tensors = {
            f"rng.{rank}.{k}": v for rank, r in enumerate(rng) for k, v in r.tensors.items()
        }
        try:
            save_file(weights, temporary / WEIGHTS)
            save_file(moments | random_tensors, temporary / OPTIMIZER)
            write_drafter(temporary / "drafter")
        except SafetensorError as error:  # how safetensors reports a full disk
            raise OSError(f"checkpoint {final.name} could not be written: {error}") from error
        manifest = {
            "format_version": FORMAT_VERSION,
            "state": asdict(state),
            "param_groups": param_groups,
            "rng": [one.values for one in rng],
            "files": _file_list(temporary),
        }
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1))
        _sync_tree(temporary)
        _publish(temporary, final)
        self.point_best(state)
        self._rotate(state)
        return final

    def newest(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest complete checkpoint, and a sentence about every newer one that is not."""
        passed_over: list[str] = []
        for folder in sorted(self.root.glob("step-*"), reverse=True):
            try:
                return read_checkpoint(folder), passed_over
            except ValueError as error:
                passed_over.append(f"{error}; it is passed over")
        return None, passed_over

    def point_best(self, state: TrainState) -> None:
        """Makes `best` point to the checkpoint that `state` calls the best one."""
        if state.best_step is None:
            return
        link = self._best_link.with_name(".best.tmp")
        with contextlib.suppress(FileNotFoundError):
            link.unlink()
        link.symlink_to(Path(self.root.name) / folder_name(state.best_step))
        link.replace(self._best_link)

    def _rotate(self, state: TrainState) -> None:
        """Removes all but the last ones and the best; the newest is always among the last."""
        folders = sorted(self.root.glob("step-*"))
        kept = set(folders[-self._keep_last :])
        if state.best_step is not None:
            kept.add(self.root / folder_name(state.best_step))
        for folder in folders:
            if folder not in kept:
                _remove(folder)

    def _remove_leftovers(self) -> None:
        """Temporary folders of a process that was killed while saving."""
        for leftover in self.root.glob(".step-*"):
            shutil.rmtree(leftover)


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def read_checkpoint(folder: Path) -> Checkpoint:
    """Reads and checks one checkpoint's manifest and files.

    Raises:
        ValueError: if a file is missing, cut off or changed, or the format is another one.
    """
    folder = folder.resolve()
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(f"checkpoint {folder.name} is incomplete: it has no {MANIFEST}")
    try:
        manifest = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"checkpoint {folder.name} is damaged: {MANIFEST}: {error}") from error
    if manifest["format_version"] != FORMAT_VERSION:
        raise ValueError(
            f"checkpoint {folder.name} has format {manifest['format_version']}, expected "
            f"{FORMAT_VERSION}: continue it with the version of Draftloop that wrote it"
        )
    found = _file_list(folder)
    for name, expected in manifest["files"].items():
        if found.get(name) != expected:
            raise ValueError(f"checkpoint {folder.name} is damaged: {name} is missing or cut off")
    state = TrainState(**manifest["state"])
    return Checkpoint(folder, state, manifest["param_groups"], manifest["rng"])


def restore(checkpoint: Checkpoint, parts: Parts) -> RngState:
    """Loads weights and moments in place; returns the process's random state, to be set last.

    Raises:
        ValueError: if names or shapes differ from the drafter at hand.
    """
    restore_weights(checkpoint, parts.whole)
    scatter_whole(parts)
    tensors = load_file(checkpoint.folder / OPTIMIZER)
    parts.updates.load_moments(tensors, checkpoint.param_groups)
    rank = parts.accelerator.process_index
    prefix = f"rng.{rank}."
    random_tensors = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
    return RngState(checkpoint.rng[rank], random_tensors)


def restore_weights(checkpoint: Checkpoint, module: nn.Module) -> None:
    """Loads the weights in place.

    Raises:
        ValueError: if names or shapes differ from the drafter at hand.
    """
    weights = load_file(checkpoint.folder / WEIGHTS)
    own = trained_weights(module)
    if problem := _difference(weights, own):
        raise ValueError(f"checkpoint {checkpoint.folder.name} is of another drafter: {problem}")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(weights[name])


def _difference(saved: dict[str, Tensor], own: dict[str, Tensor]) -> str | None:
    if missing := sorted(own.keys() - saved.keys()):
        return f"it lacks {missing[0]}"
    if unexpected := sorted(saved.keys() - own.keys()):
        return f"it holds {unexpected[0]}, which is not trained here"
    for name, tensor in own.items():
        if tensor.shape != saved[name].shape:
            return f"{name} is {list(saved[name].shape)} there, {list(tensor.shape)} here"
    return None


def _file_list(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of every file but the manifest, by path below `folder`."""
    files = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name != MANIFEST:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            files[name] = {"bytes": path.stat().st_size, "sha256": digest}
    return files


def _sync_tree(folder: Path) -> None:
    for path in [folder, *folder.rglob("*")]:
        _sync(path)


def _sync(path: Path) -> None:
    """Flushes a file or a directory entry to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _publish(temporary: Path, final: Path) -> None:
    """Renames; a folder of that name left by an earlier, damaged save is moved away first."""
    if final.exists():
        _remove(final)
    temporary.rename(final)
    _sync(final.parent)


def _remove(folder: Path) -> None:
    """Hides a checkpoint by a rename before deleting it, so that a half-deleted one is never seen."""
    hidden = folder.with_name(f".{folder.name}.old-{os.getpid()}")
    folder.rename(hidden)
    shutil.rmtree(hidden)
