"""Fixtures: a repository of two records, and copies of it to tamper with."""

import shutil

import pytest

import records_helpers as made
from records import files
from records.record import Repository


@pytest.fixture
def no_pause(monkeypatch):
    """Runs of stand-ins follow each other at once."""
    monkeypatch.setattr(files.LIMITS, "pause", 0)


@pytest.fixture(scope="session")
def pristine(tmp_path_factory):
    """Two records, see made.make_two_records; not to be changed."""
    return made.make_two_records(tmp_path_factory.mktemp("pristine"))


@pytest.fixture
def repository(pristine, tmp_path):
    """A copy to tamper with."""
    shutil.copytree(pristine.root, tmp_path / "proposal")
    return Repository(tmp_path / "proposal", pristine.rules)
