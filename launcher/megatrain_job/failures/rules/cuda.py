"""CUDA memory and illegal accesses: allocator, cuBLAS, cuDNN, device-side asserts, and the same errors of ROCm."""

from __future__ import annotations

from megatrain_job.failures.rule import DEVICE_FAULT, SPECIFIC, Rule, rule
from megatrain_job.failures.verdict import Label

RULES: tuple[Rule, ...] = (
    rule(
        "cuda-out-of-memory", Label.CUDA_OOM, SPECIFIC,
        "cuda out of memory", "cuda error: out of memory", "hip out of memory", "outofmemoryerror: cuda",
        "outofmemoryerror: hip", "xpu out of memory", "npu out of memory", "cuda error: memory allocation",
        "cuda_error_out_of_memory", "cudaerrormemoryallocation", "hiperroroutofmemory",
        "cuda failure & out of memory", "hip error: out of memory", "torch.outofmemoryerror",
        "cuda.outofmemoryerror", "cuda runtime error & out of memory", "cudamalloc & failed & memory",
        "cudamalloc failed: out of memory", "cumemcreate & out of memory", "out of memory on device",
        "cuda driver error: out of memory", "not enough memory on gpu", "resource_exhausted: out of memory",
        unless=r"cudahostalloc|\bpinn",
        culprit=r"\bgpu[ :]*(?P<gpu>\d+)",
    ),
    rule(
        "gpu-allocation-failed", Label.CUDA_OOM, SPECIFIC,
        "cublas_status_alloc_failed", "cudnn_status_alloc_failed", "cusolver_status_alloc_failed",
        "cublas_status_not_initialized", "cufft_alloc_failed", "failed to allocate & gpu memory",
        "failed to cuda calloc", "failed to cuda host alloc", "tried to allocate & gib total capacity",
        "no available memory for the cache blocks", "error: insufficient memory & gpu",
    ),
    rule(
        "illegal-memory-access", Label.CUDA_ILLEGAL_ACCESS, DEVICE_FAULT,
        "illegal memory access", "cudaerrorillegaladdress", "cuda_error_illegal_address", "misaligned address",
        "cuda_error_misaligned", "an illegal instruction was encountered", "cuda_error_illegal_instruction",
        "invalid program counter", "cudaerrorillegalinstruction", "hiperrorillegaladdress", "warp illegal address",
        "warp out-of-range address", "invalid address space",
        "operation not supported on global/shared address space",
        culprit=r"\bdevice[ :]*(?P<gpu>\d+)",
    ),
    rule(
        "launch-failure", Label.CUDA_ILLEGAL_ACCESS, DEVICE_FAULT,
        "unspecified launch failure", "cudaerrorlaunchfailure", "cuda_error_launch_failed", "hiperrorlaunchfailure",
        "gpu program failed to execute",
        "cublas_status_execution_failed", "cudnn_status_execution_failed", "cublas_status_internal_error",
        "cudnn_status_internal_error", "cudnn_status_mapping_error", "the launch timed out and was terminated",
        "cuda_error_launch_timeout", "memory access fault by gpu", "vm_fault & amdgpu", "gpuvm & page fault",
        "cusparse_status_execution_failed", "cufft_exec_failed", "cufft_internal_error",
    ),
    rule(
        "device-side-assert", Label.CUDA_ILLEGAL_ACCESS, DEVICE_FAULT,
        "device-side assert", "cudaerrorassert", "cuda_error_assert", "block: [ & thread: [",
        "indexselectlargeindex", "indexselectsmallindex", ".cu: & assertion & failed",
        "scattergatherkernel & assertion", "nll_loss & assertion", "device assertion & failed",
        "vectorized_gather_kernel & assertion",
        unless="TORCH_USE_CUDA_DSA",
    ),
)  # fmt: skip
