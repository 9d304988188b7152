"""Errors a user can mend: each says what was found, what was expected, and what to do.

Every class carries the exit code that the command line ends with. Nothing here imports the rest of the engine.
"""


class HooklineError(Exception):
    """Base of all our errors.

    Args:
        message: what was found and what was expected, with the numbers and names.
        hint: what the reader can do about it; printed on a line of its own.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n{self.hint}" if self.hint else self.message


class UsageError(HooklineError):
    """An option or an argument of ours has a value that it cannot have."""

    exit_code = 2


class InvalidRequestError(HooklineError, ValueError):
    """A request that can never be served as it stands: bad values, empty, too long.

    Args:
        message: what was found and what was expected.
        field: the request's field at fault, such as `temperature` or `prompt`.
    """

    exit_code = 2

    def __init__(self, message: str, *, field: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.field = field


class ModelNotFoundError(HooklineError):
    """No such model, file or folder, or no access to it."""

    exit_code = 3


class NoPluginError(HooklineError):
    """No installed plugin serves the checkpoint's architecture."""

    exit_code = 4


class PluginError(HooklineError):
    """A plugin that is needed is broken, incompatible, disabled or in conflict."""

    exit_code = 5


class ModelConfigError(HooklineError):
    """A field of the checkpoint's config is missing, unsound or not supported. The message names the field."""


class CheckpointError(HooklineError):
    """A weight file or its contents are not as they must be. The message names the file or the tensor."""


class ContainerError(HooklineError):
    """A container or parameter declaration is wrong, or weights do not fill it. The message names each name."""


class NotEnoughMemoryError(HooklineError):
    """The memory plan does not fit; the message holds the plan's table and settings that would fit."""

    exit_code = 6


class DeviceError(HooklineError):
    """The device, its driver, or torch for it is missing or does not work."""

    exit_code = 7


class ServerError(HooklineError):
    """The port is taken, or a server cannot be reached."""

    exit_code = 8
