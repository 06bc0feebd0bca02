"""Records: folders of logs that a tool can judge and that anyone can run again.

`python -m records --help` lists the commands. The modules are:

rules.json      targets, hashes, and the level of the tests: what no record changes
files.py        reading what others wrote: bounded, no links, no binaries
source.py       a script's tracks, read off its source without running it
log.py          one run's log, parsed strictly
stats.py        the tests, the intervals, and what is drawn: seeds and the order of runs
record.py       the repository, a record's folder, and every figure that follows from its logs
render.py       Markdown: a record's README and the leaderboards
judge.py        `verify`: what a record must fulfil
submit.py       `submit`
experiment.py   `run`, `ab` and `reproduce`, the commands that train
report.py       `report`, the page, and the staircase; report.html and the styles are parts of them
picture.py      `plot`, and loss.png, which the trainer draws at the end of a run
"""
