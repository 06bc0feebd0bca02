"""Records: folders of logs that a tool can judge and that anyone can run again. README.md has the
rules and the commands, and each module says at its top what it is for."""
