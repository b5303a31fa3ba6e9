"""What accelerate may be set to, and what one process does for all of them."""

from collections.abc import Callable
from typing import TypeVar

from accelerate import Accelerator
from accelerate.utils import DynamoBackend, broadcast_object_list, gather_object

Result = TypeVar("Result")
PASSED_ON = (ValueError, OSError, RuntimeError)


def check_accelerate(accelerator: Accelerator) -> None:
    """Refuses settings of accelerate that the training's own stand for.

    Raises:
        ValueError: naming the setting to use instead.
    """
    settings = (
        ("mixed_precision", accelerator.mixed_precision, "no", "training.precision"),
        (
            "gradient_accumulation_steps",
            accelerator.gradient_accumulation_steps,
            1,
            "training.accumulation_steps",
        ),
        (
            "dynamo_backend",
            accelerator.state.dynamo_plugin.backend.value,
            DynamoBackend.NO.value,
            "training.compile",
        ),
    )
    for name, found, neutral, own in settings:
        if found != neutral:
            raise ValueError(
                f"accelerate's {name} is {found}, expected {neutral}: {own} decides about that here"
            )


def on_main(accelerator: Accelerator, function: Callable[[], Result]) -> Result:
    """Runs `function` on the main process only and gives its result to every process.

    Raises:
        ValueError, OSError, RuntimeError: on every process, if the function raised it on the main
            one; so none waits.
    """
    if accelerator.num_processes == 1:
        return function()
    outcome: list[object] = [None, None, None]
    if accelerator.is_main_process:
        try:
            outcome[0] = function()
        except PASSED_ON as error:
            kind = next(kind for kind in PASSED_ON if isinstance(error, kind))
            outcome[1:] = [kind.__name__, str(error)]
    broadcast_object_list(outcome)
    for kind in PASSED_ON:
        if outcome[1] == kind.__name__:
            raise kind(outcome[2])
    return outcome[0]  # type: ignore[return-value]


def from_all(accelerator: Accelerator, value: Result) -> list[Result]:
    """The value of every process, in rank order, on every process."""
    return [value] if accelerator.num_processes == 1 else gather_object([value])
