"""What can go wrong in a trial's process, and who must act. Every message starts with "cannot"."""


class SdkError(Exception):
    """Base of all errors the SDK raises on purpose."""


class MetricInvalid(SdkError, TypeError):
    """The metric holds something JSON cannot hold; the message names its place. The training code must convert it."""


class MetricTooLong(SdkError, ValueError):
    """The metric needs more bytes than one record may have; the training code must report less."""


class MetricNotWritten(SdkError, OSError):
    """The metrics file refused the record: storage full, read-only or gone. `__cause__` is the system's error."""


class ParametersMissing(SdkError):
    """This trial's parameter file is absent, or not what the keeper writes."""


class EnvironmentIncomplete(SdkError):
    """`NNI_PLATFORM` says this process is a trial, and another variable of a trial is missing or wrong."""


class ParameterUnknown(SdkError, ValueError):
    """The tuner's parameters hold a key that the training code's own do not have."""


class ParameterMistyped(SdkError, TypeError):
    """The tuner's value for a key has another type than the training code's default."""


class ParameterAbsent(SdkError, LookupError):
    """Code generated from annotations asks for a value that this trial's parameters do not have."""
