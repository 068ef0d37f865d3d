"""The errors a user may meet. Each message says what is wrong, why, and what to do about it.

All of them are `SfumatoError`, itself a `ValueError`: the command line turns them into a message
and an exit code. Our own mistakes are `assert`s and keep their traceback.
"""


class SfumatoError(ValueError):
    """Something the user can fix."""

    code = 2
    """With which the command line ends."""

    def __init__(self, message: str = "", *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field
        """The setting, file or layer it is about; None if the message names none."""


class ConfigError(SfumatoError):
    """A setting that cannot work, named as the user typed it."""


class DataError(SfumatoError):
    """Images or labels that cannot be used; the message names the file."""


class PrivacyError(SfumatoError):
    """Going on would break the privacy guarantee, so nothing went on."""


class RunError(SfumatoError):
    """A run directory that cannot be opened, resumed or trusted."""


class DamagedRun(RunError):
    """A finished run that is no proof of anything: something in it is missing or was changed."""

    code = 3


class UnsupportedLayer(SfumatoError):
    """A layer whose per-example gradients do not exist, or cannot be had exactly."""


class SfumatoWarning(UserWarning):
    """Something that goes on, and that one should know of. It is for the screen alone: what it says
    of private images is in no file."""
