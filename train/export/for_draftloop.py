"""Draftloop's own folder, from a drafter that was trained elsewhere: our runtime then decodes with it."""

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from specdec_runtime.drafter_files import read, read_config
from specdec_runtime.eagle3_network import NOT_COMPUTED
from specdec_runtime.formats import (
    DRAFT_VOCAB_NAME,
    is_drafter_folder,
    read_manifest,
    write_manifest,
)
from train.export import rules
from train.export.eagle3_folder import (
    eagle3_config,
    eagle3_obstacle,
    eagle3_tensors,
    one_form,
    weights_dtype,
    write_eagle3,
)
from train.export.plain import draft_generation_config
from train.export.record import differences, served
from train.export.source import Source, TargetFacts

NAME = "draftloop"
KINDS = ("causal_lm", "eagle3")
EMBEDDINGS = "embed_tokens.weight"


def obstacle(source: Source) -> str | None:
    if source.kind in ("parallel", "cross_tokenizer"):
        return f"the runtime reads such folders as they are: load {source.kind}:FOLDER"
    if source.kind not in KINDS:
        return f"{source.kind} drafters have no weights of their own to write"
    if source.kind != "eagle3":
        return None
    config = source.files.config
    if unknown := [flag for flag in NOT_COMPUTED if config[flag]]:
        return f"it was trained with {', '.join(unknown)}, which our runtime does not compute"
    if config["fc_norm"] != config["norm_output"]:
        return "it has one of fc_norm and norm_output without the other"
    return eagle3_obstacle(source)


def write(source: Source, folder: Path, *, dtype: torch.dtype | None) -> None:
    if source.kind == "eagle3":
        dtype = weights_dtype(source, dtype)
        tensors = eagle3_tensors(source, dtype)
        if EMBEDDINGS not in tensors:  # engines share the target's
            tensors[EMBEDDINGS] = target_embeddings(source.target).to(dtype)
        vocabulary: dict[str, torch.Tensor] = {
            name: tensors.pop(name) for name in ("d2t", "t2d") if name in tensors
        }
        config = eagle3_config(source, dtype)
        write_eagle3(source, folder, engine=NAME, config=config, tensors=tensors)
    else:
        module = source.module(dtype)
        module.config.dtype = module.dtype
        module.generation_config = draft_generation_config(source)
        module.save_pretrained(folder)
        source.target.tokenizer.save_pretrained(folder)
        write_manifest(folder, served(source, NAME, read_config(folder)))
        vocabulary = _draft_vocabulary(source)
    if vocabulary:
        save_file(vocabulary, folder / DRAFT_VOCAB_NAME)


def check(folder: Path, target: TargetFacts) -> list[str]:
    if not is_drafter_folder(folder):
        return rules.recorded_target(folder, target)
    config = read_config(folder)
    if read_manifest(folder).kind == "eagle3":
        config = one_form(config, target)
    read(folder)
    stored = rules.stored_tensors(folder)
    return [
        *rules.no_pickles(folder),
        *rules.dtype_as_said(stored, config),
        *rules.rope_is_complete(config),
        *rules.same_tokenizer(folder, target),
        *rules.recorded_target(folder, target),
        *differences(folder, config),
    ]


def launch(folder: Path, target: TargetFacts, num_draft_tokens: int) -> str:
    return f'python -m specdec_runtime {folder} "Why is the sky blue?"'


def target_embeddings(target: TargetFacts) -> torch.Tensor:
    """[V, D] the target's token embeddings, as stored.

    Raises:
        ValueError: if its folder holds none under the usual name.
    """
    for path in sorted(target.folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a dict)
                if name.endswith(EMBEDDINGS):
                    return file.get_tensor(name)
    raise ValueError(f"{target.folder} holds no {EMBEDDINGS}, which the drafter shares")


def _draft_vocabulary(source: Source) -> dict[str, torch.Tensor]:
    token_ids = source.files.token_ids
    if token_ids is None:
        return {}
    t2d = torch.zeros(source.target.vocab_size, dtype=torch.bool)
    t2d[token_ids] = True
    return {"d2t": token_ids - torch.arange(len(token_ids)), "t2d": t2d}
