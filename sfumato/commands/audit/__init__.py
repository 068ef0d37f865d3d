"""`sfumato audit`: `command` says what it does, one stage or part in each other file."""

from sfumato.commands.audit.command import COMMAND as COMMAND
