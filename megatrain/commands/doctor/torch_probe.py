"""Run as a program: prints torch's versions, backends and devices as one JSON object.

It is a separate program because importing torch or initializing CUDA can crash or hang where a driver is broken.
"""

from __future__ import annotations

import importlib.util
import json
from typing import Any

from megatrain.commands.doctor.torch_report import REPORT_MARK, HostKernel


def report() -> dict[str, Any]:
    """Return versions, communication backends and devices as torch reports them."""
    import torch
    import torch.distributed as distributed

    from megatrain.ops.extension import load_extension, missing_capability

    has_distributed = distributed.is_available()
    has_nccl = has_distributed and distributed.is_nccl_available()
    is_cuda_available = torch.cuda.is_available()
    kernels = load_extension()
    devices = []
    for index in range(torch.cuda.device_count() if is_cuda_available else 0):
        properties = torch.cuda.get_device_properties(index)
        devices.append(
            {
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "memory_bytes": properties.total_memory,
                "missing_capability": missing_capability(kernels.architectures, (properties.major, properties.minor)),
            }
        )
    return {
        "version": torch.__version__,
        "cuda_build": torch.version.cuda,
        "is_cuda_available": is_cuda_available,
        "devices": devices,
        "kernels": {"architectures": kernels.architectures, "reason": kernels.reason},
        "host_kernels": host_kernels_report(),
        "has_gloo": has_distributed and distributed.is_gloo_available(),
        "has_nccl": has_nccl,
        "nccl_version": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None,
    }


def host_kernels_report() -> dict[str, Any]:
    """Return whether the library for CPUs is there, and the names of the kernels that are not used.

    missing: the library cannot be loaded, or has no such function of this version. unlike_torch: it rounds in another
    way than torch. slow_here: this processor lacks fused multiply-add instructions, without which the kernel is slow.
    """
    from megatrain.ops.extension import HostFunction
    from megatrain.ops.host_optimizer import compiled_step, step_kernel
    from megatrain.ops.host_rms_norm import compiled_rms_norm
    from megatrain.ops.host_rotary import compiled_rotation
    from megatrain.ops.host_swiglu import compiled_swiglu_backward, swiglu_backward_kernel
    from megatrain.ops.square_sums import compiled_square_sum

    compiled = {
        HostKernel.STEP: compiled_step(),
        HostKernel.ROTATION: compiled_rotation(),
        HostKernel.RMS_NORM: compiled_rms_norm(),
        HostKernel.SWIGLU_GRADIENT: compiled_swiglu_backward(),
        HostKernel.GRADIENT_NORM: compiled_square_sum(),
    }
    missing = [name for name, function in compiled.items() if function is None]

    def unused(name: HostKernel, function: HostFunction | None) -> list[HostKernel]:
        return [name] if function is None and name not in missing else []

    return {
        "is_built": importlib.util.find_spec("megatrain._host_kernels") is not None,
        "missing": missing,
        "unlike_torch": unused(HostKernel.STEP, step_kernel()),
        "slow_here": unused(HostKernel.SWIGLU_GRADIENT, swiglu_backward_kernel()),
    }


if __name__ == "__main__":
    print(f"{REPORT_MARK}{json.dumps(report())}")
