"""A run killed at random moments and continued each time, against one that nobody disturbed.

    python -m benchmarks.soak [--steps 300] [--kills 10] [--seed 0] [--work FOLDER]

Both are whole `python -m train` processes on a tiny target whose drafter has dropout. SIGKILL comes
when a random step is in the log and a random moment later, so it hits steps, measurements and
saves alike; one comes while the run still starts. What must be equal at the end, bit for bit: the
drafter, the optimizer, every random state, every logged loss, and the folder to serve.
Exit code 1 if anything differs.
"""

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from specdec_runtime.tiny_target import byte_tokenizer, random_llama
from train.checkpoint import Checkpoints
from train.run_log import read_metrics

DROPOUT = 0.2
POLL_S = 0.01
LATEST_S = 0.4  # longest wait between seeing a step and the kill; a step takes less
SESSION_LIMIT_S = 600.0
EQUAL_FILES = ("weights.safetensors", "optimizer.safetensors")
EQUAL_STATE = ("step", "num_tokens", "best_step", "best_score", "first_score", "num_worse")


def main() -> None:
    arguments = parse_arguments()
    work = Path(arguments.work or tempfile.mkdtemp(prefix="draftloop-soak-"))
    target = make_target(work / "target")
    say(f"{arguments.steps} steps, {arguments.kills} kills, dropout {DROPOUT}, in {work}")
    whole = start(work / "whole", target, arguments.steps)
    assert whole.wait(SESSION_LIMIT_S) == 0, "the undisturbed run failed"
    say("the undisturbed run is done")
    moments = random.Random(arguments.seed)
    steps = sorted(moments.sample(range(1, arguments.steps), arguments.kills - 1))
    for number, step in enumerate([0, *steps], start=1):
        kill_at(
            work / "killed", target, arguments.steps, step, moments.uniform(0, LATEST_S), number
        )
    last = start(work / "killed", target, arguments.steps)
    assert last.wait(SESSION_LIMIT_S) == 0, "the continued run failed"
    differences = compare(run_folder(work / "whole"), run_folder(work / "killed"))
    for one in differences:
        say(f"DIFFERENT: {one}")
    say("bit-identical" if not differences else f"{len(differences)} differences")
    sys.exit(1 if differences else 0)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    parser.add_argument("--work", help="an empty folder; default: a temporary one")
    return parser.parse_args()


def make_target(folder: Path) -> Path:
    """The tiny random target, with dropout in its attention, which its drafter inherits."""
    tokenizer = byte_tokenizer()
    model = random_llama(tokenizer)
    model.config.attention_dropout = DROPOUT
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def start(runs: Path, target: Path, steps: int) -> subprocess.Popen[bytes]:
    """A session of the run below `runs`, new or continued."""
    settings = {
        "runs_dir": runs,
        "resume": "auto",
        "target": "custom",
        "target.model": target,
        "training.max_steps": steps,
        "training.batch_tokens": 512,
        "training.accumulation_steps": 2,
        "training.save_every": 7,
        "training.log_every": 1,
        "acceptance.every": 20,
        "evaluation.time_limit_s": 5,
    }
    command = [sys.executable, "-m", "train", "+experiment=smoke"]
    command += [f"{name}={value}" for name, value in settings.items()]
    runs.mkdir(parents=True, exist_ok=True)
    with (runs / "output.log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)


def kill_at(runs: Path, target: Path, steps: int, step: int, delay_s: float, number: int) -> None:
    """A session that ends by SIGKILL, `delay_s` after step `step` was logged."""
    session = start(runs, target, steps)
    while last_step(runs) < step:
        assert session.poll() is None, f"the session ended by itself: see {runs / 'output.log'}"
        time.sleep(POLL_S)
    time.sleep(delay_s if step else 3 + 10 * delay_s)  # step 0: while it starts
    session.send_signal(signal.SIGKILL)
    code = session.wait()
    found, passed_over = Checkpoints(run_folder(runs), keep_last=1).newest()
    saved = found.state.step if found else "none"
    say(
        f"kill {number}: {delay_s:.2f} s after step {step} was logged, exit code {code}, last "
        f"logged step {last_step(runs)}, newest checkpoint {saved}"
        + (f" ({passed_over[0]})" if passed_over else "")
    )


def run_folder(runs: Path) -> Path:
    """The one run below `runs`; `runs` itself as long as there is none."""
    return next(iter(runs.glob("smoke/*")), runs)


def last_step(runs: Path) -> int:
    steps = [r["step"] for r in read_metrics(run_folder(runs)) if r["kind"] == "training"]
    return max(steps, default=0)


def compare(whole: Path, killed: Path) -> list[str]:
    """What differs between two finished runs."""
    ends = [Checkpoints(folder, keep_last=1).newest()[0] for folder in (whole, killed)]
    assert ends[0] is not None
    assert ends[1] is not None
    differences = [
        name
        for name in EQUAL_FILES
        if (ends[0].folder / name).read_bytes() != (ends[1].folder / name).read_bytes()
    ]
    differences += [
        f"{name}: {getattr(ends[0].state, name)} and {getattr(ends[1].state, name)}"
        for name in EQUAL_STATE
        if getattr(ends[0].state, name) != getattr(ends[1].state, name)
    ]
    if ends[0].rng != ends[1].rng:
        differences.append("random states")
    losses = [
        [(r["step"], r["loss"]) for r in read_metrics(folder) if r["kind"] == "training"]
        for folder in (whole, killed)
    ]
    if losses[0] != losses[1]:
        differences.append("logged losses")
    say(f"{len(losses[0])} logged losses, the last one {losses[0][-1][1]!r}")
    weights = [
        (folder / "drafter" / "model.safetensors").read_bytes() for folder in (whole, killed)
    ]
    if weights[0] != weights[1]:
        differences.append("drafter/model.safetensors")
    return differences


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


if __name__ == "__main__":
    main()
