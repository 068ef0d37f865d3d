"""`sfumato demo`: `command` says what it does, one stage or part in each other file."""

from sfumato.commands.demo.command import COMMAND as COMMAND
