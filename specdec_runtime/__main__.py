"""`python -m specdec_runtime`: stream a text in the terminal and see which tokens were drafted."""

import argparse
import os
import sys
from pathlib import Path


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and run it; returns the exit code."""
    options = _parser().parse_args(arguments)
    # torch and transformers take seconds to import, which --help and typing errors need not wait.
    from specdec_runtime.terminal import run

    try:
        return run(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read the text has gone, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return 141


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m specdec_runtime",
        description="Decode a prompt speculatively and stream the text. On a terminal, tokens are "
        "coloured: accepted (drafted and kept), corrected (drafted wrongly, the target's token in "
        "its place), bonus (the target's token after a draft that was kept as a whole).",
    )
    parser.add_argument("source", help="drafter folder (names its target), or a target")
    parser.add_argument("prompt", help="text to answer; - reads it from standard input")
    parser.add_argument("--target", help="hub id or folder; default: the one the drafter names")
    parser.add_argument(
        "--drafter",
        help="with a target as source: lookup, none, or a drafter folder (default: lookup)",
    )
    parser.add_argument(
        "--num-draft-tokens",
        type=_draft_tokens,
        help="tokens drafted a round, or auto: what pays here, measured first (about 2 s); "
        "default: what the drafter recommends, else 4",
    )
    parser.add_argument("--max-new-tokens", type=int, default=256, help="default: %(default)s")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 = greedy, the default")
    parser.add_argument("--top-k", type=int, help="sample from the k likeliest tokens")
    parser.add_argument("--top-p", type=float, help="sample from the likeliest tokens of this mass")
    parser.add_argument("--seed", type=int, help="makes sampling reproducible")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end at this text")
    parser.add_argument(
        "--no-template", action="store_true", help="pass the prompt as it is, not as a chat turn"
    )
    parser.add_argument("--dtype", default="auto", help="auto, float32 or bfloat16")
    parser.add_argument(
        "--engine",
        default="auto",
        choices=("auto", "native", "eager", "compiled"),
        help="how the models are run; default: the fastest that can",
    )
    parser.add_argument("--version", action="version", version=_version())
    return parser


def _draft_tokens(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor auto") from None


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("draftloop")
    except PackageNotFoundError:
        return f"checkout in {Path(__file__).parents[1].name}"


if __name__ == "__main__":
    sys.exit(main())
