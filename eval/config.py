"""Settings of an evaluation: what `evaluate` needs, and what the command line adds.

Registered with Hydra as `eval_schema`; ranges are checked when the dataclass is made, before any
model is loaded.
"""

from dataclasses import dataclass, field

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from eval.trackers import TrackingConfig


@dataclass(kw_only=True)
class EvaluationConfig:
    """How much is measured. The defaults take about four minutes on two CPU cores.

    num_prompts: prompts a suite for acceptance and replay.
    decoded_prompts: of them, how many are decoded with the drafters too, for exactness and to check
        the replay that the others' acceptance comes from; all, where a drafter has no replay.
    max_new_tokens: length of every answer.
    num_draft_tokens: draft length of the acceptance tables, the same for every drafter.
    max_draft_tokens: longest draft that the replay and the cost model look at.
    sampling_temperature: the temperature of the sampled acceptance table; None = greedy only.
    batch_size: rows decoded together where time is not measured.
    speed_prompts, speed_repeats: prompts a suite and interleaved repeats of the timing.
    also_time: draft lengths timed besides the recommended one, to check the cost model.
    time_auto: also time the runtime's own choice of the draft length (num_draft_tokens="auto").
    reference_prompts: prompts decoded by transformers' generate too; 0 = no comparison with it.
    policies: also compare draft-length policies of the first drafter, by replay.
    rival_prompts: prompts decoded by transformers' assisted generation with the same drafters.
    batch_sizes: at which the first drafter is timed against plain decoding.
    context_lengths: at which its costs are measured again.
    num_resamples: bootstrap resamples of every interval.
    trace_prompts: answers shown token by token in the report.
    time_limit_s: seconds the whole evaluation may take; prompts and repeats shrink to fit.
    """

    num_prompts: int = 24
    decoded_prompts: int = 8
    max_new_tokens: int = 64
    num_draft_tokens: int = 3
    max_draft_tokens: int = 8
    sampling_temperature: float | None = 1.0
    batch_size: int = 16
    speed_prompts: int = 12
    speed_repeats: int = 3
    also_time: list[int] = field(default_factory=list)
    time_auto: bool = False
    reference_prompts: int = 2
    policies: bool = False
    rival_prompts: int = 0
    batch_sizes: list[int] = field(default_factory=list)
    context_lengths: list[int] = field(default_factory=list)
    num_resamples: int = 1000
    trace_prompts: int = 3
    time_limit_s: float = 260.0
    seed: int = 0

    def __post_init__(self) -> None:
        _at_least("evaluation.num_prompts", self.num_prompts, 2, "an interval needs two prompts")
        _at_least("evaluation.decoded_prompts", self.decoded_prompts, 1, "what is it checked with?")
        _at_least("evaluation.max_new_tokens", self.max_new_tokens, 2)
        _at_least("evaluation.num_draft_tokens", self.num_draft_tokens, 1)
        _at_least("evaluation.max_draft_tokens", self.max_draft_tokens, self.num_draft_tokens)
        _at_least("evaluation.batch_size", self.batch_size, 1)
        _at_least("evaluation.speed_prompts", self.speed_prompts, 1)
        _at_least("evaluation.speed_repeats", self.speed_repeats, 1)
        _at_least("evaluation.reference_prompts", self.reference_prompts, 0)
        _at_least("evaluation.rival_prompts", self.rival_prompts, 0)
        for name in ("batch_sizes", "context_lengths"):
            for value in getattr(self, name):
                _at_least(f"evaluation.{name}", value, 1)
        _at_least("evaluation.num_resamples", self.num_resamples, 100)
        _at_least("evaluation.trace_prompts", self.trace_prompts, 0)
        if self.sampling_temperature is not None and self.sampling_temperature <= 0:
            raise ValueError(
                "evaluation.sampling_temperature must be positive, got "
                f"{self.sampling_temperature}; use null to leave sampling out"
            )
        if self.time_limit_s <= 0:
            raise ValueError(f"evaluation.time_limit_s must be positive, got {self.time_limit_s}")
        if any(k < 1 or k > self.max_draft_tokens for k in self.also_time):
            raise ValueError(
                f"evaluation.also_time must hold draft lengths from 1 to max_draft_tokens="
                f"{self.max_draft_tokens}, got {self.also_time}"
            )


@dataclass(kw_only=True)
class TargetChoice:
    """The target; `model` None = the one that the drafter was trained for."""

    model: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    engine: str = "auto"


@dataclass(kw_only=True)
class EvalConfig:
    """`python -m eval`: one target, one or several drafters, prompts, an output folder.

    drafter: the drafter that the page is about; drafters: more of them, side by side.
    lookup: also measure prompt lookup, the free baseline.
    prompts_file: JSONL; None = `suites`.
    suites: by name: fetched ones (fetched.py), and those kept beside the drafter by its run; None =
        all of the run's, and MT-bench where there are none.
    turns: of conversations with several user turns, how many are evaluated.
    failures: failures.jsonl of an earlier evaluation, or its folder: is the drafter right there now?
    output: None = runs/eval/<time>.
    tracking: where the figures, the tables and the page go besides the folder.
    """

    drafter: str = MISSING
    drafters: list[str] = field(default_factory=list)
    lookup: bool = True
    target: TargetChoice = field(default_factory=TargetChoice)
    prompts_file: str | None = None
    suites: list[str] | None = None
    turns: int = 1
    failures: str | None = None
    output: str | None = None
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    def __post_init__(self) -> None:
        _at_least("turns", self.turns, 1)


def _at_least(name: str, value: int, smallest: int, why: str = "") -> None:
    if value < smallest:
        reason = f" ({why})" if why else ""
        raise ValueError(f"{name} must be at least {smallest}, got {value}{reason}")


ConfigStore.instance().store(name="eval_schema", node=EvalConfig)
