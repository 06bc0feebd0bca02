"""The trainer, whose ranks wait for each other so many seconds, as torchrun starts it:
`torchrun ... patient.py SECONDS --key value ...`."""

import datetime
import sys

import train_gpt

if __name__ == "__main__":
    train_gpt.TIMEOUT = datetime.timedelta(seconds=int(sys.argv[1]))
    sys.exit(train_gpt.record(train_gpt.main)(sys.argv[2:]))
