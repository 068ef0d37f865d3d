"""`sfumato release`: `command` says what it does, one stage or part in each other file."""

from sfumato.commands.release.command import COMMAND as COMMAND
