"""The host: exhausted memory, driver and library mismatches, and how processes die (kernel, shells, launchers)."""

from __future__ import annotations

from megatrain_job.failures.rule import ABORT, CRASH, EXIT_CODE, HOST, SPECIFIC, Rule, rule
from megatrain_job.failures.verdict import FailureAction, Label

_SHELL_JOB = r"(?:^|\s)(?:line \d+: +\d+|\[\d+\]\W+\d*)\s+"
_EXIT = r"(?:exit ?_?code|exit status|return ?code|exited with code|exit with status code)s?\W*"
_SRUN = r"srun: error: [\w.\[\],-]+: tasks? [\d,-]+: "
_SRUN_NAMED = r"srun: error: (?P<host8>[\w.\[\],-]+): tasks? (?P<rank8>[\d,-]+): "

MEMORY: tuple[Rule, ...] = (
    rule(
        "oom-killer", Label.HOST_OOM, HOST,
        "oom-kill", "oom_kill", "out of memory: kill", "invoked oom-killer", "oomkilled",
        "memory cgroup out of memory", "out-of-memory handler", "oom-killer", "oom killer",
        "killed process & total-vm", "oom_reaper", "job step aborted: & out of memory", "exceeded memory limit",
        "exceeded job memory limit", "exceeded step memory limit", "memory limit exceeded", "out_of_memory & slurm",
        "state & out_of_memory", "reason: oom", "term_memlimit", "job killed: & mem",
        "worker was killed due to memory", "killed & due to the node running low on memory", "low on memory",
        "outofmemoryerror: task was killed", "exceeded & pod memory limit",
        unless=r"oom_score_adj (?:of|to|for)|oom_kill_disable|oom_kill[ =:]+0\b|0 oom",
        culprit=r"\b(?P<host>[\w.-]+) kernel: |srun: error: (?P<host2>\S+): ",
    ),
    rule(
        "task-out-of-memory", Label.HOST_OOM, HOST, "srun: error & out of memory",
        pattern=_SRUN + "out of memory", culprit=_SRUN_NAMED,
    ),
    # the cause is a low RLIMIT_MEMLOCK of the service that starts jobs, not a lack of memory
    rule(
        "locked-memory-limit", Label.DRIVER_SOFTWARE, SPECIFIC,
        "ibv_ & cannot allocate memory", "ibv_ & enomem", "ibv_ & errno 12", "ibv_ & error 12",
        "memory registration & cannot allocate memory", "rlimit_memlock & too small", "memlock & too low",
        "memlock & too small", "locked memory & limit & too", "allocate some locked memory", "mlock & cannot allocate",
        "fi_mr_reg & cannot allocate memory", "register memory & cannot allocate memory",
        unless=r"\bwarning\b",
    ),
    rule(
        "host-allocation-failed", Label.HOST_OOM, SPECIFIC,
        "cannot allocate memory", "memoryerror", "std::bad_alloc", "defaultcpuallocator",
        "not enough memory: you tried", "can't allocate memory", "enomem", "unable to allocate & array with shape",
        "arraymemoryerror", "java heap space", "malloc of size & failed", "arrowmemoryerror",
        "mmap failed: cannot allocate", "failed to allocate & bytes & cpu", "cudahostalloc & out of memory",
        "pin & memory & cannot allocate",
        unless=r"outofmemoryerror|cupy|\bibv_|\bm?lock|fi_mr_reg|memory registration|register memory",
    ),
    rule(
        "killed", Label.HOST_OOM, EXIT_CODE + 2,
        "killed", "signal (sigkill)",
        pattern=_SHELL_JOB + r"killed\b|" + _SRUN + r"killed|^\s*killed\s*$|"
                r"(?:exited on|terminated by|killed by|died (?:on|from)|due to|by) signal:? (?:9\b|sigkill|killed)|"
                r"signal 9 \(sig(?:kill)\) received by pid",
        unless=r"dataloader worker",
        culprit=_SRUN_NAMED + r"|process rank (?P<rank2>\d+) .*on node (?P<host2>[\w.-]+)",
    ),
    rule(
        "exit-code-killed", Label.HOST_OOM, EXIT_CODE + 2,
        "exitcode", "exit code", "exit status", "exit_code", "return code", "returncode", "exited with code",
        "status code",
        pattern=_EXIT + r"(?:-9|137)\b|died with <?signals\.sigkill|"
                r"(?:exit ?_?code)\W+0:9\b",
        culprit=r"exitcode: -9\) local_rank: (?P<rank>\d+)",
        names_own_rank=False,
    ),
    rule(
        "sigkill-name", Label.HOST_OOM, EXIT_CODE + 2,
        "signals.sigkill", "sigkill",
        pattern=r"died with <?signals\.sigkill|(?:received|got|by|with|terminated|exit).{0,40}\bsigkill\b",
        unless=r"sending|escalat|closing|sent|will|after|unless",
    ),
)  # fmt: skip

DRIVER: tuple[Rule, ...] = (
    rule(
        "driver-mismatch", Label.DRIVER_SOFTWARE, HOST,
        "driver/library version mismatch", "nvrm: api mismatch", "kernel module & version mismatch",
        "couldn't communicate with the nvidia driver", "nvml_error_lib_rm_version_mismatch",
        "nvml: & driver not loaded", "nvml & driver not loaded", "nvidia driver is not loaded",
        "nvidia module & not loaded", "failed to initialize nvml", "can't initialize nvml",
        "unable to initialize nvml", "cudaerrorsystemdrivermismatch", "cuda_error_system_driver_mismatch",
        "system has unsupported display driver", "modprobe & nvidia & not found", "modprobe: fatal: module nvidia",
        "nvidia_uvm & not", "dkms & nvidia & fail",
        action=FailureAction.EVICT_HOST,
    ),
    rule(
        "driver-kernel-line", Label.DRIVER_SOFTWARE, SPECIFIC,
        "nvrm: & fail", "nvrm: & error", "nvrm: & cannot", "nvrm: & unable", "nvidia: & probe of & failed",
        "nvrm: & timeout", "nvidia-modeset: error", "nvidia: module verification failed & fatal",
        "nvidia-uvm & error", "nvswitch & error",
        unless=r"xid|gpu at pci:.*fallen|rm_init|rminitadapter",
        action=FailureAction.EVICT_HOST,
    ),
    rule(
        "fabric-manager", Label.DRIVER_SOFTWARE, HOST,
        "system not yet initialized", "cudaerrorsystemnotready", "cuda_error_system_not_ready",
        "fabric manager & not", "fabric manager & fail", "fabricmanager & fail", "fabricmanager & not running",
        "fabric & not initialized", "fabric state & in progress", "fabric-manager & fail",
        "nv-hostengine & fail", "imex & not", "nvidia-fabricmanager & error",
        action=FailureAction.EVICT_HOST,
    ),
    rule(
        "cuda-not-initialized", Label.DRIVER_SOFTWARE, HOST,
        "cuda unknown error", "cuda initialization: unexpected error", "cuda initialization: cuda unknown",
        "unexpected error from cudagetdevicecount", "failed call to cuinit", "cuinit & failed",
        "no cuda-capable device", "cuda error: unknown error", "cuda failure & unknown error",
        "cuda failure & initialization error", "cuda_error_no_device", "cudaerrornodevice", "no devices were found",
        "all cuda-capable devices are busy or unavailable", "cuda-capable device(s) is/are busy",
        "cudaerrordevicesunavailable", "cudaerrordeviceunavailable", "cuda_error_not_initialized",
        "cudaerrorinitializationerror", "initialization error & cuda", "peer access is not supported between",
        "nvidia-container-cli: initialization error", "nvidia-container-cli & driver error",
        "nvidia-container-cli & nvml error", "nvidia-container-cli: device error", "could not select device driver",
        "gdrdrv & not loaded", "nvidia_peermem & not loaded", "nvidia-peermem & not",
        unless=r"re-initialize CUDA in forked|fork|using cpu|falling back",
        action=FailureAction.EVICT_HOST,
    ),
    rule(
        "driver-too-old", Label.DRIVER_SOFTWARE, SPECIFIC,
        "nvidia driver on your system is too old", "driver version is insufficient", "no kernel image is available",
        "provided ptx was compiled with an unsupported", "unsupported toolchain",
        "forward compatibility was attempted", "cudaerrorinsufficientdriver", "cudaerrorcompatnotsupported",
        "cuda_error_compat_not_supported", "cuda_error_no_binary_for_gpu", "device kernel image is invalid",
        "unsatisfied condition: cuda", "requires & driver & but & installed",
        "nvidia-container-cli: requirement error", "is not compatible with the current pytorch installation",
        "minimum driver version", "cudaerrorunsupportedptxversion", "cudaerrornokernelimagefordevice",
        "the detected cuda version & mismatches", "cuda version & mismatch",
        "cuda driver version & runtime version",
        unless=r"^.{0,60}\bwarn(?:ing)?\b",
    ),
    rule(
        "no-such-gpu", Label.DRIVER_SOFTWARE, SPECIFIC,
        "invalid device ordinal", "cudaerrorinvaliddevice", "no cuda gpus are available", "found no nvidia driver",
        "no nvidia driver on your system", "cuda_error_invalid_device", "cuda is not available on & host",
        "invalid device id",
    ),
    rule(
        "library-missing", Label.DRIVER_SOFTWARE, SPECIFIC,
        "cannot open shared object file", "undefined symbol", "version `glibc", "version `cxxabi",
        "symbol lookup error", "not defined in file & link time", "libcuda.so & not found", "libcudnn & could not load",
        "could not load library libcudnn", "unable to load & libcudnn", "error loading & .so", "libnccl & mismatch",
        "nccl version mismatch", "cudnn version incompatibility", "cudnn_status_version_mismatch",
        "nccl warn & version mismatch", "nccl version & mismatch", "cudnn_status_not_initialized",
        "cudnn_status_arch_mismatch", "cublas_status_arch_mismatch", "cudnn_status_sublibrary",
        "incompatible & flash_attn", "compiled against & numpy", "glibc & not found", "wrong elf class",
        "incompatible with this version of & cuda", "illegal instruction (core",
        unless=r"net[-_ ]?plugin|libnccl-net|tuner|libibverbs|librdmacm|tensorrt|libnvinfer|no plugin found|"
               r"NCCL INFO|\bINFO\b|dlerror|optional|\bwarn(?:ing)?\b|tensorflow|could not load dynamic library",
    ),
)  # fmt: skip

CRASHES: tuple[Rule, ...] = (
    rule(
        "segmentation-fault", Label.SEGFAULT, CRASH,
        "segmentation fault", "sigsegv", "segfault encountered", "segfault in", "segfault at",
        "general protection fault", "invalid permissions for mapped object", "address not mapped to object",
        "caught signal & bus error", "fatal python error: bus error", "bus error (core", "traps: & ip:",
        "stack smashing detected", "double free or corruption", "malloc(): ", "free(): invalid",
        "corrupted size vs. prev_size", "corrupted double-linked list", "munmap_chunk(): invalid",
        "heap corruption", "fatal python error: illegal instruction",
        "fatal python error: floating point exception", "sigbus", "caught signal & illegal instruction",
        "signal: bus error", "signal: illegal instruction", "pure virtual method called", "sigill",
        "free(): double free", "malloc.c: & assertion", "realloc(): invalid", "addresssanitizer:",
        "stack overflow & core",
        "invalid pointer & core",
        unless=r"received by pid|dataloader worker|sigsegv handler|signal handler (?:for|installed)|registering|oom",
        culprit=r"process rank (?P<rank>\d+) .*?on node (?P<host>[\w.-]+)|"
                + _SRUN_NAMED
                + r"|\[(?P<host3>[\w.-]+):\d+(?::\d+)*\] (?:\*\*\* process received|caught signal)",
    ),
    rule(
        "task-crashed", Label.SEGFAULT, CRASH,
        "srun: error & bus error", "srun: error & illegal instruction", "srun: error & floating point exception",
        "srun: error & trace/breakpoint trap",
        pattern=_SRUN + r"(?:bus error|illegal instruction|floating point exception|trace/breakpoint trap)",
        culprit=_SRUN_NAMED,
    ),
    rule(
        "task-exited", Label.USER_CODE, EXIT_CODE + 2, "srun: error & exited with exit code",
        pattern=_SRUN + r"exited with exit code [12]\b(?!\d)", culprit=_SRUN_NAMED,
    ),
    rule(
        "shell-reports-crash", Label.SEGFAULT, CRASH,
        "bus error", "segmentation fault", "illegal instruction", "floating point exception",
        "trace/breakpoint trap", "bad system call",
        pattern=_SHELL_JOB + r"(?:bus error|segmentation|illegal instr|floating point|trace/break|bad system)",
    ),
    rule(
        "process-signal-block", Label.SEGFAULT, CRASH,
        "signal: segmentation", "signal code: & mapped", "received signal: segmentation",
    ),
    rule(
        "exit-code-segfault", Label.SEGFAULT, EXIT_CODE + 1,
        "exitcode", "exit code", "exit status", "exit_code", "return code", "returncode", "exited on signal",
        "by signal", "received by pid", "exited with code", "status code",
        pattern=_EXIT + r"(?:-11|139|-7|135|-4|132|-8|136)\b|"
                r"(?:on|by) signal:? (?:11|7|4|8)\b|signal (?:11|7|4|8) \(",
        culprit=r"exitcode: -\d+\) local_rank: (?P<rank>\d+)",
        names_own_rank=False,
    ),
    rule(
        "aborted", Label.SEGFAULT, ABORT - 2,
        "aborted (core dumped)", "fatal python error: aborted", "sigabrt", "caught signal & aborted",
        "signal: aborted", "terminate called without an active exception", "exitcode", "exit code",
        "terminated by signal", "exited on signal", "terminate called after throwing", "assertion & core dumped",
        "aborted",
        pattern=r"aborted \(core dumped\)|fatal python error: aborted|sigabrt|signal:? (?:6\b|aborted)|"
                r"(?:exit ?_?code|exit status)s?\W*(?:-6|134)\b|terminate called (?:without|after throwing)|"
                + _SHELL_JOB + r"aborted|" + _SRUN + r"aborted",
        unless=r"(?:DistBackendError|c10::Error|std::runtime_error|gloo|NCCL|python_error)",
        culprit=_SRUN_NAMED,
    ),
)  # fmt: skip

RULES: tuple[Rule, ...] = (*MEMORY, *DRIVER, *CRASHES)
