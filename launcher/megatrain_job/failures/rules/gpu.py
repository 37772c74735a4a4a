"""Broken GPUs and their links: the kernel's Xid lines, ECC, NVML, NVLink, and CUDA errors that only hardware causes."""

from __future__ import annotations

from megatrain_job.failures.rule import ABORT, DEVICE_FAULT, HARDWARE, HOST, NOISE, SPECIFIC, Rule, rule
from megatrain_job.failures.verdict import FailureAction, Label
from megatrain_job.failures.xids import CAUSED_BY, XidKind, pattern_of

_XID = r"\bxid \((?P<gpu>pci:[0-9a-f:.]+)[^)]*\):? *"
_XID_LOOSE = r"(?:\b|_)xid(?:[ _]error| code| event)?s?(?:\{[^}]*\})?\W{0,3}"
"""As monitoring programs write it: `Xid 79`, `XID error: 79`, `xid=79`."""
_CAUSED_BY_NUMBER = r".*\bcaused by previous xid "

RULES: tuple[Rule, ...] = (
    # the number and the text after it decide, even if the line matches other rules
    rule(
        "xid-hardware", Label.GPU_HARDWARE, HARDWARE, "xid (pci",
        pattern=_XID + pattern_of(XidKind.HARDWARE), unless=CAUSED_BY, is_silencer=True,
    ),
    rule(
        "xid-program", Label.CUDA_ILLEGAL_ACCESS, DEVICE_FAULT, "xid (pci",
        pattern=_XID + pattern_of(XidKind.PROGRAM), unless=CAUSED_BY, is_silencer=True,
    ),
    rule(
        "xid-clean-up", Label.CUDA_ILLEGAL_ACCESS, ABORT, "xid (pci",
        pattern=_XID + pattern_of(XidKind.CLEAN_UP), unless=CAUSED_BY, is_cascade=True, is_silencer=True,
    ),
    # the line names the GPU with the ended channel; the cause has another line, perhaps of another GPU
    rule(
        "xid-caused-by-hardware", Label.GPU_HARDWARE, ABORT, "xid (pci & caused by previous xid",
        pattern=_XID + _CAUSED_BY_NUMBER + pattern_of(XidKind.HARDWARE), is_cascade=True, is_silencer=True,
    ),
    rule(
        "xid-caused", Label.CUDA_ILLEGAL_ACCESS, ABORT, "xid (pci & caused by previous xid",
        pattern=_XID + _CAUSED_BY_NUMBER + r"\d+", is_cascade=True, is_fallback=True, is_silencer=True,
    ),
    # Xid 94 ended one program, perhaps a worker of the job; the other handled errors affect no program
    rule(
        "xid-contained", Label.GPU_HARDWARE, DEVICE_FAULT, "xid (pci",
        pattern=_XID + r"94\b", action=FailureAction.RESTART_THEN_CHECK, is_silencer=True,
    ),
    rule(
        "xid-handled", Label.GPU_HARDWARE, NOISE, "xid (pci",
        pattern=_XID + r"(?!94\b)" + pattern_of(XidKind.HANDLED),
        action=FailureAction.RESTART_THEN_CHECK, is_silencer=True,
    ),
    rule(
        "xid-recovered", Label.BENIGN, NOISE, "xid (pci",
        pattern=_XID + pattern_of(XidKind.RECOVERED), is_silencer=True, names_own_rank=False,
    ),
    rule(
        "xid-named-hardware", Label.GPU_HARDWARE, HARDWARE, "xid",
        pattern=_XID_LOOSE + pattern_of(XidKind.HARDWARE), unless=CAUSED_BY,
    ),
    rule(
        "xid-named-program", Label.CUDA_ILLEGAL_ACCESS, DEVICE_FAULT, "xid",
        pattern=_XID_LOOSE + pattern_of(XidKind.PROGRAM), unless=CAUSED_BY,
    ),
    rule(
        "xid-named-contained", Label.GPU_HARDWARE, DEVICE_FAULT, "xid",
        pattern=_XID_LOOSE + r"94\b", action=FailureAction.RESTART_THEN_CHECK,
    ),
    rule(
        "xid-named-handled", Label.GPU_HARDWARE, NOISE, "xid",
        pattern=_XID_LOOSE + r"(?!94\b)" + pattern_of(XidKind.HANDLED), action=FailureAction.RESTART_THEN_CHECK,
    ),
    rule(
        "sxid", Label.GPU_HARDWARE, HARDWARE, "sxid (pci",
        pattern=r"\bsxid \((?P<gpu>pci:[0-9a-f:.]+)\):? *\d+,(?!.*\bnon-?fatal\b)",
    ),
    rule(
        "fallen-off-the-bus", Label.GPU_HARDWARE, HARDWARE, "fallen off the bus",
        culprit=r"(?:\b(?P<host>[\w.-]+) kernel:.*)?gpu (?:at )?(?P<gpu>pci:[0-9a-f:.]+|[0-9a-f]{4,8}:[0-9a-f:.]+)",
    ),
    rule(
        "gpu-lost", Label.GPU_HARDWARE, HARDWARE,
        "gpu is lost", "gpu has been lost", "gpu_is_lost", "nvml_error_gpu_is_lost", "error_gpu_lost",
        culprit=r"\bgpu ?(?P<gpu>[0-9a-f]{4,8}:[0-9a-f:.]+|\d+)",
    ),
    rule(
        "gpu-handle-unknown", Label.GPU_HARDWARE, HARDWARE, "unable to determine the device handle",
        culprit=r"device handle for (?:gpu\W*)?(?P<gpu>[0-9a-f]{4,8}:[0-9a-f:.]*[0-9a-f]|\d+)",
    ),
    rule(
        "ecc-uncorrectable", Label.GPU_HARDWARE, HARDWARE,
        "uncorrectable ecc", "uncorrectable nvlink", "double bit ecc", "double-bit ecc", "dbe (double",
        "ecc error & uncorrected", "eccuncorrectable", "cudaerroreccuncorrectable", "cuda_error_ecc_uncorrectable",
        "hiperroreccnotcorrectable", "uncorrectable & hbm", "uncontained ecc", "uncorrectable & sram",
    ),
    rule(
        "ecc-counter", Label.GPU_HARDWARE, HARDWARE, "ecc & uncorrectable", "inforom is corrupted",
        pattern=r"uncorrectable[\w ]*?\W*(?:volatile|aggregate|count|total)?\W*\b[1-9]\d*\b|inforom is corrupted",
        culprit=r"\bgpu[ :#]*(?P<gpu>[0-9a-f]{4,8}:[0-9a-f:.]+|\d+)",
    ),
    rule(
        "row-remap", Label.GPU_HARDWARE, HARDWARE,
        "row remapper", "row remapping failure", "row remap & fail", "page retirement & fail",
        "pending page retirement", "retired pages & pending", "remapped rows & pending", "row_remap & pending",
        unless=r"\b(?:pending|failure)[^,;]*: *(?:no|0)\b",
    ),
    rule(
        "nvlink-fatal", Label.GPU_HARDWARE, HARDWARE,
        "nvlink: fatal error", "nvlink & fatal", "nvlink error was detected", "nvlink & link down",
        "nvlink & inactive", "uncorrectable nvlink error", "cuda_error_nvlink_uncorrectable", "nvlink & crc error",
        "nvswitch & fatal", "fatal nvswitch",
        unless=r"\bnon-?fatal\b", culprit=r"\bgpu[ :#]*(?P<gpu>\d+)",
    ),
    rule(
        "hardware-stack-error", Label.GPU_HARDWARE, DEVICE_FAULT,
        "hardware stack error", "cudaerrorhardwarestackerror",
    ),
    rule(
        "gpu-firmware", Label.GPU_HARDWARE, HARDWARE,
        "gsp & rpc & timeout", "timeout waiting for rpc from gsp", "rminitadapter failed",
        "gpu initialization failed", "failed to copy vbios", "gpu reset required", "gpu requires reset",
        "gpu recovery action", "gpu is in a bad state",
        unless=r"recovery action\W+none|\bto (?:0x)?0+\b",
    ),
    rule(
        "dcgm-failure", Label.GPU_HARDWARE, HARDWARE,
        "dcgm & fail", "dcgm & unhealthy", "gpu health check failed", "gpu & failed health check", "unhealthy gpu",
        "dcgm & error", "health watch & failure",
        unless=r"failed to (?:start|connect|initialize|open|load|import|push|scrape)",
        culprit=r"\bgpu[ :#-]*(?P<gpu>\d+)",
    ),
    rule(
        "gpu-overheated", Label.GPU_HARDWARE, HARDWARE,
        "gpu & overheat", "thermal & shutdown", "thermal violation", "gpu & over-temperature",
        "hw thermal slowdown", "critical temperature", "power brake slowdown", "gpu & power cable",
        unless=r"\bnot active\b",
    ),
    rule(
        "machine-check", Label.GPU_HARDWARE, HARDWARE,
        "[hardware error]: & machine check", "mce: & hardware error", "pcie bus error: severity=uncorrected",
        "aer: & uncorrected (fatal)", "aer: & uncorrected & fatal", "uncorrected hardware memory error",
        "pcieport & uncorrected",
        unless=r"non-fatal|\bcorrected error",
    ),
    rule(
        "amd-gpu-hardware", Label.GPU_HARDWARE, HARDWARE,
        "amdgpu & uncorrectable", "amdgpu & ras & poison", "amdgpu & gpu reset", "hw exception by gpu node",
        "gpu hang & hw exception", "amdgpu & ring & timeout",
    ),
    rule(
        "silent-corruption", Label.GPU_HARDWARE, SPECIFIC,
        "silent data corruption", "sdc detected", "gpu & produced different results", "persistent error & rerun",
    ),
    rule(
        "gpu-missing", Label.GPU_HARDWARE, HOST,
        "gpu count mismatch", "expected & gpus & found", "missing gpu", "gpu & not found on & host",
        "nvidia-smi & no devices were found",
        pattern=r"(?:expected|mismatch|missing|not found|were found)",
        action=FailureAction.EVICT_HOST,
    ),
)  # fmt: skip
