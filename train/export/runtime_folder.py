"""An exported folder read back as one that our runtime decodes with, whatever engine it is for."""

from dataclasses import replace
from pathlib import Path

import torch

from specdec_runtime.drafter_files import read
from specdec_runtime.formats import is_drafter_folder, read_manifest, write_manifest
from specdec_runtime.gguf_folder import convert_gguf
from train.export import for_draftloop, for_llamacpp
from train.export.source import Source


def runtime_folder(folder: Path, source: Source, work: Path, *, engine: str) -> Path:
    """`folder` itself where the runtime reads it, else the same drafter written to `work`.

    Args:
        source: the drafter that was exported; its target and draft length are taken over.
        work: a folder that does not exist yet.
    """
    if engine == for_llamacpp.NAME:
        convert_gguf(folder / for_llamacpp.FILE, work, dtype=torch.float32)
        # The file's tokens were compared with the target's; which of the control tokens a
        # Hugging Face tokenizer calls special, it does not say.
        source.target.tokenizer.save_pretrained(work)
        write_manifest(work, read_manifest(folder))
        return work
    files = read(folder)
    ours = is_drafter_folder(folder) and engine == for_draftloop.NAME
    read_as_is = source.kind == "parallel" or (source.kind == "causal_lm" and not files.is_adapter)
    if ours or read_as_is:
        return folder
    work.mkdir()
    # An adapter as it was trained: merged without rounding.
    dtype = torch.float32 if files.is_adapter else None
    for_draftloop.write(replace(source, files=files, notes=[]), work, dtype=dtype)
    return work
