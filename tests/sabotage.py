"""The trainer with one thing gone wrong, for tests that need it in processes of its own.

    python sabotage.py WHAT [--key value ...]
"""
import os
import sys
import time

import train_gpt


def die():
    """Rank 1 vanishes in its third step."""
    step = train_gpt.Trainer.step

    def dying_step(self, number, *rest):
        if self.runtime.rank == 1 and number == 2:
            os._exit(3)
        return step(self, number, *rest)

    train_gpt.Trainer.step = dying_step
    train_gpt.warm_up = lambda trainer: None


def fail():
    """Rank 1 alone finds something wrong with its input."""
    step = train_gpt.Trainer.step

    def failing_step(self, number, *rest):
        if self.runtime.rank == 1 and number == 2:
            raise train_gpt.ConfigError("only rank 1 knows what is wrong")
        return step(self, number, *rest)

    train_gpt.Trainer.step = failing_step
    train_gpt.warm_up = lambda trainer: None


def lag():
    """Rank 1 reads the corpus from a slow disk."""
    open_corpus = train_gpt.open_corpus

    def slow_open_corpus(config):
        if int(os.environ.get("RANK", 0)) == 1:
            time.sleep(3)
        return open_corpus(config)

    train_gpt.open_corpus = slow_open_corpus


if __name__ == "__main__":
    {"die": die, "fail": fail, "lag": lag}[sys.argv[1]]()
    sys.exit(train_gpt.main(sys.argv[2:]))
