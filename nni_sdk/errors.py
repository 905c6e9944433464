"""Errors of the SDK. Every message starts with "cannot"."""


class SdkError(Exception):
    """Base of all errors that the SDK raises on purpose."""


class MetricInvalid(SdkError, TypeError):
    """JSON cannot represent a part of the metric. The message names the part; the training code must convert it."""


class MetricTooLong(SdkError, ValueError):
    """The metric exceeds the maximum size of a record; the training code must report less."""


class MetricNotWritten(SdkError, OSError):
    """The record could not be written: the storage is full, read-only or gone. `__cause__` is the system's error."""


class ParametersMissing(SdkError):
    """This trial's parameter file is absent or invalid."""


class EnvironmentIncomplete(SdkError):
    """`NNI_PLATFORM` marks this process as a trial, but another variable of a trial is missing or invalid."""


class ParameterUnknown(SdkError, ValueError):
    """The tuner's parameters have a key that the training code's parameters lack."""


class ParameterMistyped(SdkError, TypeError):
    """The tuner's value for a key has another type than the training code's default."""


class ParameterAbsent(SdkError, LookupError):
    """Code generated from annotations needs a value that this trial's parameters lack."""


class MetricAbsent(SdkError, LookupError):
    """A callback is to report a metric that training does not have. The message lists those that it has."""


class ObjectiveUnusable(SdkError):
    """The file with the function of this trial could be another user's: the function is not loaded."""


class SeedInvalid(SdkError, TypeError):
    """The seed for the random number generators is not a whole number."""


class CheckpointInvalid(SdkError):
    """A checkpoint was refused: its files have changed, belong to another user, or are not files; or its source is no path."""


class CheckpointTooLarge(SdkError, ValueError):
    """The checkpoint exceeds the limit; save less, or raise `max_bytes`."""


class CheckpointNotSaved(SdkError, OSError):
    """The checkpoint could not be written. `__cause__` is the system's error."""
