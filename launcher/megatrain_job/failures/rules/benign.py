"""Messages that resemble a failure, but are not one: warnings, retries, fallbacks, effects of other failures."""

from __future__ import annotations

from megatrain_job.failures.rule import NOISE, Rule, rule
from megatrain_job.failures.verdict import Label

_LEVEL = r"(?:^|[\s\[|(/:])"

RULES: tuple[Rule, ...] = (
    rule(
        "agent-closes-workers", Label.BENIGN, NOISE + 2,
        "closing signal sigterm", "via signal sigterm", "closing process", "sending process",
        "unable to shutdown process & via", "forcefully exiting via", "stopping remaining workers",
        "sending sigterm", "sending signal sigterm", "waiting & for worker processes to exit",
        "closing signal sigint",
        is_cascade=True, is_silencer=True, names_own_rank=False,
    ),
    rule(
        "retry-goes-on", Label.BENIGN, NOISE,
        "retrying", "will retry", "retry & attempt", "trying again", "reconnecting", "retry in",
        "attempt & failed, ", "tried & times, & retry", "retries left",
        pattern=r"retry|trying again|reconnect|retries left",
        unless=r"retrying \((?P<n>\d+)/(?P=n)\)|giving up|exhausted|max(?:imum)? retries|exceeded|no more retries|"
               r"retry(?:ing)? (?:count )?exceed|failed after|not retrying|retry limit",
        is_silencer=True, names_own_rank=False,
    ),
    rule(
        "warning-class", Label.BENIGN, NOISE,
        "warning:", "warnings.warn",
        pattern=r"\b(?:User|Future|Deprecation|PendingDeprecation|Runtime|Resource|Import|Syntax|Unicode|Bytes|Encoding|"
                r"Experimental|Numba\w*|Transformers\w*|Tokenizers\w*|DecompressionBomb|Beta|Lightning\w*|Insecure\w*|"
                r"Possible\w*|Undefined\w*|Convergence)Warning:|warnings\.warn",
        is_silencer=True, names_own_rank=False,
    ),
    rule(
        "group-not-destroyed", Label.BENIGN, NOISE,
        "destroy_process_group() was not called", "process group has not been destroyed", "leaked semaphore",
        "leaked shared_memory", "resource_tracker: there appear", "processgroupnccl has not been destroyed",
        is_silencer=True, names_own_rank=False,
    ),
    rule(
        "torch-start-noise", Label.BENIGN, NOISE,
        "setting omp_num_threads", "omp_num_threads environment variable for each process",
        "addresses of & cannot be retrieved", "no device id is provided via", "using gpu & to perform barrier",
        "guessing device id", "is deprecated", "has been deprecated", "deprecated and will be removed",
        "will be deprecated", "nni_parser", "torch_nccl_async_error_handling", "nccl_async_error_handling",
        "xformers can't load", "hostname of the client socket cannot be retrieved", "network addresses of",
        "address family not supported by protocol", "find_unused_parameters=true was specified",
        "grad strides do not match bucket view", "torch_distributed_debug",
        "peer ranks. expected number of connected peer ranks", "redirects are currently not supported",
        "master_addr & not set", "the hostname of the client", "using /dev/infiniband & warning",
        "cannot be retrieved (gai error", "lazyinit", "process group was & not destroyed", "will be ignored",
        "is ignored",
        unless=r"\bfatal\b|out of memory",
        is_silencer=True, names_own_rank=False,
    ),
    rule(
        "nccl-fallback", Label.BENIGN, NOISE,
        "no plugin found", "net/plugin", "nccl_net_plugin", "libnccl-net", "tuner/plugin", "using internal tuner",
        "using internal net plugin", "using network socket", "using internal network plugin",
        "peer access is not supported & nccl info", "nccl info failed to open lib", "nccl info & could not find",
        "could not enable p & p", "net/ib : no device found", "failed to open libibverbs", "dlvsym failed",
        "call to ibv_reg_dmabuf_mr", "nccl info & cudriver", "nvls & not supported", "gdr & disabled",
        "no ib devices found", "missing & iommu", "cuda_launch_blocking", "acs is enabled", "nccl_cumem",
        "minimum link capability", "nccl warn & environment variable", "numa auto balancing", "numa_balancing",
        "nccl_plugin", "nccl info comm & abort complete",
        unless=r"NCCL WARN.*(?:fail|error)(?!.*plugin)",
        is_silencer=True, names_own_rank=False,
    ),
    rule(
        "loss-scale-adapts", Label.BENIGN, NOISE,
        "overflow! & skipping step", "attempted loss scale", "gradient overflow. skipping step",
        "reducing loss scale", "overflow detected. skipping", "overflow & reducing to", "found overflow & skip",
        "loss scaler reducing", "lowering loss scale", "grad overflow on",
        unless=r"minimum|\bcannot\b|(?:reducing|loss scale) to 0(?:\.0+)?(?:\s|$)",
        is_silencer=True, names_own_rank=False,
    ),
    rule(
        "skipped-sample", Label.BENIGN, NOISE,
        "skipping sample", "skipping corrupt", "skipping record", "skipped sample", "skipping invalid",
        "skipping file", "skipping batch", "skipping image", "skipping bad", "ignoring sample", "skipped corrupt",
        "skipping this sample", "skipping the sample", "skipping it", "skipping document", "skipping truncated",
        "skipping malformed",
        is_silencer=True, names_own_rank=False,
    ),
    rule(
        "corrected-by-hardware", Label.BENIGN, NOISE,
        "corrected error", "severity=corrected", "severity=correctable", "corrected hardware", "correctable ecc",
        "single bit ecc & corrected", "volatile & sbe", "aer: corrected", "aer: correctable", "corrected, type=",
        "pcie bus error: severity=corrected", "ce memory",
        pattern=r"correct|single bit|sbe|\bce memory",
        unless=r"uncorrected|uncorrectable|exceed|threshold",
        is_silencer=True, names_own_rank=False,
    ),
    rule(
        "library-start-noise", Label.BENIGN, NOISE,
        "unable to register & factory", "computation placer already registered", "could not find tensorrt",
        "tf-trt warning", "could not load dynamic library", "cuda drivers on your machine", "rebuild tensorflow",
        "numa node read from sysfs", "unable to import & fall", "not installed & fall", "falling back to",
        "fallback to", "will fall back", "using the fallback", "flash attention is not installed",
        "could not import & using", "optional & not found", "apex is not installed", "is not installed. using",
        "no module named & fall", "no module named & optional", "async_io requires", "please install & if you",
        "tokenizers_parallelism", "process just got forked", "token indices sequence length",
        "some weights of & not initialized", "you should probably train this model", "not been tested with",
        "legacy behaviour",  # codespell:ignore behaviour -- the spelling of transformers
        "using `use_cache=true` is incompatible", "asking to truncate to max_length",
        "special tokens have been added", "unauthenticated requests", "torchvision & image extension",
        "failed to load image python extension", "triton is not available", "no c compiler", "wandb: warning",
        "lr_scheduler.step() & before", "detected call of `lr_scheduler.step",
        "none of the inputs have requires_grad", "please note that authentication", "max_steps is given",
        "pin_memory & no accelerator", "this dataloader will create", "graph break", "recompile_limit",
        "cache_size_limit", "not enough sms", "could not parse", "cpu random generator", "error_file: <n/a>",
        "unable to find a match & using", "numexpr", "matplotlib",
        unless=r"\bfatal\b|out of memory|^\w*(?:Error|Exception): |_dynamo\.exc",
        is_silencer=True, names_own_rank=False,
    ),
    rule(
        "telemetry-failed", Label.BENIGN, NOISE,
        "wandb & error", "wandb & fail", "wandb & timeout", "tensorboard & error", "mlflow & error",
        "mlflow & fail", "neptune & error", "prometheus & fail", "opentelemetry & fail", "statsd & fail",
        "sentry & fail", "comet & error", "usage stats", "network error (connectionerror), entering retry loop",
        "otel & fail", "metrics & failed to push", "swanlab & error",
        unless=r"CommError|UsageError|Traceback|exception: .*raise",
        is_silencer=True, names_own_rank=False,
    ),
    rule(
        "ignored-exception", Label.BENIGN, NOISE,
        "error in atexit", "exception ignored", "errors:", "errors=", "error: none", "no errors", "error_handler",
        "success", "errors & none",
        pattern=r"ignored|errors?\W+(?:0|none)\b|no errors|atexit|error_handler",
        unless=r"Traceback|fatal",
        names_own_rank=False,
    ),
    rule(
        "logged-warning", Label.BENIGN, NOISE - 1,
        "warn",
        pattern=_LEVEL + r"warn(?:ing)?\b|\[W\d*",
        names_own_rank=False, is_fallback=True,
    ),
)  # fmt: skip
