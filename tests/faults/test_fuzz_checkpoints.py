"""Checkpoints that are damaged, or lack their sha256: resumed, sampled, scored, gone on with.

A sha256 says that a file is what a run has written; what else may stand in a file is not looked at.
So only what is damaged is tried here: whatever has changed, it is refused in one line."""

import hashlib
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
    "micro_batches": 1,
    "data": "data/python",
}


class Content(bytes):
    """Of a checkpoint; hypothesis need not write it out."""

    def __repr__(self):
        return f"{len(self)} bytes"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Work in a folder with a tiny corpus. Gives the content of a checkpoint after two of four
    steps; here runs have no warm-up, and a resumed one no steps."""
    folder = tmp_path_factory.mktemp("checkpoints")
    helpers.make_corpus(folder / "data" / "python", train_tokens=6000, val_tokens=1000)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(train_gpt, "warm_up", lambda trainer: None)
        patch.setattr(train_gpt, "plot", lambda folder: "")
        # the handlers here are the fuzzer's
        patch.setattr(train_gpt, "listen_for_signals", lambda: None)
        run = fuzzing.observe(lambda: train_gpt.main(helpers.arguments(TINY)))
        assert run.status == 0, (run.out, run.problem)
        content = Content((folder / "logs" / "base" / "step_000002.pt").read_bytes())
        patch.setattr(train_gpt, "train", lambda run: 1.0)
        yield content


def resume(path):
    return train_gpt.main(["--resume", path])


def go_on(path):
    changes = {"track": "continual", "first_data": "", "ngram_lr": 0.0, "init_from": path}
    words = helpers.arguments({**TINY, **changes, "steps": 2, "run_id": "next"})
    return train_gpt.main([*words, "--check"], continual.extend)


READERS = {
    "resume": resume,
    "sample": lambda path: sample.main(["--checkpoint", path, "--tokens", "1"]),
    "eval": lambda path: sample.main(["--checkpoint", path, "--eval"]),
    "continual": go_on,
}


@pytest.fixture(scope="module")
def outcome_of(base):
    """outcome_of((reader, content, sha256)): what a reader makes of these bytes as a checkpoint,
    which must be refused unless both are whole. sha256: the bytes beside it, or None."""
    path = Path("odd.pt")

    def outcome(example):
        reader, content, recorded = example
        path.write_bytes(content)
        path.with_suffix(".sha256").unlink(missing_ok=True)
        if recorded is not None:
            path.with_suffix(".sha256").write_bytes(recorded)
        kept = torch.get_rng_state()
        seen = fuzzing.status_line(fuzzing.observe(lambda: READERS[reader](path.name), lines=None))
        torch.set_rng_state(kept)
        shutil.rmtree("logs", ignore_errors=True)
        is_whole = content == base and recorded is not None and digest_of(base) in recorded
        if not seen.problem and (seen.status == 0) != is_whole:
            seen.problem = "message", f"status {seen.status} of a file that is whole: {is_whole}"
        return seen

    return outcome


def digest_of(content):
    return hashlib.sha256(content).hexdigest().encode()


def fits(content):
    """The line that save_checkpoint writes beside a file."""
    return digest_of(content) + b"  odd.pt\n"


@st.composite
def checkpoints(draw, content):
    """A reader, the bytes of a checkpoint, and those of its .sha256 or None: one of them is mostly
    damaged."""
    made = draw(st.one_of(st.just(content), fuzzing.changed_bytes(content)))
    odd = [b"", b"\n", b"\xff\xfe", b"0" * 64, b"x" * 10**6]
    recorded = draw(
        st.one_of(
            st.just(fits(content)),
            st.just(fits(content)),
            st.none(),
            st.sampled_from(odd),
            fuzzing.changed_bytes(fits(content)),
        )
    )
    return draw(st.sampled_from(sorted(READERS))), Content(made), recorded


@pytest.mark.parametrize("reader", READERS)
def test_a_sound_checkpoint_is_read(reader, base, outcome_of):
    outcome = outcome_of((reader, base, fits(base)))
    assert not outcome.problem and outcome.status == 0, (outcome.problem, outcome.out)


@pytest.mark.parametrize("recorded", [None, b"", b"\xff", b"\n", b"0" * 64])
def test_a_checkpoint_without_its_sha256_is_refused(recorded, base, outcome_of):
    for reader in READERS:
        outcome = outcome_of((reader, base, recorded))
        assert not outcome.problem and "sha256" in outcome.out, (outcome.problem, outcome.out)


CUT = [b"", b"PK\3\4", b"\0" * 1000, b"\x80\x02."]


@pytest.mark.parametrize("content", CUT, ids=range(len(CUT)))
def test_what_is_no_file_of_torch_is_refused_whatever_its_sha256(content, base, outcome_of):
    for reader in READERS:
        outcome = outcome_of((reader, content, fits(content)))
        assert not outcome.problem and "odd.pt: cannot be read" in outcome.out, outcome.problem


@pytest.mark.slow
def test_bytes_of_checkpoints(base, outcome_of):
    fuzzing.hold(checkpoints(base), outcome_of, 100)


@fuzzing.in_parts
def test_many_checkpoints(part, base, outcome_of):
    name = "checkpoints, bytes changed, by resume, sample, eval and continual"
    fuzzing.survey(name, part, checkpoints(base), outcome_of, 2_500)
