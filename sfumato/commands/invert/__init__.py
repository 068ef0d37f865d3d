"""`sfumato invert`: `command` says what it does, one stage or part in each other file."""

from sfumato.commands.invert.command import COMMAND as COMMAND
