"""Things that go wrong on one rank alone: functions that ranks call before the trainer, as `before`
of ranks.train."""

import os
import threading

import train_gpt

WRONG_ROW = 123_456


def before_third_step(rank, act):
    """A rank calls `act` in place of its third step; nobody warms up."""
    step = train_gpt.Trainer.step

    def acting_step(self, number, *rest):
        if self.runtime.rank == rank and number == 2:
            act()
        return step(self, number, *rest)

    train_gpt.Trainer.step = acting_step
    train_gpt.warm_up = lambda trainer: None


def die(rank=1):
    """A rank vanishes in its third step."""
    before_third_step(rank, lambda: os._exit(3))


def spoil_second_rank():
    """The hash leaves the table on rank 1, in the loader's thread alone."""
    honest = train_gpt.RowFinder.find

    def wrong(self, passages):
        rows, signs, hints = honest(self, passages)
        if threading.current_thread() is not threading.main_thread() and os.environ["RANK"] == "1":
            rows[5, 0] = WRONG_ROW
        return rows, signs, hints

    train_gpt.RowFinder.find = wrong
