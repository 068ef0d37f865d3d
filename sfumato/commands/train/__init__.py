"""`sfumato train`: `command` says what it does, one stage or part in each other file."""

from sfumato.commands.train.command import COMMAND as COMMAND
