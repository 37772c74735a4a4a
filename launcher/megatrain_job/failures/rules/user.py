"""Errors of the program itself: Python exceptions, shapes, imports, arguments and configuration."""

from __future__ import annotations

from megatrain_job.failures.rule import ABORT, EXCEPTION, EXIT_CODE, SPECIFIC, Rule, rule
from megatrain_job.failures.verdict import Label

_NAME_ENDS = (
    "error",
    "exception",
    "interrupt",
    "systemexit",
    "fault",
    "failure",
    "failed",
    "notfound",
    "stopiteration",
)
_EXCEPTION = r"[\w.]++(?:" + "|".join(f"(?<={end})" for end in _NAME_ENDS) + r")(?::\s|:?\s*$)"

RULES: tuple[Rule, ...] = (
    rule(
        "wrong-build", Label.USER_CODE, SPECIFIC,
        "torch not compiled with", "is not compiled with & support", "ninja is required to load",
        "cannot re-initialize cuda in forked", "default process group has not been initialized",
        "trying to initialize the default process group twice", "environment variable & expected, but not set",
        "world size & not divisible", "must be divisible by", "is not divisible by", "not divisible",
        "expected all tensors to be on the same device", "mat1 and mat2 shapes cannot be multiplied",
        "shapes cannot be multiplied", "size mismatch for", "error(s) in loading state_dict",
        "missing key(s) in state_dict", "unexpected key(s) in state_dict", "the size of tensor a",
        "does not require grad and does not have a grad_fn", "modified by an inplace operation",
        "trying to backward through the graph a second time", "expected to have finished reduction in the prior",
        "expected to mark a variable ready only once", "find_unused_parameters=true", "unrecognized arguments",
        "invalid choice:", "the following arguments are required", "expected scalar type", "shape mismatch",
        "inconsistent tensor size", "is invalid for input of size", "sizes of tensors must match",
        "has no attribute", "unexpected keyword argument", "missing & required positional", "could not override",
        "hydra.errors", "omegaconf.errors", "validationerror for", "configattributeerror",
        "error in call to target", "expected input & to have & channels", "dimension out of range",
        "local rank & must be & device count", "only tensors of floating point", "expected is_sm",
        "triton compilation", "compilationerror", "backendcompilerfailed", "torch._dynamo.exc",
        "invalid configuration argument", "cuda error: invalid argument", "trust_remote_code", "gated repo",
        "can't open file", ": command not found", "outofresources", "out of resource: shared memory",
        "access to model & is restricted",
        unless=r"^.{0,80}\b(?:warn(?:ing)?|info|debug)\b|deprecat",
    ),
    rule(
        "c-plus-plus-assertion", Label.USER_CODE, EXCEPTION - 3,
        "assertion & failed", "internal assert failed", "check failed:",
        unless=r"\.cu\b|block: \[|warn|inline_container|opencv",
        is_fallback=True,
    ),
    rule(
        "python-exception", Label.USER_CODE, EXCEPTION,
        "error", "exception", "failure", "fault", "notfound", "stopiteration", "systemexit",
        pattern=_EXCEPTION, is_at_start=True,
        unless=r"ChildFailedError|SignalException|ChildProcessError|NCCL error|ncclUnhandled|KeyboardInterrupt|"
               r"gloo/transport|CalledProcessError|ProcessExitedException|ProcessRaisedException|SubprocessFailedError|"
               r"\bDEBUG\b|\bINFO\b|\[(?:DEBUG|INFO)\]|Exception raised from|Exception ignored|StopIteration|"
               r"c10::(?:Dist)?(?:Backend)?Error|std::|StoreTimeoutError|falling back|ignor(?:ed|ing)|Retry|retry|"
               r"(?:SystemExit|Exit): 0",
        is_fallback=True,
    ),
    rule(
        "spawned-process-failed", Label.USER_CODE, EXIT_CODE,
        "processraisedexception", "process & terminated with the following error", "calledprocesserror",
        "subprocess & returned non-zero exit status", "returned non-zero exit status", "failed (exitcode: ",
        pattern=r"terminated with the following error|ProcessRaisedException|non-zero exit status (?!-|137|139|143)\d|"
                r"failed \(exitcode: 1\)",
        names_own_rank=False,
    ),
    rule(
        "exit-code-one", Label.USER_CODE, EXIT_CODE - 1,
        "exitcode", "exited with exit code", "exit code", "exit status",
        pattern=r"(?:exitcode|exit code|exit status)\W*(?:1|2)\b(?!\d)",
        unless=r"-\d", names_own_rank=False, is_fallback=True,
    ),
    rule(
        "nccl-cuda-error", Label.CUDA_ILLEGAL_ACCESS, ABORT + 2,
        "ncclunhandledcudaerror", "unhandled cuda error", "nccl warn cuda failure",
        "nccl & call to cuda function failed", "cuda kernel errors might be asynchronously & launch",
        "cuda error: an illegal",
    ),
    rule(
        "ncclinternal", Label.NETWORK, ABORT + 1,
        "ncclinternalerror", "nccl error: internal error", "internal error & nccl", "nccl error & unhandled",
        "nccl error in:",
    ),
)  # fmt: skip
