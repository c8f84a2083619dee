"""What the tests run in other processes, which import little to do so."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import torch

LONG = 300  # seconds: no test waits for it


def square(x):
    return x * x


def wait_for(*paths):
    """Wait for files that other items write, a minute at the most."""
    for _ in range(600):
        if all(path.exists() for path in paths):
            return
        time.sleep(0.1)
    raise TimeoutError(f"{paths}: nobody wrote them")


def first_ends_last(item):
    folder, i, last = item
    if i == 0:
        wait_for(folder / str(last))
    (folder / str(i)).touch()
    return i


def dies(item):
    """Item 0 kills the process that runs it so many times, the first when item 3 is through."""
    folder, i, times = item
    if i == 0:
        wait_for(folder / "3")
        deaths = folder / "deaths"
        done = len(deaths.read_text()) if deaths.exists() else 0
        if done < times:
            deaths.write_text("x" * (done + 1))
            os.kill(os.getpid(), signal.SIGKILL)
    with (folder / str(i)).open("a") as file:
        file.write("once ")
    return i


def stops_everything(item):
    """Item 1 sends `home` the signal when both items are being worked on."""
    home, how, folder, i = item
    (folder / str(i)).write_text(str(os.getpid()))
    if i == 1:
        wait_for(folder / "0")
        os.kill(home, how)
    time.sleep(LONG)


def numbers(seed):
    """Bytes of sums whose last bits depend on how they are made, and on how many threads."""
    x = torch.from_numpy(np.random.default_rng(seed).normal(size=(200, 300)).astype(np.float32))
    return x.numpy().sum(0).tobytes(), (x.T @ x).numpy().tobytes(), torch.get_num_threads()


def waits(item):
    """Item 0 is done at once, the others when there is a file `go`; all say who runs them."""
    folder, i = item
    with (folder / str(i)).open("a") as file:
        file.write(f"{os.getpid()} ")
    if i:
        wait_for(folder / "go")
    return i


def deadly(item):
    """Item 3 kills every process that runs it."""
    folder, i = item
    with (folder / str(i)).open("a") as file:
        file.write(f"{os.getpid()} ")
    if i == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return i
