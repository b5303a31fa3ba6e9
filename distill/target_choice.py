"""Which target a command of this package works with."""

from dataclasses import dataclass, field

from specdec_runtime.engines import Engine
from specdec_runtime.loading import load_target
from specdec_runtime.model_names import DEFAULT_TARGET
from specdec_runtime.target import Target


@dataclass(kw_only=True)
class TargetChoice:
    """A model; the arguments of `specdec_runtime.loading.load_target`.

    Attributes:
        model: hub id, local folder, GGUF file, or the name of the embedded default.
        template_options: given to the chat template, as where the target is served.
    """

    model: str = DEFAULT_TARGET
    dtype: str = "auto"
    device: str = "auto"
    engine: Engine = Engine.auto
    template_options: dict[str, str | bool] = field(default_factory=dict)

    def load(self) -> Target:
        """The target, ready to decode.

        Raises:
            ValueError: if there is no such model, or it cannot be decoded here.
        """
        return load_target(self.model, dtype=self.dtype, device=self.device, engine=self.engine)
