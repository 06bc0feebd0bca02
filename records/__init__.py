"""Records: folders of logs that a tool can judge and that anyone can run again.

`python -m records --help` lists the commands. The modules are:

rules.json      targets, hashes, and the level of the tests: what no record changes
files.py        reading what others wrote: bounded, no links, no binaries
source.py       a script's tracks, read off its source without running it
log.py          one run's log, parsed strictly
record.py       the repository, a record's folder, and every figure that follows from its logs
stats.py        the tests and intervals
judge.py        `verify`: what a record must fulfil
render.py       a record's README and the leaderboards
submit.py       `submit`
compare.py      `diff`
experiment.py   `run`, `ab` and `reproduce`; the last two alone run code from a record
ledger.py       counting the runs that are started for records
curves.py       `plot` and `report` (report.css and report.js are parts of the page)
picture.py      loss.png, which the trainer draws at the end of a run
"""
