"""Start the ranks of a run, wait for them, and say how they ended. run.sh calls this file with the
words of its command line.

There is one rank a GPU, or one a core of the CPU: 1, 2, 4 or 8 of them, which share a step evenly.
They are forks of this process, which has imported torch by then. Where a fork is unsafe, as on
macOS, they are new processes; START_METHOD=spawn asks for these anywhere.
"""

import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import continual
import train_gpt
from train_gpt import dist, torch

BUILDERS = {
    "data/english": ["data/text.py", "--corpus", "english"],
    "data/verse": ["data/text.py", "--corpus", "verse"],
    "data/fineweb10B": ["data/fineweb.py"],
}


def read(path):
    """The text of a file; none where there is no such file, as on macOS, or none for us."""
    try:
        return path.read_text("utf-8", errors="replace")
    except OSError:
        return ""


def limits(*names):
    """Yield the numbers in files of this process' control groups, v1 or v2, and of those above."""
    for line in read(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        own = Path("/sys/fs/cgroup", controllers, path.strip("/"))
        for folder in (own, *own.parents):
            found = " ".join(read(folder / name) for name in names).split()
            if found and found[0].isdigit():  # neither "max" nor -1
                yield [int(number) for number in found]


def room_on_cpu(config):
    """How many ranks have a core and memory each."""
    has_affinity = hasattr(os, "sched_getaffinity")  # Linux
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    for quota, period in limits("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us"):
        cores = min(cores, quota / period)
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):  # this system does not tell it
        memory = math.inf
    for name in ("memory.max", "memory.high", "memory.limit_in_bytes"):
        memory = min([memory, *(limit for [limit] in limits(name))])
    # Coarse: torch, the n-gram table, and the vocabulary's weights with their state
    room = memory / (2**30 + config.model_dim * (4 * config.ngram_rows + 16 * config.vocab_size))
    print(f"run.sh: {cores:g} core(s), memory for {room:.1f} rank(s)", file=sys.stderr)
    return min(cores, room)


def count_of_ranks(config):
    """How many ranks share each step of a run evenly, and have a GPU, or a core and memory each."""
    gpus = 0 if config.device == "cpu" else torch.cuda.device_count()
    most = gpus or room_on_cpu(config)
    counts = [stage.micro_batches for stage in config.stages]
    fitting = [n for n in (2, 4, 8) if n <= most and not any(count % n for count in counts)]
    return max(fitting, default=1)


def train(rank, script_main, words):
    """Train as one rank: what each process of a run does."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    sys.exit(script_main(words))


def run_ranks(ranks, *work):
    """Let so many processes train, and pass signals on to them. Returns the exit status, after a
    line that names the signal which has ended a rank, if one has."""
    os.environ["WORLD_SIZE"] = str(ranks)
    if ranks > 1:
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port)}
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    method = os.environ.get("START_METHOD") or ("fork" if sys.platform == "linux" else "spawn")
    options = {"args": work, "nprocs": ranks, "join": False, "start_method": method}
    group = torch.multiprocessing.start_processes(train, **options)

    def pass_on(number, frame):
        """Ask the ranks to end after their step. At a second signal they end at once."""
        for process in group.processes:
            process.terminate()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, pass_on)
    try:
        while not group.join(timeout=1, grace_period=600):  # a rank may still write a checkpoint
            pass
    except torch.multiprocessing.ProcessExitedException as error:
        if error.exit_code < 0:  # a rank that ended by itself has said why
            reason = ": killed, perhaps by the system for memory" if error.exit_code == -9 else ""
            print(f"status:error rank {error.error_index} was ended by {error.signal_name}{reason}")
        return max(1, error.exit_code)
    return 0


def main(words):
    """Returns the exit status of a run: of its data's builder, of its script, or of its ranks."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # a fork must not find CUDA started
    script = continual if words[:2] == ["--track", "continual"] else train_gpt
    try:
        config, _ = train_gpt.resumed(train_gpt.parse_command_line(words))
    except (train_gpt.ConfigError, OSError):
        return script.main(words)  # which answers --check and a wrong call
    script = continual if config.track == "continual" else train_gpt
    if config.data in BUILDERS and not Path(config.data, "manifest.json").exists():
        builder = [sys.executable, *BUILDERS[config.data]]
        status = subprocess.call(builder, stdout=sys.stderr)
        if status:
            return status
    return run_ranks(count_of_ranks(config), script.main, words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
