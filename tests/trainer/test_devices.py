"""What a run asks of its GPUs, on probes of torch's that tell of machines that are not here."""

import contextlib
import importlib.util
import inspect
import os
import re
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention.varlen import varlen_attn

import train_gpt
from helpers import tiny_config

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


@pytest.fixture
def gpus(monkeypatch):
    """gpus(count, capability): from now on torch sees so many GPUs; nothing is in the environment.
    has_driver: whether the machine has NVIDIA's."""
    exists = os.path.exists

    def see(count, capability=(9, 0), has_driver=True):
        driver = {"/proc/driver/nvidia": has_driver}
        monkeypatch.setattr(os.path, "exists", lambda path: driver.get(path, exists(path)))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        answers = {"is_available": count > 0, "device_count": count, "set_device": None}
        answers |= {"get_arch_list": ["sm_75", "sm_80", "sm_90", "compute_90"]}
        answers |= {"get_device_name": "a GPU"}
        for name, answer in {**answers, "get_device_capability": capability}.items():
            monkeypatch.setattr(torch.cuda, name, lambda *words, answer=answer: answer)

    return see


UNSEEN = (
    r"^device=auto: torch \S+ sees 0 GPUs, .* update a driver below 580 .*/cu126, .* --device cpu$"
)


@pytest.mark.parametrize(
    "device, count, has_driver, variables, expected",
    [
        ("auto", 0, False, {}, CPU),
        ("auto", 1, True, {}, CUDA),
        ("cpu", 1, True, {}, CPU),
        ("cuda", 0, False, {}, "^device=cuda: .*sees 0 GPUs.* --device cpu"),
        ("auto", 3, True, {"LOCAL_RANK": "3"}, "sees 3 GPUs.*start one process a GPU"),
        ("cpu", 0, False, {"RANK": "1"}, "^RANK=1, .*WORLD_SIZE=1: .* or unset RANK"),
        ("cpu", 0, False, {"RANK": "-1"}, "^RANK=-1, "),
        ("cpu", 0, False, {"WORLD_SIZE": "0"}, "WORLD_SIZE=0: "),
        ("cpu", 0, False, {"LOCAL_RANK": "-1"}, " LOCAL_RANK=-1, "),
        # GPUs that torch does not see are no reason to train on the CPU, unless they are hidden
        # from it, or a CPU is asked for.
        ("auto", 0, True, {}, UNSEEN),
        ("auto", 0, True, {"CUDA_VISIBLE_DEVICES": "0"}, UNSEEN),
        ("cpu", 0, True, {}, CPU),
        ("auto", 0, True, {"CUDA_VISIBLE_DEVICES": ""}, CPU),
        ("auto", 0, True, {"CUDA_VISIBLE_DEVICES": "-1"}, CPU),
    ],
)
def test_the_device_of_a_process(device, count, has_driver, variables, expected, gpus, monkeypatch):
    gpus(count, has_driver=has_driver)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if isinstance(expected, str):
        with pytest.raises(train_gpt.ConfigError, match=expected):
            train_gpt.Runtime(device)
    else:
        assert train_gpt.Runtime(device).device == expected


@pytest.mark.parametrize(
    "capability, has_code",
    [
        ((7, 5), True),
        ((8, 6), True),  # by code for an older card of its generation
        ((9, 0), True),
        ((12, 0), True),  # by the intermediate language
        ((6, 1), False),
    ],
)
def test_a_card_that_the_wheel_has_no_code_for_is_refused(capability, has_code, gpus):
    gpus(1, capability)
    told = r"^a GPU: torch \S+ has no code for capability \(\d, \d\); take torch's wheel .*/cu126$"
    with contextlib.nullcontext() if has_code else pytest.raises(train_gpt.ConfigError, match=told):
        assert train_gpt.choose_device("auto", 0) == CUDA


def test_a_card_newer_than_the_wheel_is_refused(gpus, monkeypatch):
    gpus(1, (12, 0))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_90"])
    with pytest.raises(train_gpt.ConfigError, match="take a newer wheel of torch$"):
        train_gpt.choose_device("auto", 0)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_operations_on_the_host_get_one_thread(device, gpus, monkeypatch):
    """Unless the user says how many."""
    gpus(1)
    counts = []
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    train_gpt.Runtime(device)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    train_gpt.Runtime(device)
    assert counts == [1]


# ----- memory


def first_of(world_size):
    """Stands for the Runtime of the first rank, for code that asks only who it is."""
    return SimpleNamespace(rank=0, world_size=world_size)


def test_the_estimate_counts_the_state_that_ranks_share():
    """Against the tensors of a trainer: half of them is what a rank of two saves."""
    config = tiny_config(dtype="bfloat16", mean_share=0.5)
    trainer = train_gpt.Trainer(config, train_gpt.Runtime("cpu"))
    states = [state for group in trainer.optimizer.groups[1:] for state in group.state.values()]
    shared = sum(tensor.nbytes for state in states for tensor in state.values())
    one, two, four = (train_gpt.peak_memory(config, first_of(count)) for count in (1, 2, 4))
    saved = 2**30 * (one - two)
    of_pass = 2**30 * (two - four)
    assert saved - of_pass == pytest.approx(shared / 4, rel=0.05)


@pytest.mark.parametrize(
    "world_size, free, said",
    [
        (1, 79, r"memory: \S+ GiB by estimate, 79.0 are free$"),
        (1, 31, "; add --micro-batches-a-pass 1$"),
        (1, 23.3, "; add --micro-batches-a-pass 1 --ngram-rows 2097152$"),
        (1, 5, "; take more GPUs, or larger ones$"),
        (8, 31, r"memory: \S+ GiB by estimate, 31.0 are free$"),
        (8, 22.3, "; add --micro-batches-a-pass 2$"),
    ],
)
def test_a_check_says_with_which_options_a_run_fits(world_size, free, said):
    """The peaks of fineweb with eleven layers were, by an audit of generated code: 37 GiB and the
    context on one GPU, 26 with passes of one micro-batch, 24 to 26 on each of eight."""
    config = train_gpt.TRACKS["fineweb"]
    try:
        line = train_gpt.check_memory(config, first_of(world_size), free)
    except train_gpt.ConfigError as error:
        line = str(error)
    assert re.search(said, line)


# ----- types and back ends


@pytest.mark.parametrize(
    "capability, has_package, dtype, attention, device, expected",
    [
        ((8, 0), True, "bfloat16", "auto", CUDA, "varlen-FA2"),
        ((9, 0), False, "bfloat16", "auto", CUDA, "varlen-FA2"),
        ((9, 0), True, "bfloat16", "auto", CUDA, "varlen-FA3"),
        ((10, 0), True, "bfloat16", "auto", CUDA, "varlen-FA2"),
        ((7, 5), False, "bfloat16", "auto", CUDA, "sdpa"),
        ((9, 0), False, "bfloat16", "auto", CPU, "sdpa"),
        ((9, 0), False, "bfloat16", "sdpa", CUDA, "sdpa"),
        ((9, 0), False, "float32", "auto", CUDA, "sdpa"),
    ],
)
def test_flash_attention_is_for_bfloat16_on_cuda(
    capability, has_package, dtype, attention, device, expected, gpus, monkeypatch
):
    """Its third version for a Hopper that has the package."""
    gpus(1, capability)
    activated, find_spec = [], importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name: has_package if name == "flash_attn_interface" else find_spec(name),
    )
    activate = "torch.nn.attention.activate_flash_attention_impl"
    monkeypatch.setattr(activate, activated.append)
    config = tiny_config(dtype=dtype, attention=attention)
    back_end, description = train_gpt.choose_attention(config, device)
    is_third = expected.endswith("FA3")
    assert description == expected and activated == ["FA3"] * is_third
    assert isinstance(back_end, train_gpt.BlockedAttention) == (expected == "sdpa")
    assert getattr(back_end, "is_fused", True) == (device == CUDA)
    has_choice = "num_splits" in inspect.signature(varlen_attn).parameters  # not in torch 2.11
    assert getattr(back_end, "options", {}) == (
        {"num_splits": 1} if is_third and has_choice else {}
    )
