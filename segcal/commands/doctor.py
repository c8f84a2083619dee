"""``segcal doctor``: whether segcal works here."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from segcal.commands.console import open_console, say
from segcal.commands.errors import user_errors

NO_GPU = 3
"""Exit code: there is no GPU to look at."""


class GpuOrCpu(str, Enum):
    """What is looked at."""

    CUDA = "cuda"
    CPU = "cpu"


def doctor(
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Check and time the kernels on this machine's GPU.")
    ] = False,
    device: Annotated[
        GpuOrCpu, typer.Option(help="cpu rehearses --gpu on tiny shapes, without a GPU.")
    ] = GpuOrCpu.CUDA,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="JSON file for everything that is found.")
    ] = None,
    part: Annotated[
        list[str] | None, typer.Option(help="Run this part only; may be repeated.")
    ] = None,
    minutes: Annotated[float, typer.Option(min=0.2, help="Minutes that all parts may take.")] = 8.0,
) -> None:
    """Check that segcal's fast paths work here and, with --gpu, that the GPU computes correctly.

    Example: segcal doctor --gpu -o gpu.json

    With --gpu, nine parts run one after the other, each in a process of its own, so that a failed
    part does not end the others: equality with the readable version in plain PyTorch, tests,
    compilations, times and memory, two processes, a training compared with the CPU's, epochs of
    the published U-Net, steps of nnU-Net, and compute-sanitizer. segcal nnunet doctor finds what
    would stop a training with nnU-Net.

    segcal's kernels have never run on a GPU: they are tested by an interpreter and by compiling
    them. Please report what this command finds, whether right or wrong.

    Exit code 0: nothing is wrong. 1: something is wrong, or the time was too short. 3: no GPU.
    """
    console = open_console()
    import torch

    found_gpu = torch.cuda.is_available()
    if not gpu:
        _say_fast_paths(found_gpu)
        return
    if device is GpuOrCpu.CUDA and not found_gpu:
        built = torch.version.cuda or "no CUDA"
        say(
            console,
            f"No CUDA device: torch {torch.__version__} (built for {built}) finds no GPU that it "
            "can use. nvidia-smi says whether the driver sees one. To rehearse the check without "
            "one: segcal doctor --gpu --device cpu",
            "red",
        )
        raise typer.Exit(NO_GPU)
    from segcal.gpu.checking import check

    with user_errors({"part": "--part"}):
        found = check(
            device.value,
            report=output,
            only=part or (),
            seconds=60 * minutes,
            tiny=device is GpuOrCpu.CPU,
            say=lambda text: say(console, text),
        )
    if output is not None:
        say(console, f"Written: {output}")
    wrong = [n for n, p in found["parts"].items() if p["status"] not in ("passed", "skipped")]
    if wrong:
        say(console, f"Not as it should be: {', '.join(wrong)}.", "red")
        raise typer.Exit(1)
    say(console, "Nothing is wrong." if found_gpu else "The rehearsal ran to its end.")


def _say_fast_paths(found_gpu: bool) -> None:
    """Compile the loops where they can be, and say where that is."""
    import torch

    from segcal import __version__
    from segcal.penalties.confidence import Confidence
    from segcal.penalties.nacl import NACL
    from segcal.sweep.fused import supports

    console = open_console()
    say(console, f"segcal {__version__}, torch {torch.__version__}")
    for name in ("cpu", "cuda") if found_gpu else ("cpu",):
        logits = torch.zeros(1, 2, 8, 8, device=name)
        terms = (penalty(2).to(name).swept() for penalty in (NACL, Confidence))
        works = all(term is not None and supports(logits, term) for term in terms)
        say(console, f"{name}: {'fast path works' if works else 'slower readable version'}")
    if found_gpu:
        say(console, f"GPU: {torch.cuda.get_device_name(0)}; segcal doctor --gpu checks it")
    else:
        say(console, "GPU: none that torch can use")
