"""Settings from the command line, the plan on the terminal."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eval.plan.outlook import Plan

HELP = """\
Would a drafter pay here, and from which acceptance on? Measures untrained candidates.

    python -m eval.plan [key=value ...]

    target=smollm2-135m-instruct     hub id, folder, GGUF file or the embedded default
    layers=[1,2,4]                   candidates, each layer of the target's own shape
    draft_vocab_size=8192            tokens that a candidate can propose; null = all
    max_draft_tokens=8               longest draft that is looked at
    context_tokens=128               length of the text that costs are measured behind
    training_minutes=20              what writing the text and training would take
    dtype=auto device=auto engine=auto
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the plan; the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & set(given):
        print(HELP, end="")
        return 0
    # Only now: torch takes seconds to import.
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from eval.cli import explain
    from eval.plan.measure import PlanConfig, measure_plans

    try:
        schema = OmegaConf.structured(PlanConfig)
        config = OmegaConf.to_object(OmegaConf.merge(schema, OmegaConf.from_dotlist(given)))
        assert isinstance(config, PlanConfig)
        plans = measure_plans(config)
    except OmegaConfBaseException as error:
        print(f"error: {explain(error, PlanConfig)}", file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    _print(plans, config.training_minutes)
    return 0


def _print(plans: "Sequence[Plan]", training_minutes: float) -> None:
    from rich.console import Console
    from rich.table import Table

    from eval.plan.outlook import sentence

    console = Console()
    for plan in plans:
        costs = plan.costs
        console.print(f"\n[bold]{sentence(plan)}[/bold]", highlight=False)
        passes = ", ".join(f"{value:.2f}" for value in costs.verify[1:])
        console.print(
            f"one token: {costs.target_s * 1000:.1f} ms; a draft pass {costs.draft_cost:.2f} of it; "
            f"passes over 2, 3, ... tokens {passes}",
            highlight=False,
        )
        table = Table(box=None, pad_edge=False)
        titles = (
            "acceptance",
            "draft length",
            "tokens a round",
            "speedup",
            "payback, min",
            "tokens",
        )
        for title in titles:
            table.add_column(title, justify="right")
        for one in plan.outlooks:
            table.add_row(
                f"{one.acceptance:.2f}",
                str(one.num_draft_tokens),
                f"{one.acceptance_length:.2f}",
                f"{one.speedup:.2f}",
                "never" if one.payback_minutes is None else f"{one.payback_minutes:.0f}",
                "never" if one.payback_tokens is None else f"{one.payback_tokens:,.0f}",
            )
        console.print(table)
    console.print(
        f"\npayback: minutes and tokens of plain decoding to replace until the {training_minutes:g} of "
        "training are saved; which acceptance a candidate reaches, only a short training tells",
        highlight=False,
    )
