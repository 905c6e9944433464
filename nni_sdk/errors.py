"""Errors of the SDK, by who must act. Every message starts with "cannot"."""


class SdkError(Exception):
    """Base of all errors that the SDK raises on purpose."""


class MetricInvalid(SdkError, TypeError):
    """JSON cannot hold a part of the metric; the message names its place. The training code must convert it."""


class MetricTooLong(SdkError, ValueError):
    """The metric exceeds the size of one record; the training code must report less."""


class MetricNotWritten(SdkError, OSError):
    """The record could not be written to the metrics file: storage full, read-only or gone. `__cause__` is the system's error."""


class ParametersMissing(SdkError):
    """This trial's parameter file is absent or invalid."""


class EnvironmentIncomplete(SdkError):
    """`NNI_PLATFORM` marks this process as a trial, but another variable of a trial is missing or invalid."""


class ParameterUnknown(SdkError, ValueError):
    """The tuner's parameters have a key that the training code's own do not have."""


class ParameterMistyped(SdkError, TypeError):
    """The tuner's value for a key has another type than the training code's default."""


class ParameterAbsent(SdkError, LookupError):
    """Code generated from annotations needs a value that this trial's parameters do not have."""
