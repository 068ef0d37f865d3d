"""`sfumato reconstruct`: `command` says what it does, one stage or part in each other file."""

from sfumato.commands.reconstruct.command import COMMAND as COMMAND
