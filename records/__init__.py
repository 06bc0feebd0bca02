"""Records: folders of logs that a tool can judge and that anyone can run again. README.md has the
rules and the commands, and each module says at its top what it is for."""

import importlib.util
import sys

for _name in ("fcntl", "numpy"):
    if importlib.util.find_spec(_name) is None:
        _remedy = "./run.sh installs what is missing into .venv; on Windows call it in WSL"
        sys.exit(f"records: no module named {_name}; {_remedy}")
