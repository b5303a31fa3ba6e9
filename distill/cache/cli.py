"""`python -m distill.cache answers=FOLDER [key=value ...]`; exit codes as in distill/cli.py."""

from distill import cli

HELP = """\
Computes what a target says at every token of existing answers, and keeps it for training.

    python -m distill.cache answers=FOLDER [key=value ...]

Size, free disk and time are said before anything is written. Often set:
    answers=FOLDER         of python -m distill.answers: own, a server's or a data set's
    target.model=MODEL     the target that is to be distilled
    signals.form=sparse    top-k and draws (default), or hidden: the last hidden states
    signals.top_k=64       most probable tokens kept; signals.draws=50 drawn ones
    output=FOLDER          where to; by default where `python -m train` looks for them
"""


def main() -> None:
    """Runs the command line and exits."""
    cli.main(HELP, run_command)


def run_command(overrides: list[str]) -> int:
    """Runs one job; whatever a user can cause ends in one line on standard error."""
    # Only now: torch takes seconds to import, and `--help` needs none of this.
    from distill.cache.job import CacheJob, run_job

    return cli.run_command(
        overrides,
        config_name="cache",
        schema=CacheJob,
        run=run_job,
        stopped=lambda job: "stopped; the same command continues where this one was",
    )
