"""The examples of Accelerate and of the Trainer with DeepSpeed, and with Shardfold in its place, as a Markdown table.

python benchmarks/clients.py [--clients accelerate trainer] [--stages 1 2 3] [--precisions fp32 bf16] [--steps 20]

Every cell is `examples/accelerate_loop.py` or `examples/transformers_trainer.py`, unmodified, on 2 processes of one
thread and a model of about 3.5 million parameters; twice: the second run goes on from what the first one saved after
half of its steps. Needs `pip install deepspeed`, or `--packages shardfold`, which leaves out what is compared with
DeepSpeed.

    losses       of the first and last step, with DeepSpeed
    apart        largest difference of a step's mean loss between the two packages
    norms        largest relative difference of a step's gradient norm
    resumed      largest difference of a loss, with Shardfold, between the run that went on and the one that was not
                 interrupted; in brackets with DeepSpeed
    ms per step  median of the second half of the steps, rank 0: DeepSpeed, Shardfold
    MiB          largest resident memory of a rank beyond what it was once everything was imported: DeepSpeed, Shardfold

Below the table, what `import deepspeed` took after `import torch`: the smallest of all runs.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[1] / "examples"
RANKS, WIDTH = 2, 256
MIB = 1024**2


@dataclass
class Run:
    """What one run of an example told: by step, and of rank 0 or the largest rank."""

    losses: list[float]
    norms: list[float]
    seconds: list[float]
    import_seconds: float
    peak_bytes: int


# -- inside a rank


def rank(package: str, folder: Path, script: str, arguments: list[str]) -> None:
    """Run a script as ``python script`` would, with ``package`` answering to ``import deepspeed``."""
    import torch

    torch.set_num_threads(1)
    began = time.perf_counter()
    if package == "shardfold":
        import shardfold.compat

        shardfold.compat.install()
    import deepspeed

    took = time.perf_counter() - began
    assert ("shardfold" in sys.modules) == (package == "shardfold"), deepspeed.__file__
    import accelerate
    import transformers.trainer

    steps: list[float] = []

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            steps.append(time.perf_counter() - self.began)

    transformers.trainer.DEFAULT_CALLBACKS.append(Clock)
    accelerate.state.PartialState  # noqa: B018  imported lazily otherwise
    before = resident()
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
    said = {
        "import": took,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before,
        "seconds": steps,
    }
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(said))


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


# -- outside


def run(client: str, package: str, stage: int, precision: str, steps: int, folder: Path, resume: bool) -> Run:
    """One run of an example; ``resume`` goes on in the folder of a run before."""
    arguments = ["--precision", "bf16" if precision == "bf16" else "no", "--steps", str(steps), "--output", str(folder)]
    arguments += ["--width", str(WIDTH)]
    if client == "accelerate":
        script, arguments = "accelerate_loop.py", [*arguments, "--stage", str(stage)]
        arguments += ["--resume", str(folder / f"step-{steps // 2}")] if resume else []
    else:
        config = EXAMPLES / f"ds_zero{stage}.json"
        script, arguments = "transformers_trainer.py", [*arguments, "--deepspeed", str(config)]
        arguments += ["--resume"] if resume else []
    folder.mkdir(exist_ok=True)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command = [*launch, __file__, "--rank-of", package, str(folder), str(EXAMPLES / script), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    log = folder / "log.txt"
    with log.open("w") as out:
        status = subprocess.run(command, check=False, env=environment, stdout=out, stderr=out, timeout=600).returncode
    if status:
        raise SystemExit(f"{client}, {package}, stage {stage}, {precision} failed:\n{log.read_text()[-4000:]}")
    ranks = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]
    if client == "accelerate":
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        seconds = [line["seconds"] for line in lines]
    else:
        history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
        lines, seconds = [line for line in history if "loss" in line], ranks[0]["seconds"]
    return Run(
        [line["loss"] for line in lines],
        [float(line["grad_norm"]) for line in lines],
        seconds,
        min(rank["import"] for rank in ranks),
        max(rank["peak"] for rank in ranks),
    )


def apart(a: list[float], b: list[float], relative: bool = False) -> float:
    """Largest difference over the last steps that both have."""
    count = min(len(a), len(b))
    pairs = zip(a[-count:], b[-count:], strict=True)
    return max(abs(x - y) / (abs(y) if relative else 1.0) for x, y in pairs)


def twice(client: str, package: str, stage: int, precision: str, steps: int, folder: Path) -> tuple[Run, float]:
    """A whole run, and how far the losses of a run that goes on from its middle are from it."""
    whole = run(client, package, stage, precision, steps, folder, False)
    if client == "trainer":  # it goes on from the newest, which is the end
        (folder / f"checkpoint-{steps}").rename(folder / "last")
    later = run(client, package, stage, precision, steps, folder, True)
    return whole, apart(later.losses[-(steps - steps // 2) :], whole.losses)


def row(client: str, stage: int, precision: str, runs: dict[str, tuple[Run, float]]) -> str:
    ours, resumed = runs["shardfold"]
    cells = [client, str(stage), precision]
    speed = f"{1e3 * statistics.median(ours.seconds[len(ours.seconds) // 2 :]):.0f}"
    memory = f"{ours.peak_bytes / MIB:.0f}"
    if "deepspeed" in runs:
        theirs, theirs_resumed = runs["deepspeed"]
        cells += [f"{theirs.losses[0]:.4f} - {theirs.losses[-1]:.4f}"]
        cells += [f"{apart(ours.losses, theirs.losses):.1e}", f"{apart(ours.norms, theirs.norms, relative=True):.1e}"]
        cells += [f"{resumed:.1e} ({theirs_resumed:.1e})"]
        cells += [f"{1e3 * statistics.median(theirs.seconds[len(theirs.seconds) // 2 :]):.0f}, {speed}"]
        cells += [f"{theirs.peak_bytes / MIB:.0f}, {memory}"]
    else:
        cells += [f"{ours.losses[0]:.4f} - {ours.losses[-1]:.4f}", "", "", f"{resumed:.1e}", speed, memory]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", nargs="*", default=["accelerate", "trainer"])
    parser.add_argument("--packages", nargs="*", default=["deepspeed", "shardfold"])
    parser.add_argument("--stages", nargs="*", type=int, default=[1, 2, 3])
    parser.add_argument("--precisions", nargs="*", default=["fp32", "bf16"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--keep", type=Path, help="a folder that what the runs wrote is left in")
    parser.add_argument("--rank-of", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank_of:
        package, folder, script, *arguments = given.rank_of
        rank(package, Path(folder), script, arguments)
        return
    titles = "client | stage | | losses | apart | norms | resumed | ms per step | MiB"
    print(f"| {titles} |\n|{'---|' * 9}")
    imports: dict[str, list[float]] = {package: [] for package in given.packages}
    with tempfile.TemporaryDirectory() as temporary:
        for client in given.clients:
            for stage in given.stages:
                for precision in given.precisions:
                    runs = {}
                    for package in given.packages:
                        folder = (given.keep or Path(temporary)) / f"{client}-{stage}-{precision}-{package}"
                        runs[package] = twice(client, package, stage, precision, given.steps, folder)
                        imports[package].append(runs[package][0].import_seconds)
                    print(row(client, stage, precision, runs), flush=True)
    for package, seconds in imports.items():
        print(f"\n`import deepspeed` after torch, {package}: {min(seconds):.2f} s")


if __name__ == "__main__":
    main()
