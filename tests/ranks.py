"""The one way in which tests start ranks: functions called in processes that are forked from this
one, which has imported torch by then, so that a group of them starts in a fraction of a second."""

import copy
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import wait
from pathlib import Path

import torch

import train_gpt
from helpers import TRAINER, Run, arguments
from train_gpt import Runtime

FORKING = multiprocessing.get_context("fork")
ONE_RANK_SECONDS = 100  # after which something hangs
# of the others after one has failed: what failed there too may be told; launchers poll as well
OWN_SECONDS = 0.3
LAST_SECONDS = 20  # of the others after they were told to end


def whole_state(group):
    """A copy of what a checkpoint keeps of a group, which rank 0 gathers, on all ranks."""
    found = [group.full_state()]
    if torch.distributed.is_initialized():
        torch.distributed.broadcast_object_list(found)
    return copy.deepcopy(found[0])


def fork(world_size, function, *words):
    """Call a function on so many ranks, each a process, as a launcher would: when one fails the
    others are ended. Returns the exit status of the first that failed, or 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = [(rank, world_size, port, function, words) for rank in range(world_size)]
    processes = [FORKING.Process(target=_run_rank, args=args) for args in own]
    for process in processes:
        process.start()
    left = processes
    try:
        while left and not any(process.exitcode for process in processes):
            wait([process.sentinel for process in left])
            left = [process for process in processes if process.exitcode is None]
        code = next((process.exitcode for process in processes if process.exitcode), 0)
        for seconds in (OWN_SECONDS, LAST_SECONDS):
            until = time.monotonic() + seconds
            for process in processes:
                process.join(max(0, until - time.monotonic()))
            for process in processes:
                process.terminate()
    finally:
        for process in processes:
            process.kill()
            process.join()
    return code


def _run_rank(rank, world_size, port, function, words):
    """What a child does between its birth and its end."""
    status = 1
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # pytest-timeout's handler was inherited
        # torch makes its thread pool anew after a fork, at the first such call, and fails if two
        # threads come at once.
        torch.set_num_threads(torch.get_num_threads())
        signal.alarm(ONE_RANK_SECONDS)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
        os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        status = function(*words) or 0
    except BaseException:
        traceback.print_exc()
    finally:  # whatever happens, this process must not go on with the tests
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def speak_into(folder):
    """Send this process's words to files of its rank, past whatever pytest has put in place of the
    streams."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(Path(folder) / f"{name}{os.environ['RANK']}.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
        setattr(sys, name, open(number, "w", buffering=1, closefd=False))


def spoken(folder, name):
    """The words of all ranks to a stream, one after the other."""
    return "".join(path.read_text() for path in sorted(Path(folder).glob(f"{name}*.txt")))


def share_out():
    """Let the ranks of this process share groups of any size out, as they do those of a large
    model."""
    train_gpt.SHARE_ABOVE = 0


def acting(act, at, rank=0, name="step"):
    """What all ranks call first so that one of them calls `act` ahead of a method of Trainer at a
    step; nobody warms up."""

    def before():
        honest = getattr(train_gpt.Trainer, name)

        def method(self, number, *rest):
            if number == at and self.runtime.rank == rank:
                act()
            return honest(self, number, *rest)

        setattr(train_gpt.Trainer, name, method)
        train_gpt.warm_up = lambda *_: None

    return before


def on_ranks(world_size, work, *words):
    """What work(runtime, *words) returns on each rank of a gloo group, as a list; tensors and plain
    types."""
    with tempfile.TemporaryDirectory() as folder:

        def call():
            speak_into(folder)
            runtime = Runtime("cpu")
            torch.save(work(runtime, *words), Path(folder) / f"{runtime.rank}.pt")
            runtime.close()

        assert fork(world_size, call) == 0, spoken(folder, "std")
        paths = [Path(folder) / f"{rank}.pt" for rank in range(world_size)]
        return [torch.load(path, weights_only=False) for path in paths]


def train(cwd, values, *words, world_size=1, before=None, main=train_gpt.main):
    """The trainer's command line on so many ranks in the folder `cwd`, where logs/ is made, without
    the plot at the end. Returns a helpers.Run with the words of all ranks, one after the other.
    before: a function that each rank calls first. main: of a script."""

    def call():
        speak_into(said)
        os.chdir(cwd)
        train_gpt.plot = lambda folder: ""
        if before:
            before()
        return main([*words, *arguments(values)])

    run_id = values.get("run_id") or values.get("resume", "")
    folder, source = Path(cwd) / "logs" / str(run_id), TRAINER.read_text()
    with tempfile.TemporaryDirectory() as said:
        code = fork(world_size, call)
        return Run(code, spoken(said, "stdout"), spoken(said, "stderr"), folder, source)
