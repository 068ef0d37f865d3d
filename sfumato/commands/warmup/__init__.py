"""`sfumato warmup`: `command` says what it does, one stage or part in each other file."""

from sfumato.commands.warmup.command import COMMAND as COMMAND
