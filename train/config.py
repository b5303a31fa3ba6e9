"""Every setting of a training run: the dataclasses, each beside what it configures, in one tree.

Registered with Hydra once, as `train_schema`. Ranges are checked when the dataclasses are made, and
what contradicts itself across them here, before any model is loaded.
"""

from dataclasses import dataclass, field

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from distill.answers.config import AnswersConfig
from distill.losses import LossConfig
from distill.on_policy import ON_POLICY_KINDS, OnPolicyConfig
from distill.prompts import PromptsConfig
from distill.recipe import DraftSettings, settings_of, trained_kinds
from distill.signal_forms import SignalsConfig, require_form
from eval.config import EvaluationConfig
from eval.trackers import TrackingConfig
from specdec_runtime.engines import Engine
from train.acceptance import AcceptanceConfig
from train.export.registry import format_named
from train.optim import OptimConfig
from train.precision import Precision


@dataclass(kw_only=True)
class TargetConfig:
    """The model whose output is kept exactly.

    model: hub id, local folder, GGUF file, "smollm2-135m-instruct" or "tiny-random".
    dtype, device, engine: see specdec_runtime.loading.load_target. The drafter is trained on the
        device of its process, so device=cuda:1 or spread gives the target others.
    template_options: given to the chat template, as where the target is served.
    """

    model: str = MISSING
    dtype: str = "auto"
    device: str = "auto"
    engine: Engine = Engine.auto
    template_options: dict[str, str | bool] = field(default_factory=dict)


@dataclass(kw_only=True)
class TrainingConfig:
    """How long and in which portions.

    budget_minutes, max_steps, num_epochs: whichever ends first; null = no limit. The budget becomes
        a number of steps when training starts, from the measured time of a step, so that a resumed
        run takes exactly the same steps.
    batch_tokens: padded tokens of a micro-batch.
    accumulation_steps: micro-batches of each process per optimizer step.
    save_every: optimizer steps between checkpoints; a better drafter is saved at once.
    keep_last: newest checkpoints to keep, besides the best one.
    precision: of matrix products; weights and moments are float32 in every case.
    gradient_checkpointing: compute a layer's inside again in the backward pass: less memory, about
        a third more time.
    compile: torch.compile the drafter; pays off from about ten minutes of training on.
    """

    budget_minutes: float | None = 9.0
    max_steps: int | None = None
    num_epochs: float | None = None
    batch_tokens: int = 4096
    accumulation_steps: int = 1
    log_every: int = 10
    save_every: int = 100
    keep_last: int = 2
    precision: Precision = Precision.auto
    gradient_checkpointing: bool = False
    compile: bool = False

    def __post_init__(self) -> None:
        counts = ("batch_tokens", "accumulation_steps", "log_every", "save_every", "keep_last")
        for name in counts:
            if getattr(self, name) < 1:
                raise ValueError(f"training.{name} must be at least 1, got {getattr(self, name)}")
        limits = {
            name: getattr(self, name) for name in ("budget_minutes", "max_steps", "num_epochs")
        }
        if all(limit is None for limit in limits.values()):
            raise ValueError(
                "training never ends: set one of "
                + ", ".join(f"training.{name}" for name in limits)
            )
        for name, limit in limits.items():
            if limit is not None and not limit > 0:
                raise ValueError(f"training.{name} must be positive, got {limit}: null = no limit")


@dataclass(kw_only=True)
class TrainConfig:
    """`python -m train`: one drafter for one target.

    name: of the experiment; runs go to `runs_dir/name/<time>`.
    run_dir: another folder for this run; must not exist or be empty.
    resume: null, "auto" for the newest run of this name, or a run folder.
    answers_folder: answers that exist, of `python -m distill.answers`; null = have them written.
    verify_export: load the exported folder in another process, which loads the target once more, and
        compare its acceptance with that in training.
    export_formats: engines' formats that the drafter is exported to at the end, into `export/`; each
        is verified, and served by its engine where that is installed: see train.export.
    evaluate_lookup: measure lookup beside the drafter: alone, the baseline that costs nothing,
        and in front of the drafter, where the drafter can follow it.
    """

    name: str = MISSING
    seed: int = 0
    runs_dir: str = "runs"
    run_dir: str | None = None
    resume: str | None = None
    target: TargetConfig = field(default_factory=TargetConfig)
    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    answers: AnswersConfig = field(default_factory=AnswersConfig)
    answers_folder: str | None = None
    signals: SignalsConfig = field(default_factory=SignalsConfig)
    draft: DraftSettings = MISSING  # the dataclass of the kind that conf/draft/<kind>.yaml names
    loss: LossConfig = field(default_factory=LossConfig)
    on_policy: OnPolicyConfig = field(default_factory=OnPolicyConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    acceptance: AcceptanceConfig = field(default_factory=AcceptanceConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    verify_export: bool = True
    export_formats: list[str] = field(default_factory=list)
    evaluate_lookup: bool = True
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    def __post_init__(self) -> None:
        for form in self.export_formats:
            format_named(form)
        if self.resume is not None and self.run_dir is not None:
            raise ValueError("resume and run_dir contradict each other: give one of them")
        if self.on_policy.fraction and self.draft.kind not in ON_POLICY_KINDS:
            raise ValueError(
                f"on_policy.fraction={self.on_policy.fraction} is for draft.kind "
                f"{' and '.join(ON_POLICY_KINDS)}, got {self.draft.kind}: set it to 0"
            )
        if self.loss.temperature is None:
            # Of the temperatures that the target is served at; greedy text says nothing about it.
            sampled = [value for value in self.answers.temperatures if value > 0]
            self.loss.temperature = max(sampled, default=1.0)
        require_form(self.signals, self.loss)


ConfigStore.instance().store(name="train_schema", node=TrainConfig)
for _kind in trained_kinds():
    ConfigStore.instance().store(
        group="draft", name=f"{_kind}_schema", node=settings_of(_kind), package="draft"
    )
