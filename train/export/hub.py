"""Publishing an exported folder on the Hugging Face hub; the token is huggingface_hub's own business."""

from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError

from train.card import license_of
from train.export.rules import no_pickles


def push(folder: Path, repository: str, *, dry_run: bool) -> None:
    """Upload a folder with its card, or only say what would be uploaded.

    Raises:
        ValueError: the folder holds a pickle or states no licence, or the hub refused.
    """
    if problems := no_pickles(folder):
        raise ValueError(problems[0])
    if license_of(folder) is None:
        raise ValueError(
            f"{folder} states no licence, which others need to use it: give license=..."
        )
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    if dry_run:
        total = sum(path.stat().st_size for path in files)
        print(f"would upload to https://huggingface.co/{repository} ({total / 2**20:.1f} MiB):")
        for path in files:
            print(f"  {path.relative_to(folder)}  {path.stat().st_size} bytes")
        return
    api = HfApi()
    try:
        api.create_repo(repository, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder)
    except (HfHubHTTPError, OSError) as error:
        raise ValueError(f"{repository} was not uploaded: {str(error).splitlines()[0]}") from None
    print(f"https://huggingface.co/{repository}")
