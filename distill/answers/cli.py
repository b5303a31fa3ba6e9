"""`python -m distill.answers output=FOLDER [key=value ...]`; exit codes as in distill/cli.py."""

from distill import cli

HELP = """\
Has a target answer prompts; what it writes, with its hidden states, is what drafters learn from.

    python -m distill.answers output=FOLDER [key=value ...]

Often set:
    output=FOLDER                 where to; an interrupted job continues there
    target.model=MODEL            hub id, local folder or GGUF file
    prompts.file=a.jsonl          your own prompts: a file, folder or hub id (docs/data.md)
    answers.temperatures=[0,1]    as the target is served
    answers.max_tokens=200000     stop after so many tokens; answers.max_seconds likewise
"""


def main() -> None:
    """Runs the command line and exits."""
    cli.main(HELP, run_command)


def run_command(overrides: list[str]) -> int:
    """Runs one job; whatever a user can cause ends in one line on standard error."""
    # Only now: torch takes seconds to import, and `--help` needs none of this.
    from distill.answers.job import AnswersJob, run_job

    return cli.run_command(
        overrides,
        config_name="answers",
        schema=AnswersJob,
        run=run_job,
        stopped=lambda job: f"stopped; the same command continues in {job.output}",
    )
