"""What a run asks of its GPUs, on probes of torch's that tell of machines that are not here."""

import importlib.util
import os

import numpy as np
import pytest
import torch

import train_gpt
from helpers import passage_of, tiny_config

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


@pytest.fixture
def gpus(monkeypatch):
    """gpus(count, capability): from now on torch sees so many GPUs, on a machine that has NVIDIA's
    driver if it sees any, unless told otherwise. Returns the list of the FlashAttention packages
    that are activated."""
    activated = []
    exists = os.path.exists

    def see(count, capability=(9, 0), has_driver=None):
        driver = {"/proc/driver/nvidia": count > 0 if has_driver is None else has_driver}
        monkeypatch.setattr(os.path, "exists", lambda path: driver.get(path, exists(path)))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        answers = {
            "is_available": count > 0,
            "device_count": count,
            "get_device_capability": capability,
            "set_device": None,
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, lambda *words, answer=answer: answer)

        activate = "torch.nn.attention.activate_flash_attention_impl"
        monkeypatch.setattr(activate, activated.append)
        return activated

    return see


# ----- GPUs and processes


def test_auto_takes_a_gpu_where_there_is_one(gpus):
    gpus(0)
    assert train_gpt.Runtime("auto").device == CPU
    with pytest.raises(train_gpt.ConfigError, match=r"^device=cuda: .*sees 0 GPUs.* --device cpu"):
        train_gpt.Runtime("cuda")
    gpus(1)
    assert train_gpt.Runtime("auto").device == CUDA and train_gpt.Runtime("cpu").device == CPU


def test_gpus_that_torch_does_not_see_are_no_reason_to_train_on_the_cpu(gpus, monkeypatch):
    """Unless they are hidden from it, or a CPU is asked for."""
    gpus(0, has_driver=True)
    words = r"^device=auto: torch \S+ sees 0 GPUs, .* update a driver .* --device cpu$"
    with pytest.raises(train_gpt.ConfigError, match=words):
        train_gpt.Runtime("auto")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(train_gpt.ConfigError, match=words):
        train_gpt.Runtime("auto")
    assert train_gpt.Runtime("cpu").device == CPU
    for nothing in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", nothing)
        assert train_gpt.Runtime("auto").device == CPU


def test_a_process_without_a_gpu_of_its_own_is_refused(gpus, monkeypatch):
    gpus(3)
    monkeypatch.setenv("LOCAL_RANK", "3")
    with pytest.raises(train_gpt.ConfigError, match="sees 3 GPUs.*start one process a GPU"):
        train_gpt.Runtime("auto")


def test_nccl_is_told_its_device(gpus, monkeypatch):
    gpus(2)
    started = {}
    for name in ("RANK", "LOCAL_RANK", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("MASTER_ADDR", "here")
    store = torch.distributed.HashStore()
    answers = {
        "init_process_group": lambda **options: started.update(options),
        "rendezvous": lambda *words, **options: iter([(store, 1, 2)]),
        "new_group": lambda timeout, backend: backend,
        "monitored_barrier": lambda *words: started.update(waited=words),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.distributed, name, answer)
    runtime = train_gpt.Runtime("auto")
    assert started["backend"] == "cpu:gloo,cuda:nccl"
    assert started["device_id"] == runtime.device == torch.device("cuda", 1)
    assert runtime.loader_group == "gloo" and started["waited"] == ("gloo", train_gpt.TIMEOUT)


# ----- types and back ends


@pytest.mark.parametrize(
    "capability, has_fa3, version",
    [((8, 0), True, "FA2"), ((9, 0), False, "FA2"), ((9, 0), True, "FA3"), ((10, 0), True, "FA2")],
)
def test_flash_attention_3_is_taken_on_a_hopper_that_has_its_package(
    capability, has_fa3, version, gpus, monkeypatch
):
    activated = gpus(1, capability)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name: has_fa3 if name == "flash_attn_interface" else find_spec(name),
    )
    back_end, description = train_gpt.choose_attention(tiny_config(dtype="bfloat16"), CUDA)
    assert isinstance(back_end, train_gpt.VarlenAttention) and description == f"varlen-{version}"
    assert activated == ["FA3"] * (version == "FA3")
    assert back_end.options == ({"num_splits": 1} if version == "FA3" else {})


def test_flash_attention_is_for_bfloat16_on_cuda(gpus):
    for capability, dtype, attention, device in (
        ((9, 0), "float32", "auto", CUDA),
        ((9, 0), "bfloat16", "sdpa", CUDA),
        ((7, 5), "bfloat16", "auto", CUDA),
        ((9, 0), "bfloat16", "auto", CPU),
    ):
        gpus(1, capability)
        config = tiny_config(dtype=dtype, attention=attention)
        back_end, description = train_gpt.choose_attention(config, device)
        assert isinstance(back_end, train_gpt.BlockedAttention) and description == "sdpa"


@pytest.mark.parametrize("count", [1, 2])
def test_flash_attention_is_told_the_segments_and_the_cap(count, monkeypatch):
    """Of FineWeb, whose mean is 690 tokens: no segment is longer than what it is told, in layers
    with `count` positions a token."""
    given = []
    kernel = "torch.nn.attention.varlen.varlen_attn"
    monkeypatch.setattr(kernel, lambda q, k, v, *told, **options: given.extend([*told, options]))
    config = train_gpt.TRACKS["fineweb"]
    length = config.micro_batch_tokens
    lows = [*range(0, length, 640)]
    spans = [*zip(lows, [*lows[1:], length], strict=True)]
    passage = passage_of(np.zeros(length + 1, np.uint16), spans)
    micro_batch = train_gpt.make_pass([passage], tiny_config(copy_orders=()), CPU)
    phase = train_gpt.training_phase(config, 0)
    back_end = train_gpt.VarlenAttention()
    mask = back_end.mask(micro_batch, 128, count, phase, config.torch_dtype)
    q = torch.zeros(count * length, 1, 4)
    back_end.attend(q, q, q, mask, 0.1)
    bounds, same, longest, also, options = given
    assert bounds is same and bounds.dtype == torch.int32
    assert bounds.tolist() == [count * low for low in lows + [length] * (128 - len(lows))]
    assert longest == also == 896 * count >= bounds.diff().max()
    assert options == {"scale": 0.1, "window_size": (127, 0)}


def test_a_pass_of_evaluation_has_room_for_its_documents():
    """A pass of 65,536 tokens has 138 at most, and an empty one takes the same code."""
    for count in (1, 138):
        text = (np.arange(2**16 + 1) % (2**16 // count)).astype(np.uint16)
        passage = train_gpt.contiguous_passage(text, 0, 0, 2**16)
        micro_batch = train_gpt.make_pass([passage], tiny_config(copy_orders=()), CPU)
        assert micro_batch.segment_bounds.shape == (512,)


# ----- the compiler


def test_an_error_of_the_compiler_tells_how_to_go_without(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    broken = torch._dynamo.exc.BackendCompilerFailed(str, OSError("a kernel"), None)
    status, said = train_gpt.ending_of(broken)
    assert status == 2
    for word in ("a kernel", "--compile false", str(tmp_path)):
        assert word in said
