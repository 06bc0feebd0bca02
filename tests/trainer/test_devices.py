"""Chapters 2 and 10: what a run asks of its GPUs, on probes of torch's that tell of machines that are not here."""
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import ranks
import train_gpt
from helpers import make_corpus, refusal, tiny_config
from train_gpt import ConfigError, Runtime, choose_attention

CUDA = torch.device("cuda", 0)


@pytest.fixture
def gpus(monkeypatch):
    """gpus(count, capability): torch sees so many GPUs of a compute capability from now on, and no more happens."""
    def see(count, capability=(9, 0), packages=()):
        for name, value in {"is_available": count > 0, "device_count": count, "get_device_capability": capability,
                            "get_device_name": "Some GPU", "set_device": None}.items():
            monkeypatch.setattr(torch.cuda, name, lambda *words, value=value: value)
        def activate(name):
            if name not in packages:
                raise ModuleNotFoundError(f"no package {name}")
            activated.append(name)
        monkeypatch.setattr("torch.nn.attention.activate_flash_attention_impl", activate)
        return activated
    activated = []
    return see


@pytest.fixture
def device_files(monkeypatch):
    """device_files(*names): the machine has these files of NVIDIA's driver, and torch may see its GPUs."""
    def have(*names, driver="NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5"):
        glob = Path.glob
        monkeypatch.setattr(Path, "glob", lambda folder, pattern: (
            [Path("/dev") / name for name in names if re.fullmatch(pattern.replace("*", ".*"), name)]
            if folder == Path("/dev") else glob(folder, pattern)))
        line_of = train_gpt.line_of
        monkeypatch.setattr(train_gpt, "line_of", lambda path, beginning: (
            driver.partition(": ")[2] if path == "/proc/driver/nvidia/version" else line_of(path, beginning)))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return have


# ----- a GPU that torch does not see

@pytest.mark.parametrize("device", ["auto", "cuda"])
@pytest.mark.parametrize("built_for, reason", [
    ("13.0", r"its CUDA 13\.0 does not run with this driver: NVIDIA .* 550\.54\.15 .*\(CUDA 13 needs 580 or newer\)"),
    (None, r"this wheel is built without; install the one with CUDA \(PyPI.s has it\)")])
def test_a_gpu_that_torch_cannot_use_is_no_reason_to_train_on_the_cpu_in_silence(
        device, built_for, reason, gpus, device_files, monkeypatch):
    gpus(0)
    device_files("nvidiactl", "nvidia3")
    monkeypatch.setattr(torch.version, "cuda", built_for)
    with pytest.raises(ConfigError, match=rf"^device={device}: .*sees no CUDA device, for {reason}; use --device cpu"):
        Runtime(device)
    assert Runtime("cpu").device.type == "cpu"


@pytest.mark.parametrize("files, hidden", [((), None), (("nvidiactl", "nvidia-uvm"), None), (("nvidia0",), ""),
                                           (("nvidia0",), "-1")])
def test_without_a_gpu_or_with_hidden_ones_auto_is_the_cpu(files, hidden, gpus, device_files, monkeypatch):
    gpus(0)
    device_files(*files)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert Runtime("auto").device.type == "cpu"
    with pytest.raises(ConfigError, match=r"^device=cuda: .*sees no CUDA device; use --device cpu"):
        Runtime("cuda")


# ----- GPUs and processes

@pytest.mark.parametrize("local_rank, processes, count", [(0, 2, 1), (1, 2, 1), (0, 9, 8), (7, 9, 8), (3, None, 3)])
def test_every_rank_refuses_fewer_gpus_than_processes(local_rank, processes, count, gpus, monkeypatch):
    """Also those that would get one: else they wait for the others until a time-out."""
    gpus(count)
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    if processes:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    with pytest.raises(ConfigError, match=rf"processes on a node with {count} GPU\(s\): start at most one a GPU"):
        Runtime("cuda")


def test_every_rank_says_so_in_a_line_of_its_own(tiny, tmp_path):
    def one_gpu():
        torch.cuda.is_available, torch.cuda.device_count, torch.cuda.set_device = lambda: True, lambda: 1, lambda _: 0
    run = ranks.train(tmp_path, {**tiny, "device": "cuda"}, world_size=2, before=one_gpu)
    assert run.code == 2
    said = "status:error 2 processes on a node with 1 GPU(s): start at most one a GPU (--nproc-per-node)"
    assert run.lines == [said] and run.stderr.splitlines() == [f"rank 1: {said}"]


def test_nccl_is_told_its_device(gpus, monkeypatch):
    gpus(2)
    started = {}
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend, *rest, **options: started.update(
        options, backend=backend))
    monkeypatch.setattr(torch.distributed, "rendezvous", lambda *words, **options: iter([(
        torch.distributed.HashStore(), 1, 2)]))
    monkeypatch.setattr(torch.distributed, "new_group", lambda ranks, timeout, backend: backend)
    monkeypatch.setattr(torch.distributed, "monitored_barrier", lambda *words: started.update(waited=words))
    runtime = Runtime("auto")
    assert (started["backend"], started["device_id"]) == ("cpu:gloo,cuda:nccl", torch.device("cuda", 1))
    assert runtime.loader_group == "gloo" and runtime.device == torch.device("cuda", 1)
    assert started["waited"] == ("gloo", train_gpt.TIMEOUT)


# ----- what a GPU can do

@pytest.mark.parametrize("attention", ["auto", "sdpa"])
def test_a_gpu_without_bfloat16_is_told(attention, gpus):
    gpus(1, capability=(7, 5))
    with pytest.raises(ConfigError, match=r"^dtype=bfloat16: Some GPU has no bfloat16 .*\(7, 5\).*--dtype float32"):
        choose_attention(tiny_config(dtype="bfloat16", attention=attention), CUDA)
    assert choose_attention(tiny_config(dtype="float32"), CUDA) == ("sdpa", "sdpa")


@pytest.mark.parametrize("capability, packages, activated, told", [
    ((8, 0), ("FA3", "FA4"), [], r"varlen-FA2 \(no newer one for this device: \w+\)"),  # torch's own calls would fail
    ((9, 0), (), [], r"varlen-FA2 \(no FA3: ModuleNotFoundError\)"),
    ((9, 0), ("FA3",), ["FA3"], r"varlen-FA3 \(activated; only a profile proves that its kernels run\)"),
    ((10, 0), ("FA3",), [], r"varlen-FA2 \(no FA4: ModuleNotFoundError\)"),
    ((10, 0), ("FA4",), ["FA4"], r"varlen-FA4 \(activated; .*\)")])
def test_the_log_says_which_flash_attention_was_asked_for(capability, packages, activated, told, gpus):
    found = gpus(1, capability, packages)
    name, description = choose_attention(tiny_config(dtype="bfloat16"), CUDA)
    assert name == "varlen" and re.fullmatch(told, description) and found == activated


def test_flash_attention_gets_at_most_64_segments_of_the_cap(monkeypatch):
    """Of GPT-2 text, whatever a micro-batch holds: the kernel is told a longest segment that is none too short."""
    given = {}
    def varlen_attn(q, k, v, bounds, same, longest, also, scale, window_size):
        given.update(bounds=bounds, longest=longest, window=window_size)
        assert bounds is same and longest == also
        return v
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    config = train_gpt.TRACKS["fineweb"]
    q = torch.zeros(config.micro_batch_tokens, 1, 4)
    cap = train_gpt.phase_at(config, 0).cap
    starts = torch.arange(0, len(q), 640, dtype=torch.int32).tolist()  # FineWeb's mean is 690
    bounds = torch.tensor(starts + [len(q)] * (65 - len(starts)), dtype=torch.int32)
    train_gpt.varlen_attention(q, q, q, SimpleNamespace(segment_bounds=bounds), cap, None, 128, 0.1)
    assert len(given["bounds"]) - 1 == train_gpt.BOUNDS == 64
    assert given["longest"] == cap == 896 >= bounds.diff().max() and given["window"] == (127, 0)


# ----- data

def test_without_fineweb_shards_the_line_says_how_to_get_them(cli, tmp_path):
    small = dict(device="cpu", steps=2, ngram_rows=1000, num_layers=1, long_layers="()", value_embedding_layers="()",
                 model_dim=128, mlp_dim=128, micro_batch_tokens=256, val_batch_tokens=256, val_tokens=1024,
                 windows="(32, 64)")
    assert "data/fineweb10B: no *_train_*.bin shards; build them with `python data/fineweb.py`" in refusal(
        cli("--track", "fineweb", **small))
    make_corpus(tmp_path / "data" / "fineweb10B")
    for shard in (tmp_path / "data" / "fineweb10B").glob("*_val_*"):
        shard.unlink()
    assert "data/fineweb10B: no *_val_*.bin shards" in refusal(cli("--track", "fineweb", **small))
