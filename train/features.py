"""The target's inner states for a run's examples, kept in the user's cache for all runs."""

from collections.abc import Sequence

from distill.features import E, FeatureFolder, record_features
from specdec_runtime.assets import cache_folder
from specdec_runtime.target import Target
from train.job import Job


def feature_folder(target: Target, layers: Sequence[int]) -> FeatureFolder:
    """Where the states after these layers are kept for all runs."""
    named = "-".join(map(str, layers))
    folder = cache_folder() / "features" / f"{target.fingerprint[:16]}-{named}"
    return FeatureFolder(folder, layers)


def with_features(job: Job, target: Target, layers: Sequence[int], examples: list[E]) -> list[E]:
    """The examples with the residuals after these layers of the target; none asked for, none read.

    Processes that share the cache record each text once: the first one writes, the others wait.
    """
    if not layers:
        return examples
    total = sum(len(example.token_ids) for example in examples)
    with job.progress("the target's inner states", total) as progress:
        return record_features(
            target.model, examples, feature_folder(target, layers), progress=progress.update
        )
