"""Exit codes: OpenPAI's codes for the end of a container, and their derivation.

`container_exit` maps the exit code of the user's commands to that of the container, as OpenPAI's runtime does. Known failures
have their own codes; all others are 255. `exit_spec` describes a code.

Source: microsoft/pai v1.8.1 (k8s-job-exit-spec.yaml) for codes, phrases and their order. The log patterns of 224-234 are ours,
derived from the error names in the phrases. Codes 229, 230 and 235 are never reported: their original patterns are ambiguous.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum

from nni_manager.local_openpai.core.exit_explanations import EXIT_EXPLANATIONS, ExitExplanation
from trial_keeper.frozen_dataclass import dataclass

STOPPED_BY_USER = -210
STOPPED_BY_COMPLETION = -220
"""The job's verdict was set while this task was running."""
STOPPED = frozenset({STOPPED_BY_USER, STOPPED_BY_COMPLETION})
NOT_CREATED = -120
NODE_LOST = -1001
ALLOCATION_REFUSED = -1005
"""The allocation can never succeed."""
KILLED = 137
PORT_CONFLICT = 253
IMAGE_NOT_FOUND = 254
CONTAINER_NOT_MADE = -1201
UNRECOGNIZED = 255
_UNDEFINED_POSITIVE = 256
_UNDEFINED_NEGATIVE = -8000

# As in OpenPAI: the size of the searched log, and the length of a reported match.
SEARCHED_BYTES = 10 * 2**20
MAX_MATCH = 2048


class Behavior(Enum):
    """Whether a retry can succeed."""

    TRANSIENT = "TRANSIENT"
    TRANSIENT_CONFLICT = "TRANSIENT_CONFLICT"
    """A shortage of resources: a later retry may succeed."""
    PERMANENT = "PERMANENT"
    UNKNOWN = "UNKNOWN"


@dataclass(frozen=True, slots=True)
class ExitSpec:
    """The meaning of a code: its issuer, cause, type and stage, and the reaction to it."""

    code: int
    phrase: str
    issuer: str
    causer: str
    type: str
    stage: str
    behavior: Behavior

    @property
    def reaction(self) -> str:
        """OpenPAI's automatic reaction."""
        return "NEVER_RETRY" if self.code == 0 else _REACTIONS[self.behavior]

    @property
    def explanation(self) -> ExitExplanation:
        """Cause, reproduction and remedies; an unknown code has the generic ones."""
        return EXIT_EXPLANATIONS.get(self.code) or EXIT_EXPLANATIONS[_generic(self.code)]


_REACTIONS = {
    Behavior.TRANSIENT: "ALWAYS_RETRY",
    Behavior.TRANSIENT_CONFLICT: "ALWAYS_BACKOFF_RETRY",
    Behavior.PERMANENT: "NEVER_RETRY",
    Behavior.UNKNOWN: "RETRY_TO_MAX",
}

_TABLE = """
0 Succeeded USER_CONTAINER USER_CONTAINER USER_SUCCESS COMPLETING UNKNOWN
-100 ConfigMapExternalDeleted PAI_FC UNKNOWN PLATFORM_FAILURE UNKNOWN TRANSIENT
-101 PodExternalDeleted PAI_FC UNKNOWN PLATFORM_FAILURE UNKNOWN TRANSIENT
-110 ConfigMapLocalCacheCreationTimeout PAI_FC UNKNOWN PLATFORM_FAILURE LAUNCHING TRANSIENT
-111 PodLocalCacheCreationTimeout PAI_FC UNKNOWN PLATFORM_FAILURE LAUNCHING TRANSIENT
-120 PodCreationTransientError PAI_FC UNKNOWN PLATFORM_FAILURE LAUNCHING TRANSIENT
-200 PodCreationPermanentError PAI_FC USER_SUBMISSION USER_FAILURE SUBMITTING PERMANENT
-210 StopFrameworkRequested PAI_FC USER_STOP USER_STOP UNKNOWN PERMANENT
-220 FrameworkAttemptCompletion PAI_FC USER_STOP USER_STOP UNKNOWN PERMANENT
-230 DeleteTaskRequested PAI_FC USER_STOP USER_STOP UNKNOWN PERMANENT
-300 PodFailedWithoutFailedContainer PAI_FC UNKNOWN UNKNOWN_FAILURE LAUNCHING UNKNOWN
-310 PodCreationUnknownError PAI_FC UNKNOWN UNKNOWN_FAILURE LAUNCHING UNKNOWN
-1000 PodEvicted PAI_K8S PAI_K8S PLATFORM_FAILURE RUNNING TRANSIENT
-1001 PodNodeLost PAI_K8S PAI_K8S PLATFORM_FAILURE RUNNING TRANSIENT
-1002 PodScheduledToInsufficientResourceNode PAI_K8S PAI_K8S PLATFORM_FAILURE LAUNCHING TRANSIENT
-1003 PodPreemptedForCriticalPod PAI_K8S PAI_K8S PLATFORM_FAILURE RUNNING TRANSIENT
-1004 PodDeadlineExceeded PAI_K8S USER_STOP USER_STOP RUNNING PERMANENT
-1005 PodNodeAdmissionForbidden PAI_K8S USER_SUBMISSION USER_FAILURE LAUNCHING PERMANENT
-1006 PodNodeAdmissionUnexpectedError PAI_K8S PAI_K8S PLATFORM_FAILURE LAUNCHING TRANSIENT
-1100 CreateFrameworkPermanentFailed PAI_DB_CONTROLLER USER_SUBMISSION USER_FAILURE SUBMITTING PERMANENT
-1300 InitContainerDockerOOMKilled PAI_DOCKER PAI_RUNTIME PLATFORM_FAILURE LAUNCHING TRANSIENT
-1200 UserContainerDockerOOMKilled PAI_DOCKER USER_CONTAINER USER_FAILURE RUNNING PERMANENT
-1201 ContainerDockerCreationError PAI_DOCKER UNKNOWN UNKNOWN_FAILURE LAUNCHING UNKNOWN
-1202 ContainerDockerStartCmdPermissionDenied PAI_DOCKER PAI_RUNTIME PLATFORM_FAILURE LAUNCHING PERMANENT
-1203 ContainerDockerStartCmdNotFound PAI_DOCKER PAI_RUNTIME PLATFORM_FAILURE LAUNCHING PERMANENT
-1204 ContainerDockerStartUnknownError PAI_DOCKER UNKNOWN UNKNOWN_FAILURE LAUNCHING UNKNOWN
-1205 ContainerGpuDeviceNotFoundError PAI_DOCKER PAI_HW PLATFORM_FAILURE LAUNCHING TRANSIENT
128 ContainerMayFailDueToGpuDeviceEccError USER_CONTAINER PAI_HW PLATFORM_FAILURE RUNNING UNKNOWN
130 ContainerSigIntReceived PAI_OS PAI_OS PLATFORM_FAILURE RUNNING TRANSIENT
131 ContainerSigQuitReceived PAI_OS PAI_OS PLATFORM_FAILURE RUNNING TRANSIENT
132 ContainerSigIllReceived USER_CONTAINER USER_CONTAINER USER_FAILURE RUNNING PERMANENT
134 ContainerSigAbrtReceived USER_CONTAINER UNKNOWN UNKNOWN_FAILURE RUNNING UNKNOWN
135 ContainerSigBusReceived USER_CONTAINER USER_CONTAINER USER_FAILURE RUNNING PERMANENT
136 ContainerSigFpeReceived USER_CONTAINER USER_CONTAINER USER_FAILURE RUNNING PERMANENT
137 ContainerSigKillReceived PAI_OS PAI_OS PLATFORM_FAILURE RUNNING TRANSIENT
139 ContainerSigSegvReceived USER_CONTAINER UNKNOWN UNKNOWN_FAILURE RUNNING UNKNOWN
141 ContainerSigPipeReceived USER_CONTAINER USER_CONTAINER USER_FAILURE RUNNING PERMANENT
143 ContainerSigTermReceived PAI_OS PAI_OS PLATFORM_FAILURE RUNNING TRANSIENT
220 UserCommandExitWithError USER_CONTAINER USER_CONTAINER USER_FAILURE RUNNING PERMANENT
221 ContainerTensorflowOOMKilled PAI_RUNTIME USER_CONTAINER USER_FAILURE RUNNING PERMANENT
222 ContainerMPISegvFault PAI_RUNTIME USER_CONTAINER USER_FAILURE RUNNING PERMANENT
223 ContainerCudaUncorrectableECCError PAI_RUNTIME PAI_HW PLATFORM_FAILURE RUNNING TRANSIENT
224 ContainerCudaVersionMismatch PAI_RUNTIME USER_CONTAINER USER_FAILURE RUNNING PERMANENT
225 ContainerCudaDnnVersionMismatch PAI_RUNTIME USER_CONTAINER USER_FAILURE RUNNING PERMANENT
226 ContainerCudaOOMKilled PAI_RUNTIME USER_CONTAINER USER_FAILURE RUNNING PERMANENT
228 ContainerIncorrectParameterError PAI_RUNTIME USER_CONTAINER USER_FAILURE RUNNING PERMANENT
229 ContainerIncorrectDataModelError PAI_RUNTIME USER_CONTAINER USER_FAILURE RUNNING PERMANENT
230 ContainerInvalidSavePath PAI_RUNTIME USER_CONTAINER USER_FAILURE RUNNING PERMANENT
231 ContainerSyntaxError PAI_RUNTIME USER_CONTAINER USER_FAILURE RUNNING PERMANENT
232 ContainerImportError PAI_RUNTIME USER_CONTAINER USER_FAILURE RUNNING PERMANENT
233 ContainerIndexOutOfRange PAI_RUNTIME USER_CONTAINER USER_FAILURE RUNNING PERMANENT
234 ContainerSigvFault PAI_RUNTIME USER_CONTAINER USER_FAILURE RUNNING PERMANENT
235 ContainerEngineCoreDump PAI_RUNTIME USER_CONTAINER USER_FAILURE RUNNING PERMANENT
249 PAIRuntimeSSHBarrierTimeout PAI_RUNTIME PAI_RUNTIME PLATFORM_FAILURE RUNNING PERMANENT
250 FrameworkBarrierTransientFailed PAI_RUNTIME PAI_RUNTIME PLATFORM_FAILURE LAUNCHING TRANSIENT
251 JobGangAllocationTimeout PAI_RUNTIME RESOURCE_ALLOCATION_TIMEOUT RESOURCE_ALLOCATION_TIMEOUT ALLOCATING TRANSIENT_CONFLICT
252 FrameworkBarrierPermanentFailed PAI_RUNTIME PAI_RUNTIME PLATFORM_FAILURE LAUNCHING PERMANENT
253 ContainerPortConflict PAI_RUNTIME PAI_RUNTIME PLATFORM_FAILURE LAUNCHING TRANSIENT
254 ContainerImageNotExists PAI_RUNTIME PAI_RUNTIME USER_FAILURE LAUNCHING PERMANENT
255 PAIRuntimeUnknownFailed PAI_RUNTIME UNKNOWN UNKNOWN_FAILURE UNKNOWN UNKNOWN
-8000 ContainerUndefinedNegativeExitCode UNKNOWN UNKNOWN UNKNOWN_FAILURE UNKNOWN UNKNOWN
256 PAIRuntimeExitAbnormally PAI_RUNTIME PAI_RUNTIME PLATFORM_FAILURE UNKNOWN UNKNOWN
"""


def _row(line: str) -> ExitSpec:
    code, phrase, issuer, causer, kind, stage, behavior = line.split()
    return ExitSpec(int(code), phrase, issuer, causer, kind, stage, Behavior(behavior))


EXIT_SPECS = {spec.code: spec for spec in map(_row, _TABLE.strip().splitlines())}


def exit_spec(code: int) -> ExitSpec:
    """The meaning of a code. An unknown code keeps its number and gets the generic description."""
    return EXIT_SPECS.get(code) or replace(EXIT_SPECS[_generic(code)], code=code)


def _generic(code: int) -> int:
    return _UNDEFINED_POSITIVE if code > 0 else _UNDEFINED_NEGATIVE


@dataclass(frozen=True, slots=True)
class TaskExit:
    """The outcome of an attempt of a job or a task.

    `container_exit_code` is None if no container ran to its end. `origin_user_exit_code` is the exit code of the user's commands
    before OpenPAI's mapping (128 + n for signal n; None if they did not run). `diagnostics` is an explanation for the user.
    `matched_log` is the log text that determined the code.
    """

    code: int
    container_exit_code: int | None = None
    origin_user_exit_code: int | None = None
    diagnostics: str = ""
    matched_log: str | None = None

    @property
    def spec(self) -> ExitSpec:
        """The meaning of the code."""
        return exit_spec(self.code)


# Signal exit codes that OpenPAI passes through. All others become 255.
_SIGNALS = frozenset({130, 131, 132, 134, 135, 136, 137, 139, 141, 143})
_COMMAND_NOT_FOUND = "command not found"


@dataclass(frozen=True, slots=True)
class _ExitPattern:
    """Texts that occur in this order in one line of a log. A regex on lines of megabytes would delay all other work."""

    code: int
    texts: tuple[str, ...]
    ignores_case: bool = True

    def found_in(self, log: str, folded: str) -> str | None:
        """The first matching line without what precedes the first of `texts`; None without a match.

        `folded` is the log in lower case.
        """
        text = folded if self.ignores_case else log
        begin = text.find(self.texts[0])
        while begin >= 0:
            end = text.find("\n", begin)
            end = len(text) if end < 0 else end
            at = begin
            for wanted in self.texts:
                at = text.find(wanted, at, end)
                if at < 0:
                    break
                at += len(wanted)
            else:
                # A few letters change length in lower case; positions are then valid in the lower-case text only.
                return (log if len(log) == len(folded) else text)[begin:end][:MAX_MATCH]
            begin = text.find(self.texts[0], end)
        return None


# Tried in this order; the first match wins.
_PATTERNS = (
    _ExitPattern(221, ("tensorflow", "resourceexhaustederror", "oom")),
    _ExitPattern(222, ("signal code: address not mapped",)),
    _ExitPattern(223, ("cuda_error_ecc_uncorrectable",)),
    _ExitPattern(224, ("cuda driver version is insufficient for cuda runtime version",)),
    _ExitPattern(225, ("loaded runtime cudnn library", "but source was compiled with")),
    _ExitPattern(226, ("cuda out of memory",)),
    _ExitPattern(226, ("cuda runtime error (2)",)),
    _ExitPattern(228, ("invalid argument:",), ignores_case=False),
    _ExitPattern(228, ("dynamic_rnn() got",), ignores_case=False),
    _ExitPattern(231, ("SyntaxError:",), ignores_case=False),
    _ExitPattern(232, ("ImportError:",), ignores_case=False),
    _ExitPattern(233, ("IndexError:",), ignores_case=False),
    _ExitPattern(234, ("segmentation fault",)),
)


def container_exit(user_exit_code: int, log: str) -> TaskExit:
    """The exit of a container, from the exit code of the user's commands (128 + n for signal n) and the end of their output.

    The log is searched only if the commands failed.
    """
    code, matched_log = _code_of(user_exit_code, log)
    return TaskExit(code, code, user_exit_code, matched_log=matched_log)


def _code_of(user_exit_code: int, log: str) -> tuple[int, str | None]:
    """The container's exit code, and the log text that determined it, if any."""
    if user_exit_code == 0 or user_exit_code in _SIGNALS:
        return user_exit_code, None
    if user_exit_code == 127 and _COMMAND_NOT_FOUND in log:
        return 220, _COMMAND_NOT_FOUND
    folded = log.lower()
    for pattern in _PATTERNS:
        if (found := pattern.found_in(log, folded)) is not None:
            return pattern.code, found
    return UNRECOGNIZED, None
