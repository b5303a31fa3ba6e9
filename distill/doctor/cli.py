"""`python -m distill.doctor [key=value ...]`; exit codes as in distill/cli.py, and 1 for errors in the
data."""

from distill import cli
from distill.doctor.finding import Finding, Level

HELP = """\
Looks at prompts or answers before any training: what is trained on, and what is wrong with it.

    python -m distill.doctor [key=value ...]

Ends with exit code 1 if something would spoil the training. Often set:
    target.model=MODEL         hub id, local folder or GGUF file; its weights are not loaded
    prompts.file=my.jsonl      your own prompts, or any other of the prompts.* settings
    answers_folder=FOLDER      look at written answers instead
    html=doctor.html           the page; null = none
    show=1                     conversations shown in the terminal
"""


def main() -> None:
    """Runs the command line and exits."""
    cli.main(HELP, run_command)


def run_command(overrides: list[str]) -> int:
    """Runs one examination; whatever a user can cause ends in one line on standard error."""
    # Only now: torch takes seconds to import, and `--help` needs none of this.
    from distill.doctor.job import DoctorJob, run_job

    findings: list[Finding] = []
    code = cli.run_command(
        overrides,
        config_name="doctor",
        schema=DoctorJob,
        run=lambda job: findings.extend(run_job(job)),
        stopped=lambda job: "stopped",
    )
    return code or int(any(finding.level is Level.error for finding in findings))
