"""Time and memory of losses and penalties, forward and backward, beside torch's and MONAI's.

Every round runs every candidate once, in a new order, in one process on the same input; the table
gives medians and ratios to torch's cross-entropy. Memory is what the allocator held at most beyond
logits and labels, in units of the logits. The last table is the share that the penalty takes of a
training step of nnU-Net's own network with nnU-Net's own loss. With --functions, instead: what the
sweep's own exponential and logarithm bring beside the C library's. What an existing file of numbers
says of other parts is kept.

    python scripts/bench_losses.py                      # all shapes, 15 rounds
    python scripts/bench_losses.py --shape 8,4,192,192 --rounds 30 --json bench.json
    python scripts/bench_losses.py --functions
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from dynamic_network_architectures.architectures.unet import PlainConvUNet
from monai.losses import DiceCELoss, NACLLoss
from nnunetv2.training.loss.compound_losses import DC_and_CE_loss
from nnunetv2.training.loss.dice import MemoryEfficientSoftDiceLoss
from numba import njit
from rich.console import Console
from rich.progress import track
from rich.table import Table

from segcal.losses.cross_entropy import CrossEntropy
from segcal.losses.dice import SoftDiceLoss
from segcal.losses.ml1_ace import ML1ACE
from segcal.objective import Objective
from segcal.penalties.cals import CALS
from segcal.penalties.confidence import Confidence
from segcal.penalties.crac import CRaC
from segcal.penalties.margin import Margin
from segcal.penalties.nacl import NACL
from segcal.recipes import build
from segcal.sweep.loops import STRETCH
from segcal.sweep.vector_math import EXACT, exp32, log32

SHAPES = ((2, 5, 48, 128, 128), (8, 4, 192, 192), (2, 4, 128, 128, 128))
POOL = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def blobs(shape: tuple[int, ...], k: int, device: str) -> torch.Tensor:
    """Label maps with objects of some 16 voxels, as segmentations have them."""
    coarse = torch.randint(0, k, (shape[0], 1, *(max(1, s // 16) for s in shape[1:])))
    return F.interpolate(coarse.float(), size=shape[1:])[:, 0].long().to(device)


def seen(labels: torch.Tensor, k: int) -> torch.Tensor:
    """Logits of a network that is right, but for noise, and unsure at borders.

    About a tenth of the probabilities lie between .025 and .975. Of pure noise it would be half of
    them, which makes no loss slower but those of bins.
    """
    wanted = F.one_hot(labels.cpu(), k).movedim(-1, 1).float()
    blurred = POOL[wanted.ndim - 2](wanted, 5, stride=1, padding=2)
    return 10 * blurred + torch.randn(wanted.shape)


def candidates(k: int, device: str, axes: int) -> dict[str, Loss]:
    """All that is compared; those that are not `readable` run as a user would build them."""
    found: dict[str, Loss] = {"torch CE": F.cross_entropy}
    if axes in (2, 3):
        found["MONAI NACLLoss"] = NACLLoss(classes=k, dim=axes).to(device)
    penalties = {"NACL": NACL, "MbLS": Margin, "CALS": CALS, "CRaC": CRaC, "confidence": Confidence}
    for name, penalty in penalties.items():
        for fused in (True, False):
            term = penalty(k, fused=fused).to(device)
            if hasattr(term, "lam"):
                term.lam.fill_(0.2)
            objective = Objective({"ce": CrossEntropy(k), "penalty": term})
            found[f"CE + {name}" + ("" if fused else ", readable")] = objective
    for fused in (True, False):
        end = "" if fused else ", readable"
        found["mL1-ACE" + end] = ML1ACE(k, fused=fused)
        found["mL1-ACE, soft bins" + end] = ML1ACE(k, binning="soft", fused=fused)
    host = nnunet_loss()
    found["nnU-Net Dice + CE"] = lambda x, y: host(x, y[:, None])
    both = DiceCELoss(softmax=True, to_onehot_y=True)
    found["MONAI DiceCELoss"] = lambda x, y: both(x, y[:, None])
    for fused in (True, False):
        dice = {"dice": SoftDiceLoss(k, fused=fused), "ce": CrossEntropy(k)}
        end = "" if fused else ", Dice readable"
        found["Dice + CE" + end] = Objective(dice)
        for name, penalty in (("CRaC", CRaC), ("confidence", Confidence)):
            term = penalty(k).to(device)
            term.lam.fill_(0.2)
            found[f"Dice + CE + {name}{end}"] = Objective({**dice, "penalty": term})
    recipe = build("confidence", num_classes=k).to(device)
    recipe.terms["confidence"].lam.fill_(0.2)
    found["recipe confidence"] = recipe
    return found


def nnunet_loss() -> torch.nn.Module:
    """nnU-Net's own loss of a head, as a trainer builds it."""
    options = {"batch_dice": True, "smooth": 1e-5, "do_bg": False, "ddp": False}
    return DC_and_CE_loss(options, {}, dice_class=MemoryEfficientSoftDiceLoss)


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def run(loss: Loss, logits: torch.Tensor, labels: torch.Tensor, device: str) -> float:
    logits.grad = None
    synchronise(device)
    start = time.perf_counter()
    loss(logits, labels).backward()
    synchronise(device)
    return time.perf_counter() - start


def peak(loss: Loss, logits: torch.Tensor, labels: torch.Tensor, device: str) -> float:
    """Most bytes held at once by one forward and backward pass, over those of the logits."""
    logits.grad = None
    size = logits.numel() * logits.element_size()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(loss, logits, labels, device)
        return (torch.cuda.max_memory_allocated() - before) / size
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        run(loss, logits, labels, device)
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most / size


def bench_shape(
    shape: tuple[int, ...], rounds: int, device: str, dtype: torch.dtype, console: Console
) -> dict[str, dict[str, float]]:
    torch.manual_seed(0)
    n, k, *space = shape
    labels = blobs((n, *space), k, device)
    logits = seen(labels, k).to(device, dtype).requires_grad_()
    losses = candidates(k, device, len(space))
    times: dict[str, list[float]] = {name: [] for name in losses}
    for loss in losses.values():  # compile, warm up
        run(loss, logits, labels, device)
    order = list(losses)
    shuffle = random.Random(0)
    for _ in track(range(rounds), f"{shape}", console=console, transient=True):
        shuffle.shuffle(order)
        for name in order:
            times[name].append(run(losses[name], logits, labels, device))
    reference = statistics.median(times["torch CE"])
    monai = statistics.median(times["MONAI NACLLoss"]) if "MONAI NACLLoss" in times else None
    memory = {name: peak(loss, logits, labels, device) for name, loss in losses.items()}
    table = Table(title=f"{shape} {str(dtype)[6:]}, medians of {rounds} interleaved rounds")
    for column in ("", "ms", "fastest", "x CE", "MONAI / it", "peak memory", "beyond CE's"):
        table.add_column(column, justify="left" if not column else "right")
    result = {}
    for name, values in times.items():
        median = statistics.median(values)
        result[name] = {
            "ms": 1e3 * median,
            "fastest_ms": 1e3 * min(values),
            "ratio_to_ce": median / reference,
            "monai_to_it": monai / median if monai else float("nan"),
            "peak_memory": memory[name],
            "memory_beyond_ce": memory[name] - memory["torch CE"],
        }
        row = result[name]
        table.add_row(
            name, f"{row['ms']:.1f}", f"{row['fastest_ms']:.1f}", f"{row['ratio_to_ce']:.2f}",
            f"{row['monai_to_it']:.1f}", f"{row['peak_memory']:.2f}",
            f"{row['memory_beyond_ce']:+.2f}",
        )  # fmt: skip
    console.print(table)
    return result


def bench_step(rounds: int, device: str, console: Console) -> dict[str, float]:
    """Share of the penalty in a training step of nnU-Net's networks (default widths)."""
    table = Table(title=f"one nnU-Net training step, medians of {rounds} rounds")
    for column in ("", "step ms", "CRaC ms", "share"):
        table.add_column(column, justify="left" if not column else "right")
    shares = {}
    for name, shape, stages, conv, norm in (
        ("2d, 4 x 1 x 256 x 224", (4, 1, 256, 224), 6, torch.nn.Conv2d, torch.nn.InstanceNorm2d),
        ("3d, 2 x 1 x 40 x 56 x 40", (2, 1, 40, 56, 40), 4, torch.nn.Conv3d,
         torch.nn.InstanceNorm3d),
    ):  # fmt: skip
        k = 4
        torch.manual_seed(0)
        network = PlainConvUNet(
            shape[1], stages, [min(32 * 2**i, 512) for i in range(stages)], conv, 3,
            [1] + [2] * (stages - 1), 2, k, 2, conv_bias=True, norm_op=norm,
            norm_op_kwargs={"eps": 1e-5, "affine": True}, nonlin=torch.nn.LeakyReLU,
        ).to(device)  # fmt: skip
        optimiser = torch.optim.SGD(network.parameters(), 1e-2, momentum=0.99, nesterov=True)
        host = nnunet_loss()
        crac = CRaC(k, lambda0=0.2).to(device)
        images = torch.randn(shape, device=device)
        labels = blobs((shape[0], *shape[2:]), k, device)
        steps, penalties = [], []
        for i in range(rounds + 1):
            synchronise(device)
            start = time.perf_counter()
            optimiser.zero_grad()
            logits = network(images)
            host(logits, labels[:, None]).backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 12)
            optimiser.step()
            synchronise(device)
            step = time.perf_counter() - start
            x = logits.detach().requires_grad_()
            x.grad = torch.zeros_like(x)  # the penalty's gradient is added to the host's
            synchronise(device)
            start = time.perf_counter()
            crac(x, labels).backward()
            synchronise(device)
            if i:
                steps.append(step)
                penalties.append(time.perf_counter() - start)
        step, penalty = statistics.median(steps), statistics.median(penalties)
        shares[name] = penalty / (step + penalty)
        table.add_row(name, f"{1e3 * step:.0f}", f"{1e3 * penalty:.1f}", f"{shares[name]:.2%}")
    console.print(table)
    return shares


def nanoseconds(function: Callable[[float], float], values: np.ndarray, rounds: int) -> float:
    """Fastest time of a function per number, in a compiled loop over a stretch of them."""
    repeats = 2000

    @njit(fastmath=EXACT)
    def loop(x, out):
        for _ in range(repeats):
            for i in range(x.shape[0]):
                out[i] += function(x[i])

    times = []
    for _ in range(rounds + 1):  # the first compiles
        out = np.zeros_like(values)
        start = time.perf_counter()
        loop(values, out)
        times.append(time.perf_counter() - start)
    return 1e9 * min(times[1:]) / repeats / len(values)


def bench_functions(rounds: int, console: Console) -> dict[str, dict[str, float]]:
    """The sweep's own exponential and logarithm beside the C library's, as Numba calls them."""
    rng = np.random.default_rng(0)
    table = Table(title=f"ns per number, fastest of {rounds} rounds of {STRETCH} numbers")
    for column in ("", "own, float32", "C, float32", "C / own", "C, float64"):
        table.add_column(column, justify="left" if not column else "right")
    result = {}
    for name, own, library, values in (
        ("exp", exp32, math.exp, rng.uniform(-20, 0, STRETCH)),
        ("log", log32, math.log, rng.uniform(1, 20, STRETCH)),
    ):
        call = njit(fastmath=EXACT)(lambda x, library=library: library(x))
        single = values.astype(np.float32)
        row = {
            "own_float32": nanoseconds(own, single, rounds),
            "c_float32": nanoseconds(call, single, rounds),
            "c_float64": nanoseconds(call, values, rounds),
        }
        result[name] = {**row, "ratio": row["c_float32"] / row["own_float32"]}
        table.add_row(
            name, f"{row['own_float32']:.2f}", f"{row['c_float32']:.2f}",
            f"{result[name]['ratio']:.1f}", f"{row['c_float64']:.2f}",
        )  # fmt: skip
    console.print(table)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", action="append", help="N,K,... of the logits; may be repeated")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--step-rounds", type=int, default=5, help="0 leaves out nnU-Net's step")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--functions", action="store_true", help="exponential and logarithm alone")
    parser.add_argument("--step", action="store_true", help="nnU-Net's training step alone")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    options = parser.parse_args()
    shapes = [tuple(map(int, s.split(","))) for s in options.shape or []] or SHAPES
    console = Console(width=110)
    where = torch.cuda.get_device_name() if options.device == "cuda" else platform.processor()
    console.print(
        f"{where or platform.machine()}, {torch.get_num_threads()} threads, torch "
        f"{torch.__version__}"
    )
    found: dict[str, object] = {}
    if options.functions:
        found["functions"] = bench_functions(options.rounds, console)
    elif not options.step:
        dtype = getattr(torch, options.dtype)
        found["losses"] = {
            str(shape): bench_shape(shape, options.rounds, options.device, dtype, console)
            for shape in shapes
        }
    if options.step_rounds and not options.functions:
        found["penalty_share_of_step"] = bench_step(options.step_rounds, options.device, console)
    if options.json:  # other parts of the file stay, but the ratios of a table are of one sitting
        known = json.loads(options.json.read_text()) if options.json.exists() else {}
        options.json.write_text(json.dumps({**known, **found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
