"""What the compiler must know of a GPU to compile for it where there is none.

Facts of three cards, one for each architecture that the kernels are tuned or checked for, in the
text form that XLA reads. Used by `benchmarks/deviceless.py`.
"""

from dataclasses import dataclass

CUDA = "13.0.0"
CUDA_VERSIONS = ("driver_version", "runtime_version", "compile_time_toolkit_version")


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """One card; memory in bytes, the clock in GHz, bandwidth in bytes a second."""

    name: str
    capability: tuple[int, int]
    cores: int  # multiprocessors
    threads_per_core: int
    fpus_per_core: int
    shared_per_core: int
    shared_per_program: int  # the most that one program can ask for
    l2: int
    memory: int
    bandwidth: int
    clock: float

    def describe(self) -> str:
        """The description of this card as XLA reads it (a GpuTargetConfigProto as text)."""
        major, minor = self.capability
        facts = {
            "threads_per_block_limit": 1024,
            "threads_per_warp": 32,
            "shared_memory_per_block": 48 * 1024,
            "shared_memory_per_core": self.shared_per_core,
            "threads_per_core_limit": self.threads_per_core,
            "core_count": self.cores,
            "fpus_per_core": self.fpus_per_core,
            "block_dim_limit_x": 2**31 - 1,
            "block_dim_limit_y": 65535,
            "block_dim_limit_z": 65535,
            "memory_bandwidth": self.bandwidth,
            "l2_cache_size": self.l2,
            "clock_rate_ghz": self.clock,
            "device_memory_size": self.memory,
            "shared_memory_per_block_optin": self.shared_per_program,
            "registers_per_core_limit": 65536,
            "registers_per_block_limit": 65536,
        }
        lines = [f"  {key}: {value}" for key, value in facts.items()]
        lines.append(f"  cuda_compute_capability {{ major: {major} minor: {minor} }}")
        # Without these XLA takes the libraries for older than what knows products in 8 bits.
        lines += [f'  {name}: "{CUDA}"' for name in CUDA_VERSIONS]
        return "\n".join(
            [
                "gpu_device_info {",
                *lines,
                "}",
                'platform_name: "CUDA"',
                "dnn_version_info { major: 9 minor: 10 patch: 0 }",
                f'device_description_str: "{self.name}"',
            ]
        )


TARGETS = {
    "a100": Target(
        name="NVIDIA A100-SXM4-80GB", capability=(8, 0), cores=108, threads_per_core=2048,
        fpus_per_core=64, shared_per_core=164 * 1024, shared_per_program=163 * 1024,
        l2=40 * 2**20, memory=80 * 2**30, bandwidth=2039 * 10**9, clock=1.41,
    ),
    "l4": Target(
        name="NVIDIA L4", capability=(8, 9), cores=58, threads_per_core=1536,
        fpus_per_core=128, shared_per_core=100 * 1024, shared_per_program=99 * 1024,
        l2=48 * 2**20, memory=24 * 2**30, bandwidth=300 * 10**9, clock=2.04,
    ),
    "h200": Target(
        name="NVIDIA H200", capability=(9, 0), cores=132, threads_per_core=2048,
        fpus_per_core=128, shared_per_core=228 * 1024, shared_per_program=227 * 1024,
        l2=50 * 2**20, memory=141 * 2**30, bandwidth=4800 * 10**9, clock=1.98,
    ),
}  # fmt: skip
