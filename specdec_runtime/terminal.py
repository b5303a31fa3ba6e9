"""Running a command line of `python -m specdec_runtime`: load, stream in colour, sum up."""

import argparse
import os
import sys
from typing import Any, TextIO

import torch
from transformers.utils import logging as transformers_logging

from specdec_runtime.chat import encode_chat
from specdec_runtime.decode import SpeculativeDecoder
from specdec_runtime.draft import Drafter
from specdec_runtime.formats import DrafterManifest, is_drafter_folder, read_manifest
from specdec_runtime.loading import load_drafter, load_target
from specdec_runtime.results import Generation
from specdec_runtime.target import Target
from specdec_runtime.text import TextStream, require_unicode

_DEFAULT_NUM_DRAFT_TOKENS = 4
_COLOURS = {"accepted": "\033[32m", "recovered": "\033[33m", "bonus": "\033[36m"}
_RESET = "\033[0m"


def run(options: argparse.Namespace) -> int:
    """Decode one prompt; text goes to standard output, everything else to standard error.

    Raises:
        ValueError: for whatever is wrong with the options, before any forward pass.
    """
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    target, drafter, manifest = _load(options)
    recommended = manifest.recommended.get("num_draft_tokens") if manifest else None
    num_draft_tokens = options.num_draft_tokens
    if num_draft_tokens is None:
        num_draft_tokens = recommended or _DEFAULT_NUM_DRAFT_TOKENS
    decoder = SpeculativeDecoder(target, drafter, num_draft_tokens=num_draft_tokens)
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    printer = _Printer(target.tokenizer, sys.stdout)
    generation = decoder.generate(
        [_prompt_ids(target, prompt, manifest, as_chat=not options.no_template)],
        max_new_tokens=options.max_new_tokens,
        stop_strings=options.stop,
        seed=options.seed,
        on_tokens=printer.show,
        **_sampling(options),
    )
    print()
    print(_summary(generation, num_draft_tokens if drafter else 0), file=sys.stderr)
    return 0


def _load(
    options: argparse.Namespace,
) -> tuple[Target, Drafter | None, DrafterManifest | None]:
    """Target, drafter, and what the drafter's folder says of itself."""
    manifest = None
    if options.drafter is None and is_drafter_folder(options.source):
        manifest = read_manifest(options.source)
        name, spec = options.target or manifest.target.name, options.source
    else:
        if options.target is not None and options.drafter is not None:
            raise ValueError(f"both {options.source!r} and --target name a target: give one")
        # A plain causal LM as the source is a drafter if --target names the target.
        name = options.target or options.source
        spec = options.source if options.target else options.drafter or "lookup"
        if is_drafter_folder(spec):
            manifest = read_manifest(spec)
    target = load_target(name, dtype=_dtype(options.dtype), engine=options.engine)
    return target, load_drafter(spec, target, engine=options.engine), manifest


def _dtype(name: str) -> torch.dtype | str:
    dtypes: dict[str, torch.dtype | str] = {
        "auto": "auto",
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
    }
    if name not in dtypes:
        raise ValueError(f"--dtype is {name!r}, expected one of {', '.join(dtypes)}")
    return dtypes[name]


def _sampling(options: argparse.Namespace) -> dict[str, Any]:
    named = {name: getattr(options, name) for name in ("temperature", "top_k", "top_p")}
    return {name: value for name, value in named.items() if value is not None}


def _prompt_ids(
    target: Target, prompt: str, manifest: DrafterManifest | None, *, as_chat: bool
) -> list[int]:
    """The prompt as a chat turn, with the template options that the drafter was trained with."""
    require_unicode(prompt)
    tokenizer = target.tokenizer
    if not as_chat or not tokenizer.chat_template:
        return tokenizer(prompt).input_ids
    template_options = manifest.template_options if manifest else {}
    return encode_chat(tokenizer, [{"role": "user", "content": prompt}], template_options)


class _Printer:
    """Writes pieces of text as they become final, coloured on a terminal."""

    def __init__(self, tokenizer: Any, stream: TextIO) -> None:
        self._texts = TextStream(tokenizer)
        self._stream = stream
        self._is_coloured = stream.isatty() and not os.environ.get("NO_COLOR")

    def show(self, chunk: Any) -> None:
        for text, kind in self._texts.pieces(chunk):
            colour = _COLOURS.get(kind, "") if self._is_coloured else ""
            self._stream.write(f"{colour}{text}{_RESET}" if colour else text)
        self._stream.flush()


def _summary(generation: Generation, num_draft_tokens: int | str) -> str:
    """Tokens per second are those after the first, which the prefill gives."""
    num_tokens = len(generation.token_ids[0])
    decode_s = generation.seconds - generation.prefill_s
    parts = [f"{num_tokens} tokens ({generation.finish_reasons[0]})"]
    if num_tokens > 1:
        parts.append(f"{(num_tokens - 1) / decode_s:.1f} tokens/s")
    stats = generation.stats
    if stats.num_drafted:
        parts.append(f"acceptance length {stats.acceptance_length:.2f}")
        parts.append(f"acceptance rate {stats.acceptance_rate:.0%} at K={num_draft_tokens}")
    parts.append(f"prefill {generation.prefill_s * 1000:.0f} ms")
    return ", ".join(parts)
