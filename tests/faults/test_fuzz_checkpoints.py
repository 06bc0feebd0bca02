"""Checkpoints that are damaged, or odd with a sha256 that fits, or without one: resumed, sampled, scored, gone on
with."""

import copy
import hashlib
import io
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st

import continual
import fuzzing
import helpers
import sample
import train_gpt

TINY = {
    **helpers.TINY,
    "save_every": 2,
    "run_id": "base",
    "val_tokens": 512,
    "micro_batches": ((0.0, 1),),
}


class Content(bytes):
    """Of a checkpoint; hypothesis need not write it out."""

    def __repr__(self):
        return f"{len(self)} bytes"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Work in a folder with a tiny corpus. Gives the content of a checkpoint after two of four steps; here runs have no
    warm-up, and nothing follows their last step."""
    folder = tmp_path_factory.mktemp("checkpoints")
    helpers.make_corpus(folder / "data" / "python", train_tokens=6000, val_tokens=1000)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(train_gpt, "warm_up", lambda trainer: None)
        patch.setattr(train_gpt, "finish", lambda run, steps: 1.0)
        patch.setattr(train_gpt, "plot", lambda folder: "")
        patch.setattr(
            train_gpt.signal, "signal", lambda *_: None
        )  # the handlers here are the fuzzer's
        run = fuzzing.observe(
            lambda: train_gpt.main(helpers.arguments({**TINY, "data": "data/python"}))
        )
        assert run.status == 0, (run.out, run.problem)
        yield Content((folder / "logs" / "base" / "step_000002.pt").read_bytes())


def resume(path):
    return train_gpt.main(["--resume", path])


def go_on(path):
    words = {
        **TINY,
        "track": "continual",
        "data": "data/python",
        "first_data": "",
        "ngram_lr": 0.0,
        "init_from": path,
        "val_sha256": "",
        "steps": 2,
        "run_id": "next",
    }
    return train_gpt.main([*helpers.arguments(words), "--check"], continual.extend)


READERS = {
    "resume": resume,
    "sample": lambda path: sample.main(["--checkpoint", path, "--tokens", "1"]),
    "eval": lambda path: sample.main(["--checkpoint", path, "--eval"]),
    "continual": go_on,
}


@pytest.fixture(scope="module")
def outcome_of(base):  # for it works in that folder
    """outcome_of((reader, content, sha256)): what a reader makes of these bytes as a checkpoint; sha256: or None."""
    path = Path("odd.pt")

    def outcome(example):
        reader, content, recorded = example
        path.write_bytes(content)
        path.with_suffix(".sha256").unlink(missing_ok=True)
        if recorded is not None:
            path.with_suffix(".sha256").write_bytes(recorded)
        kept = torch.get_rng_state()
        seen = fuzzing.observe(lambda: READERS[reader](path.name), lines=None)
        torch.set_rng_state(kept)
        shutil.rmtree("logs", ignore_errors=True)
        return fuzzing.status_line(seen)

    return outcome


def fits(content):
    """The line that save_checkpoint writes beside a file."""
    return f"{hashlib.sha256(content).hexdigest()}  odd.pt\n".encode()


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def odd_tensor(tensor, how):
    """Another tensor in a tensor's place."""
    made = {
        "nan": lambda: torch.full_like(tensor.float(), torch.nan).to(tensor.dtype),
        "empty": lambda: tensor[:0],
        "scalar": lambda: torch.tensor(1.0),
        "longer": lambda: torch.cat([tensor, tensor]),
        "flat": lambda: tensor.reshape(-1),
        "double": lambda: tensor.double(),
        "bool": lambda: tensor > 0,
        "negative": lambda: -tensor if tensor.dtype.is_signed else tensor,
        "sparse": lambda: tensor.to_sparse(),
        "meta": lambda: tensor.to("meta"),
        "huge": lambda: (tensor.double() * 1e300).to(tensor.dtype),
        "complex": lambda: tensor.to(torch.complex64),
    }[how]
    try:
        return made()
    except (RuntimeError, NotImplementedError, ValueError):  # not of every tensor
        return torch.zeros(0)


TENSORS = [
    "nan",
    "empty",
    "scalar",
    "longer",
    "flat",
    "double",
    "bool",
    "negative",
    "sparse",
    "meta",
    "huge",
    "complex",
]


def like(tensor, how):
    """A tensor of the same type and shape with other values, finite ones if it holds floats."""
    if not tensor.dtype.is_floating_point:
        low, high = torch.iinfo(tensor.dtype).min, torch.iinfo(tensor.dtype).max
        return torch.full_like(tensor, {"large": high, "zero": 0, "one": 1}.get(how, low))
    made = {
        "large": lambda: torch.full_like(tensor, torch.finfo(tensor.dtype).max),
        "negative": lambda: -tensor,
        "one large": lambda: (
            tensor.clone().index_fill_(0, torch.tensor([0]), 3e38) if len(tensor) else tensor
        ),
        "small": lambda: torch.full_like(tensor, 1e-45),
        "minus one": lambda: torch.full_like(tensor, -1.0),
        "zero": lambda: torch.zeros_like(tensor),
        "one": lambda: torch.ones_like(tensor),
    }
    return made[how]()


LIKE = ["large", "one large", "negative", "small", "minus one", "zero", "one"]


@st.composite
def structures(draw, content):
    """A checkpoint in which some parts are missing, others, or new, or have other values; of the configuration more
    often than by chance."""
    value = torch.load(io.BytesIO(content), weights_only=True)
    only_values = draw(st.booleans())
    for _ in range(draw(st.integers(1, 3))):
        paths = list(fuzzing.paths_in(value))
        top = draw(
            st.sampled_from(
                ["config", "config", "groups", "model", "loader", "train_seconds", "step"]
            )
        )
        path = draw(st.sampled_from([path for path in paths if path[:1] == (top,)] or paths))
        how = draw(
            st.sampled_from(["drop", "odd", "odd", "odd", "tensor", "tensor", "rename", "deep"])
        )
        odd, kind = draw(fuzzing.ODD_JSON), draw(st.sampled_from(TENSORS))
        same, number = draw(st.sampled_from(LIKE)), draw(st.integers(-2, 70) | fuzzing.ODD_INT)
        real = draw(st.floats(0, allow_infinity=False))

        def other(old):  # of the same type
            return (
                like(old, same)
                if isinstance(old, torch.Tensor)
                else not old
                if isinstance(old, bool)
                else number
                if isinstance(old, int)
                else real
                if isinstance(old, float)
                else old
            )

        if only_values:
            value = fuzzing.replaced(value, path, other)
            continue

        def new(old):
            if how == "drop":
                return fuzzing.DROP
            if how == "tensor" and isinstance(old, torch.Tensor):
                return odd_tensor(old, kind)
            if how == "rename" and isinstance(old, dict):
                return {str(odd): it for it in old.values()}
            return [[old]] if how == "deep" else odd

        value = fuzzing.replaced(value, path, new)
        value = {} if value is fuzzing.DROP else value
    try:
        return saved(value)
    except (UnicodeEncodeError, RuntimeError, OverflowError):  # what cannot be written
        return saved(odd) if not isinstance(odd, str) else b""


@st.composite
def checkpoints(draw, content, how):
    """A reader, the bytes of a checkpoint, and those of its .sha256 or None. how: bytes or structure are changed."""
    made = draw(
        st.one_of(st.just(content), fuzzing.changed_bytes(content))
        if how == "bytes"
        else structures(content)
    )
    recorded = draw(
        st.one_of(
            st.just(fits(made)),
            st.just(fits(made)),
            st.just(fits(made)),
            st.none(),
            st.just(fits(content)),
            st.sampled_from([b"", b"\n", b"\xff\xfe", b"0" * 64, b"x" * 10**6]),
            fuzzing.changed_bytes(fits(made)),
        )
    )
    return draw(st.sampled_from(sorted(READERS))), made, recorded


@pytest.mark.parametrize("reader", READERS)
def test_a_sound_checkpoint_is_read(reader, base, outcome_of):
    outcome = outcome_of((reader, base, fits(base)))
    assert not outcome.problem and outcome.status == 0, (outcome.problem, outcome.out)


def changed(content, path, new):
    value = torch.load(io.BytesIO(content), weights_only=True)
    return saved(fuzzing.replaced(copy.deepcopy(value), path, lambda _: new))


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    "path, new",
    [
        (("config",), None),
        (("config", "track"), []),
        (("config", "steps"), "4"),
        (("config", "steps"), 10**400),
        (("config", "data"), "\0"),
        (("config", "data"), "a\nb"),
        (("config", "windows"), ((0.0, (64, 128), 1),)),
        (("model",), fuzzing.DROP),
        (("groups",), {}),
        (("loader", "piece"), 10**9),
        (("loader", "shard"), -1),
        (("loader", "offset"), 0.5),
        (("loader", "offset"), 10**400),
        (("step",), -1),
        (("step",), 10**9),
        (("step",), 2.5),
        (("rng",), torch.zeros(3)),
        (("rng",), torch.zeros(5056, dtype=torch.uint8)),
        (("groups", "matrices"), fuzzing.DROP),
        (("loader",), {}),
        (("train_seconds",), "x"),
        (("train_seconds",), float("nan")),
        (("config", "run_id"), "../x"),
        (("format",), None),
    ],
    ids=lambda value: ascii(value)[:40],
)
def test_a_checkpoint_that_was_hard(reader, path, new, base, outcome_of):
    content = changed(base, path, new)
    outcome = outcome_of((reader, content, fits(content)))
    assert not outcome.problem, outcome.problem


@pytest.mark.parametrize("recorded", [None, b"", b"\xff", b"\n", b"0" * 64])
def test_a_checkpoint_without_its_sha256_is_refused(recorded, base, outcome_of):
    for reader in READERS:
        outcome = outcome_of((reader, base, recorded))
        assert not outcome.problem and outcome.status == 2 and "sha256" in outcome.out, (
            outcome.problem,
            outcome.out,
        )


def test_bytes_of_checkpoints(base, outcome_of):
    fuzzing.hold(checkpoints(base, "bytes"), outcome_of, 60)


def test_structures_of_checkpoints(base, outcome_of):
    fuzzing.hold(checkpoints(base, "structure"), outcome_of, 60)


@fuzzing.in_parts
@pytest.mark.parametrize("how", ["bytes", "structure"])
def test_many_checkpoints(how, part, base, outcome_of):
    fuzzing.survey(
        f"checkpoints, {how} changed, by resume, sample, eval and continual",
        part,
        checkpoints(base, how),
        outcome_of,
        2_500,
    )
