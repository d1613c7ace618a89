"""Train a small Megatron GPT with quantized weights, save it, and resume it at two other layouts, byte for byte.

    python examples/gpt_fp8_resume.py [--scheme float8|blockwise|mxfp8|nvfp4]

starts three torchruns of four gloo processes each, one after the other, on the CPU:

1. TP2 x PP2 trains a few steps on `alice.txt`, saves, and trains a few steps more;
2. TP1 x PP2 (with two data-parallel replicas) loads that checkpoint, compares every code and every scale with what was
   saved, and trains the same few steps more;
3. TP4 x PP1 does likewise.

The exit status is 0, and the last line of stdout sums it up, only where every quantized tensor came back bit for bit
on every rank of both and the losses go on where they were. `_rank.py` is what each rank does.
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from _results import Layout, ResumeResult, TrainResult, read_resume_result, read_train_result

SAVED = Layout(tp=2, pp=2)
RESUMED = (Layout(tp=1, pp=2), Layout(tp=4, pp=1))
RANKS = 4
SCHEMES = ("float8", "blockwise", "mxfp8", "nvfp4")
STEPS = 8
STEPS_AFTER = 3
LOSS_TOLERANCE = 0.02
"""Most that the first loss after a resume may be off: BF16 sums are taken in another order at another layout."""


class DemoError(Exception):
    """The demonstration did not show what it claims; the message says what it found."""


def main() -> None:
    """The whole command; `--phase` is how it starts its own ranks."""
    arguments = _parser().parse_args()
    if arguments.phase:
        _run_rank(arguments)
        return
    console = Console()
    try:
        if arguments.out is None:
            with tempfile.TemporaryDirectory(prefix="gpt_fp8_resume-") as folder:
                summary = _demonstrate(Path(folder), arguments, console)
        else:
            summary = _demonstrate(_empty_folder(arguments.out), arguments, console)
    except DemoError as error:
        sys.exit(f"gpt_fp8_resume: {error}")
    print(summary, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Save quantized weights at one layout, resume at two others.")
    parser.add_argument("--out", type=Path, help="keep all files in this empty folder (default: a temporary one)")
    parser.add_argument(
        "--weights",
        choices=("auto", "te", "block_scaled"),
        default="auto",
        help="te: Transformer Engine's tensors; block_scaled: this package's; auto: te where it is installed",
    )
    parser.add_argument("--scheme", choices=SCHEMES, default="float8", help="how the weights are quantized (float8)")
    parser.add_argument("--phase", choices=("train", "resume"), help=argparse.SUPPRESS)
    parser.add_argument("--tp", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--pp", type=int, help=argparse.SUPPRESS)
    return parser


def _run_rank(arguments: argparse.Namespace) -> None:
    """One rank of one torchrun. torch and Megatron are imported here: the command itself does without them."""
    _quiet_hosts()
    import _rank

    layout = Layout(tp=arguments.tp, pp=arguments.pp)
    if arguments.phase == "train":
        _rank.train(arguments.out, layout, arguments.weights, arguments.scheme, STEPS, STEPS_AFTER)
    else:
        _rank.resume(arguments.out, layout, arguments.weights, arguments.scheme, STEPS_AFTER)


def _quiet_hosts() -> None:
    """Silence what torch and Megatron tell everybody on every rank: missing options, deprecations of their own."""
    for category in (UserWarning, FutureWarning):
        for host in (r"megatron\.core\.", r"torch\.distributed\.checkpoint\."):
            warnings.filterwarnings("ignore", category=category, module=host)
    for logger in ("megatron.core", "torch.utils.cpp_extension"):
        logging.getLogger(logger).setLevel(logging.ERROR)


def _empty_folder(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise DemoError(f"--out {folder}: the folder is not empty; name a new one")
    return folder


def _demonstrate(out: Path, arguments: argparse.Namespace, console: Console) -> str:
    """Run the three torchruns, show the table, and return the line that sums it up."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=1 + len(RESUMED))

        def show(line: str) -> None:
            progress.console.print(line, markup=False, highlight=False, soft_wrap=True)

        for phase, layout in (("train", SAVED), *(("resume", layout) for layout in RESUMED)):
            progress.update(task, description=f"{phase} {layout}")
            show(f"{layout}: starting {RANKS} processes to {phase}")
            _torchrun(phase, layout, out, arguments, show)
            progress.advance(task)
    saved = read_train_result(out, SAVED)
    resumed = {layout: read_resume_result(out, layout) for layout in RESUMED}
    console.print(_table(saved, resumed))
    _check(saved, resumed)
    layouts = ", ".join(map(str, RESUMED))
    exact = set.intersection(*(set(result.bit_exact) for result in resumed.values()))
    return f"resume: {SAVED} -> {layouts}: {saved.tensors} quantized tensors, {len(exact)} bit-exact"


def _torchrun(
    phase: str, layout: Layout, out: Path, arguments: argparse.Namespace, show: Callable[[str], None]
) -> None:
    """One torchrun; what its rank 0 prints goes through `show` line by line.

    Raises:
        DemoError: it failed. What it had to say about that is on stderr already.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(RANKS)]
    command += [__file__, "--phase", phase, "--tp", str(layout.tp), "--pp", str(layout.pp)]
    command += ["--out", str(out), "--weights", arguments.weights, "--scheme", arguments.scheme]
    # A CPU program on every machine, with one thread per rank: the ranks share few cores.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            show(line.rstrip("\n"))
    if process.returncode:
        raise DemoError(f"{phase} at {layout} failed with exit status {process.returncode}")


def _table(saved: TrainResult, resumed: dict[Layout, ResumeResult]) -> Table:
    steps = saved.step + 1, saved.step + len(saved.losses)
    table = Table(title=f"saved at {SAVED} after step {saved.step}, resumed at {' and '.join(map(str, resumed))}")
    table.add_column("layout")
    headings = [
        "tensors",
        "codes",
        "bit-exact",
        "exact /\nrequantized",
        *(f"loss of\nstep {s}" for s in steps),
    ]
    for heading in headings:
        table.add_column(heading, justify="right")
    size = f"{saved.tensors}", f"{saved.codes:,}"
    table.add_row(str(SAVED), *size, "saved", "", *_losses(saved.losses))
    for layout, result in resumed.items():
        report = f"{result.exact_parameters} / {result.requantized_parameters}"
        table.add_row(str(layout), *size, str(len(result.bit_exact)), report, *_losses(result.losses))
    ratio = saved.quantized_bytes / saved.bf16_bytes
    table.caption = (
        "exact / requantized: as the load reports them, parameters of all ranks\n"
        f"on disk, the model alone, all files: {saved.quantized_bytes:,} bytes;\n"
        f"the same in BF16 by Megatron's own save: {saved.bf16_bytes:,} ({ratio:.0%})"
    )
    return table


def _losses(losses: list[float]) -> tuple[str, str]:
    return f"{losses[0]:.4f}", f"{losses[-1]:.4f}"


def _check(saved: TrainResult, resumed: dict[Layout, ResumeResult]) -> None:
    """Hold the runs to what the last line says.

    Raises:
        DemoError: a tensor differs, or a loss does not go on where it was.
    """
    for layout, result in resumed.items():
        if result.differing or len(result.bit_exact) != saved.tensors:
            raise DemoError(f"{layout}: not bit-exact: {', '.join(result.differing)}")
        off = abs(result.losses[0] - saved.losses[0])
        if not off <= LOSS_TOLERANCE:  # NaN fails too
            raise DemoError(f"{layout}: loss of step {saved.step + 1} is {off:.4f} off, more than {LOSS_TOLERANCE}")


if __name__ == "__main__":
    main()
