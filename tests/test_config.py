"""Settings: every experiment composes, and what is wrong is refused in one line before any load."""

from dataclasses import replace
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from distill.losses import LossName
from train.cli_errors import CONFIG_ERRORS, check_complete, explain, key_paths, unknown_key
from train.config import TrainConfig
from train.plan import Machine, describe, known_parameters, planned_stages

CONF = Path(__file__).parent.parent / "conf"
EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
OWN_DATA = "+prompts.datasets.mine={path: a.csv, weight: 2, columns: {prompt: question}}"
GROUPS = ("loss", "optim", "tracking", "prompts", "draft")


def composed(*overrides: str) -> TrainConfig:
    with initialize_config_module("conf", version_base="1.3"):
        settings = compose("train", overrides=list(overrides))
    check_complete(settings, TrainConfig)
    config = OmegaConf.to_object(settings)
    assert isinstance(config, TrainConfig)
    return config


def refusal(*overrides: str) -> str:
    """The one line that a user gets."""
    with pytest.raises((*CONFIG_ERRORS, ValueError)) as error:
        composed(*overrides)
    line = explain(error.value, TrainConfig)
    assert "\n" not in line
    return line


@pytest.fixture(scope="module")
def distill() -> TrainConfig:
    return composed("+experiment=distill")


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_composes_and_bears_its_own_name(name: str):
    assert composed(f"+experiment={name}").name == name


@pytest.mark.parametrize("loss", [loss.value for loss in LossName])
def test_every_loss_is_a_choice_and_every_choice_of_the_other_groups_composes(loss: str):
    number = [member.value for member in LossName].index(loss)
    choices = {
        group: sorted(path.stem for path in (CONF / group).glob("*.yaml")) for group in GROUPS
    }
    cycled = [f"{group}={names[number % len(names)]}" for group, names in choices.items()]
    own = [] if "prompts=own" not in cycled else [OWN_DATA]  # it has no prompts of its own
    own += ["draft.model=FOLDER"] if "draft=cross_tokenizer" in cycled else []
    config = composed("name=x", *cycled, *own, f"loss={loss}")
    assert config.loss.name.value == loss
    assert loss in choices["loss"]
    assert len(choices["loss"]) == len(LossName)


def test_own_data_sets_are_declared_on_the_command_line_and_checked():
    prompts = composed("name=x", "prompts=own", "prompts.turns=each", OWN_DATA).prompts
    assert prompts.shares == {"mine": 2}
    assert prompts.own["mine"].columns == {"prompt": "question"}
    wrong = OWN_DATA.replace("weight", "wieght")
    assert "prompts.datasets.mine.wieght is no setting" in refusal("name=x", "prompts=own", wrong)
    assert "prompts.sources has no positive share" in refusal("name=x", "prompts=own")


def test_every_file_of_a_group_says_what_it_is():
    for path in CONF.glob("*/*.yaml"):
        lines = [line for line in path.read_text().splitlines() if not line.startswith("# @")]
        assert lines[0].startswith("# "), path


def test_the_baseline_differs_from_distill_in_its_loss_alone(distill: TrainConfig):
    baseline = composed("+experiment=hard_labels")
    assert baseline.loss.name is LossName.hard_labels
    baseline.loss, baseline.name = distill.loss, distill.name
    assert baseline == distill


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("optim.lerning_rate=1", "did you mean optim.learning_rate?"),
        ("+optim.lerning_rate=1", "did you mean optim.learning_rate?"),
        ("optim.lr=1", "did you mean optim.learning_rate?"),
        ("training.learning_rate=1", "did you mean optim.learning_rate?"),
        ("training.packing=true", "rows are padded to others of their length and never packed"),
        ("loss=forward_lk", "did you mean forward_kl?"),
        ("loss.name=kll", "expected one of [forward_kl"),
        ("+experiment=distil", "did you mean distill?"),
        ("experiment=smoke", "write +experiment="),
        ("optim.learning_rate=-1", "optim.learning_rate must be positive, got -1.0"),
        ("optim.learning_rate=fast", "optim.learning_rate: "),
        ("export_formats=[vlm]", "format=vlm is not known, expected one of draftloop"),
        ("acceptance.share=2", "acceptance.share must lie between 0 and 1"),
        ("+prompts.sources.word_problem=1", "prompts.sources.word_problem is not a source"),
        ("target.model=???", "target.model has no value"),
        ("target.model=${oc.env:SURELY_NOT_SET}", "environment variable SURELY_NOT_SET is not set"),
        ("optim.betas=[0.9", "optim.betas=[0.9 can not be read"),
        ("optim.betas=[0.9,nan]", "optim.betas is [0.9, nan], expected a finite number"),
        ("optim.weight_decay=nan", "optim.weight_decay is nan, expected a finite number"),
        ("training.budget_minutes=inf", "budget_minutes is inf, expected a finite number"),
    ],
)
def test_a_wrong_setting_is_refused_with_a_remedy(override: str, says: str):
    first = [] if "experiment" in override else ["+experiment=distill"]
    assert says in refusal(*first, override)


def test_the_loss_has_the_temperature_of_decoding_unless_it_is_given():
    def loss(*overrides: str) -> float | None:
        return composed("name=x", *overrides).loss.temperature

    assert loss() == 1.0
    assert loss("answers.temperatures=[0.0,0.6]") == 0.6
    assert loss("answers.temperatures=[0.0]") == 1.0
    assert loss("answers.temperatures=[0.6]", "loss.temperature=1.5") == 1.5


def test_a_training_without_an_end_is_refused():
    said = refusal("+experiment=distill", "training.budget_minutes=null")
    assert "training never ends" in said
    assert "training.max_steps" in said


def test_a_run_without_a_name_asks_for_one():
    assert refusal() == "name has no value: give name=... or start an experiment"


def test_free_keys_are_accepted_where_the_schema_has_them():
    options = composed("name=x", "+target.template_options.enable_thinking=false").target
    assert options.template_options == {"enable_thinking": False}


def test_key_paths_hold_nodes_and_leaves():
    paths = key_paths(TrainConfig)
    assert {"optim", "optim.learning_rate", "evaluation.num_prompts", "draft.layers"} <= set(paths)
    assert unknown_key("qqq.zzz", TrainConfig).endswith("for all keys")


@pytest.mark.parametrize("model", ["smollm2-135m-instruct", "tiny-random", "owner/name", "FOLDER"])
def test_every_kind_of_target_name_gets_a_plan(model: str, tmp_path: Path, distill: TrainConfig):
    (tmp_path / "model.safetensors").write_bytes(bytes(4000))
    name = str(tmp_path) if model == "FOLDER" else model
    config = replace(distill, target=replace(distill.target, model=name))
    machine = Machine("toy", flops_per_s=1e11, bytes_per_s=1e10)
    stages = planned_stages(config, machine)
    (training_s,) = [stage.seconds for stage in stages if stage.name == "training"]
    assert training_s == 60 * (config.training.budget_minutes or 0)
    assert known_parameters(name) == {"FOLDER": 2000, "owner/name": None}.get(
        model, known_parameters(model)
    )
    assert describe(machine, stages).count("about") == len(stages) + 1
